"""What all pages share: colours that can be read, and a template that needs nothing else."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from matplotlib.colors import to_rgb

from privlora.pages.figures import COLOURS, HUES, grid, in_style, inline_svg, png

PAPER = ("#ffffff", "#1b1f23")  # behind a figure, light and dark


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("name", sorted(COLOURS.keys() - {"grid"}))
def test_text_of_every_colour_can_be_read(name: str, theme: int) -> None:
    """WCAG 2 AA for text: a contrast of 4.5."""
    low, high = sorted((luminance(COLOURS[name][theme]), luminance(PAPER[theme])))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_colours_are_told_apart() -> None:
    for theme in (0, 1):
        assert len({both[theme] for both in COLOURS.values()}) == len(COLOURS)


@in_style
def test_a_figure_follows_the_pages_theme() -> None:
    figure, (axes,) = grid(1, 1, 3, 2)
    axes.plot([0, 1], color=HUES[5])
    axes.set_title("<b> #1c2024")
    picture = inline_svg(figure, "a & b")
    assert picture.startswith('<svg role="img" aria-label="a &amp; b"')
    assert "stroke: var(--sixth)" in picture
    assert "&lt;b&gt; #1c2024" in picture  # a text is no colour
    assert set(re.findall(r"(?<=: )#\w{6}", picture)) == set()
    assert png(figure).startswith(b"\x89PNG")


def test_templates_are_installed() -> None:
    rooms = {"pages": "base", "reporting": "report", "auditing": "audit", "lab.studies": "study"}
    for room, name in {**rooms, "lab.diagnostics": "diagnostics"}.items():
        assert (resources.files(f"privlora.{room}") / "templates" / f"{name}.html.j2").is_file()
