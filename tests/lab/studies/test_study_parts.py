"""A study in parts, as a job array runs it: every run in one part, and the result of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from study_cases import invented, on_disk, paper

from privlora.errors import ConfigError
from privlora.lab.cli import part_of
from privlora.lab.studies.choice import Progress
from privlora.lab.studies.results import Row, read_folder
from privlora.lab.studies.settings import Study, study_from
from privlora.lab.studies.study import StudyReport, Unfinished, report_study, run_study

SMALL: dict[str, Any] = {
    "methods": ["prism", "dp-adamw"],
    "tasks": {"one": None},
    "learning_rate": [0.002, 0.2],
    "selection": {"seeds": [100]},
    "insecure_noise_seed": "paired",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study_from(on_disk(tmp_path_factory.mktemp("study"), **SMALL), "tiny.yaml")


def run(study: Study, folder: Path, *part: int) -> StudyReport | Unfinished:
    return run_study(study, folder, part=(part[0], part[1]))


def test_parts_after_one_another_give_what_one_process_gives(study: Study, tmp_path: Path) -> None:
    whole = run_study(study, tmp_path / "whole")
    assert isinstance(whole, StudyReport)
    shared = tmp_path / "shared"
    assert run(study, shared, 1, 3) == Unfinished(shared, "choosing learning rates", 2, 2)
    assert run(study, shared, 2, 3) == Unfinished(shared, "choosing learning rates", 1, 1)
    assert run(study, shared, 3, 3) == Unfinished(shared, "report runs", 1 + 1, 3)  # the choice is made now
    assert not (shared / "table.md").exists()
    assert run(study, shared, 3, 3) == Unfinished(shared, "report runs", 0, 3)
    assert run(study, shared, 1, 3) == Unfinished(shared, "report runs", 2, 1)
    assert report_study(study, shared).summary["runs"]["finished"] == 7
    last = run(study, shared, 2, 3)
    assert isinstance(last, StudyReport)
    assert last.table.read_bytes() == whole.table.read_bytes()
    cells = [row.cell for row in read_folder(shared)]
    assert len(cells) == len(set(cells)) == 8
    assert sorted(path.name for path in shared.glob("results*")) == [
        f"results-{k}-of-3.jsonl" for k in (1, 2, 3)
    ]


def test_whoever_is_last_completes_what_parts_left(study: Study, tmp_path: Path) -> None:
    run(study, tmp_path, 3, 3)
    torn = tmp_path / "results-3-of-3.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"cell"')
    found = run_study(study, tmp_path)
    assert isinstance(found, StudyReport)
    assert found.summary["runs"]["finished"] == 8
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 7


def test_a_run_that_ended_well_counts_before_one_that_failed() -> None:
    study = paper()
    good = next(iter(invented(study, lambda cell: 1.0).rows.values()))
    bad = Row(good.cell, good.role, good.fingerprint, "no memory", {}, {}, {})
    for rows in ([good, bad], [bad, good]):
        assert Progress(study, rows).rows[good.cell] == good


def test_names_of_parts() -> None:
    assert part_of("3/8") == (3, 8)
    for text in ("0/8", "9/8", "3/0", "3", "/", "-1/2"):
        with pytest.raises(ConfigError, match="is no part"):
            part_of(text)
