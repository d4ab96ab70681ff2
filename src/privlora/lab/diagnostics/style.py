"""How each method looks, in every diagnostic figure the same."""

from __future__ import annotations

from typing import Literal

from privlora.pages.figures import ACCENT, FOURTH, MUTED, SECOND, THIRD

_COLOURS = {
    "dp-adamw": SECOND,
    "prism rank": ACCENT,
    "prism scalar": THIRD,
    "prism paper": FOURTH,
    "lora-rite": THIRD,
    "dp-sgd": FOURTH,
}
_MARKERS = {"dp-adamw": "o", "prism rank": "s", "prism scalar": "^", "prism paper": "D"}
LineStyle = Literal["-"] | tuple[int, tuple[int, int]]


def colour_of(method: str) -> str:
    """Its colour."""
    return _COLOURS.get(method, ACCENT if method.startswith("prism") else MUTED)


def dashes_of(method: str) -> LineStyle:
    """Its dashes: a line that may coincide with another is broken."""
    return (0, (2, 2)) if method == "prism scalar" else "-"


def marker_of(method: str) -> str:
    """Its marker."""
    return _MARKERS.get(method, "s")
