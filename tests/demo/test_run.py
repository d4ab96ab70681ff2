"""What the demo shows of its two runs, and that what it prints at its end can be pasted and runs."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from privlora.demo import make_canaries, model_path, run
from privlora.training.files import RunFolder

CANARIES = make_canaries(3, seed=1)
NOTHING = "of the garden."


def answers(*recited: int) -> dict[str, Any]:
    return {"answers": [canary.secret if i in recited else NOTHING for i, canary in enumerate(CANARIES)]}


def text(*tables: Table) -> str:
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(*tables)
    return console.export_text()


def test_the_last_lines_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "read_ledger", lambda _: SimpleNamespace(charges=3))
    monkeypatch.setattr("peft.PeftModel.from_pretrained", lambda model, _: model)
    console = Console(record=True, file=io.StringIO(), width=40)  # narrower than any of the lines
    run._show_where(
        console, str(model_path()), RunFolder(tmp_path), tmp_path / "secrets.jsonl", tmp_path / "picture.png"
    )
    exec(console.export_text().partition("in Python:\n")[2].partition("\n\nAttack it")[0], {})
    assert "Clinic note for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plain", "private", "shown"), [((1, 2), (), 1), ((1, 2), (1,), 2), ((), (), 0), ((0,), (0,), 0)]
)
def test_the_secret_that_is_shown_is_one_that_privacy_kept(
    plain: tuple[int, ...], private: tuple[int, ...], shown: int
) -> None:
    rows = {"before": answers(), "private": answers(*private), "non-private": answers(*plain)}
    assert run.most_telling(rows, CANARIES) == shown


def test_answers_say_which_is_the_secret_and_only_of_those_that_are() -> None:
    secret = CANARIES[0].secret
    said = {"before": NOTHING, "private": "000000.", "non-private": f"{secret}."}
    lines = text(run._answers(CANARIES[0], said)).splitlines()
    assert [line.count("recited") for line in lines if "model" in line] == [0, 0, 1]
    assert sum(secret in line for line in lines) == 2  # in the notes, and recited


def test_bars_of_the_curve_are_as_long_as_its_losses() -> None:
    curves = {"private": {0: 4.0, 9: 2.0, 18: 1.0}, "non-private": {0: 4.0, 64: 0.5, 128: 0.01}}
    lines = [line for line in text(run._curve(curves)).splitlines() if "%" in line]
    assert [line.split()[0] for line in lines] == ["0%", "50%", "100%"]
    assert [[len(word) for word in line.split() if "█" in word] for line in lines] == [
        [16, 16],
        [8, 2],
        [4, 1],
    ]


def test_the_picture_is_drawn_whoever_recites() -> None:
    curves = {"private": {0: 4.0, 9: 2.0}, "non-private": {0: 4.0, 64: 0.5}}
    for said in (NOTHING, f"{CANARIES[0].secret} and $a_b$ <i> " + "word " * 40):
        figure = run.draw(curves, CANARIES[0], dict.fromkeys(run.TITLES, said))
        assert run.png(figure).startswith(b"\x89PNG")
        shown = [part.get_text() for part in figure.axes[1].texts]
        assert sum("word for word" in line for line in shown) == (0 if said == NOTHING else 3)
        assert max(map(len, shown)) < 70
