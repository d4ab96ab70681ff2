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
        what = f"template {named(template)} cannot be read: {error}"
        raise ConfigError(what, fix="write {{ and }} for literal braces") from None
    shown = Counter(field for _, field, _, _ in pieces if field is not None)
    wrong, fix = "", ""
    if any(field == "" or spec or conversion for _, field, spec, conversion in pieces):
        wrong, fix = "has a field that is not a plain {column}", "write columns in braces, without ! or :"
    elif not shown:
        wrong, fix = "names no column, so all records would be alike", "name one in single braces, as {title}"
    elif max(shown.values()) > _MOST:
        wrong, fix = f"shows one column more than {_MOST} times", "name each column once"
    if wrong:
        raise ConfigError(f"template {named(template)} {wrong}", fix=fix)
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
    fix = "use an instruction-tuned model's tokenizer, set data.chat_template, or give columns of prompts and answers"
    return ConfigError("the tokenizer has no chat template, so messages cannot be rendered", fix=fix)


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
        known = ", ".join(sorted(named))
        fix = f"set data.chat_template to the name of one of its own ({known}), or to another template"
        raise ConfigError(f"the tokenizer has no chat template {name!r}", fix=fix)
    return str(named[name])
