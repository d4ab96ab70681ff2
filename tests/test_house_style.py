"""The pages keep to docs/style.md: their length, their sentences and their words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *DOCS]

# At most.
LIMITS = {
    "words of README.md without code": 700,
    "words of docs/*.md without settings.md": 46_000,
    "words of a sentence, on average over a page": 20,
    "words of docs/style.md": 350,
}

STYLE = (ROOT / "docs/style.md").read_text(encoding="utf-8")
REFUSED = [
    word
    for row in re.findall(r"^\| .*? \| (`.*) \|$", STYLE.split("## Claims")[0], re.MULTILINE)
    for word in re.findall(r"`([^`]+)`", row)
]
_LIST = re.compile(r"\s*(?:[*-]|\d+\.) ")


def without_code(text: str) -> str:
    """Without fenced blocks, and without blocks that are indented outside of a list."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    kept, in_list = [], False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            in_list = bool(_LIST.match(line))
        if in_list or not line.startswith("    "):
            kept.append(line)
    return "\n".join(kept)


def paragraphs(text: str) -> list[str]:
    """Of prose: without code, tables, headings and pictures; an item of a list is a paragraph."""
    text = re.sub(r"^ *(?:\||#|!\[|<!--).*$", "", without_code(text), flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    found = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text)
    return [" ".join(_LIST.sub("", each, count=1).split()) for each in found if each.strip()]


def sentences(text: str) -> list[str]:
    return [
        each
        for paragraph in paragraphs(text)
        for each in re.split(r"(?<=[.!?])[*_)]*\s+(?=[^a-z])", paragraph)
        if re.search(r"\w", each)
    ]


def refused(text: str) -> list[str]:
    """The words of the style page that are no words of ours, in prose and in tables, not in code."""
    text = " ".join(re.sub(r"``.*?``|`[^`]*`|\]\([^)]*\)", "", without_code(text)).split())
    return [word for word in REFUSED if re.search(rf"\b{word}\b", text, re.IGNORECASE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_keeps_to_the_style(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [len(each.split()) for each in sentences(text)]
    assert found, "no sentence"
    assert sum(found) / len(found) <= LIMITS["words of a sentence, on average over a page"]
    assert refused(text) == []


def test_pages_are_short() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in DOCS}
    readme = without_code((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(readme.split()) <= LIMITS["words of README.md without code"]
    assert words["style.md"] <= LIMITS["words of docs/style.md"]
    assert sum(words.values()) - words["settings.md"] <= LIMITS["words of docs/*.md without settings.md"]


def test_what_the_style_refuses_is_found() -> None:
    assert len(REFUSED) >= 10
    text = "A file, of\nwhich `told` is code.\n\n| a | we told you |\n\n    anew\n\n```text\nbeside\n```\n"
    assert refused(text) == ["told", "of which"]
    assert sentences("# Head\n\nOne (two). Three\nfour.\n\n* five [six](seven.md) at ε = 0.5.\n") == [
        "One (two).",
        "Three four.",
        "five [six] at ε = 0.5.",
    ]
