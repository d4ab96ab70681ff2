"""Which figures and methods are asked for, by their names: known before torch is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from privlora.config.methods import METHODS
from privlora.errors import ConfigError, nearest

BASELINE: Final = "dp-adamw"
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
    found = _chosen(names, FIGURES, "unknown figure {!r}") if names is not None else FIGURES
    if not found:
        raise ConfigError("no figure is chosen", fix=f"name some of {', '.join(FIGURES)}")
    return found


def chosen_rows(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Methods of the table besides the baseline that clip and noise both factors; None: no more.

    Raises ConfigError for any other name.
    """
    known = [row.name for row in METHODS.values() if row.space == "factors" and row.private]
    known.remove(BASELINE)
    return _chosen(names or (), known, f"{{!r}} is not a private method on both factors besides {BASELINE}")


def _chosen(names: str | Iterable[str], known: Iterable[str], wrong: str) -> tuple[str, ...]:
    given = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    for name in given:
        if name not in known:
            raise ConfigError(wrong.format(name), fix=nearest(name, known))
    return tuple(name for name in known if name in given)
