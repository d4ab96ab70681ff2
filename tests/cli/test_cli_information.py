"""methods, report and demo."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cli_cases import LOADING, Call, check
from rich.console import Console

from privlora.config.methods import SPACES as FACTS
from privlora.methods import METHODS, SPACES, VOTE_METHODS
from privlora.training.loop import Interrupted

DOCS = Path(__file__).parents[2]
ROWS = {**METHODS, **VOTE_METHODS}


def test_every_row_of_the_table_is_printed(call: Call) -> None:
    shown = call("methods").out.splitlines()
    listed = dict(line.split(maxsplit=1) for line in shown[: len(ROWS)])
    assert listed == {name: row.summary for name, row in ROWS.items()}
    found = call("methods", "--json").json
    listed = found["methods"]
    assert [row["name"] for row in listed] == list(ROWS)
    assert [row["private"] for row in listed] == [row.private for row in ROWS.values()]


@pytest.mark.parametrize("name", ROWS)
def test_one_row_is_shown_with_its_settings_and_pages(name: str, call: Call) -> None:
    shown = call("methods", name).out
    found = call("methods", name, "--json").json
    row = ROWS[name]
    assert shown.startswith(f"{name}: {row.summary}\n")
    assert (found["name"], found["reference"]) == (name, row.reference)
    for link in found["docs"]:
        assert link in shown
        page, _, section = link.partition("#")
        headings = [
            line.lstrip("# ") for line in (DOCS / page).read_text().splitlines() if line.startswith("#")
        ]
        anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings}
        assert not section or section in anchors, link
    assert found["needs_public_data"] == (row.public_texts is not None) == ("PUBLIC texts" in shown)
    assert FACTS[row.space].described in shown
    assert list(found["optimizers"]) == list(row.optimizers)
    for optimizer, settings in found["optimizers"].items():
        for setting, value in row.optimizer_settings(optimizer, {}).items():
            assert settings[setting]["default"] == value
            assert settings[setting]["meaning"]
    # All that may be set of an optimizer, also what is chosen before each step where it is left out.
    kind = SPACES[row.space].optimizers[row.optimizer]
    assert set(found["optimizers"][row.optimizer]) == {*kind.settings, *kind.space_settings}


def test_a_row_that_there_is_not_leads_to_the_nearest(call: Call) -> None:
    check(call("methods", "prsm"), "unknown method 'prsm'", "did you mean 'prism'?")
    check(call("methods", "DP_AdamW", "--json"), "did you mean 'dp-adamw'?")
    check(call("methods", "mezo"), "dp-zo")


def test_a_report_is_written_again(finished: Path, tmp_path: Path, call: Call) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    written = run / "release" / "report.html"
    before = written.read_bytes()
    written.unlink()
    assert call("report", run).out == f"{written}\n"
    assert written.read_bytes() == before
    assert call("report", run, "--json").json == {"report": str(written)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("privlora.demo.run", []),
        ("privlora.demo.federated", ["--federated"]),
        ("privlora.demo.few", ["--few"]),
    ],
)
def test_the_demo_is_wired(
    name: str, options: list[str], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(output: Path | None, console: Console, *model: str | None) -> dict[str, Any]:
        console.print("[bold]live[/]")
        return {"output": str(output), "loss": float("nan")}

    module = types.ModuleType(name)
    monkeypatch.setattr(module, "main", show, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    assert call("demo", *options).out == "live\n"
    ended = call("demo", *options, "--output", tmp_path, "--json")
    assert ended.json == {"output": str(tmp_path), "loss": None}
    assert ended.err == f"{LOADING}\nlive\n"


@pytest.mark.parametrize("kind", [KeyboardInterrupt(), Interrupted(3)])
def test_ctrl_c_in_a_demo_is_one_line(
    kind: BaseException, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise kind

    module = types.ModuleType("privlora.demo.few")
    monkeypatch.setattr(module, "main", stop, raising=False)
    monkeypatch.setitem(sys.modules, "privlora.demo.few", module)
    ended = call("demo", "--few")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == f"{LOADING}\ninterrupted: the demo is not whole; run it again for all of it\n"


def test_the_demo_of_a_model_of_ones_own(tmp_path: Path, call: Call) -> None:
    for option in ("--few", "--federated"):
        check(
            call("demo", option, "--model", tmp_path),
            "are of the embedded model. Fix: leave out --model, or them",
        )
    check(call("demo", "--few", "--federated"), "--federated and --few are two demos")
    refused = call("demo", "--model", tmp_path / "none", "--output", tmp_path / "runs")
    assert (refused.code, "it is no local folder" in refused.err) == (2, True)
    assert not (tmp_path / "runs").exists()
