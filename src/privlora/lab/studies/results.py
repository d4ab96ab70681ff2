"""results.jsonl: one line for each finished run, on the disk before the next run is counted as done."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from privlora.errors import RunError
from privlora.lab.studies.settings import Cell

if TYPE_CHECKING:
    from privlora.lab.studies.leases import Lease

Role = Literal["selection", "report"]


@dataclass(frozen=True)
class Row:
    """One finished run.

    role: selection runs choose learning rates and are never reported; report runs are reported and never choose.
    fingerprint: of the run's settings and of the records it was scored on; a changed study does not reuse the row.
    error: why the run failed; None if it ended well.
    scores, before: of the trained and the untouched model on the role's share of the evaluation records: "loss"
        (nats, mean over records), "accuracy" (of the next token), where data.task is set "task" and "task_metric".
    facts: what it took and where: noise_multiplier, steps, delta, cpu_seconds, ledger, machine, versions.
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

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Row:
        return cls(**{**content, "cell": Cell(**content["cell"])})


class Results:
    """The file of one process, which has its lease; as a context manager. A line torn by a crash is cut off.

    before: files of other processes, whose rows count as well, earlier than its own.

    Raises RunError if it cannot be written, or is not such a file.
    """

    def __init__(self, path: Path, lease: Lease, before: Callable[[], Sequence[Path]] = tuple) -> None:
        self.path = path
        self._lease, self._before = lease, before
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise RunError(
                f"cannot write {str(path)!r}: {error.strerror}", fix="give another folder with --output"
            ) from None
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, row: Row) -> None:
        """Write and sync. Raises RunError (disk full, or another process has the lease or took the file's rows)."""
        self._lease.check()
        try:
            if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                raise FileNotFoundError
        except FileNotFoundError:
            raise RunError(
                f"{str(self.path)!r} is no longer the file that this process opened",
                why="its rows are in the file of the whole study, and one written here would be lost",
                fix="run the same command again, which runs what is missing",
            ) from None
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._file.write(row.to_line())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {str(self.path)!r}: {error.strerror}", fix="free space, then run the same command"
        )

    def rows(self) -> list[Row]:
        others = [row for path in self._before() if path != self.path for row in read_results(path)]
        return others + read_results(self.path)


def read_results(path: Path) -> list[Row]:
    """All whole lines, in the order of their runs; none if there is no file. Raises RunError."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(Row.from_dict(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            raise RunError(
                f"{str(path)!r}, line {number} is no result of this version",
                fix="remove the line, or give another folder with --output",
            ) from None
    return rows


def all_finite(scores: Mapping[str, Any]) -> bool:
    """Whether every number among the scores is one."""
    return all(math.isfinite(value) for value in scores.values() if isinstance(value, float))
