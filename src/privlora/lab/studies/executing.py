"""Where the runs of a study are made: in this process or in a pool of processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

import torch

from privlora.cli.console import quiet_libraries
from privlora.errors import RunError
from privlora.lab.studies.results import Row
from privlora.lab.studies.running import Job, Runner
from privlora.training.loop import Interrupted

Execute = Callable[[Sequence[Job]], Iterator[Row]]
"""Makes the rows of jobs, in the order in which the runs end."""


def executor(jobs: int, threads: int) -> AbstractContextManager[Execute]:
    """jobs: runs at the same time on this machine. threads: of each."""
    return in_this_process(threads) if jobs == 1 else process_pool(jobs, threads)


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
        raise RunError(
            "a process of the pool died, out of memory perhaps",
            fix="run the same command with fewer --jobs; what is finished is kept",
        ) from None
    except BaseException:
        for child in set(active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _devices() -> list[str]:
    """Names of GPUs to spread processes over; none if there is at most one."""
    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(i) for i in range(count)]) if count > 1 else []


_kept: list[Runner] = []
"""Of this process, once it is one of a pool."""
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


def _run(job: Job) -> Row:
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
