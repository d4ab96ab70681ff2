"""Files of a run: where they lie, and writing them so that a crash leaves the old or the new one, never half."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from privlora.disk import sync_folder
from privlora.errors import RunError
from privlora.names import PRIVATE_FOLDER, PUBLIC_FOLDERS, SETTINGS_FILE

# Nobody else's files end like this, so `remove_leftovers` may go by it.
_TEMPORARY = ".privlora-tmp"
_BESIDE = ".tmp"  # behind it, in torch's profiler
_OF_SAFETENSORS = ".tmp??????"  # save_file writes there, next to its target, before it renames

_BESIDE_RUNS = (".log", ".out", ".err", ".yaml", ".yml")

_LEDGER, _REPORT = "ledger.jsonl", "privacy_report.json"

IDENTITY = "identity.json"
"""In RUN/private: which records, model and settings the run belongs to."""

AUDIT_MARK = "AUDIT-NOT-FOR-RELEASE.txt"
"""Stands where a release would, in folders of runs that were trained with canaries."""

AUDITED = "AUDIT, not for release: "
"""Begins what their ledgers say of the data set."""


@dataclass(frozen=True)
class _In:
    """A file or folder of a run, by its name in one of the run's rooms."""

    room: Literal["release", "private"]
    name: str

    def __get__(self, folder: RunFolder, _: type) -> Path:
        place: Path = getattr(folder, self.room)
        return place / self.name


@dataclass(frozen=True)
class RunFolder:
    """RUN/release is safe to publish; RUN/private never is. A run that protects nobody has RUN/not-private instead."""

    root: Path

    @property
    def release(self) -> Path:
        """What may be published; of a run that protects nobody, not-private/."""
        open_place = self.root / "not-private"
        return open_place if open_place.exists() else self.root / "release"

    @property
    def private(self) -> Path:
        return self.root / PRIVATE_FOLDER

    ledger = _In("release", _LEDGER)
    report = _In("release", _REPORT)
    evaluations = _In("release", "evaluations.jsonl")
    # Public numbers step by step, where run.report_to has jsonl.
    metrics = _In("release", "metrics.jsonl")
    # Why the run took its method, where method.name stood for several.
    choice = _In("release", "choice.json")
    # The texts that a run released, one a line; other runs have none.
    texts = _In("release", "synthetic.jsonl")
    # They name the files of the records.
    settings = _In("private", SETTINGS_FILE)
    identity = _In("private", IDENTITY)
    checkpoint = _In("private", "checkpoint.safetensors")
    private_losses = _In("private", "training_loss.jsonl")
    data_summary = _In("private", "data_summary.json")
    # What an interrupted start had measured for a choice.
    measured = _In("private", "measured.json")
    # A folder: where the time of steps went.
    profile = _In("private", "profile")
    # Of a run whose noise is correlated: what units are dealt to classes by.
    cycles = _In("private", "cycles.json")
    # The SHA-256 that the report gives for itself, where nobody writes who is handed the release.
    seal = _In("private", "report.sha256")
    # Texts that are written so far, of a run that releases them.
    sampled = _In("private", "texts.safetensors")
    # Of an audit of one run: which were among the records.
    canaries = _In("private", "canaries.safetensors")

    @property
    def is_audit(self) -> bool:
        """Whether canaries are among the run's records, so that nothing of it may be published."""
        return (self.release / AUDIT_MARK).exists() or self.canaries.exists()

    @property
    def has_plan(self) -> bool:
        """Whether the ledger's first line is complete: without it nothing was released."""
        return self.ledger.exists() and b"\n" in self.ledger.read_bytes()

    @property
    def ways_on(self) -> list[str]:
        """What an error advises where a run is already."""
        return [
            f"continue it with `privlora resume {self.root}` (records in memory: privlora.resume_run)",
            "or set run.output to another folder",
        ]

    def refuse_if_used(self) -> None:
        """Raise RunError if a run is there already."""
        if self.settings.exists() or self.ledger.exists():
            raise RunError(
                f"{str(self.root)!r} holds a run already",
                why="its ledger must not be forgotten",
                fix=self.ways_on,
            )

    def refuse_foreign(self) -> None:
        """Raise RunError for a folder that holds something, and nothing that a run begins with: it may be of records.

        Hidden files, logs and settings may lie where a run is to begin.
        """
        try:
            here = sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []
        except OSError:  # `refuse_unwritable` tells
            return
        others = [name for name in here if not name.startswith(".") and Path(name).suffix not in _BESIDE_RUNS]
        if others and not {"release", "not-private", PRIVATE_FOLDER}.intersection(here):
            raise RunError(
                f"{str(self.root)!r} is not empty, and what it holds is no run of privlora",
                why="release/, which may be published, would lie among other files, which may be records",
                fix="set run.output to a new folder",
            )

    def refuse_unwritable(self, *, protects: bool = True) -> None:
        """Raise the RunError of ``create`` for what cannot be made or written to; nothing is left of the try."""
        for name in ("release" if protects else "not-private", PRIVATE_FOLDER):
            place = self.root / name
            try:
                while not _is_there(place):
                    place = place.parent
                os.rmdir(tempfile.mkdtemp(dir=place))
            except OSError as error:
                raise self._uncreated(error) from None

    def _uncreated(self, error: OSError) -> RunError:
        return RunError(
            f"cannot create {str(self.root)!r}: {error.strerror}", fix="set run.output to a writable folder"
        )

    def create(self, *, protects: bool = True, releases: bool = True) -> None:
        """Make the folders; ``protects``: whether what will be released may be published; ``releases``: whether
        anything will, or private/ is all that there will be.

        Raises RunError if a run is there already, or nothing can be written.
        """
        self.refuse_if_used()
        release, open_place = self.root / "release", self.root / "not-private"
        place, other = (release, open_place) if protects else (open_place, release)
        try:
            if other.exists():
                other.rmdir()  # of a start that failed: what is published must not depend on it
            if releases:
                place.mkdir(parents=True, exist_ok=True)
            self.private.mkdir(parents=True, exist_ok=True)
            self.private.chmod(0o700)
        except OSError as error:
            raise self._uncreated(error) from None

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed process left. Only while the run's ledger is open, and so locked.

        The settings' is left alone: they are written before there is a lock, and a new start replaces it.

        Raises RunError for one that cannot be removed.
        """
        for folder in (self.release, self.private, self.profile):
            for path in temporary_files(folder):
                if path == temporary(self.settings):
                    continue
                try:
                    path.unlink()
                except OSError as error:
                    what, fix = (
                        f"cannot remove {str(path)!r}: {error.strerror}",
                        "give permission, then resume",
                    )
                    raise RunError(what, fix=fix) from None


def _is_there(path: Path) -> bool:
    """Also of a link to nothing. Raises OSError where that cannot be told."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def refuse_no_run(folder: RunFolder) -> None:
    """Raise `no_run` for a folder with nothing of a run: no settings, no ledger, no report."""
    if not _is_run(folder):
        raise no_run(folder.root)


