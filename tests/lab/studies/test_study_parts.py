"""A study over several machines: every run in one part, and the result of one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from study_cases import invented, on_disk, paper
from test_study_leases import left_behind

import privlora
from privlora.errors import ConfigError, RunError
from privlora.lab.studies import study as studies
from privlora.lab.studies.choice import all_cells, report_cells, selection_cells
from privlora.lab.studies.parts import Deal, content_of
from privlora.lab.studies.results import Row, read_results
from privlora.lab.studies.settings import Study, study_from
from privlora.lab.studies.shares import Part, part_from
from privlora.lab.studies.study import StudyReport, missing_runs, report_study, run_part, run_study

SMALL: dict[str, Any] = {
    "methods": ["prism", "dp-adamw"],
    "tasks": {"one": None},
    "learning_rate": [0.002, 0.2],
    "selection": {"seeds": [100]},
    "insecure_noise_seed": "paired",
    "keep_runs": False,
}
ONE, TWO = Part(1, 2), Part(2, 2)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study_from(on_disk(tmp_path_factory.mktemp("study"), **SMALL), "tiny.yaml")


@pytest.fixture(scope="module")
def whole(study: Study, tmp_path_factory: pytest.TempPathFactory) -> StudyReport:
    """By one process."""
    return run_study(study, tmp_path_factory.mktemp("whole"))


def same(found: StudyReport, whole: StudyReport) -> bool:
    return (
        found.table.read_bytes() == whole.table.read_bytes()
        and found.summary["rules"] == whole.summary["rules"]
    )


def ran_once(folder: Path) -> bool:
    """Whether each run of the study stands in its results once."""
    cells = [row.cell for row in read_results(folder / "results.jsonl")]
    return len(cells) == len(set(cells)) == 8


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_every_run_has_one_owner_and_parts_are_even(count: int) -> None:
    study = paper()
    deal, again = Deal(study, count), Deal(paper(), count)
    owners = [(cell, role, deal.owner(cell, role)) for cell, role in all_cells(study)]
    assert all(1 <= owner.number <= count == owner.count for _, _, owner in owners)
    assert all(again.owner(cell, role) == owner for cell, role, owner in owners)
    wanted = {
        "selection": selection_cells(study),
        "report": report_cells(study, invented(study, lambda cell: 1.0)),
    }
    for role, cells in wanted.items():
        numbers = Counter(owner for cell, of, owner in owners if of == role and cell in cells)
        share = len(cells) / count
        assert all(int(share) <= numbers[Part(k, count)] <= int(share) + 1 for k in range(1, count + 1))


def test_who_reports_does_not_depend_on_the_chosen_rate() -> None:
    study = paper()
    deal = Deal(study, 5)
    owners: dict[Any, set[Part]] = {}
    for cell in study.grid(study.settings.seeds):
        owners.setdefault((cell.task, cell.method, cell.seed), set()).add(deal.owner(cell, "report"))
    assert all(len(found) == 1 for found in owners.values())
    assert len(set.union(*owners.values())) == 5


def test_contents() -> None:
    assert content_of(paper()) == content_of(paper())
    for change in ({"seeds": [0, 2]}, {"learning_rate": [0.1, 0.2]}, {"methods": ["prism"]}):
        assert content_of(paper(**change)) != content_of(paper())


def test_names_of_parts() -> None:
    assert part_from("3/8") == Part(3, 8)
    assert str(Part(3, 8)) == "3/8"
    wrong = {
        "0/8": r"\$\(\(SLURM_ARRAY_TASK_ID \+ 1\)\)",
        "9/8": "1/8 to 8/8",
        "3/0": "no part",
        "1/10001": "10000/10000",
    }
    for text, words in {**wrong, "3": "is not a part", "/": "is not a part", "-1/2": "is not a part"}.items():
        with pytest.raises(ConfigError, match=words):
            part_from(text)


@pytest.mark.long
def test_two_parts_after_one_another_give_what_one_process_gives(
    study: Study, whole: StudyReport, tmp_path: Path
) -> None:
    first = run_part(study, ONE, tmp_path)
    assert (first.ran, first.left, first.waits_for) == (2, None, (TWO,))
    second = run_part(study, TWO, tmp_path)
    assert (second.ran, second.left, second.waits_for) == (4, 2, ())
    assert run_part(study, TWO, tmp_path).ran == 0
    assert report_study(study, tmp_path).summary["runs"]["finished"] == 6
    last = run_part(study, ONE, tmp_path)
    assert (last.ran, last.left, last.waits_for) == (2, 0, ())
    assert missing_runs(study, tmp_path) == 0
    assert same(report_study(study, tmp_path), whole)
    assert not (tmp_path / "results.jsonl").exists()
    found = run_study(study, tmp_path, watcher=Idle())
    assert same(found, whole)
    assert ran_once(tmp_path)
    assert not (tmp_path / "parts").exists()


class Idle:
    """A watcher of a process that finds every run made."""

    def __init__(self) -> None:
        self.waited: list[tuple[tuple[Part, ...], int]] = []

    def on_phase(self, words: str, done: int, total: int) -> None:
        assert done == total

    def on_row(self, row: Row) -> None:
        raise AssertionError("nothing was to be run")

    def on_waiting(self, parts: tuple[Part, ...], runs: int) -> None:
        self.waited.append((parts, runs))


def test_whoever_is_last_completes_what_parts_left(study: Study, whole: StudyReport, tmp_path: Path) -> None:
    run_part(study, Part(3, 3), tmp_path)
    torn = tmp_path / "parts/3-of-3.jsonl"
    kept = read_results(torn)
    torn.write_bytes(torn.read_bytes() + kept[0].to_line()[:30])
    more = run_part(study, TWO, tmp_path)  # another number of parts, later
    assert not {row.cell for row in kept} & {
        row.cell for row in read_results(tmp_path / "parts/2-of-2.jsonl")
    }
    assert more.waits_for == (ONE,)
    assert same(run_study(study, tmp_path), whole)
    assert ran_once(tmp_path)


def update(source: Path, target: Path) -> None:
    """`rsync -au`: an older file replaces no newer one."""

    def newer(found: str, place: str) -> None:
        if not os.path.exists(place) or os.path.getmtime(found) > os.path.getmtime(place):
            shutil.copy2(found, place)

    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=newer)


def test_folders_of_machines_that_share_none(study: Study, whole: StudyReport, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run_part(study, ONE, here)
    run_part(study, TWO, there)
    update(there, here)
    update(here, there)
    assert run_part(study, ONE, here).ran == 2
    assert run_part(study, TWO, there).ran == 2
    update(there, here)
    assert same(run_study(study, here, watcher=Idle()), whole)
    assert ran_once(here)


def test_a_part_waits_as_long_as_the_others_work(
    study: Study, whole: StudyReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {row.cell: row for row in read_results(whole.folder / "results.jsonl")}
    deal = Deal(study, 2)
    theirs = [cell for cell in selection_cells(study) if deal.owner(cell, "selection") == TWO]
    run_part(study, ONE, tmp_path)
    working = left_behind(tmp_path, TWO, content=content_of(study))
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        with open(tmp_path / "parts/2-of-2.jsonl", "ab") as file:
            file.write(rows[theirs[len(looks) - 1]].to_line())
        if len(looks) == len(theirs):
            working.unlink()

    monkeypatch.setattr(studies.time, "sleep", sleep)

    class Log(Idle):
        def on_phase(self, words: str, done: int, total: int) -> None: ...

        def on_row(self, row: Row) -> None: ...

    log = Log()
    ended = run_part(study, ONE, tmp_path, watcher=log)
    assert len(looks) == len(theirs) == 2
    assert log.waited == [((TWO,), 2)]
    assert (ended.ran, ended.waits_for) == (2, ())


def test_nobody_takes_the_whole_while_a_part_runs(study: Study, tmp_path: Path) -> None:
    left_behind(tmp_path, TWO, content=content_of(study))
    with pytest.raises(RunError, match="part 2/2"):
        run_study(study, tmp_path)
    with pytest.raises(RunError, match="part 2/2"):
        run_part(study, Part(1, 3), tmp_path)
    changed = study_from(paper(seeds=[7]).settings.model_dump(), "paper.yaml")
    with pytest.raises(RunError, match="another content"):
        run_part(changed, ONE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_a_run_that_ended_well_counts_before_one_that_failed() -> None:
    study = paper()
    progress = invented(study, lambda cell: 1.0)
    good = next(iter(progress.rows.values()))
    bad = Row(good.cell, good.role, good.fingerprint, "no memory", {}, {}, {})
    for rows in ([good, bad], [bad, good]):
        assert studies.Progress(study, rows).rows[good.cell] == good


@pytest.mark.long
def test_parts_that_run_together_one_of_which_is_killed(tmp_path: Path) -> None:
    content = on_disk(tmp_path, **SMALL)
    content["base"]["privacy"]["steps"] = 12
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(content))
    study = study_from(content, "tiny.yaml")
    shared = tmp_path / "shared"
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(privlora.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }

    def start(part: Part) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "privlora.cli", "lab", "compare", str(file), "--output", str(shared)]
        return subprocess.Popen(
            [*command, "--part", str(part)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    killed, other = start(ONE), start(TWO)
    own = shared / "parts/1-of-2.jsonl"
    deadline = time.monotonic() + 300
    while not own.exists() or b"\n" not in own.read_bytes():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    both = [start(ONE), other]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    if "give the same command again" in said[1]:  # it looked while nobody worked at the killed part
        assert run_part(study, TWO, shared).waits_for == ()
    found = run_study(study, shared, watcher=Idle())
    assert ran_once(shared)
    assert same(found, run_study(study, tmp_path / "whole"))
