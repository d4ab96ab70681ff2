"""``privlora lab compare`` as a user types it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_cases import Call
from study_cases import on_disk

from privlora.lab.studies.results import Results, Row

SMALL: dict[str, Any] = {
    "methods": ["prism", "dp-adamw"],
    "tasks": {"one": None},
    "learning_rate": [0.002, 0.2],
    "selection": {"seeds": [100]},
}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """tiny.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(on_disk(tmp_path, **SMALL)))
    return Path("tiny.yaml")


def test_from_file_to_table(study: Path, call: Call) -> None:
    early = call("lab", "compare", study, "--table")
    assert early.code == 0, early.err
    assert "| prism | … |" in early.out
    ended = call("lab", "compare", study)
    assert ended.code == 0, ended.err
    assert "selection runs: 4 of 4" in ended.err
    assert "report runs: 4 of 4" in ended.err
    assert Path("studies/tiny/table.md").read_text() in ended.out
    assert "page:     studies/tiny/study.html" in ended.out
    assert "is best in the mean" in ended.out
    again = call("lab", "compare", study, "--json")
    assert "report runs" not in again.err
    assert again.json["page"] == "studies/tiny/study.html"
    assert again.json["runs"]["finished"] == 8
    assert again.json["rules"] == json.loads(Path("studies/tiny/summary.json").read_text())["rules"]
    assert call("lab", "compare", study, "--table").out == ended.out


def test_two_parts(study: Path, call: Call) -> None:
    first = call("lab", "compare", study, "--part", "1/2")
    assert first.code == 0, first.err
    assert "selection runs: 2 of 2" in first.err
    assert "part 1/2 made 2 runs; 2 of other parts are left (choosing learning rates)" in first.out
    second = call("lab", "compare", study, "--part", "2/2", "--json").json
    assert second == {"part": "2/2", "phase": "report runs", "ran": 4, "left": 2}
    ended = call("lab", "compare", study, "--part", "1/2")
    assert ended.code == 0
    assert "report runs: 2 of 2" in ended.err
    assert "page:     studies/tiny/study.html" in ended.out


def test_bad_parts(study: Path, call: Call) -> None:
    for given, words in {
        ("--part", "0/2"): "write 1/N to N/N",
        ("--part", "two"): "'two' is no part",
    }.items():
        ended = call("lab", "compare", study, *given)
        assert ended.code == 2
        assert words in ended.err
    assert not Path("studies").exists()


def test_failures_are_shown(study: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr("privlora.lab.studies.running.finish_training", fails)
        ended = call("lab", "compare", study)
    assert ended.code == 2
    assert "failed: one/prism/eps3-r2-lr0.002-s100: RuntimeError: no luck" in ended.err
    assert ended.err.splitlines()[-1].startswith(
        "error: every run failed, the first with: RuntimeError: no luck"
    )
    assert call("lab", "compare", study).code == 2
    assert call("lab", "compare", study, "--retry-failed").code == 0


def test_ctrl_c(study: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, rows = Results.append, list[Row]()

    def append(self: Results, row: Row) -> None:
        kept(self, row)
        rows.append(row)
        if len(rows) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "append", append)
        stopped = call("lab", "compare", study)
    assert stopped.code == 130
    assert stopped.err.splitlines()[-1].startswith("interrupted: finished runs are kept")
    assert len(Path("studies/tiny/results.jsonl").read_text().splitlines()) == 2
    assert call("lab", "compare", study).code == 0


def test_bad_options(study: Path, call: Call) -> None:
    assert call("lab", "compare", study, "--jobs", "0").code == 2
    assert call("lab", "compare", "none.yaml").code == 2
    held = Path("studies/tiny")
    held.mkdir(parents=True)
    (held / "results.jsonl").write_text("{}\n")
    broken = call("lab", "compare", study, "--table")
    assert broken.code == 2
    assert "line 1 is no result" in broken.err
