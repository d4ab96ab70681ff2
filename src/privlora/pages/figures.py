"""Figures in one style: inline SVG whose colours follow a page's light or dark theme, or PNG on white."""

from __future__ import annotations

import io
import re
import struct
from base64 import b64decode, b64encode
from typing import Any
from xml.etree import ElementTree
from zlib import adler32, crc32

import numpy as np
from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

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


in_style = style.context(["default", STYLE])
"""Decorator of a function that draws, whatever the machine's own matplotlibrc says."""


def grid(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels (inches), row after row; options: of ``Figure.subplots``."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(width, height), layout=layout)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


@in_style
def inline_svg(figure: Figure, label: str) -> Markup:
    """The figure as an <svg> element, sized and coloured by the page; label: names it, and no other on its page.

    Written anew from what matplotlib draws, so that all versions of it write the same up to ``drawn_alike``.
    """
    buffer = io.StringIO()
    without = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=without)
    svg = buffer.getvalue()
    svg = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", svg[svg.index("<svg") :]).replace("xlink:href", "href")
    root = ElementTree.fromstring(svg)
    prefix, names = f"f{crc32(label.encode()):08x}", dict[str, str]()

    def renamed(name: re.Match[str]) -> str:
        return names.setdefault(name[0], f"{prefix}-{len(names)}")

    def written(element: ElementTree.Element) -> str:
        tag, attributes = element.tag, dict(element.attrib)
        if tag == "style":
            return ""
        inside = str(escape((element.text or "").strip())) + "".join(map(written, element))
        if tag == "g":
            attributes.pop("id", None)
        if tag in ("g", "defs") and not (inside and attributes):
            return inside if tag == "g" or not inside else f"<defs>{inside}</defs>"
        for name, value in attributes.items():
            if name in _PLACES:
                value = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}", value)
            elif name == "style":
                value = _style(value)
            elif value.startswith(_PNG):
                value = _PNG + b64encode(_stored(b64decode(value[len(_PNG) :]))).decode()
            else:  # a name, or what refers to one
                value = re.sub(".+" if name == "id" else r"(?<=#)[\w-]+", renamed, value)
            attributes[name] = value
        own = "".join(f' {name}="{escape(value)}"' for name, value in sorted(attributes.items()))
        return f"<{tag}{own}>{inside}</{tag}>"

    inside = "\n".join(map(written, root))
    return Markup(
        f'<svg role="img" aria-label="{escape(label)}" viewBox="{root.get("viewBox")}">{inside}</svg>'
    )


def drawn_alike(found: str, true: str) -> bool:
    """Whether two pages are the same but for places within figures, by 2 points: versions of matplotlib measure letters
    in their own ways. What any figure says, and in which lines and colours, is compared letter by letter."""
    if len(found) > 2 * len(true):
        return False
    (page, places), (own, others) = _apart(found), _apart(true)
    near = all(abs(one - other) <= _NEAR for one, other in zip(places, others, strict=False))
    return page == own and len(places) == len(others) and near


def _apart(page: str) -> tuple[str, list[float]]:
    """A page without the numbers that say where something lies in a figure, and those."""
    places = list[float]()

    def take(number: re.Match[str]) -> str:
        places.append(float(number[0]))
        return "#"

    return _PLACED.sub(lambda found: _NUMBER.sub(take, found[0]), page), places


_PLACES, _NEAR = ("d", "height", "transform", "width", "x", "y"), 2.0
_PLACED = re.compile(rf' (?:{"|".join(_PLACES)})="[^"]*"')
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_PNG = "data:image/png;base64,"


def _style(text: str) -> str:
    """Of an element, in the page's font and colours."""
    text = re.sub(r"font(?:-size)?: ([\d.]+px)[^;]*", r"font-size: \1", text)
    for variable, (light, _) in COLOURS.items():
        text = text.replace(f": {light}", f": var(--{variable})")
    return "; ".join(sorted(part for part in re.split("; ?", text) if part and "font-family" not in part))


def _stored(png: bytes) -> bytes:
    """The same picture with nothing compressed, which each zlib does in its own way."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))
    height, width, _ = pixels.shape
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0))).tobytes()
    blocks = [rows[start : start + 65535] for start in range(0, len(rows), 65535)]
    data = b"\x78\x01" + b"".join(
        struct.pack("<BHH", index == len(blocks) - 1, len(block), 65535 - len(block)) + block
        for index, block in enumerate(blocks)
    )
    data += struct.pack(">I", adler32(rows))
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc32(kind + content))
        for kind, content in ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    )


@in_style
def png(figure: Figure) -> bytes:
    """The figure on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
