"""Which figures are asked for, by their names: told before torch is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from privlora.config.methods import known_methods
from privlora.config.names import unknown_method
from privlora.errors import ConfigError, nearest

FIGURES: Final = (
    "noise-ratio",
    "gauge-sensitivity",
    "noise-energy",
    "clipping",
    "gauge-sweep",
    "preconditioning",
    "gram-stress",
)


def chosen_figures(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Figures by name (a list, or names with commas between them), in the page's order; None: all.

    Raises ConfigError for an unknown name or none at all.
    """
    if names is None:
        return FIGURES
    given = names_in(names)
    for name in given:
        if name not in FIGURES:
            raise ConfigError(f"unknown figure {name!r}", fix=nearest(name, FIGURES))
    if not given:
        raise ConfigError("no figure is chosen", fix=f"name some of {', '.join(FIGURES)}")
    return tuple(name for name in FIGURES if name in given)


def refuse_unknown_methods(names: str | Iterable[str] | None) -> None:
    """Raise ConfigError for a name of no method; which of them can be shown the table of methods tells later."""
    for name in names_in(names):
        if name not in known_methods():
            raise unknown_method(name)


def names_in(names: str | Iterable[str] | None) -> list[str]:
    """A list, or names with commas between them; None: none."""
    if names is None:
        return []
    return [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
