"""Cutting one set of records into the clients of a study or a rehearsal of federated training.

Whoever cuts holds all records, so nothing here protects anyone: the seed is public, and who gets what follows from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from privlora.data.records import value_of
from privlora.data.units import Units, group_units
from privlora.errors import DataError, RecordError
from privlora.randomness import counter_generator

_DRAWS = 1000  # of proportions, before alpha counts as too small
_Record = Mapping[str, Any]


def cut(
    records: Sequence[_Record], federation: Any, *, seed: int, user_column: str | None = None
) -> dict[str, list[_Record]]:
    """The records of each client, in their order; every client has at least one.

    Without ``column`` at random; sizes differ by at most one. With it one client for each value, in the order of the
    values: a record more or less leaves all others where they are. With ``alpha`` too, for each value the shares of the
    clients are drawn from Dirichlet(alpha, ..., alpha) (Yurochkin et al., 2019), whatever the clients have already;
    shares that leave a client empty are drawn again, all of them.

    Args:
        records: of any number, in memory.
        federation: ``config.federation.FederationSettings``: names of the K clients and how to cut.
        seed: public; the same seed and records give the same cut.
        user_column: all records of a user go to the same client, and in what is said above users take the place of
            records; a user's value is the most frequent one of the user's records. None: every record for itself.

    Raises:
        DataError: fewer records or users than clients; with column alone, another number of values than of clients; a
            record without the column; a value that is neither a string nor an integer; alpha too small for every client
            to get a record.
    """
    units = group_units(records, user_column)
    what = "records" if user_column is None else "users"
    if len(units) < len(federation.names):
        what = f"there are fewer {what} than the {len(federation.names)} clients to cut them into"
        raise DataError(what, fix="set federation.clients to a smaller number")
    parts = _parts(records, units, federation, seed)
    return {
        name: [records[i] for i in sorted(i for unit in part for i in units[int(unit)])]
        for name, part in zip(federation.names, parts, strict=True)
    }


def _parts(
    records: Sequence[_Record], units: Units, federation: Any, seed: int
) -> Sequence[np.ndarray | list[int]]:
    """Units of each client."""
    clients = len(federation.names)
    if federation.column is None:
        return np.array_split(counter_generator(seed).permutation(len(units)), clients)
    of_value = _units_of_each_value(records, units, federation.column)
    if federation.alpha is None:
        return _one_for_each(of_value, clients, federation.column)
    return _dirichlet(list(of_value.values()), clients, federation.alpha, seed)


def _units_of_each_value(records: Sequence[_Record], units: Units, column: str) -> dict[Any, list[int]]:
    """The units that have each value, values in the order in which units come."""
    values = [_value(record, column, number) for number, record in enumerate(records, start=1)]
    if len({type(value) for value in values}) > 1:
        what = f"column {column!r} mixes strings, integers or booleans"
        raise DataError(what, why='1 and "1" would be two values', fix="write all its values as strings")
    found: dict[str | int, list[int]] = {}
    for unit, of_unit in enumerate(units):
        value = Counter(values[i] for i in of_unit).most_common(1)[0][0]  # of equals, the first one seen
        found.setdefault(value, []).append(unit)
    return found


def _value(record: _Record, column: str, number: int) -> str | int:
    try:
        value = value_of(record, column, number)
    except DataError as error:
        raise error.of("federation.column, in data.path") from None
    if not isinstance(value, str | int):
        what = f"column {column!r} holds {type(value).__name__}, which is nothing to cut by"
        raise RecordError(number, what, fix="cut by a column of strings or integers, such as a label")
    return value


def _one_for_each(of_value: dict[Any, list[int]], clients: int, column: str) -> list[list[int]]:
    if len(of_value) != clients:
        what = f"federation.column={column!r} has {len(of_value)} different values, and there are {clients} clients"
        fix = f"set federation.clients to {len(of_value)}, or cut by another column, such as one that joins values"
        lost = "one client has one value, so records with the other values would be left out"
        raise DataError(what, why=lost if len(of_value) > clients else None, fix=fix)
    return [of_value[value] for value in sorted(of_value)]


def _dirichlet(of_value: list[list[int]], clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    sizes = np.array([len(of_one) for of_one in of_value])
    for draw in count():
        generator = counter_generator(seed, stream=draw)
        ends = _ends(sizes, generator.dirichlet(np.full(clients, alpha), size=len(sizes)))
        if (np.diff(ends, prepend=0).sum(axis=0) > 0).all():
            break
        if draw + 1 == _DRAWS:
            what = f"federation.alpha={alpha:g} is too small: each of {_DRAWS} draws left a client without records"
            raise DataError(what, fix="set a larger alpha or fewer clients, or give more records")
    pieces = [
        np.split(generator.permutation(of_one), end[:-1]) for of_one, end in zip(of_value, ends, strict=True)
    ]
    return [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]


def _ends(sizes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """(values, clients) int64: behind which of a value's units each client's piece ends; the last has the rest."""
    ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
    ends[:, -1] = sizes
    return np.minimum(ends, sizes[:, None])
