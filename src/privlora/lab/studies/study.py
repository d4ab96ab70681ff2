"""Run a study, or take it up where it stopped, and write what it found."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from privlora.cli.console import quiet_libraries
from privlora.errors import ConfigError, RunError
from privlora.lab.studies.choice import Progress, job_of, report_cells, selection_cells
from privlora.lab.studies.results import Results, Role, Row, read_folder
from privlora.lab.studies.running import Job, Runner
from privlora.lab.studies.settings import Study
from privlora.lab.studies.summary import Summary, summarise
from privlora.lab.studies.tables import markdown, render
from privlora.training.files import write_atomically
from privlora.training.loop import Interrupted

Execute = Callable[[Sequence[Job]], Iterator[Row]]
"""Makes the rows of jobs, in the order in which the runs end."""


@contextmanager
def in_this_process(threads: int) -> Iterator[Execute]:
    torch.set_num_threads(threads)
    runner = Runner()

    def execute(jobs: Sequence[Job]) -> Iterator[Row]:
        for job in jobs:
            try:
                row = runner.run(job)
            except Interrupted:
                raise KeyboardInterrupt from None
            yield row

    yield execute


@contextmanager
def process_pool(count: int, threads: int) -> Iterator[Execute]:
    """Processes that keep their model and tokens, spread over the GPUs. Raises RunError if one of them dies."""
    context = get_context("spawn")  # a forked torch with threads or a GPU may hang
    others = set(active_children())
    devices, queue = _devices(), context.SimpleQueue()
    for number in range(count):
        queue.put(devices[number % len(devices)] if devices else None)
    start = (queue, threads, count, max(1, len(devices)))
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=start)

    def execute(jobs: Sequence[Job]) -> Iterator[Row]:
        for future in as_completed([pool.submit(_run, job) for job in jobs]):
            yield future.result()

    try:
        yield execute
    except BrokenProcessPool:
        fix = "run the same command with fewer --jobs; what is finished is kept"
        raise RunError("a process of the pool died, out of memory perhaps", fix=fix) from None
    except BaseException:
        for child in set(active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def ray_tasks(threads: int) -> Iterator[Execute]:
    """One task a run, on one GPU where the cluster has any. Raises ConfigError without Ray."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray, which is not installed", fix="pip install ray") from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    task: Any = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_run)

    def execute(jobs: Sequence[Job]) -> Iterator[Row]:
        left = [task.remote(job, threads) for job in jobs]
        while left:
            done, left = ray.wait(left)
            try:
                yield ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None

    try:
        yield execute
    finally:
        ray.shutdown()


def _devices() -> list[str]:
    """Names of GPUs to spread processes over; none if there is at most one."""
    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(i) for i in range(count)]) if count > 1 else []


_kept: list[Runner] = []
"""Of this process, once it is one of a pool or of Ray."""
_as_long_as_this_process = ExitStack()


def _begin(queue: Any, threads: int, count: int, gpus: int) -> None:
    """A process of the pool begins. queue: the GPU of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's, which then ends the others
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if (device := queue.get()) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    _as_long_as_this_process.enter_context(quiet_libraries())  # stdout is the parent's result
    torch.set_num_threads(threads)
    _kept.append(Runner(count, gpus))


def _run(job: Job, threads: int = 1) -> Row:
    if not _kept:  # of Ray, whose processes have no beginning of ours
        torch.set_num_threads(threads)
        _kept.append(Runner())
    try:
        return _kept[0].run(job)
    except Interrupted:
        os._exit(1)


def _die_with_parent() -> None:
    """If the parent is killed, so is this: a resumed study must not meet a run that still goes on."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


TABLE, SUMMARY, PAGE = "table.md", "summary.json", "study.html"


@dataclass(frozen=True)
class StudyReport:
    """What a study wrote. ``summary`` is the content of summary.json."""

    folder: Path
    summary: Summary

    @property
    def table(self) -> Path:
        return self.folder / TABLE

    @property
    def page(self) -> Path:
        return self.folder / PAGE


@dataclass(frozen=True)
class Unfinished:
    """What a part leaves to others. ran: runs that it made. left: of the phase, before which the next cannot begin."""

    folder: Path
    phase: str
    ran: int
    left: int


def run_study(
    study: Study,
    folder: str | Path | None = None,
    *,
    part: tuple[int, int] = (1, 1),
    jobs: int = 1,
    threads: int = 1,
    ray: bool = False,
    retry_failed: bool = False,
    on_run: Callable[[Row, int, int], None] = lambda row, done, total: None,
) -> StudyReport | Unfinished:
    """Run the cells that the folder does not hold yet, first those that choose learning rates; then report.

    folder: None takes ``_output_folder(study)``. part: (k, n) runs every n-th cell, from the k-th on. jobs: runs at the
    same time, each with so many ``threads``. ray: as tasks of Ray instead. retry_failed: run failed cells once more.
    on_run: called with each finished run, how many of its role are there, and how many there will be.

    Raises PrivloraError subclasses, and KeyboardInterrupt on ctrl-C; what is finished stays in any case.
    """
    folder = _output_folder(study) if folder is None else Path(folder)
    phases: list[tuple[Role, str]] = [("report", "report runs")]
    if study.selects:
        phases.insert(0, ("selection", "choosing learning rates"))
    ran = 0
    pool = in_this_process(threads) if jobs == 1 else process_pool(jobs, threads)
    workers = ray_tasks(threads) if ray else pool
    with Results(folder, part) as results, workers as execute:
        progress = Progress(study, read_folder(folder))
        again = {cell for cell, row in progress.rows.items() if row.error is not None and retry_failed}
        for role, words in phases:
            cells = selection_cells(study) if role == "selection" else report_cells(study, progress)
            own = cells[part[0] - 1 :: part[1]]
            missing = [cell for cell in own if cell not in progress.rows or cell in again]
            rows = execute([job_of(study, cell, role, folder) for cell in missing])
            for done, row in enumerate(rows, start=len(own) - len(missing) + 1):
                results.append(row)
                ran += 1
                on_run(row, done, len(own))
            progress = Progress(study, read_folder(folder))
            errors = [row.error for row in progress.rows.values()]
            if errors and None not in errors:
                fix = "mend it, then --retry-failed"
                raise RunError(f"every run failed, the first with: {errors[0]}", fix=fix)
            if left := sum(1 for cell in cells if cell not in progress.rows):
                return Unfinished(folder, words, ran, left)
    return _write(progress, folder)


def report_study(study: Study, folder: str | Path | None = None) -> StudyReport:
    """Make the tables and the page of what is finished; nothing is run."""
    folder = _output_folder(study) if folder is None else Path(folder)
    return _write(Progress(study, read_folder(folder)), folder)


def _output_folder(study: Study) -> Path:
    return Path("studies") / Path(study.source).stem


def _write(progress: Progress, folder: Path) -> StudyReport:
    summary = summarise(progress, name=Path(progress.study.source).stem)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name, content in ((SUMMARY, text), (TABLE, markdown(summary)), (PAGE, render(summary))):
        write_atomically(folder / name, content)
    return StudyReport(folder, summary)
