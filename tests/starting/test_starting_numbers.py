"""Public numbers: rounded before anything follows from them, and such that settings take them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from privlora.config import PrivacySettings
from privlora.rounding import to_one_digit
from privlora.starting.proposal import _delta_for, _numbers_for


@pytest.mark.parametrize("units", [1, 2, 7, 14, 95, 120, 999, 1500, 2001, 4306, 9_999, 50_000, 1_234_567])
def test_settings_and_a_run_take_them(units: int) -> None:
    numbers = _numbers_for(units)
    assert numbers.n / 2 <= units <= 2 * numbers.n  # what data.summary lets pass
    assert float(numbers.delta) <= 1 / (10 * max(numbers.n, units))
    assert 10 * float(numbers.delta) > 1 / (10 * 1.5 * numbers.n)
    PrivacySettings(
        target_epsilon=3,
        delta=float(numbers.delta),
        steps=numbers.steps,
        expected_batch_size=numbers.batch,
        public_dataset_size=numbers.n,
    )


def test_numbers_tell_no_more_than_the_first_digit() -> None:
    assert _numbers_for(3501) == _numbers_for(4499)
    assert [to_one_digit(n) for n in (1, 14, 15, 949, 950, 96_000)] == [1, 10, 20, 900, 1000, 100_000]
    assert _delta_for(10_000) == "1e-6"


def test_delta_is_never_above_a_tenth_of_one_in_the_true_number() -> None:
    """Of every number, and so of the largest that rounds to the same digit; nor is it smaller than that one needs."""
    largest: dict[int, int] = {}
    for units in range(1, 30_000):
        n = to_one_digit(units)
        assert Fraction(_delta_for(n)) <= Fraction(1, 10 * units)
        largest[n] = units
    for n, units in largest.items():
        if n < 30_000:  # whole
            assert 10 * Fraction(_delta_for(n)) > Fraction(1, 10 * units)
