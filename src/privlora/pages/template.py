"""Filling a room's template: HTML that extends base.html.j2, self-contained and without a script, or Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from privlora.pages.figures import COLOURS
from privlora.pages.numbers import duration, nats, number
from privlora.rounding import rounded_up

_LINKED = re.compile(r"(://|(?<=www)\.|@)", re.IGNORECASE)
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")


def fill(template: str, package: str, *, title: str, banner: tuple[str, str] | None, **content: Any) -> str:
    """The page of a template in ``package``'s folder templates; texts are escaped, a missing name is an error.

    title: of the browser's tab. banner: an alarm across the top, a word and a sentence without its full stop.
    """
    page = _environment(package, autoescape=True).get_template(template)
    return page.render(title=title, banner=banner, colours=COLOURS, **content)


def fill_markdown(template: str, package: str, **content: Any) -> str:
    """The same of Markdown: all that a template shows is `plain`, but for Markup."""
    environment = _environment(package, finalize=_escaped, keep_trailing_newline=True)
    return environment.get_template(template).render(**content)


def fill_lines(template: str, package: str, **content: Any) -> list[str]:
    """The lines of plain text that are not empty: nothing that a template shows breaks its line."""
    page = _environment(package, finalize=_in_a_line).get_template(template)
    return [line for line in page.render(**content).split("\n") if line]


def plain(text: object) -> str:
    """Text on one line in which Markdown and HTML have no effect, and no address becomes a link."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line)
    return _LINKED.sub(r"\\\1", line)


def _escaped(value: object) -> str:
    return value if isinstance(value, Markup) else plain(value)


def _in_a_line(value: object) -> str:
    return re.sub(r"\s+", " ", str(value))


def _table(rows: Iterable[Iterable[object]], *head: str) -> Markup:
    """A table of Markdown; without a head, one of names and values."""
    head = head or ("", "")
    body = ((*map(plain, row),) for row in rows)
    return Markup("\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)))


@cache
def _environment(package: str, **options: Any) -> Environment:
    """Kept, for to compile a template takes longer than to fill it."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("privlora.pages")]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.filters.update(
        number=number, duration=duration, nats=nats, rounded_up=rounded_up, table=_table
    )
    return environment
