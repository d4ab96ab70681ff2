"""Cells over several processes that stay alive, each with its loaded model and tokens; or in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch

from privlora.errors import RunError
from privlora.lab.studies.leases import LeaseLostError
from privlora.lab.studies.results import Row
from privlora.lab.studies.running import Job, LoadingError, Runner
from privlora.training.loop import Interrupted

_READY = "ready"
_SECONDS_TO_STOP = 10.0  # a worker ends after its current step


class Workers:
    """Runs jobs, here or in ``count`` processes that live until the end of the ``with`` block.

    count: 1 runs them in this process. threads: of torch, for each worker.

    Raises RunError if either is below 1.
    """

    def __init__(self, count: int, threads: int) -> None:
        if count < 1 or threads < 1:
            raise RunError("the number of workers or threads is below 1", fix="give 1 or more")
        self._pool = _Pool(count, threads) if count > 1 else None
        self._runner = Runner()
        self._threads = threads

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.stop()

    def run(self, jobs: Sequence[Job], on_row: Callable[[Row], None]) -> None:
        """Run all jobs and hand each row over as it comes.

        Raises LoadingError if a task cannot be loaded, LeaseLostError if another process took the study over, RunError
        if a worker cannot start, KeyboardInterrupt on ctrl-C.
        """
        if self._pool is not None:
            self._pool.run(jobs, on_row)
            return
        torch.set_num_threads(self._threads)
        for job in jobs:
            try:
                row = self._runner.run(job)
            except Interrupted:
                raise KeyboardInterrupt from None
            on_row(row)


@dataclass
class _Worker:
    process: BaseProcess
    connection: Any  # of a class that is another one on each system
    ready: bool = False
    job: Job | None = None
    task: str | None = None
    """Task of its last job: the next job of the same task needs no loading."""


class _Pool:
    def __init__(self, count: int, threads: int) -> None:
        self._threads = threads
        self._devices = _devices()
        self._started = 0
        self._count = count
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job], on_row: Callable[[Row], None]) -> None:
        pending = list(jobs)
        while pending or self._busy():
            while len(self._workers) < min(self._count, len(pending) + self._busy()):
                self._start()
            for worker in self._workers:
                if worker.ready and worker.job is None and pending:
                    job = _take(pending, worker.task)
                    try:
                        worker.connection.send(job)
                    except OSError:  # it died while it waited, which _wait will see
                        pending.insert(0, job)
                        break
                    worker.job, worker.task = job, job.cell.task
            self._wait(on_row)

    def _busy(self) -> int:
        return sum(1 for worker in self._workers if worker.job is not None)

    def _start(self) -> None:
        context = get_context("spawn")  # a forked torch with threads or a GPU may hang
        here, there = context.Pipe()
        device = self._devices[self._started % len(self._devices)] if self._devices else None
        sharing = (self._count, max(1, len(self._devices)))
        process = context.Process(target=_work, args=(there, self._threads, device, sharing), daemon=True)
        process.start()
        there.close()
        self._workers.append(_Worker(process, here))
        self._started += 1

    def _wait(self, on_row: Callable[[Row], None]) -> None:
        """Until at least one worker has something to say or has died."""
        by_handle: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers}
        for handle in wait(list(by_handle)):
            worker = by_handle[handle]
            try:
                said = worker.connection.recv()
            except (EOFError, OSError):
                self._bury(worker, on_row)
                continue
            if said == _READY:
                worker.ready = True
            elif isinstance(said, Row):
                worker.job = None
                on_row(said)
            else:
                kind, what, why, fix = said
                raise kind(what, why=why, fix=fix)

    def _bury(self, worker: _Worker, on_row: Callable[[Row], None]) -> None:
        """A worker is gone: its job failed, and another worker takes its place."""
        self._workers.remove(worker)
        worker.process.join(_SECONDS_TO_STOP)
        code = worker.process.exitcode
        end = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if not worker.ready:
            raise RunError(f"a worker could not start ({end})", fix="use --workers 1, which shows the cause")
        if worker.job is not None:
            error = f"the worker process died ({end}); out of memory?"
            job = worker.job
            on_row(Row(job.cell, job.role, job.fingerprint, error, {}, {}, {}))

    def stop(self) -> None:
        """End all workers: idle ones at once, busy ones after their current step, or by force."""
        for worker in self._workers:
            worker.connection.close()
            if worker.job is not None or not worker.ready:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_SECONDS_TO_STOP)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _take(pending: list[Job], task: str | None) -> Job:
    """The next job of the worker's task; of a new task, the first that waits."""
    place = next((i for i, job in enumerate(pending) if job.cell.task == task), 0)
    return pending.pop(place)


def _devices() -> list[str]:
    """Names of GPUs to spread workers over; none if there is at most one."""
    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(i) for i in range(count)]) if count > 1 else []


def _work(connection: Connection, threads: int, device: str | None, sharing: tuple[int, int]) -> None:
    """A worker process: jobs in, rows out, until the other end is closed or gone. sharing: workers and GPUs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's, which then ends the workers
    _die_with_parent()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    sys.stdout = sys.stderr  # stdout is the parent's result
    warnings.simplefilter("ignore")
    logging.getLogger("absl").setLevel(logging.ERROR)
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    runner = Runner(*sharing)
    with contextlib.suppress(EOFError, BrokenPipeError, Interrupted):
        connection.send(_READY)
        while True:
            job = connection.recv()
            try:
                connection.send(runner.run(job))
            except (LoadingError, LeaseLostError) as error:
                connection.send((type(error), error.what, error.why, error.fix))


def _die_with_parent() -> None:
    """If the parent is killed, so is this: a resumed study must not meet a run that still goes on."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
