from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from privlora.data.sampling import PoissonSampler
from privlora.data.units import group_units
from privlora.errors import ConfigError, DataError

RECORDS = [{"user": user} for user in ["ann", "bob", "ann", "cy", "ann", "bob", "ann"]]


def test_every_record_is_its_own_unit() -> None:
    units = group_units(RECORDS, None)
    assert [u.tolist() for u in units] == [[i] for i in range(7)]


def test_groups_by_column() -> None:
    units = group_units(RECORDS, "user")
    assert len(units) == 3
    assert [u.tolist() for u in units] == [[0, 2, 4, 6], [1, 5], [3]]
    assert units[-1].tolist() == [3]
    assert [u.tolist() for u in units[1:]] == [[1, 5], [3]]
    with pytest.raises(IndexError):
        units[3]


def test_integers_name_units_too() -> None:
    assert len(group_units([{"user": 5}, {"user": 0}, {"user": 5}], "user")) == 2


class Name(str, enum.Enum):  # noqa: UP042 - whose str() is "Name.ANN"
    ANN = "ann"


class Number(enum.IntEnum):
    FIVE = 5


class Varying(str):
    """Shows something else whenever it is asked."""

    shown = 0

    def __str__(self) -> str:
        Varying.shown += 1
        return str(Varying.shown)


class Alike(str):
    def __str__(self) -> str:
        return "somebody"


class Odd(int):
    def __int__(self) -> int:
        return 7

    def __format__(self, spec: str) -> str:
        return "7"


@pytest.mark.parametrize(
    ("users", "units"),
    [
        (["ann", Name.ANN, "bob"], [[0, 1], [2]]),
        (["ann", np.str_("ann"), "bob"], [[0, 1], [2]]),
        ([Varying("ann"), "ann", Varying("ann")], [[0, 1, 2]]),
        ([Alike("ann"), Alike("bob"), "bob"], [[0], [1, 2]]),
        ([5, Number.FIVE, 6], [[0, 1], [2]]),
        ([Odd(5), Odd(6), 5], [[0, 2], [1]]),
        ([10**5000, 10**5000, 10**5000 + 1, -(10**5000)], [[0, 1], [2], [3]]),
        (["\ud800", "?", "\ud800", "\ud801"], [[0, 2], [1], [3]]),
    ],
    ids=["enum", "numpy", "varying", "shown alike", "int enum", "odd int", "long int", "surrogates"],
)
def test_a_user_is_its_value_whatever_its_class_shows(users: list[Any], units: list[list[int]]) -> None:
    assert [u.tolist() for u in group_units([{"user": user} for user in users], "user")] == units


def test_no_records_no_units() -> None:
    assert len(group_units([], None)) == len(group_units([], "user")) == 0


def test_all_or_none_of_a_unit_takes_part() -> None:
    units = group_units(RECORDS, "user")
    sampler = PoissonSampler(len(units), 0.5, insecure_seed=1)
    seen = set()
    for _ in range(200):
        chosen = units.draw_records(sampler.draw(), sampler.generator)
        present = frozenset(int(i) for records in chosen for i in records)
        assert all(set(u.tolist()) <= present or not set(u.tolist()) & present for u in units)
        seen.add(present)
    assert len(seen) == 8  # every subset of three users


def test_contribution_bound_draws_uniform_subsets() -> None:
    units = group_units(RECORDS, "user", max_records_per_unit=2)
    generator = np.random.default_rng(0)
    draws, counts = 3000, np.zeros(7)
    for _ in range(draws):
        ann, cy = units.draw_records(np.array([0, 2]), generator)
        assert len(np.unique(ann)) == 2
        assert cy.tolist() == [3]
        counts[ann] += 1
    assert abs(counts[[0, 2, 4, 6]] - draws / 2).max() < 4 * np.sqrt(draws / 4)
    assert counts[[1, 3, 5]].sum() == 0


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"user": "a"}, {"usr": "b"}], "record 2: has no column 'user'.*did you mean 'usr'"),
        ([{"user": None}], r"names no unit: it is empty \(null\)"),
        ([{"user": float("nan")}], r"names no unit: it is empty \(NaN\)"),
        ([{"user": True}], "names no unit: it is true or false"),
        ([{"user": 1.5}], "names no unit: it is a fraction"),
        ([{"user": ""}], "names no unit: it is an empty text"),
        ([{"user": ["a"]}], "names no unit: it is a list"),
        ([{"user": 1}, {"user": "1"}], "mixes"),
    ],
)
def test_refuses_records_without_a_unit(records: list[dict[str, object]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        group_units(records, "user")


def test_refuses_an_empty_bound() -> None:
    with pytest.raises(ConfigError, match="max_records_per_unit"):
        group_units(RECORDS, "user", max_records_per_unit=0)
