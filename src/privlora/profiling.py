"""Where the time of a run's steps goes: torch's profiler over a short window, with stages as named ranges. PRIVATE.

The window reaches from the release of one step to the first micro-batches of the next, so that the trace stays a file
that a browser opens.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from privlora.accounting import read_ledger
from privlora.config import Settings
from privlora.errors import ConfigError, RunError
from privlora.methods import find_row
from privlora.stages import CHARGE, OPTIMIZER, heard_by
from privlora.training.files import (
    RunFolder,
    for_owner,
    replace_atomically,
    temporary,
    temporary_files,
    written_beside,
)

_log = logging.getLogger(__name__)

TRACE: Final = "trace.json.gz"
BATCHES: Final = 4
"""Micro-batches of the window, at most."""
_PREFIX = "privlora: "
_OPEN = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def refuse_without_steps(settings: Settings) -> None:
    """Raise ConfigError for settings whose runs take no steps of gradients."""
    name = settings.method.name
    finished = settings.synthesis is not None and settings.synthesis.source is not None
    if finished or find_row(name).releases != "gradients":
        what = "a finished run, as synthesis.source names one," if finished else f"method {name!r}"
        fix = "leave --profile (profile=True) out"
        raise ConfigError(f"{what} takes no steps of gradients, so there is nothing to profile", fix=fix)


@contextmanager
def profiled(
    folder: RunFolder, device: torch.device, steps: int, tell: Callable[[Path], None] | None
) -> Iterator[list[Path]]:
    """Around a run's steps, of which so many are planned: profiles some, and ``tell``s of the trace when they are over.

    The list that it gives then holds the trace. Without ``tell`` nothing is measured. What cannot be written is logged
    as a warning, and stops nothing.
    """
    traces = list[Path]()
    if tell is None or not _made(folder.profile):
        yield traces
        return
    left = read_ledger(folder.ledger).remaining if folder.ledger.exists() else steps
    window = Window(folder.profile, device, left)
    try:
        with heard_by(window):
            yield traces
    finally:
        window.end()
        if window.path is not None:
            traces.append(window.path)
            tell(window.path)


def _made(place: Path) -> bool:
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.chmod(0o700)  # one that was there
        _remove_temporary(place)
        return True
    except OSError as error:
        _log.warning("no profile: cannot write %s: %s", place, error.strerror)
        return False


class Window:
    """Implements `privlora.stages.Listener`: hears a run, and changes nothing of it.

    folder: where the trace is written. device: of the model. steps: how many are to come.
    """

    def __init__(self, folder: Path, device: torch.device, steps: int) -> None:
        self.path: Path | None = None
        self._folder, self._device = folder, device
        # The release after which the window opens; a single step is traced from its begin.
        self._opens_after = min(1, steps - 1)
        self._step = self._batches = 0
        self._released = False
        self._profile: torch.profiler.profile | None = None

    def stage(self, name: str) -> AbstractContextManager[Any]:
        if name in (CHARGE, OPTIMIZER) and not self._released:
            self._released = True
            if self._step == self._opens_after:
                self._advance()
            elif self._step > self._opens_after > 0:
                self.end()
        recording = self._profile is not None and self._profile.current_action in _OPEN
        return record_function(_PREFIX + name) if recording else nullcontext()

    def step_begins(self) -> None:
        self._step += 1
        self._released = False
        if self._step == 1:
            self._start()
            if self._opens_after == 0:
                self._advance()

    def micro_batch(self) -> None:
        if self._profile is None or self._profile.current_action not in _OPEN:
            return
        if self._batches == BATCHES:
            self.end()
        self._batches += 1

    def end(self) -> None:
        """Close the window, if it is open."""
        profile, self._profile = self._profile, None
        if profile is not None:
            with _without_clocks():
                profile.stop()  # which hands over to _keep what was recorded

    def _start(self) -> None:
        cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        plan = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        kinds = [ProfilerActivity.CPU, *cuda]
        self._profile = torch.profiler.profile(
            activities=kinds, schedule=plan, on_trace_ready=self._keep, record_shapes=True
        )
        try:
            with _without_clocks():
                self._profile.start()
        except RuntimeError as error:  # one is on already, as under a profiler of the user's own
            self._profile = None
            _log.warning("no profile: %s", " ".join(str(error).split()))

    def _advance(self) -> None:
        if self._profile is not None:
            with _without_clocks():
                self._profile.step()

    def _keep(self, profile: torch.profiler.profile) -> None:
        path = self._folder / TRACE
        try:
            _export(profile, path)
            self.path = path
        except (OSError, RuntimeError, RunError) as error:
            _log.warning("%s was not written: %s", path, error)


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
            written = open(half, "wb", opener=for_owner)  # noqa: SIM115 - closed below
            with written as file, gzip.open(file, "wb") as packed, open(plain, "rb") as trace:
                shutil.copyfileobj(trace, packed)

        replace_atomically(path, write)
    finally:
        _remove_temporary(path.parent)


def _remove_temporary(folder: Path) -> None:
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
