"""The ledger: an append-only file that says what a run has released, written before each release.

Every line is flushed to the disk before the call that wrote it returns, so after any crash the ledger shows
at least what was released. A last line without its newline is a charge that never returned: its release never
happened, and it is dropped. `ledger_format` says what the lines mean.
"""

from __future__ import annotations

import json
import os
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from privlora.accounting.accountants import accountant_versions
from privlora.accounting.events import StepEvent
from privlora.accounting.ledger_format import (
    SCHEMA_VERSION,
    LedgerSummary,
    Plan,
    digest,
    fingerprint,
    parse_ledger,
)
from privlora.disk import BINARY, lock, remove_held, sync_folder
from privlora.errors import PrivacyError, RunError


class Ledger:
    """A ledger open for charging, under an exclusive lock until `close`; as a context manager, until its end.

    >>> with Ledger.create(path, plan) as ledger:  # doctest: +SKIP
    ...     step = ledger.charge(plan.event_of(1))  # on the disk now; release after this line
    ...     ledger.finish()
    """

    def __init__(self, file: int, summary: LedgerSummary, head: str | None, size: int) -> None:
        """Use `create` or `open`. `file` is locked, `head` is the hash of its last line, `size` its bytes."""
        self._file: int | None = file
        self._begun = summary  # without charges, which are in a list: a tuple would be copied at each of them
        self._charged = list(summary.charge_hashes)
        self._names = [fingerprint(event) for event, _ in summary.plan.phases]
        self._head = head
        self._size = size

    @classmethod
    def create(cls, path: str | os.PathLike[str], plan: Plan) -> Ledger:
        """A new ledger with `plan` as its first line. A file that a crash left without one is taken over.

        Raises:
            RunError: the file exists, or cannot be written.
        """
        path = Path(path)
        today = datetime.now(UTC).date().isoformat()
        summary = LedgerSummary(path, str(uuid.uuid4()), today, accountant_versions(), plan)
        header = {
            "type": "plan",
            "schema_version": SCHEMA_VERSION,
            "run_id": summary.run_id,
            "created": summary.created,
            "versions": summary.versions,
            "plan": plan.to_dict(),
        }
        file = _open_locked(path, os.O_CREAT)
        ledger = cls(file, summary, head=None, size=0)
        if b"\n" in path.read_bytes():
            ledger.close()
            raise RunError(
                f"{path}: a ledger exists already",
                why="writing over it would forget what was released",
                fix="resume that run, or choose another run directory",
            )
        held = os.dup(file)  # a write that fails closes the file
        try:
            os.ftruncate(file, 0)
            ledger._append(header)
            sync_folder(path.parent)
        except BaseException:
            # Nothing was released under this ledger, so it may go, before another process can lock it.
            remove_held(path)  # what is left of it on Windows is taken over
            ledger.close()
            raise
        finally:
            os.close(held)
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Ledger:
        """Take over an unfinished ledger: verify it and drop a torn last line. Adds no line.

        The caller must draw its noise from a fresh stream. To look only, use `read_ledger`.

        Raises:
            RunError: there is no such ledger, another process holds it, the run is over, or writing failed.
            PrivacyError: a line was changed, removed or is not understood.
        """
        path = Path(path)
        file = _open_locked(path, 0)
        try:
            content = path.read_bytes()
            summary, head, size = parse_ledger(path, content)
            if summary.closed:
                raise RunError(f"{path}: this run is over", fix="start a new run, with a ledger of its own")
            if size < len(content):
                os.ftruncate(file, size)
        except BaseException:
            os.close(file)
            raise
        return cls(file, summary, head, size)

    @property
    def summary(self) -> LedgerSummary:
        """What the ledger says now; of many steps, a copy of as many hashes."""
        return replace(self._begun, charge_hashes=tuple(self._charged))

    @property
    def path(self) -> Path:
        return self._begun.path

    @property
    def run_id(self) -> str:
        return self._begun.run_id

    @property
    def plan(self) -> Plan:
        return self._begun.plan

    @property
    def charges(self) -> int:
        """Steps charged so far."""
        return len(self._charged)

    @property
    def remaining(self) -> int:
        """Steps that may still be charged."""
        return self.plan.steps - self.charges

    def charge_hash(self, step: int) -> str:
        """That of the line which charged step 1, 2, …; see `LedgerSummary.charge_hashes`."""
        return self._charged[step - 1]

    def events(self) -> list[tuple[StepEvent, int]]:
        """What happened, run-length encoded."""
        return self.plan.events(self.charges)

    def epsilon(self, delta: float | None = None) -> float:
        """See `LedgerSummary.epsilon`."""
        return self.summary.epsilon(delta)

    def charge(self, event: StepEvent) -> int:
        """Charge one step, before its release; returns its number, from 1, once the line is on the disk.

        Raises:
            PrivacyError: the plan has no step left, or another event at this step. Nothing was charged.
            RunError: the line could not be written. Nothing may be released, and the ledger is closed.
        """
        if self.remaining == 0:
            raise PrivacyError(
                f"{self.path}: all {self.plan.steps} steps of the plan are charged",
                why="one more release would exceed the stated epsilon",
                fix="plan more steps from the start; they need more noise",
            )
        step = self.charges + 1
        phase = self.plan.phase_of(step)
        planned = self.plan.phases[phase][0]
        if event != planned:
            raise PrivacyError(
                f"{self.path}: charged in step {step} is [{event.describe()}], planned [{planned.describe()}]",
                why="the stated epsilon holds for the plan only",
                fix="resume with the settings of the first run, and release the phases in the plan's order",
            )
        salt = secrets.token_hex(8)  # lines of copies that are continued apart differ
        line = {"type": "charge", "step": step, "event": self._names[phase], "salt": salt}
        self._charged.append(self._append(line))
        return step

    def finish(self) -> None:
        """Write that the run is over, then close. No step can be charged after it.

        Raises:
            RunError: the line could not be written.
        """
        self._append({"type": "close"})
        self._begun = replace(self._begun, closed=True)
        self.close()

    def close(self) -> None:
        """Let go of the file and its lock. The run may be resumed later. Closing twice is allowed."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, content: dict[str, Any]) -> str:
        """Write one line and wait for the disk; gives the line's hash."""
        path = self.path
        if self._file is None:
            raise RunError(f"{path}: this ledger is closed", fix="open it again with Ledger.open")
        chained = {**content, "prev": self._head}
        line = json.dumps(chained, sort_keys=True, allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except BaseException as error:
            # The state of the disk is unknown now: take the line back and charge nothing more.
            file, self._file = self._file, None
            try:
                os.ftruncate(file, self._size)
            finally:
                os.close(file)
            if not isinstance(error, OSError):
                raise
            raise RunError(
                f"{path}: cannot be written: {error.strerror}",
                why="a release that is not in the ledger would not be accounted for, so training stops here",
                fix="free space on that disk, then resume the run",
            ) from error
        self._head, self._size = digest(line), self._size + len(line)
        return self._head


@contextmanager
def locked_charges(path: str | os.PathLike[str]) -> Iterator[int]:
    """How many charges the ledger at `path` shows; inside, nobody can add one. Nothing is written.

    A last line that a crash cut short counts as a charge, though its release never happened.

    Raises:
        RunError: there is no such ledger, or another process holds it.
        PrivacyError: a line was changed, removed or is not understood.
    """
    path = Path(path)
    file = _open_locked(path, 0)
    try:
        content = path.read_bytes()
        # Without a whole plan nothing can be charged; but a disk that lost power may have left anything in its place.
        charges = int(b"\n" not in content and not b'{"'.startswith(content[:2]))
        if b"\n" in content:
            summary, _, size = parse_ledger(path, content)
            charges = summary.charges + (size < len(content))
        yield charges
    finally:
        os.close(file)


def _open_locked(path: Path, flags: int) -> int:
    """A file descriptor for reading and appending, with the exclusive lock that closing it gives back."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | BINARY | flags, 0o644)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be opened: {error.strerror}", fix="give a run directory of yours"
        ) from error
    try:
        lock(file)
    except OSError as error:
        os.close(file)
        raise RunError(
            f"{path}: the ledger cannot be locked: {error.strerror}",
            why="two processes that charge one ledger would release more than it says",
            fix="wait for the other process of this run, or end it",
        ) from error
    if not _still_named(file, path):
        os.close(file)
        raise RunError(
            f"{path}: the ledger was removed while it was opened",
            why="charges in a file without a name would be lost",
            fix="start again",
        )
    return file


def _still_named(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
