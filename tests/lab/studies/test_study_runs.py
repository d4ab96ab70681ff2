"""Studies that really run: killed and resumed, failing, over processes; and what each run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_cases import write_records
from study_cases import on_disk

import privlora
from privlora.accounting import read_ledger
from privlora.errors import ConfigError, PrivloraError, RunError
from privlora.lab.studies import running
from privlora.lab.studies.choice import job_of, selection_cells
from privlora.lab.studies.results import Row, read_results
from privlora.lab.studies.settings import Cell, Study, study_from
from privlora.lab.studies.study import StudyReport, in_this_process, process_pool, report_study, run_study
from privlora.training import assembly
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted

SMALL: dict[str, Any] = {
    "methods": ["prism", "dp-adamw"],
    "learning_rate": [0.002, 0.2],
    "selection": {"seeds": [100]},
}


class Log:
    """Keeps the runs that it is told of."""

    def __init__(self, then: Callable[[Row], None] = lambda row: None) -> None:
        self.rows: list[Row] = []
        self.counts: list[tuple[int, int]] = []
        self._then = then

    def __call__(self, row: Row, done: int, total: int) -> None:
        self.rows.append(row)
        self.counts.append((done, total))
        self._then(row)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study_from(on_disk(tmp_path_factory.mktemp("study"), **SMALL), "tiny.yaml")


@dataclass(frozen=True)
class Watched:
    """shares: seed and records of each evaluation."""

    report: StudyReport
    log: Log
    shares: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def watched(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    seen: list[tuple[int, ...]] = []
    share = running._share

    def noted(job: running.Job, count: int) -> tuple[int, ...]:
        found = share(job, count)
        seen.append((job.cell.seed, *found))
        return found

    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_share", noted)
        report = run_study(study, tmp_path_factory.mktemp("found"), on_run=log)
    return Watched(report, log, seen)


@pytest.fixture(scope="module")
def found(watched: Watched) -> StudyReport:
    return watched.report


def test_each_role_sees_its_own_seeds_and_records(watched: Watched) -> None:
    log = watched.log
    assert log.counts == [(done, 8) for _ in range(2) for done in range(1, 9)]
    assert {row.cell.seed for row in log.rows if row.role == "selection"} == {100}
    assert {row.cell.seed for row in log.rows if row.role == "report"} == {0, 1}
    assert set(watched.shares) == {(100, 0, 2, 4, 6, 8), (0, 1, 3, 5, 7, 9), (1, 1, 3, 5, 7, 9)}
    halves = {row.role: row.before["loss"] for row in log.rows if row.cell.task == "one"}
    assert halves["selection"] != halves["report"]


def test_every_method_gets_the_same_public_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_records(tmp_path / "similar.jsonl", 8, first=200)
    content = on_disk(tmp_path / "study", **{**SMALL, "learning_rate": [0.02]})
    content["base"]["adapter"] = {"init": "public-gradient", "public_text": str(text)}
    content["tasks"] = {"one": None}
    content["methods"].append({"name": "ffa", "adapter.init": "random", "adapter.public_text": None})
    seeds: list[int] = []
    find = assembly.mean_gradient_subspaces

    def noted(*args: Any, seed: int, **options: Any) -> Any:
        seeds.append(seed)
        return find(*args, seed=seed, **options)

    monkeypatch.setattr(assembly, "mean_gradient_subspaces", noted)
    log = Log()
    run_study(study_from(content), tmp_path / "found", on_run=log)
    assert [row.error for row in log.rows] == [None] * 6
    assert sorted(seeds) == [0, 1]


def test_one_ledger_a_run(found: StudyReport) -> None:
    rows = read_results(found.folder / "results.jsonl")
    assert len(rows) == 16
    ledgers = [read_ledger(found.folder / row.facts["ledger"]) for row in rows]
    assert len({ledger.run_id for ledger in ledgers}) == 16
    for row, ledger in zip(rows, ledgers, strict=True):
        assert ledger.closed
        assert ledger.charges == 3
        assert ledger.plan.method == row.cell.method
        assert ledger.plan.dataset == row.cell.task
        assert ledger.epsilon() <= row.cell.epsilon
        release = (found.folder / row.facts["ledger"]).parent
        assert [path.name for path in release.parent.rglob("*")] == ["release", "ledger.jsonl"]


def test_what_is_written(found: StudyReport) -> None:
    assert {p.name for p in found.folder.iterdir()} == {
        "results.jsonl",
        "runs",
        "study.html",
        "summary.json",
        "table.md",
    }
    summary = json.loads((found.folder / "summary.json").read_text())
    assert summary["runs"]["finished"] == 16
    assert summary["runs"]["cpu_seconds"] > 0
    assert summary["runs"]["versions"][0]["privlora"] == privlora.__version__
    assert summary["tuning_cost"]
    assert "is best in the mean" in found.table.read_text()


def test_a_finished_study_runs_nothing(
    study: Study, found: StudyReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.Runner, "run", None)
    before = found.table.read_bytes()
    log = Log()
    again = run_study(study, found.folder, on_run=log)
    assert not log.rows
    assert again.table.read_bytes() == before


def test_an_extended_study_runs_what_is_new(tmp_path: Path) -> None:
    content = on_disk(tmp_path / "study", **{**SMALL, "methods": ["prism"]}, tasks={"one": None})
    study = study_from(content, "tiny.yaml")
    run_study(study, tmp_path)
    more = study.settings.model_copy(update={"seeds": [0, 1, 2]})
    log = Log()
    run_study(replace(study, settings=more), tmp_path, on_run=log)
    assert {row.cell.seed for row in log.rows} == {2}
    changed = study.settings.model_dump()
    changed["base"]["privacy"]["steps"] = 2
    log = Log()
    found = run_study(study_from(changed, "tiny.yaml"), tmp_path, on_run=log)
    assert len(log.rows) == 4
    assert found.summary["runs"]["outdated"] == 4 + 1
    run = (tmp_path / log.rows[0].facts["ledger"]).parents[1]
    assert read_ledger(run / "earlier-ledger-1.jsonl").plan.steps == 3
    assert read_ledger(run / "release" / "ledger.jsonl").plan.steps == 2


def test_an_earlier_ledger_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them somebody removed, and whoever else writes one meanwhile."""
    folder = RunFolder(tmp_path / "run")

    def clear(content: str) -> dict[str, str]:
        folder.create()
        folder.ledger.write_text(content)
        running._clear(folder)
        assert not folder.release.exists()
        return {path.name: path.read_text() for path in folder.root.iterdir()}

    assert clear("a") == {"earlier-ledger-1.jsonl": "a"}
    (folder.root / "earlier-ledger-1.jsonl").rename(folder.root / "earlier-ledger-2.jsonl")
    assert clear("b") == {"earlier-ledger-2.jsonl": "a", "earlier-ledger-3.jsonl": "b"}
    link = os.link

    def late(source: Path, target: Path) -> None:
        target.write_text("another's")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(FileExistsError):
        clear("c")
    assert folder.ledger.read_text() == "c"
    assert (folder.root / "earlier-ledger-4.jsonl").read_text() == "another's"


