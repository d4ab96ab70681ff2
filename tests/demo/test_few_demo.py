"""The demo of a clinic with few notes, in a size that takes seconds: what it returns, says and leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from privlora.accounting import compose_ledgers
from privlora.cli import main as command
from privlora.demo import few
from privlora.demo.corpus import CLINICS
from privlora.demo.few import METHODS, Sizes, notes_of_patients, public_notes, what_came_out
from privlora.errors import RunError
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder

SMALL = Sizes(notes=12, held_out=2, texts=8, epochs=1, steps=2, batch=6)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What a small demo returns and prints, and its folder. Tests must not change it."""
    root = tmp_path_factory.mktemp("few") / "demo"
    console = Console(record=True, width=160, file=io.StringIO())
    return few.main(root, console, SMALL), console.export_text(), root


@pytest.mark.long
def test_all_methods_have_the_same_budget_and_the_same_public_texts(
    shown: tuple[dict[str, Any], str, Path],
) -> None:
    _, _, root = shown
    reports = [json.loads((root / name / "release" / "privacy_report.json").read_text()) for name in METHODS]
    for report in reports:
        assert report["statement"]["epsilon"] <= few.EPSILON
        for name in ("sampling", "noise_multiplier", "epsilon", "delta", "steps_charged", "unit"):
            assert report["statement"][name] == reports[0]["statement"][name]
    groups = [RunFolder(root / name).settings.read_text().partition("\nsynthesis:")[2] for name in METHODS]
    for name in ("warm_start_epochs: 1", "warm_start_learning_rate: ", "public_notes.jsonl", "seeds: 4"):
        assert all(name in group for group in groups)


def test_every_number_of_the_table_is_returned(shown: tuple[dict[str, Any], str, Path]) -> None:
    result, text, _ = shown
    assert list(result["methods"]) == list(METHODS)
    assert f"{result['untouched']:.3f}" in text
    for row in result["methods"].values():
        assert row["start"] != row["end"]
        assert f"{row['start']:.3f}" in text
        assert f"{row['end']:.3f}" in text
    assert result["public_text"] in text
    json.dumps(result)


def test_what_all_adapters_together_cost_is_said(
    shown: tuple[dict[str, Any], str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    result, text, root = shown
    spent = compose_ledgers([RunFolder(root / name).ledger for name in METHODS]).epsilon
    assert result["epsilon_of_all"] == spent > few.EPSILON
    assert f"all three together cost ε = {rounded_up(spent)}" in text
    line = next(line for line in text.splitlines() if "privlora budget" in line)
    capsys.readouterr()
    assert command([*line.split()[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == spent


def test_what_it_names_is_there(shown: tuple[dict[str, Any], str, Path]) -> None:
    result, text, root = shown
    assert Path(result["picture"]).read_bytes().startswith(b"\x89PNG")
    best = min(result["methods"], key=lambda name: result["methods"][name]["end"])
    for place in (root / "losses.png", root / "public_notes.jsonl", root / best / "release" / "report.html"):
        assert place.is_file()
        assert str(place) in text


def test_private_and_public_notes_share_no_text_complaint_or_doctor() -> None:
    notes = notes_of_patients(120, seed=1)
    assert len(notes) == len({note["patient"] for note in notes}) == 120
    assert {note["clinic"] for note in notes} == {CLINICS[few.PRIVATE].name}
    held_out = notes_of_patients(60, seed=3)
    assert not {note["patient"] for note in notes} & {note["patient"] for note in held_out}
    sizes = Sizes()
    public = public_notes(sizes)
    assert len(set(public)) == len(public) >= sizes.texts + sizes.texts // 2 * sizes.steps
    for visit in CLINICS[few.PRIVATE].complaints:
        assert not any(visit.complaint in text or visit.doctor in text for text in public)


@pytest.mark.parametrize("best", METHODS)
def test_words_follow_the_losses(best: str) -> None:
    rows = {name: {"start": 5.0, "end": 4.0 if name == best else 4.5} for name in METHODS}
    rows["span-prism"]["start"] = 4.2
    said = what_came_out(rows, 12_345, Sizes())
    assert said.strip().startswith(f"[bold]{best}[/] is ahead here, with 4.00 against 4.50")
    assert ("It may move all 12,345 numbers" in said) == (best == "prism")
    assert ("span-prism did more harm than good" in said) == (best != "span-prism")


def test_a_folder_that_holds_runs_is_refused(shown: tuple[dict[str, Any], str, Path]) -> None:
    with pytest.raises(RunError, match="not empty"):
        few.main(shown[2], Console(file=io.StringIO()), SMALL)
