"""What a report may hold: each kind refuses what is of another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from privlora.mechanisms import gaussian
from privlora.ranges import SLACKS
from privlora.reporting.fields import HASH, KWARGS, NUMBER, TEXT, TEXTS, WORD, one_of, strange


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (NUMBER, [1, 0.5, True, None, 10**400], ["1", math.nan, math.inf, [1], {}]),
        (
            TEXT,
            ["two words", "two\nlines", "ü", "می\u200cروم", None],
            [1, "\u202ea", "a\u200bb", "\U000e0041", "\ue000", "\x1b[1m", "a" * 5000, ["a"]],
        ),
        (TEXTS, ["a", ["a", "\u2066"], "b" * 5000, None], [[1], {"a": "b"}, ["a", 7]]),
        (HASH, ["0f" * 32, None], ["0g" * 32, "0f" * 31, 7, ["0f" * 32]]),
        (
            KWARGS,
            [{"enable_thinking": True, "level": "low"}, {}],
            [{"true epsilon": 0.1}, {"a\u3164b": 1}, {"a" * 99: 1}, {"a": [1]}, "a"],
        ),
        (WORD, ["lora+", "rank"], ["two words", "", None, "a" * 40, ["rank"]]),
        (one_of("a", None), ["a", None], ["b", ["a"], 1]),
    ],
)
def test_kinds(kind: Callable[[object], bool], right: list[Any], wrong: list[Any]) -> None:
    assert all(map(kind, right))
    assert not any(map(kind, wrong))


def test_places_are_named_and_lists_are_where_they_are_due() -> None:
    kinds = {"rows": [{"name": TEXT, "sizes": [NUMBER]}], "one": NUMBER}
    right = {"rows": [{"name": "a", "sizes": [1, 2]}], "one": 3}
    assert list(strange(right, kinds)) == []
    wrong = {"rows": [{"name": ["a"], "sizes": 1, "more": 2}, "a"], "one": [3], "two": 4}
    assert list(strange(wrong, kinds)) == ["rows.name", "rows.sizes", "rows.more", "rows", "one", "two"]
    assert list(strange({"rows": {"name": "a"}}, kinds)) == ["rows"]


def test_slacks_are_those_of_the_mechanism() -> None:
    assert {gaussian.SLACK, gaussian.RAISED_SLACK, gaussian.REDUCED_SLACK, 0.0} == set(SLACKS)
