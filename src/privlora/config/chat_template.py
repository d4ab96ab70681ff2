"""data.chat_template: a template's text, or the file that holds it; checked before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from privlora.config.base import Wrong
from privlora.errors import named

_LONGEST_PATH: Final = 200
_LARGEST: Final = 1 << 20  # bytes


def read_template(given: str) -> str:
    """The template. Raises Wrong with what to mend for a file that is not there, or text that is no template.

    given: a template, which has braces, the path of a file that holds one, or the name of one of the tokenizer's.
    """
    if re.fullmatch(r"\w{1,40}", given) and not Path(given).exists():
        return given
    text = given if "{" in given else _of_file(given)
    if "{{" not in text and "{%" not in text:
        raise Wrong("chat_template shows nothing of a message", "give a Jinja template, or its file")
    _parse(text)
    return text


def _of_file(given: str) -> str:
    shown = named(given, longest=_LONGEST_PATH)
    try:
        path = Path(given).expanduser()
        if path.stat().st_size > _LARGEST:
            raise Wrong(f"chat_template={shown} is too large for a template", "check the path")
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeError) as error:
        raise Wrong(
            f"chat_template={shown} is no file that can be read ({type(error).__name__})",
            "check the path, or give the template itself",
        ) from None


def _parse(text: str) -> None:
    from jinja2 import TemplateSyntaxError

    from privlora.data.sandbox import Environment

    try:
        Environment().parse(text)
    except TemplateSyntaxError as error:  # whose words may quote a file of records
        raise Wrong(
            f"chat_template, line {error.lineno}, is no Jinja",
            "mend the template, or leave it out for the tokenizer's own",
        ) from None
