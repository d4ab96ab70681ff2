"""What labels may be, which is public: the classes of a text, or a score."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, Literal

from privlora.data.records import value_of
from privlora.errors import ConfigError, RecordError, named

MOST_CLASSES: Final = 100_000
SCORE = "score"
"""In the place of the classes: the label is a number, learned by its squared error."""


Labels = list[str] | dict[int, str] | int | Literal["score"]
"""As data.labels: names that records hold; a name for each number that they hold; how many numbers from 0 on."""


@dataclass(frozen=True)
class Classes:
    """What labels may be. PUBLIC: a class that only a private record has must not show.

    column: of the label. names: of the classes; () of a score. numbers: what records hold, one for each name; () where
    they hold the names.
    """

    column: str
    names: tuple[str, ...]
    numbers: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """How many numbers the model gives: one a class, or the score."""
        return len(self.names) or 1

    def answer_of(self, record: Mapping[str, Any], number: int) -> float:
        """The class's place among the names, or the score. number: of the record, from 1. Raises DataError, which shows
        no value."""
        value = value_of(record, self.column, number)
        found = self._class(value) if self.names else number_of(value)
        if found is None:
            what, fix = self._wanted()
            why = "what labels may be is public, and one that is found in private records would be published"
            what = f"the label in column {self.column!r} is {what}"
            raise RecordError(number, what, why=why, fix=f"{fix}; else mend the record")
        return found

    def _wanted(self) -> tuple[str, str]:
        """What a label is not that is none, and what to set if all are otherwise."""
        if not self.names:
            return "not a finite number", "if labels are names, set data.labels=[negative, positive]"
        if self.numbers:
            fix = "name them, as data.labels={-1: negative, 1: positive}; or names, as data.labels=[negative, positive]"
            return "none of the numbers of data.labels", fix
        # Quoted, as JSON is also YAML and Python.
        named = ", ".join(f"{at}: {json.dumps(name)}" for at, name in enumerate(self.names))
        fix = f"if records hold numbers from 0 on, set data.labels={{{named}}}"
        return f"none of the {len(self.names)} names of data.labels", fix

    def _class(self, value: Any) -> float | None:
        if self.numbers:
            number = number_of(int(value) if isinstance(value, bool) else value)
            return float(self.numbers.index(int(number))) if number in self.numbers else None
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, float) and value.is_integer() and str(value) not in self.names:
            value = int(value)  # a table makes fractions of whole numbers once one of them is missing
        try:
            text = str(value) if isinstance(value, str | int | float) else None
        except ValueError:  # an integer of thousands of digits
            return None
        return float(self.names.index(text)) if text in self.names else None


def number_of(value: Any) -> float | None:
    """A finite number, also one that a text states; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def classes_of(column: str, labels: Labels) -> Classes:
    """From data.label and data.labels. Raises ConfigError."""
    if labels == SCORE:
        return Classes(column, ())
    if isinstance(labels, int) and labels > MOST_CLASSES:
        fix = "give how many there can be, or score for a number that is to be predicted"
        raise ConfigError(f"data.labels: there cannot be more than {MOST_CLASSES} classes", fix=fix)
    if isinstance(labels, int):
        labels = {number: str(number) for number in range(labels)}
    numbers = tuple(labels) if isinstance(labels, dict) else ()
    names = tuple(labels.values() if isinstance(labels, dict) else labels)
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"data.labels names {named(labels)}: there have to be two different classes or more",
            fix="give all labels that there can be, as labels: [negative, positive], their number, or score",
        )
    return Classes(column, names, numbers)
