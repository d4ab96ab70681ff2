"""The clocks of a profile: what each stage of each step took, and the micro-batches that it was taken in. PRIVATE."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from privlora.profiling.trace import Trace
from privlora.stages import CHECKPOINT, EVALUATION, PREPARE, PROCESSES

REST: Final = "rest"
"""Of a step, what no stage is told of: modes, generators, the training loss, the loop itself."""
ASIDE: Final = (EVALUATION, CHECKPOINT)
"""They are no part of a step: they come once in a while."""
# What happens inside belongs to them: their own passes through the model are no step's. But to wait is to wait.
_WHOLE: Final = {EVALUATION, CHECKPOINT, PREPARE}
_SHAPES: Final = 5000  # micro-batches whose shapes are kept


def _seconds() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class StepTimes:
    """PRIVATE. One step. wall, cpu: stage -> seconds; on a GPU wall is by the clock of its stream, and host what the
    process itself was in the stage. occurred: how often a stage was entered.

    batches, positions, tokens: micro-batches, rows x width over all of them, and what of it are tokens of records.
    disturbed: torch's profiler was on.
    """

    step: int
    wall: defaultdict[str, float] = field(default_factory=_seconds)
    cpu: defaultdict[str, float] = field(default_factory=_seconds)
    host: defaultdict[str, float] = field(default_factory=_seconds)
    occurred: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    positions: int = 0
    tokens: int = 0
    disturbed: bool = False

    @property
    def seconds(self) -> float:
        """Wall time, without what comes once in a while."""
        return sum(seconds for stage, seconds in self.wall.items() if stage not in ASIDE)

    @property
    def host_seconds(self) -> float:
        """The process' own time in the step, likewise: below ``seconds`` where it waits for a GPU."""
        return sum(seconds for stage, seconds in self.host.items() if stage not in ASIDE)


@dataclass(frozen=True)
class _Mark:
    """A moment, from which on time belongs to ``stage``."""

    stage: str
    host: float
    cpu: float
    event: torch.cuda.Event | None


class Watch:
    """Implements `privlora.stages.Listener`: hears a run, and changes nothing of it.

    On a GPU moments are events on its stream, and the device is waited for once a step, when it is over.

    device: of the model. steps: how many are to come. folder: for torch's trace; None takes none.
    """

    def __init__(self, device: torch.device, steps: int, folder: Path | None) -> None:
        self.device = device
        self.steps = list[StepTimes]()
        self.shapes = list[tuple[int, int, int]]()
        """(rows, width, tokens) of the first micro-batches."""
        self.memory = Memory(device)
        self.trace = Trace(folder, device, steps)
        self._now: StepTimes | None = None
        self._marks = list[_Mark]()
        self._inside = list[str]()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        within = self._inside[-1] if self._inside else None
        if self._now is None or (within in _WHOLE and (within, name) != (PREPARE, PROCESSES)):
            yield
            return
        self.trace.stage_begins(name)
        self._now.occurred[name] += 1
        self._inside.append(name)
        self._mark(name)
        try:
            with self.trace.named(name):
                yield
        finally:
            self._inside.pop()
            self._mark(self._inside[-1] if self._inside else REST)

    def step_begins(self, step: int) -> None:
        self._step_ends()
        self.trace.step_begins()
        if not self.steps:
            self.memory.begin()
        self._now = StepTimes(step)
        self._mark(REST)

    def micro_batch(self, rows: int, width: int, tokens: int) -> None:
        if self._now is None or self._inside[-1:] == [PREPARE]:
            return
        self.trace.micro_batch(rows * width)
        self._now.batches += 1
        self._now.positions += rows * width
        self._now.tokens += tokens
        if len(self.shapes) < _SHAPES:
            self.shapes.append((rows, width, tokens))

    def end(self, *, whole: bool) -> None:
        """No step follows. whole: whether the last one was taken to its end; another is left out."""
        if whole:
            self._step_ends()
        self._now = None
        self._inside.clear()
        self._marks.clear()
        self.trace.end()

    def measured(self) -> list[StepTimes]:
        """The steps that speak for the run: without the first one and those in which torch's profiler was on, as far as
        there are others."""
        after = self.steps[1:]
        calm = [each for each in after if not each.disturbed]
        return calm or [each for each in self.steps if not each.disturbed] or after or self.steps

    def _mark(self, stage: str) -> None:
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
        self._marks.append(_Mark(stage, time.perf_counter(), time.process_time(), event))

    def _step_ends(self) -> None:
        if self._now is None:
            return
        self._mark(REST)
        last = self._marks[-1].event
        if last is not None:
            last.synchronize()
        found = self._now
        for before, after in pairwise(self._marks):
            host = after.host - before.host
            wall = host
            if before.event is not None and after.event is not None:
                wall = before.event.elapsed_time(after.event) / 1000
            found.wall[before.stage] += wall
            found.host[before.stage] += host
            found.cpu[before.stage] += after.cpu - before.cpu
        found.disturbed = self.trace.disturbed()
        self.steps.append(found)
        self.memory.look(calm=not found.disturbed)
        self._marks.clear()
        self._now = None


def median(values: list[float]) -> float:
    """0 of none."""
    return statistics.median(values) if values else 0.0


class Memory:
    """Bytes that the process (on a GPU: torch's allocator) held before the first step, and at most since.

    None where the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before: int | None = None
        self.most: int | None = None

    def begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.before = torch.cuda.memory_allocated(self._device)
            return
        self._forget()
        self.before = _status("VmRSS")

    def look(self, *, calm: bool) -> None:
        """At the end of a step. calm: torch's profiler was off, whose own memory is not the run's."""
        found = self._peak()
        if found is not None and (calm or self.most is None):
            self.most = max(found, self.most or 0)
        if not calm:
            self._forget()

    def _peak(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM") or _highest()

    def _forget(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: the peak begins anew
        except OSError:
            return


def _highest() -> int | None:
    """Bytes that the process took at most since it began; None on Windows, which does not tell by these means."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(name: str) -> int | None:
    """Bytes of a line of /proc/self/status; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
