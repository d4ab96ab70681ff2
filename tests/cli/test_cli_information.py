"""methods, report and demo."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cli_cases import call
from rich.console import Console

from privlora.methods import CHOICES, METHODS, VOTE_METHODS
from privlora.training.loop import Interrupted

ROWS = {**METHODS, **VOTE_METHODS}


def test_every_row_of_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = call(capsys, "methods").out
    for row in ROWS.values():
        assert f"{row.name}: {row.summary}" in shown
        assert f"optimizers  {row.optimizer} (default)" in shown
    for choice in CHOICES.values():
        assert f"{choice.name}: {choice.summary}\n  rows        {', '.join(choice.rows)}" in shown
        assert set(choice.rows) <= set(METHODS)
    found = call(capsys, "methods", "--json").json
    assert [choice["name"] for choice in found["choices"]] == list(CHOICES)
    listed = found["methods"]
    assert [row["name"] for row in listed] == list(ROWS)
    assert [row["private"] for row in listed] == [row.private for row in ROWS.values()]


def test_a_report_is_written_again(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    written = run / "release" / "report.html"
    before = written.read_bytes()
    written.unlink()
    assert call(capsys, "report", run).out == f"{written}\n"
    assert written.read_bytes() == before
    assert call(capsys, "report", run, "--json").json == {"report": str(written)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("privlora.demo.run", []),
        ("privlora.demo.federated", ["--federated"]),
        ("privlora.demo.few", ["--few"]),
    ],
)
def test_the_demo_is_wired(
    name: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def show(output: Path | None, console: Console) -> dict[str, Any]:
        console.print("[bold]live[/]")
        return {"output": str(output), "loss": float("nan")}

    module = types.ModuleType(name)
    monkeypatch.setattr(module, "main", show, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    assert call(capsys, "demo", *options).out == "live\n"
    ended = call(capsys, "demo", *options, "--output", tmp_path, "--json")
    assert ended.json == {"output": str(tmp_path), "loss": None}
    assert ended.err == "live\n"


def test_one_demo_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    ended = call(capsys, "demo", "--few", "--federated")
    assert ended.code == 2
    assert "--federated and --few are two demos" in ended.err


@pytest.mark.parametrize("kind", [KeyboardInterrupt(), Interrupted(3)])
def test_ctrl_c_in_a_demo_is_one_line(
    kind: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise kind

    module = types.ModuleType("privlora.demo.few")
    monkeypatch.setattr(module, "main", stop, raising=False)
    monkeypatch.setitem(sys.modules, "privlora.demo.few", module)
    ended = call(capsys, "demo", "--few")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == "interrupted: the demo is not whole; run it again for all of it\n"
