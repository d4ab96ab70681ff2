"""torch's profiler over a window of bounded size: from the release of one step to some micro-batches of the next."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from privlora.errors import RunError
from privlora.stages import ACCUMULATE, BACKWARD, CAPTURE, CHARGE, COLLATE, FORWARD, LOSS, OPTIMIZER
from privlora.training.files import for_owner, replace_atomically, temporary, temporary_files, written_beside
from privlora.training.paper import READ_BACKS

_log = logging.getLogger(__name__)

TRACE: Final = "trace.json.gz"
BATCHES: Final = 4
"""Micro-batches of the window, at most: a trace holds every operation, and has to stay a file that a browser opens."""
PER_BATCH: Final = {COLLATE, FORWARD, LOSS, BACKWARD, CAPTURE, ACCUMULATE}
"""Stages that come with every micro-batch, and so grow with the positions of a step."""
_PREFIX = "privlora: "
_ROWS, _INPUTS = 14, 3  # of the table: operations, and inputs of each that are shown
_OPEN = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


@dataclass(frozen=True)
class Operator:
    """Of all calls in the window of an operation in a stage. seconds: its own, on the device. shapes: of the inputs of
    those calls that took most together."""

    stage: str
    name: str
    calls: int
    seconds: float
    shapes: str


@dataclass(frozen=True)
class Traced:
    """PRIVATE. positions: rows x width that went through the model in the window. read_backs: calls after which the
    process waits for a device. launches: of kernels on a GPU. busy: of the window's seconds, those in which the GPU
    computed; None on a CPU."""

    operators: Sequence[Operator]
    seconds: float
    positions: int
    batches: int
    read_backs: int
    launches: int
    busy: float | None


class Trace:
    """Implements what `Watch` asks of a trace. folder: where trace.json.gz is written; None takes no trace."""

    def __init__(self, folder: Path | None, device: torch.device, steps: int) -> None:
        self.found: Traced | None = None
        self.path: Path | None = None
        self._folder, self._device = folder, device
        # The release after which the window opens; a single step is traced from its begin.
        self._opens_after = min(2, steps - 1)
        self._step = 0
        self._released = self._was_on = False
        self._batches = self._positions = 0
        self._profile: torch.profiler.profile | None = None

    @property
    def _recording(self) -> bool:
        return self._profile is not None and self._profile.current_action in _OPEN

    def named(self, stage: str) -> AbstractContextManager[Any]:
        """What stands in the trace for a stage."""
        return record_function(_PREFIX + stage) if self._recording else nullcontext()

    def disturbed(self) -> bool:
        """Whether the profiler was on since this was last asked."""
        found, self._was_on = self._was_on or self._profile is not None, False
        return found

    def step_begins(self) -> None:
        self._step += 1
        self._released = False
        if self._folder is not None and self._step == max(1, self._opens_after):
            self._start()
            if self._opens_after == 0:
                self._advance()

    def stage_begins(self, name: str) -> None:
        if name not in (CHARGE, OPTIMIZER) or self._released:
            return
        self._released = True
        if self._profile is None:
            return
        if self._step == self._opens_after:
            self._advance()
        elif self._step > self._opens_after > 0:
            self.end()

    def micro_batch(self, positions: int) -> None:
        if not self._recording:
            return
        if self._batches == BATCHES:
            self.end()
            return
        self._batches += 1
        self._positions += positions

    def end(self) -> None:
        """Close the window, if it is open."""
        profile, self._profile = self._profile, None
        if profile is not None:
            self._was_on = True
            with _without_clocks():
                profile.stop()  # which hands over to _keep what was recorded

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=self._keep,
            record_shapes=True,
        )
        try:
            with _without_clocks():
                self._profile.start()
        except RuntimeError as error:  # one is on already, as under a profiler of the user's own
            self._profile = None
            _log.warning("no operators in the profile: %s", " ".join(str(error).split()))

    def _advance(self) -> None:
        assert self._profile is not None
        with _without_clocks():
            self._profile.step()

    def _keep(self, profile: torch.profiler.profile) -> None:
        assert self._folder is not None
        path = self._folder / TRACE
        try:
            _export(profile, path)
            self.path = path
        except (OSError, RuntimeError, RunError) as error:
            _log.warning("%s was not written: %s", path, error)
        self.found = summed(list(profile.events() or ()), self._positions, self._batches, self._device.type)


def _export(profile: torch.profiler.profile, path: Path) -> None:
    """Write torch's trace to ``path``, compressed; on the way it lies beside it, for its owner alone.

    Asked for a name in .gz, torch would write the plain trace into the system's folder of temporary files, where
    everybody may read it. Raises OSError, RuntimeError and RunError; nothing else is left then.
    """
    plain = temporary(path.with_suffix(""))
    try:
        for each in (plain, written_beside(plain)):
            with open(each, "wb", opener=for_owner):
                pass
        profile.export_chrome_trace(str(plain))

        def write(half: Path) -> None:
            with (
                open(plain, "rb") as trace,
                open(half, "wb", opener=for_owner) as file,
                gzip.open(file, "wb") as packed,
            ):
                shutil.copyfileobj(trace, packed)

        replace_atomically(path, write)
    finally:
        remove_temporary(path.parent)


def remove_temporary(folder: Path) -> None:
    """Remove what is half-written in ``folder``, or was left by a process that was killed. Raises OSError."""
    for path in temporary_files(folder):
        path.unlink(missing_ok=True)


@contextmanager
def _without_clocks() -> Iterator[None]:
    """Inside, nothing reaches standard error: torch writes there when its profiler starts and stops, to the second, and
    a job's log is not private."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def summed(events: list[Any], positions: int, batches: int, device: str) -> Traced:
    """What torch's events say of each operation."""
    stages = sorted(
        (event.time_range.start, event.time_range.end, event.name.removeprefix(_PREFIX))
        for event in events
        if event.name.startswith(_PREFIX) and str(event.device_type).endswith("CPU")
    )
    on_gpu = device == "cuda"
    rows: dict[tuple[str, str], list[float]] = {}
    shapes: dict[tuple[str, str], dict[str, float]] = {}
    read_backs = launches = 0
    busy = 0.0
    moments = list[float]()
    at, starts = 0, sorted(events, key=lambda event: event.time_range.start)
    open_stages = list[tuple[float, str]]()
    for event in starts:
        start = event.time_range.start
        while at < len(stages) and stages[at][0] <= start:
            open_stages.append((stages[at][1], stages[at][2]))
            at += 1
        while open_stages and open_stages[-1][0] < start:
            open_stages.pop()
        if not str(event.device_type).endswith("CPU"):
            busy += event.time_range.elapsed_us() / 1e6 if not event.name.startswith(_PREFIX) else 0.0
            continue
        name = event.name
        if name.startswith((_PREFIX, "ProfilerStep")):
            continue
        moments += [start, event.time_range.end]
        read_backs += name.removeprefix("aten::") in READ_BACKS
        launches += name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        key = (open_stages[-1][1] if open_stages else "rest", name)
        row = rows.setdefault(key, [0, 0.0])
        row[0] += 1
        row[1] += own / 1e6
        sizes = ["x".join(map(str, shape)) for shape in event.input_shapes or () if shape]
        given = " · ".join(sizes[:_INPUTS])
        of_shapes = shapes.setdefault(key, {})
        of_shapes[given] = of_shapes.get(given, 0.0) + own
    dearest = sorted(rows, key=lambda key: -rows[key][1])[:_ROWS]
    operators = [
        Operator(*key, int(rows[key][0]), rows[key][1], max(shapes[key], key=lambda s, k=key: shapes[k][s]))  # type: ignore[misc]
        for key in dearest
    ]
    seconds = (max(moments) - min(moments)) / 1e6 if moments else 0.0
    return Traced(
        operators, seconds, positions, batches, read_backs, launches, min(busy, seconds) if on_gpu else None
    )
