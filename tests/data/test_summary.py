"""The summary of private records: its numbers, and that it refuses what cannot be, without stating one."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_tokenizer

from privlora.data.examples import IGNORED, Example, Examples, Template, build_examples
from privlora.data.summary import DataSummary, refuse_implausible, summarise
from privlora.errors import DataError

GOOD = DataSummary(
    records=100,
    units=100,
    median_tokens=20.0,
    p95_tokens=40.0,
    cut=0.4,
    mostly_cut=0.1,
    empty=0.0,
    repeated=0.0,
)


def example(length: int, *, labelled: bool = True, dropped: int = 0, first: int = 3) -> Example:
    ids = np.arange(first, first + length, dtype=np.int32)
    return Example(ids, ids.copy() if labelled else np.full_like(ids, IGNORED), dropped)


def test_counts() -> None:
    examples = Examples(
        [
            example(10),
            example(20, dropped=20),
            example(10),
            example(20, dropped=21),
            example(4, labelled=False),
        ],
        pad_token_id=0,
    )
    found = summarise(examples, 3)
    assert asdict(found) == {
        "records": 5,
        "units": 3,
        "median_tokens": 10.0,
        "p95_tokens": 40.8,
        "cut": 0.4,
        "mostly_cut": 0.2,
        "empty": 0.2,
        "repeated": pytest.approx(0.4),
        "spelled": 0.0,
        "chunks": None,
    }
    assert found.to_dict() == asdict(found)
    assert "5 records of 3 units, 10 tokens" in found.describe("unit")
    assert "\n" not in found.describe("unit")
    good = DataSummary(3, 3, 10.0, 12.0, cut=0.0, mostly_cut=0.0, empty=0.0, repeated=0.0)
    words = "3 records, 10 tokens each (median; 95 % have at most 12); "
    assert good.describe("unit") == f"{words}none is cut, empty or a repetition"
    assert replace(good, cut=0.25).describe("unit") == f"{words}25.0% are cut by max_length"


def test_what_a_record_loses_is_counted() -> None:
    records = [{"text": "a" * length} for length in (3, 20, 40)]
    examples = build_examples(records, Template(text="text"), tiny_tokenizer(), max_length=12)
    whole = build_examples(records, Template(text="text"), tiny_tokenizer(), max_length=100)
    assert whole.dropped.tolist() == [0, 0, 0]
    assert (examples.lengths + examples.dropped).tolist() == whole.lengths.tolist()


def check(summary: DataSummary, **options: Any) -> None:
    refuse_implausible(summary, **{"public_units": 100.0, "unit": "record", "max_length": 32, **options})


def test_what_can_be_is_taken() -> None:
    check(GOOD)
    for units in (50, 200):
        check(replace(GOOD, units=units))
    check(replace(GOOD, empty=0.5, mostly_cut=0.5, repeated=0.99, cut=1.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"units": 201}, "more than twice as many records as the 100"),
        ({"units": 49}, "fewer than half as many records as the 100"),
        ({"empty": 0.51}, "more than half of the records have nothing to train on"),
        ({"mostly_cut": 0.51}, "lose more than half of their tokens to data.max_length=32"),
    ],
)
def test_what_cannot_be_is_refused_without_a_private_number(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        check(replace(GOOD, records=4711, median_tokens=47.0, **change))
    assert "data.unchecked=true" in str(caught.value)
    assert set(re.findall(r"\d+", str(caught.value))) <= {"100", "32"}
    assert "\n" not in str(caught.value)


def test_users_are_called_so() -> None:
    with pytest.raises(DataError, match="as many users as the 30 "):
        check(replace(GOOD, units=10), public_units=30.0, unit="user")
