"""Columns and formats of columns, as settings name them; and what is said where none renders a chat."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from privlora.errors import ConfigError, named

_MOST: Final = 4  # times that a format shows one column


def parse(template: str) -> list[tuple[str, str | None]]:
    """A column's name or a format as (literal text, column or None) pieces.

    Raises ConfigError for what cannot be read and for what shows nothing of a record.
    """
    if "{" not in template and "}" not in template:
        return [("", template)]
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"template {named(template)} cannot be read: {error}", fix="write {{ and }} for literal braces"
        ) from None
    for _, field, spec, conversion in pieces:
        if field == "" or spec or conversion:
            raise ConfigError(
                f"template {named(template)} has a field that is not a plain {{column}}",
                fix="name one column between each pair of braces, without ! or :",
            )
    if all(field is None for _, field, _, _ in pieces):
        raise ConfigError(
            f"template {named(template)} names no column",
            why="every record would be the same text",
            fix="name one in single braces, as {title}",
        )
    if max(Counter(field for _, field, _, _ in pieces if field is not None).values()) > _MOST:
        raise ConfigError(
            f"template {named(template)} shows one column more than {_MOST} times",
            why="a record is read whole before it is cut",
            fix="name each column once",
        )
    return [(literal, field) for literal, field, _, _ in pieces]


def fields_of(templates: Iterable[str | None]) -> frozenset[str]:
    """The columns that formats name; None counts for nothing."""
    given = (parse(each) for each in templates if each is not None)
    return frozenset(field for pieces in given for _, field in pieces if field is not None)


_TAKEN = """messages conversation tools documents chat_template strftime_now tokenize tokenizer_kwargs padding
truncation add_generation_prompt continue_final_message max_length return_tensors return_dict
return_assistant_tokens_mask"""
TAKEN: Final = frozenset(_TAKEN.split())
"""Arguments of apply_chat_template that are no variables of a template."""


def no_chat_template() -> ConfigError:
    """The error for messages that nothing renders."""
    return ConfigError(
        "the tokenizer has no chat template, so messages cannot be rendered",
        fix="use the tokenizer of an instruction-tuned model, set data.chat_template, or use prompt and completion "
        "columns of text",
    )


def template_named(own: str | None, tokenizers: Any, *, with_tools: bool) -> str:
    """The chat template to render with. own: data.chat_template, a template or the name of one of the tokenizer's.
    tokenizers: a template, or several by their names. with_tools: whether a record has tools.

    Raises ConfigError for a name that the tokenizer does not have, and where it has several without a default.
    """
    if own is not None and "{" in own:
        return own
    named = tokenizers if isinstance(tokenizers, Mapping) else {"default": tokenizers}
    name = own or ("tool_use" if with_tools and "tool_use" in named else "default")
    if name not in named:
        raise ConfigError(
            f"the tokenizer has no chat template {name!r}",
            fix=f"set data.chat_template to the name of one of its own ({', '.join(sorted(named))}), or to another "
            "template",
        )
    return str(named[name])
