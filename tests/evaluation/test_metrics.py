"""Metrics against hand-computed values and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from privlora.evaluation.metrics import (
    accuracy,
    f1,
    is_correct,
    matthews_correlation,
    pearson,
    spearman,
    worst_for,
)

GOLD = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], dtype=float)
PREDICTED = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0], dtype=float)  # TP 3, FN 1, FP 2, TN 4


def test_by_hand() -> None:
    assert accuracy(GOLD, PREDICTED) == 0.7
    assert f1(GOLD, PREDICTED) == pytest.approx(2 * 3 / (2 * 3 + 2 + 1))
    expected = (3 * 4 - 2 * 1) / np.sqrt((3 + 2) * (3 + 1) * (4 + 2) * (4 + 1))
    assert matthews_correlation(GOLD, PREDICTED) == pytest.approx(expected)
    assert matthews_correlation(GOLD, 1 - PREDICTED) == pytest.approx(-expected)


def test_correlations_against_scipy() -> None:
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 26, 200) / 5  # many ties
    predicted = gold + rng.normal(size=200)
    assert pearson(gold, predicted) == pytest.approx(stats.pearsonr(gold, predicted).statistic)
    assert spearman(gold, predicted) == pytest.approx(stats.spearmanr(gold, predicted).statistic)


def test_a_constant_prediction_tells_nothing() -> None:
    for metric in (matthews_correlation, pearson, spearman):
        assert metric(GOLD, np.ones(10)) == 0
        assert metric(np.ones(10), GOLD) == 0
    assert f1(np.zeros(3), np.zeros(3)) == 0
    assert f1(GOLD, np.zeros(10)) == 0


def test_numbers_within_a_thousandth_are_equal() -> None:
    gold = np.array([1.833333, 1.833333, 0.5, 0.5, 70000.0, 3.0])
    predicted = np.array([1.8333333333, 1.83, 0.501, 0.5011, 70000.0, np.nan])
    assert is_correct(gold, predicted).tolist() == [True, False, True, False, True, False]


def test_what_cannot_be_read_is_the_worst_answer() -> None:
    nan = np.full(4, np.nan)
    assert worst_for(np.array([0.0, 1.0, 2.0, 1.0]), nan, classes=3, top=0).tolist() == [1, 2, 0, 2]
    assert worst_for(np.array([0.0, 2.4, 2.6, 5.0]), nan, classes=0, top=5).tolist() == [5, 5, 0, 0]
    readable = np.array([1.0, 0.0, 2.0, 1.0])
    assert worst_for(np.zeros(4), readable, classes=3, top=0) is not readable
    assert worst_for(np.zeros(4), readable, classes=3, top=0).tolist() == readable.tolist()


@pytest.mark.parametrize("metric", [accuracy, f1, matthews_correlation])
def test_unreadable_never_beats_readable(metric: object) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        gold, predicted = rng.integers(0, 2, (2, 30)).astype(float)
        holes = rng.random(30) < 0.3
        with_holes = worst_for(gold, np.where(holes, np.nan, predicted), classes=2, top=0)
        assert metric(gold, with_holes) <= metric(gold, predicted) + 1e-12  # type: ignore[operator]
