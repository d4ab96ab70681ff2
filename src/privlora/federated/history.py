"""What a federation's server keeps of its rounds: who was asked, who answered, and how many bytes went each way."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privlora.errors import RunError
from privlora.training.files import append_line, read_lines

_ID = 16  # bytes


@dataclass(frozen=True)
class Round:
    """step: its number. down, up: bytes of all messages, without the engine's own. void: why nothing came of it."""

    step: int
    asked: tuple[str, ...]
    answered: tuple[str, ...]
    down: int
    up: int
    void: str | None = None


class History:
    """A file of JSON lines in the server's private folder. The first names the run; a round has a line when it begins
    and one when it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = read_lines(path)
        if not rows:
            append_line(path, {"step": 0, "run": secrets.token_hex(_ID)})
            rows = read_lines(path)
        self._rows = rows
        try:
            self.run = str(rows[0]["run"])
        except KeyError:
            raise RunError(
                f"{str(path)!r} does not begin with the name of its run",
                fix="restore it; clients know the run by it",
            ) from None

    @property
    def begun(self) -> int:
        """The last round that was begun; one that was not ended is void."""
        return max(int(row["step"]) for row in self._rows)

    def begin(self, number: int, asked: Sequence[str]) -> None:
        self._append({"step": number, "asked": list(asked)})

    def end(self, one: Round) -> None:
        self._append(asdict(one))

    def rounds(self) -> list[Round]:
        """All that were begun, in order."""
        ended = {row["step"]: row for row in self._rows if "answered" in row}
        found = []
        for row in self._rows[1:]:
            number = row["step"]
            if "answered" in row:
                names = {name: tuple(row[name]) for name in ("asked", "answered")}
                found.append(Round(**{**row, **names}))
            elif number not in ended:
                found.append(Round(number, tuple(row["asked"]), (), 0, 0, "the server stopped"))
        return found

    def _append(self, row: dict[str, Any]) -> None:
        append_line(self._path, row)
        self._rows.append(row)
