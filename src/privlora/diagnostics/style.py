"""Colours of the diagnostic figures: on the page they follow its theme, in a PNG they are fixed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Literal

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from privlora.reporting.plots import ACCENT, GRID, INK, MUTED, SECOND, STYLE, inline_svg

# Stand for the page's variables, as those of the report's plots do.
THIRD, FOURTH = "#5a5b5c", "#6a6b6c"
_MORE = {THIRD: "--third", FOURTH: "--fourth"}
# Okabe and Ito's hues, darkened: told apart with any colour vision, and readable on white.
_LIGHT = {
    INK: "#1c2024",
    MUTED: "#5c666e",
    GRID: "#e3e2dc",
    ACCENT: "#0b7a75",
    SECOND: "#b8510d",
    THIRD: "#3d5a9e",
    FOURTH: "#96416f",
}
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
_LINES: dict[str, LineStyle] = {"prism scalar": (0, (2, 2))}
_DPI = 160


class Palette:
    """``palette(colour)`` is what to draw a named colour in: itself for the page, a fixed one for a PNG."""

    def __init__(self, fixed: bool) -> None:
        self.fixed = fixed

    def __call__(self, colour: str) -> str:
        return _LIGHT[colour] if self.fixed else colour

    def method(self, name: str) -> str:
        """The colour of a method, in every figure the same."""
        return self(_COLOURS.get(name, ACCENT if name.startswith("prism") else MUTED))

    def line(self, name: str) -> LineStyle:
        """The dashes of a method: one that may coincide with another is broken."""
        return _LINES.get(name, "-")

    def marker(self, name: str) -> str:
        """The marker of a method."""
        return _MARKERS.get(name, "s")


Draw = Callable[[Any, Palette], Figure]


def as_svg(draw: Draw, result: Any, label: str) -> Markup:
    """The figure as inline SVG in the page's colours."""
    with matplotlib.rc_context(STYLE):
        svg = inline_svg(draw(result, Palette(fixed=False)), label)
    for colour, variable in _MORE.items():
        svg = Markup(svg.replace(colour, f"var({variable})"))
    return svg


def as_png(draw: Draw, result: Any) -> bytes:
    """The figure on white."""
    style = {
        key: _LIGHT.get(value, value) if isinstance(value, str) else value for key, value in STYLE.items()
    }
    with matplotlib.rc_context({**style, "figure.facecolor": "white"}):
        figure = draw(result, Palette(fixed=True))
        FigureCanvasAgg(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels (inches), row after row."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(width, height), layout=layout)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(visible=True)
        axes.tick_params(length=0, which="both")
    return figure, panels
