"""Metrics of membership attacks agree with brute force, and their intervals hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from privlora.auditing.membership import (
    area_under_curve,
    held_out_balanced_accuracy,
    judge_membership,
    roc_curve,
)
from privlora.errors import ConfigError


def test_curve_of_a_small_case() -> None:
    curve = roc_curve([3.0, 2.0, 2.0, 0.0], [2.0, 1.0, 0.0, 0.0])
    np.testing.assert_array_equal(curve.thresholds, [np.inf, 3, 2, 1, 0])
    np.testing.assert_allclose(curve.true_positive_rates, [0, 0.25, 0.75, 0.75, 1])
    np.testing.assert_allclose(curve.false_positive_rates, [0, 0, 0.25, 0.5, 1])
    assert curve.balanced_accuracy == 0.75
    assert curve.true_positive_rate(0.2) == 0.25
    assert curve.true_positive_rate(0.25) == 0.75


def test_area_is_the_share_of_ordered_pairs() -> None:
    generator = np.random.default_rng(0)
    members, others = generator.integers(0, 6, 40), generator.integers(-2, 4, 30)  # with ties
    difference = members[:, None] - others[None, :]
    expected = (difference > 0).mean() + (difference == 0).mean() / 2
    assert area_under_curve(members, others).value == pytest.approx(expected, abs=1e-12)
    curve = roc_curve(members, others)
    trapezia = np.trapezoid(curve.true_positive_rates, curve.false_positive_rates)
    assert trapezia == pytest.approx(expected, abs=1e-12)


def test_interval_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    truth, runs, covered = norm.cdf(1.2 / 2**0.5), 400, 0
    for _ in range(runs):
        area = area_under_curve(generator.normal(1.2, 1, 50), generator.normal(0, 1, 70), confidence=0.9)
        covered += area.low <= truth <= area.high
    assert 0.86 < covered / runs < 0.95  # 0.9 within 2.7 and 3.3 standard errors


def test_separated_scores_keep_an_honest_interval() -> None:
    area = area_under_curve(np.arange(100, 300), np.arange(-400, 0))
    assert (area.value, area.high) == (1.0, 1.0)
    assert area.low == pytest.approx(0.025 ** (1 / 200))
    reverse = area_under_curve(np.arange(-400, 0), np.arange(100, 300))
    assert (reverse.value, reverse.low) == (0.0, 0.0)
    assert reverse.high == pytest.approx(1 - 0.025 ** (1 / 200))
    same = area_under_curve(np.zeros(20), np.zeros(20))
    assert same.low < same.value == 0.5 < same.high


def test_held_out_threshold_is_not_flattered_by_noise() -> None:
    generator = np.random.default_rng(2)
    best, held_out = [], []
    for seed in range(100):
        members, others = generator.normal(size=40), generator.normal(size=40)
        best.append(roc_curve(members, others).balanced_accuracy)
        held_out.append(held_out_balanced_accuracy(members, others, seed=seed))
    assert np.mean(best) > 0.55
    assert np.mean(held_out) == pytest.approx(0.5, abs=5 * np.std(held_out) / 10)


def test_summary_of_a_strong_attack() -> None:
    generator = np.random.default_rng(3)
    found = judge_membership(generator.normal(4, 1, 100), generator.normal(0, 1, 100))
    assert found.area.value > 0.98
    assert found.held_out_balanced_accuracy > 0.93
    (low_rate, low), (_, high) = found.true_positive_rates
    assert low_rate == 0.01
    assert low <= high
    assert (found.members, found.non_members) == (100, 100)


@pytest.mark.parametrize(("members", "others"), [([], [1.0]), ([1.0, np.nan], [1.0, 2.0])])
def test_bad_scores_are_refused(members: list[float], others: list[float]) -> None:
    with pytest.raises(ConfigError):
        roc_curve(members, others)
    with pytest.raises(ConfigError):
        judge_membership(members, others)


def test_too_few_scores_and_odd_confidence_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        area_under_curve([1.0], [2.0, 3.0])
    with pytest.raises(ConfigError, match="confidence"):
        area_under_curve([1.0, 2.0], [2.0, 3.0], confidence=1.0)
