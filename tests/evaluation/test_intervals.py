"""Intervals cover what they should, and see a paired difference that unpaired ones miss."""

from __future__ import annotations

import numpy as np
import pytest

from privlora.errors import ConfigError
from privlora.evaluation.intervals import bootstrap_interval, paired_difference


def test_coverage_of_an_accuracy() -> None:
    rng = np.random.default_rng(0)
    strata, covered = np.zeros(150), 0
    for trial in range(200):
        correct = rng.random(150) < 0.7
        found = bootstrap_interval(lambda i, c=correct: c[i].mean(), strata, resamples=200, seed=trial)
        covered += found.low <= 0.7 <= found.high
    assert 180 <= covered <= 199  # 95 % of 200, give or take four standard deviations and discreteness


@pytest.mark.slow
def test_coverage_of_a_correlation() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(100):
        x = rng.normal(size=120)
        y = 0.6 * x + 0.8 * rng.normal(size=120)
        statistic = lambda i, x=x, y=y: float(np.corrcoef(x[i], y[i])[0, 1])  # noqa: E731
        found = bootstrap_interval(statistic, np.zeros(120), resamples=200, seed=trial)
        covered += found.low <= 0.6 <= found.high
    assert 87 <= covered <= 100


def test_width_is_that_of_the_normal_law() -> None:
    correct = np.arange(1000) % 5 > 0  # accuracy 0.8
    found = bootstrap_interval(lambda i: correct[i].mean(), np.zeros(1000), resamples=2000)
    half = 1.96 * np.sqrt(0.8 * 0.2 / 1000)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert bootstrap_interval(lambda i: correct[i].mean(), np.zeros(1000), resamples=2000) == found
    wider = bootstrap_interval(lambda i: correct[i].mean(), np.zeros(1000), resamples=2000, confidence=0.99)
    assert wider.low < found.low < found.high < wider.high


def test_parts_keep_their_size() -> None:
    strata = np.array(["matched"] * 10 + ["mismatched"] * 30)
    sizes = []
    bootstrap_interval(lambda i: sizes.append((i < 10).sum()) or float(len(i)), strata, resamples=100)
    assert set(sizes) == {10}


def test_a_paired_difference() -> None:
    rng = np.random.default_rng(2)
    easy = rng.random(400) < 0.6
    first, second = easy.copy(), easy.copy()
    first[:12] = True
    second[:12] = False  # right on 12 more of the same examples
    found = paired_difference(lambda i: first[i].mean(), lambda i: second[i].mean(), np.zeros(400))
    assert found.value == pytest.approx(12 / 400)
    assert 0 < found.interval.low < 0.03 < found.interval.high
    unpaired = bootstrap_interval(lambda i: first[i].mean(), np.zeros(400))
    assert unpaired.low < second.mean()


def test_one_example_has_no_interval() -> None:
    found = bootstrap_interval(lambda i: 1.0, np.zeros(1))
    assert np.isnan([found.low, found.high]).all()


@pytest.mark.parametrize("wrong", [{"confidence": 1.0}, {"confidence": 0.0}, {"resamples": 10}])
def test_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        bootstrap_interval(lambda i: 0.0, np.zeros(5), **wrong)
