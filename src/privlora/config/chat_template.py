"""data.chat_template: a template's text, or the file that holds it; checked before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from privlora.errors import named

_LONGEST_PATH: Final = 200
_LARGEST: Final = 1 << 20  # bytes


def read_template(given: str) -> str:
    """The template. Raises ValueError with what to mend for a file that is not there, or text that is no template.

    given: a template, which has braces, the path of a file that holds one, or the name of one of the tokenizer's.
    """
    if re.fullmatch(r"\w{1,40}", given) and not Path(given).exists():
        return given
    text = given if "{" in given else _of_file(given)
    if "{{" not in text and "{%" not in text:
        raise ValueError("chat_template shows nothing of a message. Fix: give a Jinja template, or its file")
    _parse(text)
    return text


def _of_file(given: str) -> str:
    shown = named(given, longest=_LONGEST_PATH)
    try:
        path = Path(given).expanduser()
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"chat_template={shown} is too large for a template. Fix: check the path")
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeError) as error:
        raise ValueError(
            f"chat_template={shown} is no file that can be read ({type(error).__name__}). Fix: check the path, or give "
            "the template itself"
        ) from None


def _parse(text: str) -> None:
    from jinja2 import TemplateSyntaxError

    from privlora.data.jinja import draws

    try:
        found = draws(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat_template, line {error.lineno}, is no Jinja{_reason(error.message or '')}. Fix: mend the template, "
            "or leave it out for the tokenizer's own"
        ) from None
    if found is not None:
        raise ValueError(
            f"chat_template uses {found}, which draws at random, or may: a record's text would depend on the records "
            "before it. Fix: remove it"
        )


_QUOTED: Final = re.compile(r"'([^']*)'")
_TAGS: Final = "for if set macro block call filter raw generation"
_OF_JINJA: Final = frozenset(
    [
        *(f"{end}{tag}" for tag in _TAGS.split() for end in ("", "end")),
        *("elif", "else", "in", "end of print statement", "end of statement block", "end of template"),
        *("name", "string", "integer"),
    ]
)


def _reason(said: str) -> str:
    """What Jinja says, in brackets, without words of the template: the file may be one of records."""
    if not said or "\\" in said or '"' in said or said.count("'") % 2:  # an apostrophe is no quote
        return ""

    def word(found: re.Match[str]) -> str:
        own = found[1] in _OF_JINJA or not any(map(str.isalnum, found[1]))
        return found[0] if own else "what is not shown"

    return f" ({_QUOTED.sub(word, said).strip().rstrip('.')})"
