"""Who works on a study's folder, on whatever machine: a file for each part, made in one act and kept fresh.

No lock of the file system is relied on: that a name is linked once, and that a rename is one act, holds on NFS as well.
Whoever dies leaves a file that grows old and is replaced; at once by a process of the same machine, which sees that the
other one is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final

from privlora.disk import WINDOWS
from privlora.errors import RunError
from privlora.lab.studies.shares import WHOLE, Part

FOLDER: Final = "parts"
_SUFFIX: Final = ".running"
_FRESH_SECONDS: Final = 15.0
STALE_SECONDS: Final = 180.0
"""A lease that nobody touched for so long, by the clock of the file system, is nobody's."""


@dataclass(frozen=True)
class Holder:
    """What a lease says. content: of the study, see `parts.content_of`. host: for reading; machine: what tells it from
    every other one, also of the same name. born: when the process began, which tells it from a later one of its number.
    """

    part: tuple[int, int]
    content: str
    host: str
    machine: str
    process: int
    born: str
    token: str

    def describe(self) -> str:
        of = "the whole study" if Part(*self.part) == WHOLE else f"part {Part(*self.part)}"
        return f"{of} (process {self.process} on {self.host})"

    def gone(self) -> bool:
        """Whether its process ran on this machine, and does no more."""
        if self.machine != _machine():
            return False
        now = _born(self.process)
        return now is None or ("" not in (now, self.born) and now != self.born)


class LeaseLostError(RunError):
    """Another process has taken over what this one worked on, which then writes nothing more."""


@dataclass(frozen=True)
class Claim:
    """What tells a worker process whether its study's process still has its lease; by reading alone."""

    path: Path
    token: str

    def held(self) -> bool:
        holder = _read(self.path)
        return holder is not None and holder.token == self.token

    def check(self) -> None:
        """Raise LeaseLostError if another process has taken over, as after this machine had slept."""
        if not self.held():
            raise LeaseLostError(
                f"{str(self.path)!r} is no longer this process'",
                why="it was still for so long that another one took over what it ran; both would write",
                fix="let that one go on; what was finished here before is kept",
            )


