"""Every code block of the README and of the Python guide runs, and so does the README's YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import privlora.methods
from privlora.api import train_run
from privlora.config import load_settings
from privlora.demo import model_path, private_records
from privlora.methods import METHODS

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/python.md",
        "docs/projection.md",
        "docs/projection-accounting.md",
        "docs/projection-studies.md",
        "docs/audit.md",
    ],
)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for table in ("METHODS", "SPACES"):  # a page may register more
        monkeypatch.setattr(privlora.methods, table, dict(getattr(privlora.methods, table)))
    found = blocks(page, "python")
    assert found
    for block in found:
        exec(compile(block, page, "exec"), {})


def test_readme_yaml_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (yaml,) = blocks("README.md", "yaml")
    Path("notes.yaml").write_text(yaml, encoding="utf-8")
    for name, count, seed in (("notes.jsonl", 200, 1), ("public_notes.jsonl", 20, 2)):
        lines = (json.dumps(record) for record in private_records(count, seed))
        Path(name).write_text("\n".join(lines), encoding="utf-8")
    small = [f"model.name={model_path()}", "privacy.steps=3", "privacy.public_dataset_size=200"]
    settings = load_settings("notes.yaml", small)
    result = train_run(settings)
    assert result.epsilon is not None
    assert 0 < result.epsilon <= 3
    assert (result.release / "report.html").exists()


def test_every_method_is_named() -> None:
    (row,) = (
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if "| `methods` |" in line
    )
    assert re.findall(r"`([^`]+)`", row)[1:] == list(METHODS)
    table = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in table for name in METHODS)


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "benchmarks/results/README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(place), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as a hub for code makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_terms_of_the_glossary_are_used() -> None:
    terms = re.findall(
        r"^\| \*\*(.*?)\*\*", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert terms
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "glossary.md"]
    files = [ROOT / "README.md", *pages, *(ROOT / "src").rglob("*.py")]
    used = " ".join(file.read_text(encoding="utf-8").lower() for file in files)
    for term in terms:
        assert re.search(rf"\b{term.replace(' ', '[ _]')}", used), term