def test_a_run_that_fails_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = on_disk(tmp_path / "study", **{**SMALL, "learning_rate": [0.02], "selection": {}})
    study = study_from(content, "tiny.yaml")
    train = running.finish_training

    def fails(parts: Any, *given: Any, **named: Any) -> None:
        if parts.settings.method.name == "prism" and parts.settings.run.seed == 1:
            raise ValueError("one\nbad   run")
        train(parts, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(running, "finish_training", fails)
        log = Log()
        found = run_study(study, tmp_path, on_run=log)
    failed = [row for row in log.rows if row.error is not None]
    assert [(row.cell.task, row.error) for row in failed] == [
        ("one", "ValueError: one bad run"),
        ("two", failed[1].error),
    ]
    assert "**2 runs failed**" in found.table.read_text()
    again = Log()
    run_study(study, tmp_path, on_run=again)
    assert not again.rows
    retried = Log()
    found = run_study(study, tmp_path, on_run=retried, retry_failed=True)
    assert [row.cell for row in retried.rows] == [row.cell for row in failed]
    assert "failed" not in found.table.read_text()


def test_a_loss_that_is_not_finite_is_a_failure(
    study: Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evaluate, calls = running.evaluate_next_token, []

    def nothing(*given: Any, **named: Any) -> Any:
        calls.append(given)
        found = evaluate(*given, **named)
        return found if len(calls) == 1 else replace(found, loss_per_example=float("nan"))

    monkeypatch.setattr(running, "evaluate_next_token", nothing)
    job = job_of(study, selection_cells(study)[0], "selection", tmp_path)
    row = running.Runner().run(job)
    assert row.error is not None
    assert "not finite" in row.error
    assert not row.scores
    assert row.before["loss"] > 0
    assert not (job.folder / "private").exists()
    assert read_ledger(job.folder / "release" / "ledger.jsonl").charges == 3


def test_a_task_that_cannot_be_loaded_stops_the_study(study: Study, tmp_path: Path) -> None:
    content = study.settings.model_dump()
    content["base"]["data"]["path"] = str(tmp_path / "none.jsonl")
    with pytest.raises(PrivloraError, match=r"none\.jsonl"):
        run_study(study_from(content), tmp_path / "out")
    assert not read_results(tmp_path / "out" / "results.jsonl")


def test_too_few_evaluation_records(tmp_path: Path) -> None:
    content = on_disk(tmp_path, **SMALL)
    held_out = Path(content["base"]["data"]["evaluation"])
    held_out.write_text(held_out.read_text().splitlines()[0] + "\n")
    with pytest.raises(PrivloraError, match="too few to choose on some and report on others"):
        run_study(study_from(content), tmp_path / "out")
    assert not read_results(tmp_path / "out" / "results.jsonl")


def test_a_task_with_a_metric_of_its_own(tmp_path: Path) -> None:
    content = on_disk(
        tmp_path, **SMALL, seeds=[0], tasks={"reviews": {"data.task": "sst2", "data.max_length": 120}}
    )
    for name, first, count in (("path", 0, 40), ("evaluation", 100, 12)):
        numbers = range(first, first + count)
        rows = [{"sentence": f"film {i} was {('bad', 'good')[i % 2]}", "label": i % 2} for i in numbers]
        Path(content["base"]["data"][name]).write_text("\n".join(map(json.dumps, rows)))
    found = run_study(study_from(content), tmp_path / "out")
    (task,) = found.summary["tasks"]
    assert (task["metric"], task["words"], task["lower_is_better"]) == ("task", "accuracy", False)
    rows = read_results(found.folder / "results.jsonl")
    assert all(row.scores["records"] == 6 and 0 <= row.scores["task"] <= 1 for row in rows)
    assert all(row.before["task_metric"] == "accuracy" for row in rows)
    assert "accuracy, higher is better" in found.table.read_text()


def test_runs_with_one_rate_choose_nothing(tmp_path: Path) -> None:
    content = on_disk(tmp_path, **SMALL)
    content |= {"tasks": {"one": None}, "methods": ["prism", "adamw"], "learning_rate": [0.02]}
    content |= {"seeds": [0], "selection": {}}
    found = run_study(study_from(content), tmp_path / "out")
    files = [path for path in (found.folder / "runs").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["ledger.jsonl"]  # none of adamw
    assert read_ledger(files[0]).plan.adjacency == "add-or-remove-one"
    assert "Each method has one learning rate" in found.table.read_text()


def test_an_interruption_keeps_what_is_finished(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = running.Runner.run

    def interrupted(self: Any, job: running.Job) -> Row:
        if job.cell.task == "two":
            raise Interrupted(1)
        return run(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(running.Runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_study(study, tmp_path)
    assert len(read_results(tmp_path / "results.jsonl")) == 4
    partial = report_study(study, tmp_path)
    assert "…" in partial.table.read_text()


@pytest.mark.long
def test_killed_and_resumed_gives_the_same_table(tmp_path: Path) -> None:
    content = on_disk(tmp_path, **SMALL, insecure_noise_seed="paired", tasks={"one": None})
    content["base"]["privacy"]["steps"] = 15
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(content))
    command = [
        sys.executable,
        "-m",
        "privlora",
        "lab",
        "compare",
        str(file),
        "--output",
        str(tmp_path / "killed"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(privlora.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    results = tmp_path / "killed" / "results.jsonl"
    with subprocess.Popen(
        [*command, "--jobs", "2"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 300
        while not results.exists() or results.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = _children(process.pid)
        process.kill()
    assert len(children) >= 2
    _wait_for_end(children)
    finished = read_results(results)
    assert 3 <= len(finished) < 8
    with results.open("ab") as torn:
        torn.write(finished[0].to_line()[:50])
    study = study_from(content, "tiny.yaml")
    log = Log()
    resumed = run_study(study, tmp_path / "killed", on_run=log)
    assert len(log.rows) == 8 - len(finished)
    whole = run_study(study, tmp_path / "whole")
    assert resumed.table.read_bytes() == whole.table.read_bytes()
    assert resumed.summary["rules"] == whole.summary["rules"]
    assert "NOT PRIVATE" in whole.table.read_text()


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def _wait_for_end(pids: list[int]) -> None:
    """Workers end with the killed parent: no run may go on beside the resumed study."""
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived the killed study"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@pytest.mark.long
def test_a_pool_gives_the_same_rows_and_says_when_a_process_dies(tmp_path: Path) -> None:
    study = study_from(on_disk(tmp_path, **SMALL, insecure_noise_seed="paired"))
    cells = selection_cells(study)[:4]

    def scores(folder: str, jobs: int) -> dict[Cell, Any]:
        with in_this_process(1) if jobs == 1 else process_pool(jobs, 1) as execute:
            rows = list(execute([job_of(study, cell, "selection", tmp_path / folder) for cell in cells]))
        assert [row.error for row in rows] == [None] * 4
        return {row.cell: row.scores for row in rows}

    assert scores("pool", 2) == scores("here", 1)
    job = job_of(study, cells[0], "selection", tmp_path / "bad")
    with pytest.raises(RunError, match=r"died.*fewer --jobs"), process_pool(2, 1) as execute:
        list(execute([replace(job, folder=Bomb())]))


@pytest.mark.long
def test_ctrl_c_ends_the_processes_of_a_pool(tmp_path: Path) -> None:
    content = on_disk(tmp_path, **SMALL, insecure_noise_seed="paired")
    content["base"]["privacy"]["steps"] = 300

    def stop(row: Row) -> None:
        raise KeyboardInterrupt

    others = set(active_children())
    with pytest.raises(KeyboardInterrupt):
        run_study(study_from(content), tmp_path / "out", jobs=2, on_run=Log(stop))
    assert set(active_children()) <= others
    assert len(read_results(tmp_path / "out" / "results.jsonl")) == 1


@pytest.mark.long
def test_tasks_of_ray_give_the_same_table(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    content = on_disk(tmp_path, **SMALL, insecure_noise_seed="paired", tasks={"one": None}, seeds=[0])
    found = run_study(study_from(content, "tiny.yaml"), tmp_path / "ray", ray=True)
    whole = run_study(study_from(content, "tiny.yaml"), tmp_path / "whole")
    assert found.table.read_bytes() == whole.table.read_bytes()


def test_ray_that_is_not_there_is_refused(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="--ray needs Ray, which is not installed"):
        run_study(study, tmp_path, ray=True)


def test_tokens_are_chosen_by_what_was_free_before_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = on_disk(tmp_path, **SMALL)
    content["base"]["run"] = {"tokens_per_micro_batch": "auto"}
    study, asked, taken = study_from(content), list[Any](), list[Any]()
    cells = selection_cells(study)

    def choose(given: Any, model: Any, device: Any, *, sharing: int, free: float) -> tuple[Any, None]:
        asked.append((sharing, free))
        run = given.run.model_copy(update={"tokens_per_micro_batch": 201})
        return given.model_copy(update={"run": run}), None

    def train(parts: Any, *_: Any, **__: Any) -> None:
        taken.append(parts.settings.run.tokens_per_micro_batch)
        raise ValueError("enough")

    order = list[str]()
    read = running.load_data
    monkeypatch.setattr(running, "free_bytes", lambda device: order.append("free") or 1e9)
    monkeypatch.setattr(running, "load_data", lambda *a, **o: order.append("records") or read(*a, **o))
    monkeypatch.setattr(running, "with_micro_batches", choose)
    monkeypatch.setattr(running, "finish_training", train)
    runner = running.Runner(workers=3)
    for cell in cells:
        runner.run(job_of(study, cell, "selection", tmp_path / "out"))
    assert asked == [(3, 1e9)] * len(cells)
    assert taken == [201] * len(cells)
    assert order == ["free", "records", "records"]  # of two tasks, with one model


def test_a_signal_to_a_single_process_is_ctrl_c(study: Study, tmp_path: Path) -> None:
    log = Log(lambda row: os.kill(os.getpid(), signal.SIGINT) if len(log.rows) == 2 else None)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, on_run=log)
    assert len(read_results(tmp_path / "results.jsonl")) == 2


@pytest.mark.long
def test_the_example_runs(tmp_path: Path) -> None:
    """configs/studies: what each file says, on a tiny model and a few records."""
    files = sorted((Path(__file__).parents[3] / "configs" / "studies").glob("*.yaml"))
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert f"privlora lab compare configs/studies/{file.name}" in text.split("\nbase:")[0]
        content = yaml.safe_load(text)
        study_from(content, file.name)
        small = on_disk(tmp_path / file.stem)["base"]
        content["base"]["model"] = small["model"]
        content["base"]["privacy"] |= {"delta": 1e-3, "steps": 2, "expected_batch_size": 4}
        for task in content["tasks"].values():
            task |= {"data.path": small["data"]["path"], "data.evaluation": small["data"]["evaluation"]}
            task |= {"privacy.public_dataset_size": 40}
        content |= {"learning_rate": content["learning_rate"][:2], "seeds": content["seeds"][:1], "rank": [2]}
        content |= {"epsilon": content["epsilon"][:1]}
        content["selection"]["seeds"] = content["selection"]["seeds"][:1]
        found = run_study(study_from(content, file.name), tmp_path / "out" / file.stem)
        assert found.summary["runs"]["failed"] == 0
        assert all(cell["state"] == "complete" for rule in found.summary["rules"] for cell in rule["cells"])
