"""Markdown of cards, in which nothing of a user's has an effect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_LINKED = re.compile(r"(://|(?<=www)\.|@)", re.IGNORECASE)
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")


def plain(text: object) -> str:
    """Text on one line in which Markdown and HTML have no effect, and no address becomes a link."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line)
    return _LINKED.sub(r"\\\1", line)


def fenced(lines: Iterable[str]) -> list[str]:
    """A block of Python that no line of it ends."""
    return ["```python", *(" ".join(line.splitlines()) for line in lines), "```"]


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a table without a head: a name and a value in each."""
    return ["| | |", "|---|---|", *(f"| {plain(name)} | {plain(value)} |" for name, value in rows)]