class Lease:
    """``part`` of a study, for this process alone as long as the ``with`` block lasts.

    Raises RunError, with nothing changed, where another process has it, or works on the folder in other parts or by
    another content: cells would be run twice.
    """

    def __init__(self, folder: Path, part: Part, content: str) -> None:
        self._place = folder / FOLDER
        self._path = self._place / f"{part.file}{_SUFFIX}"
        self._own = Holder(
            (part.number, part.count),
            content,
            socket.gethostname(),
            _machine(),
            os.getpid(),
            _born(os.getpid()) or "",
            secrets.token_hex(8),
        )
        self.claim = Claim(self._path, self._own.token)
        self._over = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, daemon=True)

    def __enter__(self) -> Lease:
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise RunError(
                f"cannot write {str(self._place)!r}: {error.strerror}",
                fix="give another folder with --output",
            ) from None
        # After its own is there: of two that begin at once each sees the other, and at most one goes on.
        try:
            self._refuse_others()
        except RunError:
            self._path.unlink(missing_ok=True)
            raise
        self._refresher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._refresher.join()
        if _read(self._path) == self._own:
            self._path.unlink(missing_ok=True)
        with suppress(OSError):  # others' files are in it
            self._place.rmdir()

    def check(self) -> None:
        """Raise LeaseLostError if another process has taken over, as after this machine had slept."""
        self.claim.check()

    def running(self) -> list[Part]:
        """Parts that processes hold at present, this one among them."""
        now = self._now()
        held = ((path, _read(path)) for path in self._leases())
        return sorted(
            Part(*holder.part) for path, holder in held if holder and not _is_gone(path, holder, now)
        )

    def _take(self) -> None:
        content = json.dumps(asdict(self._own)).encode()
        for _ in range(3):
            # Written under another name and linked: whoever sees the lease sees all of it.
            half = self._place / f".{self._own.token}"
            try:
                half.write_bytes(content)
                os.link(half, self._path)
                return
            except FileExistsError:
                self._replace_if_gone()
            finally:
                half.unlink(missing_ok=True)
        raise self._taken(_read(self._path))

    def _replace_if_gone(self) -> None:
        """Move a lease of a process that is no more out of the way. Raises RunError if it is alive."""
        holder = _read(self._path)
        if holder is None:
            return  # given back in between
        if not _is_gone(self._path, holder, self._now()):
            raise self._taken(holder)
        self._set_aside(self._path, holder)

    def _set_aside(self, path: Path, holder: Holder | None) -> None:
        """Its owner, should it only have stood still, finds it gone for good."""
        aside = self._place / f".gone-{self._own.token}"
        with suppress(FileNotFoundError):  # another process was first
            os.rename(path, aside)
            if (moved := _read(aside)) != holder and moved is not None:
                # Another process was first, and this is its lease: it comes back.
                with suppress(FileExistsError):
                    os.link(aside, path)
            aside.unlink(missing_ok=True)

    def _now(self) -> float:
        """By the clock of the file system: machines' own may differ."""
        probe = self._place / f".now-{self._own.token}"
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _taken(self, holder: Holder | None) -> RunError:
        words = "another process" if holder is None else holder.describe()
        return RunError(
            f"{str(self._place.parent)!r} is in use by another process: {words}",
            why="both would run the same cells",
            fix=f"wait for it; a machine that is gone counts as such {STALE_SECONDS / 60:g} minutes later",
        )

    def _leases(self) -> list[Path]:
        return sorted(self._place.glob(f"*{_SUFFIX}"))

    def _refuse_others(self) -> None:
        now = self._now()
        for path in self._leases():
            if path == self._path:
                continue
            holder = _read(path)
            if holder and (holder.part[1], holder.content) == (self._own.part[1], self._own.content):
                continue  # its cells are others than this one's, also should it only have stood still
            if _is_gone(path, holder, now):
                self._set_aside(path, holder)
                continue
            if holder is None:
                raise self._taken(None)
            if holder.part[1] != self._own.part[1]:
                raise RunError(
                    f"{str(self._place.parent)!r} is in use by another process: {holder.describe()}, in other parts",
                    why="a cell has another owner in each number of parts, and would be run twice",
                    fix="wait until those are over, or give all processes the same number of parts; --table reports "
                    "what is finished meanwhile",
                )
            if holder.content != self._own.content:
                raise RunError(
                    f"{holder.describe()} runs in {str(self._place.parent)!r} by a study of another content",
                    why="a cell may have another owner in each, and would be run twice",
                    fix="give every part the same file, or give this one another --output",
                )

    def _refresh(self) -> None:
        while not self._over.wait(_FRESH_SECONDS):
            holder = _read(self._path)
            if holder is not None and holder != self._own:
                return  # what cannot be read just now may be its own again the next time
            with suppress(OSError):
                os.utime(self._path)


def _read(path: Path) -> Holder | None:
    """None where there is no such file, no lease in it, or where it cannot be read now."""
    try:
        content = json.loads(path.read_bytes())
        return Holder(**{**content, "part": tuple(content["part"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_gone(path: Path, holder: Holder | None, now: float) -> bool:
    """What is not known is not gone. holder: None if it cannot be read."""
    if holder is not None and holder.gone():
        return True
    try:
        return now - path.stat().st_mtime > STALE_SECONDS
    except FileNotFoundError:
        return True  # given back in between
    except OSError:
        return False


@cache
def _machine() -> str:
    """What no other machine, and no other container of this one, has at the same time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def _born(process: int) -> str | None:
    """When a process of this machine began, as the system writes it; "" where it does not tell, None if it is gone."""
    try:
        stat = (
            Path(f"/proc/{process}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rsplit(")", 1)[1]
            .split()
        )
        return None if stat[0] == "Z" else stat[19]
    except (OSError, IndexError):
        pass  # it is gone, or /proc hides the processes of others
    if WINDOWS:
        return ""  # there the question of a signal would be a ctrl-C
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""
