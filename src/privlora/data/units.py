"""Which records belong to one privacy unit (a record, a person, a household): what one epsilon protects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, overload

import numpy as np

from privlora.data.records import missing_as, value_of
from privlora.errors import ConfigError, DataError, RecordError, article
from privlora.stages import DRAW, staged

_EXACT: Final = 2**53  # above it, whole numbers share one float
_DIGEST: Final = 16  # bytes, of which no two values share all


class Units(Sequence[np.ndarray]):
    """The records of each unit: ``units[u]`` is an int64 array of record indices, ``len(units)`` is private.

    Args:
        unit_of_record: (records,) int64: the unit of each record, numbered 0 to U - 1 without gaps.
        max_records_per_unit: at most this many of a unit's records enter one step; None for all of them.
            Epsilon does not depend on it, since the whole unit's gradient is clipped; memory does.

    Raises:
        ConfigError: ``max_records_per_unit`` < 1.
    """

    def __init__(self, unit_of_record: np.ndarray, max_records_per_unit: int | None = None) -> None:
        if max_records_per_unit is not None and max_records_per_unit < 1:
            fix = "leave it out, or allow at least one record"
            raise ConfigError(f"max_records_per_unit={max_records_per_unit} is below 1", fix=fix)
        self.max_records_per_unit = max_records_per_unit
        # Records sorted by unit, and where each unit starts: two flat arrays for millions of units.
        self._records = np.argsort(unit_of_record, kind="stable").astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(unit_of_record))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, unit: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, unit: slice) -> list[np.ndarray]: ...

    def __getitem__(self, unit: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(unit, slice):
            return [self[u] for u in range(len(self))[unit]]
        unit = range(len(self))[unit]  # one rule for negative and out-of-range numbers
        return self._records[self._starts[unit] : self._starts[unit + 1]]

    def unit_of_record(self) -> np.ndarray:
        """(records,) int64: what they were made of."""
        found = np.empty(len(self._records), np.int64)
        found[self._records] = np.repeat(np.arange(len(self)), np.diff(self._starts))
        return found

    @staged(DRAW)
    def draw_records(self, drawn: Iterable[int], generator: np.random.Generator) -> list[np.ndarray]:
        """The records with which each drawn unit takes part in this step.

        Args:
            drawn: unit indices, as from ``PoissonSampler.draw``.
            generator: source of the subsets, as ``PoissonSampler.generator``.

        Returns:
            One int64 array a drawn unit: all its records, or, above ``max_records_per_unit``, a fresh
            uniformly random subset of that size.
        """
        bound = self.max_records_per_unit
        chosen = []
        for unit in drawn:
            records = self[int(unit)]
            if bound is not None and len(records) > bound:
                records = generator.choice(records, size=bound, replace=False)
            chosen.append(records)
        return chosen


def group_units(
    records: Sequence[Mapping[str, Any]], column: str | None, *, max_records_per_unit: int | None = None
) -> Units:
    """Group records by the value of ``column``; None makes every record its own unit.

    Values are compared exactly: a person spelt in two ways counts as two units, and is protected as such.

    Raises:
        DataError: a record lacks the column, or its value is not a non-empty string or an integer, or strings
            and integers are mixed (1 and "1" would split one person in two).
    """
    grouping = Grouping(column)
    for number, record in enumerate(records, start=1):
        grouping.add(record, number)
    return Units(grouping.unit_of_record(), max_records_per_unit)


class Grouping:
    """`group_units` of records that come one after the other; of each, a digest of its unit is kept."""

    def __init__(self, column: str | None) -> None:
        self._column = column
        self.records = 0
        self._digests = bytearray()
        self._kinds = set[type]()

    def add(self, record: Mapping[str, Any], number: int) -> None:
        """The next record; its ``number`` is from 1. Raises DataError, as `unit_value`."""
        self.records += 1
        if self._column is None:
            return
        value = unit_value(record, self._column, number)
        self._kinds.add(str if isinstance(value, str) else int)
        self._digests += blake2b(_content(value), digest_size=_DIGEST).digest()

    def unit_of_record(self) -> np.ndarray:
        """(records,) int64: units are numbered in the order of their first records.

        Raises:
            DataError: strings and integers are mixed.
        """
        if self._column is None:
            return np.arange(self.records)
        if len(self._kinds) > 1:
            what = f"unit column {self._column!r} mixes strings and integers"
            why = '1 and "1" would be two privacy units, and one person could be split in two'
            raise DataError(what, why=why, fix="write all its values as strings")
        digests = np.frombuffer(self._digests, f"S{_DIGEST}")
        _, first, unit = np.unique(digests, return_index=True, return_inverse=True)
        number = np.empty(len(first), np.int64)
        number[np.argsort(first)] = np.arange(len(first))
        return number[unit]

    def count(self) -> int:
        """How many units there are. Raises DataError as `unit_of_record`."""
        return int(self.unit_of_record().max(initial=-1)) + 1


def _content(value: str | int) -> bytes:
    """What the value is, whatever a class of its own shows in its place (as an enumeration does)."""
    if isinstance(value, str):
        return str.encode(value, "utf-8", "surrogatepass")
    return int.__format__(value, "x").encode()  # decimal digits have a limit


def unit_value(record: Mapping[str, Any], column: str, number: int) -> str | int:
    """The unit that record ``number`` (from 1) belongs to.

    Raises:
        DataError: the column is missing, or holds neither a non-empty string nor an integer.
    """
    value = value_of(record, column, number)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)  # a table makes fractions of whole numbers once one of them is missing
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        what = f"unit column {column!r} names no unit: it is {_instead(value)}"
        why = "a record that belongs to nobody cannot be protected at the level of its unit"
        fix = "give every record its unit, a text or a whole number, or remove it"
        raise RecordError(number, what, why=why, fix=fix)
    return value


def _instead(value: object) -> str:
    """What stands where a unit belongs, in words that hold nothing of it.

    >>> _instead(None), _instead(""), _instead(True), _instead(2.5), _instead(["ann"])
    ('empty (null)', 'an empty text', 'true or false', 'a fraction', 'a list')
    """
    missing = missing_as(value)
    if missing is not None:
        return f"empty ({missing})"
    if isinstance(value, str):
        return "an empty text"
    if isinstance(value, bool):
        return "true or false"
    return "a fraction" if isinstance(value, float) else article(type(value).__name__)
