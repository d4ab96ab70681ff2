"""Filling a room's template, which extends base.html.j2: self-contained pages, without a script."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from privlora.pages.figures import COLOURS
from privlora.pages.numbers import duration, number


def fill(template: str, package: str, *, title: str, banner: tuple[str, str] | None, **content: Any) -> str:
    """The page of a template in ``package``'s folder templates; texts are escaped, a missing name is an error.

    title: of the browser's tab. banner: an alarm across the top, a word and a sentence without its full stop.
    """
    page = _environment(package).get_template(template)
    return page.render(title=title, banner=banner, colours=COLOURS, **content)


@cache
def _environment(package: str) -> Environment:
    """Kept, for to compile a template takes longer than to fill it."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("privlora.pages")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, duration=duration)
    return environment