def no_run(root: Path) -> RunError:
    """The error where a folder holds no run. It names the run's folder where ``root`` is a part of it, as release/."""
    above = root.resolve().parent if root.name in ("", "..") else root.parent
    if root.resolve().name in (*PUBLIC_FOLDERS, PRIVATE_FOLDER) and _is_run(RunFolder(above)):
        return RunError(f"{str(root)!r} is a part of a run", fix=f"give the run's folder, {str(above)!r}")
    fix = "give the folder that `privlora train` made, which run.output names"
    if root.is_file():
        return RunError(f"{str(root)!r} is a file, and a run is a folder", fix=fix)
    if (near := near_run(root)) is not None:
        fix = _meant(near)
    elif runs := _runs_below(root):
        more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
        fix = f"give one of the runs in it: {', '.join(runs[:_SHOWN])}{more}"
    return RunError(f"no run in {str(root)!r}", fix=fix)


def _runs_below(folder: Path) -> list[str]:
    """The runs that lie in a folder, with those first that are not finished; [] where it cannot be read."""
    try:
        runs = sorted(
            filter(_is_run, map(RunFolder, sorted(folder.glob("*/")))), key=lambda run: not _goes_on(run)
        )
        return [f"{run.root}{' (not finished)' * _goes_on(run)}" for run in runs]
    except (OSError, ValueError):
        return []


def _goes_on(folder: RunFolder) -> bool:
    """Whether it began and has no report yet. Audits write none."""
    return folder.settings.exists() and not folder.report.exists() and not folder.is_audit


def _meant(near: str) -> str:
    return f"did you mean the run {near!r}?"


_NEAR: Final = 0.7
_SHOWN: Final = 5  # runs


def near_run(folder: Path) -> str | None:
    """The run next to a folder that is not there, or in runs/, whose name is nearest. Only the local disk is asked."""
    try:
        if folder.exists():
            return None
        beside = folder.parent != Path() and folder.parent.is_dir()
        places = [folder.parent] if beside else [Path("runs"), Path()]
        runs = [each for place in places for each in place.glob("*/") if _is_run(RunFolder(each))]
    except (OSError, ValueError):  # too long, or no name of a folder
        return None
    names = {each.name: str(each) for each in reversed(runs)}
    near = difflib.get_close_matches(folder.name, names, n=1, cutoff=_NEAR)
    return names[near[0]] if near else None


