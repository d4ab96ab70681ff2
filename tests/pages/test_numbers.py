from __future__ import annotations

import math

from privlora.pages.numbers import duration, finite, number


def test_numbers() -> None:
    values = (3, 8.0, 1e-5, 0.000123456, 1234567.0, None, 2.5, math.nan, math.inf)
    assert [number(v) for v in values] == ["3", "8", "1e-5", "0.0001235", "1.235e+6", "–", "2.5", "–", "∞"]


def test_what_json_does_not_have_becomes_null() -> None:
    assert finite({"a": (1, math.nan, [-math.inf, "inf"]), "b": 0.5}) == {
        "a": [1, None, [None, "inf"]],
        "b": 0.5,
    }


def test_times_have_the_unit_that_reads_best() -> None:
    given = (75.0, 2.344, 0.0084, 1.8e-4, 2.76e-9, 0.0)
    assert [duration(seconds) for seconds in given] == ["75 s", "2.34 s", "8.4 ms", "180 µs", "2.76 ns", "0"]
