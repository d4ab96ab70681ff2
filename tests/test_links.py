"""What pages say of each other and of the package: links, names of methods, terms of the glossary."""

from __future__ import annotations

import re
from pathlib import Path

from privlora.methods import METHODS, VOTE_METHODS

ROOT = Path(__file__).parent.parent


def test_every_method_is_named() -> None:
    table = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", table.split("\n## ")[0], re.MULTILINE) == [
        *METHODS,
        *VOTE_METHODS,
    ]


def test_links_lead_somewhere() -> None:
    beside = (ROOT / "benchmarks/results").glob("*.md")
    for page in [ROOT / "README.md", *beside, *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(place), f"{page.name}: {target}#{anchor}"


def test_tables_are_whole() -> None:
    """A blank line in one makes plain text of all rows below it; a row with more cells than its head loses them."""
    pages = [
        page for room in ("", "benchmarks/results", "docs") for page in sorted((ROOT / room).glob("*.md"))
    ]
    found = [
        (page.name, table)
        for page in pages
        for table in re.findall(r"(?:^ *\|.*\n)+", _without_code(page), re.M)
    ]
    assert len(found) > 50
    for name, table in found:
        head, *rows = [line.strip() for line in table.splitlines()]
        assert rows, f"{name}: one line that looks like a table: {head}"
        assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", rows[0]), f"{name}: no head above {head}"
        for row in rows:
            assert _cells(row) == _cells(head), f"{name}: {row}"


def _without_code(page: Path) -> str:
    text = page.read_text(encoding="utf-8") + "\n"
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.M)


def _cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as a hub for code makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_terms_of_the_glossary_are_used() -> None:
    terms = re.findall(
        r"^\* \*\*(.*?)\*\*", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert terms
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "glossary.md"]
    files = [ROOT / "README.md", *pages, *(ROOT / "src").rglob("*.py")]
    used = " ".join(file.read_text(encoding="utf-8").lower() for file in files)
    for term in terms:
        assert re.search(rf"\b{term.lower().replace(' ', '[ _]')}", used), term
