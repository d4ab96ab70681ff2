"""A page that shows, loads or does anything else than the page of its report is none: not in a figure either."""

from __future__ import annotations

import re
import time
from pathlib import Path

import matplotlib
import pytest
from annex_cases import failed
from reporting_cases import Run

from privlora.pages.figures import drawn_alike
from privlora.reporting.publication import pages_of, read_report
from privlora.reporting.verifying import verify

pytestmark = pytest.mark.usefixtures("drawn")

ACTS = (
    '<style>header>.lead{font-size:0}header>.lead::after{content:"epsilon 0.1"}</style>',
    "<style>@import url(http://127.0.0.1:9/seen);</style>",
    '<meta http-equiv="refresh" content="0;url=https://example.org">',
    '<p style="position:fixed;inset:0;background:#fff;z-index:9">epsilon 0.1</p>',
    '<embed src="data:text/html;base64,PHNjcmlwdD4=">',
    '<a><animate attributeName="href" values="java&#115;cript:alert(1)"/><text y="20">more</text></a>',
    "<foreignObject><b>epsilon 0.1</b></foreignObject>",
    '<use href="https://example.org/figure.svg#all"/>',
    '<image xlink:href="http://127.0.0.1:9/seen" width="9" height="9"/>',
    '<set attributeName="fill" to="none"/>',
    "<script>alert(1)</script>",
    "<text>epsilon = 0.1</text>",
    '<path d="M 10 10 L 10 50" style="stroke: black"/>',
    '<rect x="0" y="0" width="999" height="999" style="fill: url(http://127.0.0.1:9/seen)"/>',
    '<!DOCTYPE svg [<!ENTITY e "0.1">]><text>&e;</text>',
    "<!--><script>alert(1)</script>-->",
    "<![CDATA[><script>alert(1)</script>]]>",
    "</svg><p>epsilon 0.1</p><svg>",
    "<svg>",
    "<g>",
)
CHANGES = (  # pattern in a figure, what takes its place
    (r"ε = \d", "ε = 0"),
    (r"(<text[^>]*>)\d", r"\g<1>7"),
    (r"<path ", '<path onclick="alert(1)" '),
    (r"<text ", '<text tabindex="0" onfocus="alert(1)" autofocus="" '),
    (r"(stroke-width: )", r"stroke-opacity: 0; \1"),
    (r'style="fill: none', 'style="fill: url(http://127.0.0.1:9/seen)'),
    (r"var\(--accent\)", "var(--paper)"),
    (r'(viewBox="0 0 )\d+', r"\g<1>9"),
    (r'(aria-label="[^"]*)\d', r"\g<1>0"),
    (r'(href="#)', r"https://example.org/figure.svg#"),
    (r'( d="M )[\d.]+', r"\g<1>500"),
    (r'( d="M )[\d.]+', rf"\g<1>{'9' * 400}"),
    (r'( d="M )[\d.]+', r"\g<1>#"),
    (r'( d="M [\d.]+)', r"\g<1> 3"),
    (" x=", ' x="1" x='),
    ("(base64,.{80}).{4}", r"\1AAAA"),
)


@pytest.fixture(scope="module")
def page(private_run: Run) -> str:
    return (private_run.folder.release / "report.html").read_text()


@pytest.mark.parametrize("more", ACTS)
def test_nothing_is_added_to_a_figure(more: str, page: str) -> None:
    ends = [found.end() for found in re.finditer(r"<svg [^>]*>|<g [^>]*>|<text[^>]*>|</path>|</svg>", page)]
    assert len(ends) > 50
    for at in [*ends[:30], *ends[30::20]]:
        assert not drawn_alike(page[:at] + more + page[at:], page)


@pytest.mark.parametrize(("pattern", "other"), CHANGES)
def test_nothing_in_a_figure_is_changed(pattern: str, other: str, page: str) -> None:
    start = page.index("<svg ")
    changed = page[:start] + re.sub(pattern, other, page[start:], count=1)
    assert changed != page
    assert not drawn_alike(changed, page)


def test_no_place_is_left_out(page: str) -> None:
    before, last, after = page.rpartition(' y="')
    assert not drawn_alike(before + last + re.sub(r"^-?[\d.]+", "#", after), page)


def test_another_matplotlib_may_measure_letters_in_its_own_way(page: str) -> None:
    moved = re.sub(r'(?<= d="M )[\d.]+', lambda found: f"{float(found[0]) + 0.9:.2f}", page)
    assert moved != page
    assert drawn_alike(moved, page)


def test_the_machines_own_settings_of_figures_do_not_show(private_run: Run, page: str) -> None:
    report = read_report(private_run.folder.report)
    own = {"font.size": 20, "lines.linewidth": 7, "text.usetex": True, "savefig.bbox": "tight"}
    with matplotlib.rc_context(own):
        assert pages_of(report)["report.html"] == page


@pytest.mark.parametrize(
    "content", ["<svg " * 400_000, ' d="' * 400_000, ' d="1 ' * 50_000, ' d="' + "9" * 2_000_000 + '"']
)
def test_a_page_of_any_size_is_looked_at_in_a_moment(content: str, page: str) -> None:
    start = time.monotonic()
    assert not drawn_alike(content, page)
    assert not drawn_alike(content[: len(page)], page)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("more", [ACTS[0], ACTS[2]])
def test_a_release_with_such_a_page_is_not_verified(more: str, release: Path) -> None:
    path = release / "report.html"
    text = path.read_text()
    at = text.index(">", text.index("<svg ")) + 1
    path.write_text(text[:at] + more + text[at:])
    assert failed(verify(release)) == ["pages", "annex"]
