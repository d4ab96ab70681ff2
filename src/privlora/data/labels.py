"""What labels may be, which is public: the classes of a text, or a score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, Literal

from privlora.data.records import missing_column
from privlora.errors import ConfigError, DataError, named

MOST_CLASSES: Final = 100_000
SCORE = "score"
"""In the place of the classes: the label is a number, learned by its squared error."""


@dataclass(frozen=True)
class Classes:
    """What labels may be. PUBLIC: a class that only a private record has must not show.

    column: of the label. names: of the classes, by their number; () of a score. numbered: whether records hold the
    numbers, 0 to K - 1, and not the names.
    """

    column: str
    names: tuple[str, ...]
    numbered: bool = False

    @property
    def outputs(self) -> int:
        """How many numbers the model gives: one a class, or the score."""
        return len(self.names) or 1

    def answer_of(self, record: Mapping[str, Any], number: int) -> float:
        """The class's number, or the score. number: of the record, from 1. Raises DataError, which shows no value."""
        if self.column not in record:
            raise missing_column(self.column, record, number)
        value = record[self.column]
        found = self._score(value) if not self.names else self._class(value)
        if found is None:
            what, fix = self._wanted()
            raise DataError(
                f"record {number}: the label in column {self.column!r} is {what}",
                why="what labels may be is public; one that is found in private records would be published with them",
                fix=fix,
            )
        return found

    def _wanted(self) -> tuple[str, str]:
        """What a label is not that is none, and how to mend it."""
        mend, count = "mend the record, or give all labels that there can be as data.labels", len(self.names)
        if not self.names:
            return "not a finite number", mend
        if self.numbered:
            return (
                f"no number from 0 to {count - 1}, as data.labels={count} has them",
                "if the records hold names, give all that there can be, as data.labels=[negative, positive]; else mend "
                "the record",
            )
        return f"none of data.labels, which has {count}", mend

    def _class(self, value: Any) -> float | None:
        if isinstance(value, bool):
            value = int(value) if self.numbered else str(value).lower()
        if self.numbered:
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                return None
            return number if number in range(len(self.names)) else None
        try:
            text = str(value) if isinstance(value, str | int) else None
        except ValueError:  # an integer of thousands of digits
            return None
        return float(self.names.index(text)) if text in self.names else None

    @staticmethod
    def _score(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return number if isfinite(number) else None


def classes_of(column: str, labels: list[str] | int | Literal["score"]) -> Classes:
    """From data.label and data.labels. Raises ConfigError."""
    if labels == SCORE:
        return Classes(column, ())
    if isinstance(labels, int) and labels > MOST_CLASSES:
        raise ConfigError(
            f"data.labels: there cannot be more than {MOST_CLASSES} classes",
            fix="give how many there can be, or score for a number that is to be predicted",
        )
    names = tuple(map(str, range(labels))) if isinstance(labels, int) else tuple(labels)
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"data.labels names {named(labels)}: there have to be two different classes or more",
            fix="give all labels that there can be, as labels: [negative, positive], their number, or score",
        )
    return Classes(column, names, numbered=isinstance(labels, int))
