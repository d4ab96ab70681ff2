"""Finished runs, a line of JSON each, on the disk before the next run is counted as done."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from privlora.disk import lock
from privlora.errors import RunError
from privlora.lab.studies.settings import Cell

Role = Literal["selection", "report"]


@dataclass(frozen=True)
class Row:
    """One finished run.

    role: selection runs choose learning rates and are never reported; report runs are reported and never choose.
    fingerprint: of the run's settings and of the records it was scored on; a changed study does not reuse the row.
    error: why the run failed; None if it ended well.
    scores, before: of the trained and the untouched model on the role's share of the evaluation records: "loss"
        (nats, mean over records), "accuracy" (of the next token), where data.task is set "task" and "task_metric".
    facts: what it took: noise_multiplier, steps, delta, event, cpu_seconds, ledger, versions.
    """

    cell: Cell
    role: Role
    fingerprint: str
    error: str | None
    scores: Mapping[str, Any]
    before: Mapping[str, Any]
    facts: Mapping[str, Any]

    def to_line(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False, ensure_ascii=False).encode() + b"\n"


class Results:
    """The file that this process adds its runs to: results.jsonl, or results-2-of-5.jsonl of part (2, 5).

    It is locked as long as the ``with`` block lasts, and a line that a crash tore is cut off.

    Raises RunError if it cannot be written, or if another process has it.
    """

    def __init__(self, folder: Path, part: tuple[int, int] = (1, 1)) -> None:
        self._folder = folder
        self.path = folder / ("results.jsonl" if part[1] == 1 else f"results-{part[0]}-of-{part[1]}.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115 - closed by __exit__
            lock(self._file.fileno())
        except BlockingIOError:
            raise RunError(f"another process runs what {str(self.path)!r} is of", fix="wait for it") from None
        except OSError as error:
            fix = "give another folder with --output"
            raise RunError(f"cannot write {str(self.path)!r}: {error.strerror}", fix=fix) from None
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: Row) -> None:
        """Write and sync. Raises RunError, as for a full disk."""
        try:
            self._file.write(row.to_line())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            fix = "free space, then run the same command"
            raise RunError(f"cannot write {str(self.path)!r}: {error.strerror}", fix=fix) from None


def read_folder(folder: Path) -> list[Row]:
    """The runs of all processes that worked there."""
    return [row for path in sorted(folder.glob("results*.jsonl")) for row in read_results(path)]


def read_results(path: Path) -> list[Row]:
    """All whole lines, in the order of their runs; none if there is no file. Raises RunError."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), start=1):
        try:
            content = json.loads(line)
            rows.append(Row(**{**content, "cell": Cell(**content["cell"])}))
        except (ValueError, TypeError, KeyError):
            fix = "remove the line, or give another folder with --output"
            raise RunError(f"{str(path)!r}, line {number} is no result of this version", fix=fix) from None
    return rows