def _is_run(folder: RunFolder) -> bool:
    try:
        return folder.settings.exists() or folder.ledger.exists() or folder.report.exists()
    except OSError:  # a name that no system takes
        return False


def refuse_unfinished(folder: RunFolder) -> None:
    """Raise RunError for a run that lies here with its settings and has not written its report. Audits write none."""
    if _goes_on(folder):
        raise RunError(
            f"the run in {str(folder.root)!r} is not finished: it has no report yet",
            why="what it leaves is written when its last step is taken",
            fix=f"finish it with `privlora resume {folder.root}` (records in memory: privlora.resume_run)",
        )


def release_at(path: Path) -> Path:
    """A release: the folder itself, or what that of its run holds.

    Raises RunError where there is none, and for that of a run which lies here and is not finished.
    """
    for place in (path, *(path / name for name in PUBLIC_FOLDERS)):
        if any(_is_file(place / name) for name in (_REPORT, _LEDGER)):
            found = place.resolve()
            if found.name in PUBLIC_FOLDERS:
                refuse_unfinished(RunFolder(place.parent if place.name in PUBLIC_FOLDERS else found.parent))
            return found
    with contextlib.suppress(OSError):  # a name that no system takes
        refuse_unfinished(RunFolder(path))
    near = near_run(path)
    fix = f"give the folder that holds {_REPORT} and {_LEDGER}, or that of its run"
    what = f"there is no release in {str(path)!r}{', which is a file' * _is_file(path)}"
    raise RunError(what, fix=fix if near is None else _meant(near))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no system takes
        return False


def write_atomically(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Write, sync and rename. Raises RunError (disk full, no permission); the old file is then untouched.

    mode: of the file, from its first byte on; the process's umask takes away from it. None: in a run's private/ for its
    owner's eyes alone, wherever the folder is copied to. Only one process writes a run's files; one fixed temporary
    name lets a resumed run replace what a crash left.
    """
    mode = _mode_of(path) if mode is None else mode
    data = content.encode() if isinstance(content, str) else content

    def write(half: Path) -> None:
        with open(half, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)

    replace_atomically(path, write)


def _mode_of(path: Path) -> int:
    return 0o600 if path.parent.name == PRIVATE_FOLDER else 0o666


def for_owner(name: str, flags: int) -> int:
    """What `open` takes as ``opener`` for a file that nobody else may read, from its first byte on."""
    return os.open(name, flags, 0o600)


def replace_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """The same of a file that ``write`` makes under the name that it is given."""
    half = temporary(path)
    try:
        write(half)
        with open(half, "r+b") as file:  # Windows syncs nothing that cannot be written
            os.fsync(file.fileno())
        os.replace(half, path)
        sync_folder(path.parent)
    except OSError as error:
        half.unlink(missing_ok=True)
        what = f"cannot write {str(path)!r}: {error.strerror or error}"
        raise RunError(what, fix="free space or permissions, then `privlora resume`") from None


def temporary_files(folder: Path) -> list[Path]:
    """What a killed process left half-written in ``folder``; links and folders are nobody's leftovers."""
    names = f".*{_TEMPORARY}", f".*{_TEMPORARY}{_BESIDE}", _OF_SAFETENSORS
    found = (path for name in names for path in folder.glob(name))
    return [path for path in found if path.is_file() and not path.is_symlink()]


def temporary(path: Path) -> Path:
    """Where ``path`` is written before it gets its name."""
    return path.with_name(f".{path.name}{_TEMPORARY}")


def written_beside(half: Path) -> Path:
    """Where torch writes a trace before it gives it the name ``half``."""
    return half.with_name(half.name + _BESIDE)


def set_times(folder: Path, day: str) -> None:
    """Let ``folder`` and its files look as if written at the start of ``day`` (YYYY-MM-DD, UTC).

    When a file was written says how long the steps before it took, which depends on private records. Raises RunError.
    """
    midnight = int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())
    try:
        for path in (*folder.iterdir(), folder):
            os.utime(path, (midnight, midnight))
    except OSError as error:
        raise RunError(
            f"cannot set the times of the files in {str(folder)!r}: {error.strerror}",
            why="when they were written says how long private records took",
            fix="use a folder of your own, then `privlora resume`",
        ) from None


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line, replacing a last line that a crash cut short."""
    try:
        with open(path, "a+b", opener=lambda name, flags: os.open(name, flags, _mode_of(path))) as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r}: {error.strerror}", fix="free space, then resume"
        ) from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows written by ``append_line``; a line torn by a crash is skipped. Raises RunError for other damage.

    Every row is an object with the number of its step.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        for row in rows:
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError
        return rows
    except ValueError as error:
        raise RunError(
            f"{str(path)!r} is damaged ({type(error).__name__})", fix="restore it, or remove the damaged line"
        ) from None
