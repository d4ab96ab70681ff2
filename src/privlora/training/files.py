"""Files of a run: where they lie, and writing them so that a crash leaves the old or the new one, never half."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privlora.errors import RunError

# Nobody else's files end like this, so `remove_leftovers` may go by it.
_TEMPORARY = ".privlora-tmp"


@dataclass(frozen=True)
class RunFolder:
    """RUN/release is safe to publish; RUN/private never is."""

    root: Path

    @property
    def release(self) -> Path:
        return self.root / "release"

    @property
    def private(self) -> Path:
        return self.root / "private"

    @property
    def settings(self) -> Path:
        return self.release / "config.resolved.yaml"

    @property
    def ledger(self) -> Path:
        return self.release / "ledger.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.private / "checkpoint.safetensors"

    @property
    def private_losses(self) -> Path:
        return self.private / "training_loss.jsonl"

    @property
    def data_summary(self) -> Path:
        return self.private / "data_summary.json"

    @property
    def evaluations(self) -> Path:
        return self.release / "evaluations.jsonl"

    @property
    def has_plan(self) -> bool:
        """Whether the ledger's first line is complete: without it nothing was released."""
        return self.ledger.exists() and b"\n" in self.ledger.read_bytes()

    def refuse_if_used(self) -> None:
        """Raise RunError if a run is there already."""
        if self.settings.exists() or self.ledger.exists():
            raise RunError(
                f"{str(self.root)!r} holds a run already",
                why="its ledger must not be forgotten",
                fix=f"continue it with `privlora resume {self.root}`, or set run.output to another folder",
            )

    def create(self) -> None:
        """Make the folders. Raises RunError if a run is there already, or nothing can be written."""
        self.refuse_if_used()
        try:
            self.release.mkdir(parents=True, exist_ok=True)
            self.private.mkdir(exist_ok=True)
            self.private.chmod(0o700)
        except OSError as error:
            raise RunError(
                f"cannot create {str(self.root)!r}: {error.strerror}",
                fix="set run.output to a writable folder",
            ) from None

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed process left. Only while the run's ledger is open, and so locked.

        The settings' is left alone: they are written before there is a lock, and a new start replaces it.

        Raises RunError for one that cannot be removed.
        """
        for folder in (self.release, self.private):
            for path in folder.glob(f".*{_TEMPORARY}"):
                if path == _temporary(self.settings) or path.is_symlink() or not path.is_file():
                    continue
                try:
                    path.unlink()
                except OSError as error:
                    raise RunError(
                        f"cannot remove {str(path)!r}: {error.strerror}",
                        fix="give permission, then `privlora resume`",
                    ) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write, sync and rename. Raises RunError (disk full, no permission); the old file is then untouched.

    Only one process writes a run's files; one fixed temporary name lets a resumed run replace what a crash left.
    """
    temporary = _temporary(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {str(path)!r}: {error.strerror}",
            fix="free space or permissions, then `privlora resume`",
        ) from None


def _temporary(path: Path) -> Path:
    """Where ``path`` is written before it gets its name."""
    return path.with_name(f".{path.name}{_TEMPORARY}")


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line, in place of a line that a crash tore."""
    try:
        with open(path, "a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r}: {error.strerror}", fix="free space, then resume"
        ) from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows written by ``append_line``; a line torn by a crash is skipped."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows
