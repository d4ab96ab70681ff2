"""How the share of a study is named that one machine runs, without the study: it can be read before slow imports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from privlora.errors import ConfigError

_MOST: Final = 10_000
_FORM = re.compile(r"(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True, order=True)
class Part:
    """Part ``number`` (1, 2, …) of ``count``; 1 of 1 is all of a study."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def file(self) -> str:
        """In names of files."""
        return f"{self.number}-of-{self.count}"


WHOLE: Final = Part(1, 1)


def part_from(text: str) -> Part:
    """ "3/8" as a part. Raises ConfigError."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"--part {text!r} is not a part",
            fix="write which one of how many, such as 3/8; in a job array of SLURM "
            '"$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"',
        )
    part = Part(int(found[1]), int(found[2]))
    if not 1 <= part.number <= part.count <= _MOST:
        more = "; an array that starts at 0 needs $((SLURM_ARRAY_TASK_ID + 1))" if part.number == 0 else ""
        most = min(max(1, part.count), _MOST)
        raise ConfigError(
            f"there is no part {part}",
            why="parts are counted from 1 to their number, and a cell of a missing one would never be run",
            fix=f"give one of 1/{most} to {most}/{most}{more}",
        )
    return part
