"""Figures in one style: inline SVG whose colours follow a page's light or dark theme, or PNG on white."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# A figure is drawn in the colours of the light theme; in inline SVG each of them becomes its CSS variable.
# The hues are Okabe and Ito's, darkened: told apart with any colour vision, and readable on white.
COLOURS = {
    "ink": ("#1c2024", "#e8e6e1"),
    "muted": ("#5c666e", "#9aa3aa"),
    "grid": ("#e3e2dc", "#30363c"),
    "accent": ("#0b7a75", "#5cc0b5"),
    "second": ("#b8510d", "#e98d4f"),
    "third": ("#3d5a9e", "#8fa8e6"),
    "fourth": ("#96416f", "#dd8fba"),
    "fifth": ("#6f7d12", "#b9c75a"),
    "sixth": ("#8a5a2b", "#cfa074"),
    "seventh": ("#59636b", "#9da6ad"),
    "eighth": ("#1d7bb0", "#6fc1ee"),
}
"""CSS variable -> its value in the light theme, and in the dark one."""
INK, MUTED, GRID, *HUES = (light for light, _ in COLOURS.values())
ACCENT, SECOND, THIRD, FOURTH = HUES[:4]
WIDTH = 10.2  # inches, of a figure as wide as the page
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.titlesize": 9.5,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
}
_DPI = 160  # of a PNG


in_style = matplotlib.rc_context(STYLE)
"""Decorator of a function that draws."""


def grid(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels (inches), row after row; options: of ``Figure.subplots``."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(width, height), layout=layout)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def inline_svg(figure: Figure, label: str) -> Markup:
    """The figure as an <svg> element without identifiers of its own, sized and coloured by the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": label}):  # the same report gives the same bytes
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    head = re.search(r'viewBox="[^"]*"', svg)
    assert head is not None
    svg = f'<svg role="img" aria-label="{escape(label)}" {head[0]}>' + svg[svg.index(">") + 1 :]
    for variable, (light, _) in COLOURS.items():
        svg = svg.replace(f": {light}", f": var(--{variable})")
    return Markup(svg)  # matplotlib escaped every text


@in_style
def png(figure: Figure) -> bytes:
    """The figure on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
