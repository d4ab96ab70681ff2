"""Means, standardised scores and leads, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from privlora.lab.studies.statistics import lead_over, spread, standardise, standings, unit_of_gain


def test_spread() -> None:
    found = spread([1.0, 2.0, 3.0, 6.0])
    assert found.mean == 3.0
    assert found.standard_deviation == pytest.approx(math.sqrt(14 / 3))
    assert found.standard_error == pytest.approx(math.sqrt(14 / 3) / 2)
    assert math.isnan(spread([1.0]).standard_deviation)


def test_standardise() -> None:
    runs = {"a": {0: 1.0, 1: 3.0}, "b": {0: 5.0, 1: 7.0}, "c": {0: 90.0, 1: 95.0}}
    found = standardise(
        runs, 10.0, lower_is_better=True
    )  # a gains 8 on average, b 4; c is worse than no training
    assert found["a"] == {0: 9 / 8, 1: 7 / 8}
    assert found["b"] == {0: 5 / 8, 1: 3 / 8}
    assert found["c"] == {0: -10.0, 1: -85 / 8}
    upside_down = {m: {s: -v for s, v in r.items()} for m, r in runs.items()}
    assert standardise(upside_down, -10.0, lower_is_better=False) == found
    scaled = {m: {s: 10 * v - 7 for s, v in r.items()} for m, r in runs.items()}
    assert standardise(scaled, 93.0, lower_is_better=True) == found


def test_a_task_that_nobody_learns_is_measured_by_its_noise() -> None:
    assert unit_of_gain([[0.03, -0.01], [0.0, 0.0]]) == pytest.approx(0.02)  # the best gains 0.01
    assert unit_of_gain([[-3.0, -1.0], [-9.0, -9.0]]) == pytest.approx(1.0)  # all lose: their spread
    assert unit_of_gain([[0.5], [0.25]]) == 0.5
    assert unit_of_gain([[0.0, 0.0]]) == 1.0
    assert unit_of_gain([[2.0, 2.0], [-100.0, -900.0]]) == 2.0  # a method that diverges changes nothing


Z = {
    "x": {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 0.5, 1: 1.0, 2: 3.0}, "c": {0: -1.0, 1: -1.0, 2: -1.0}},
    "y": {"a": {0: 1.0, 1: 1.0, 2: 1.0}, "b": {0: 0.0, 1: 2.0, 2: 4.0}, "c": {0: -3.0, 1: -3.0, 2: -3.0}},
}


def test_lead() -> None:
    found = lead_over(Z, "a", "b")
    x, y = np.array([0.5, 1.0, 0.0]), np.array([1.0, -1.0, -3.0])
    assert found.lead == pytest.approx((x.mean() + y.mean()) / 2)
    assert found.standard_error == pytest.approx(math.sqrt(x.var(ddof=1) / 3 + y.var(ddof=1) / 3) / 2)
    assert found.low < found.lead < found.high
    assert found.in_errors == pytest.approx(found.lead / found.standard_error)
    back = lead_over(Z, "b", "a")
    assert (back.lead, back.standard_error) == pytest.approx((-found.lead, found.standard_error))
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low), abs=0.05)


def test_the_interval_is_that_of_every_resample() -> None:
    """With two seeds on one task there are three means: the lower, the middle and the upper, at 1/4, 1/2, 1/4."""
    z = {"x": {"a": {0: 1.0, 1: 3.0}, "b": {0: 0.0, 1: 0.0}}}
    found = lead_over(z, "a", "b")
    assert (found.low, found.lead, found.high) == (1.0, 2.0, 3.0)


def test_the_interval_covers() -> None:
    """Of 300 leads whose truth is 0.5, the interval of eight seeds on four tasks misses about one in fifteen."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(300):
        z = {
            task: {
                "a": dict(enumerate(0.5 + rng.standard_normal(8))),
                "b": dict(enumerate(rng.standard_normal(8))),
            }
            for task in "wxyz"
        }
        found = lead_over(z, "a", "b")
        hits += found.low <= 0.5 <= found.high
    assert 0.89 < hits / 300 < 0.98


def test_pairing_matters() -> None:
    """What both methods share with a seed cancels."""
    shared = dict(enumerate(np.random.default_rng(0).standard_normal(6) * 5))
    z = {"x": {"a": {s: v + 1 for s, v in shared.items()}, "b": shared}}
    found = lead_over(z, "a", "b")
    assert found.lead == pytest.approx(1.0)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)


def test_seeds_that_only_one_has_are_left_out() -> None:
    z = {"x": {"a": {0: 1.0, 1: 9.0}, "b": {0: 0.0, 2: 5.0}}}
    found = lead_over(z, "a", "b")
    assert found.lead == 1.0
    assert math.isnan(found.standard_error)
    assert math.isnan(lead_over({"x": {"a": {0: 1.0}, "b": {1: 0.0}}}, "a", "b").lead)


def test_standings() -> None:
    found = standings(Z)
    assert [line.method for line in found] == ["b", "a", "c"]  # means 1.75, 1.5, -2
    assert [line.mean_score for line in found] == pytest.approx([1.75, 1.5, -2.0])
    assert [line.mean_place for line in found] == [1.5, 1.5, 3.0]
    assert [line.lead.against for line in found if line.lead] == ["a", "b", "b"]
    (alone,) = standings({"x": {"a": {0: 1.0}}})
    assert alone.lead is None
