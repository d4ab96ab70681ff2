"""GLUE's metrics and exact match, of gold and predicted values as (n,) float64 arrays.

A prediction of NaN means that the answer could not be read. It is wrong for the accuracy; ``worst_for`` replaces it for
the other metrics.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

TOLERANCE = 1e-3
"""Numbers that differ by no more are equal (LLM-Adapters, Hu et al. 2023)."""


def is_correct(gold: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """(n,) bool: whether |gold - predicted| <= 1e-3; exact for labels. NaN is wrong."""
    # The slack is for the rounding of the difference, as 0.501 - 0.5.
    return np.abs(gold - predicted) <= TOLERANCE + 1e-12 * np.maximum(1.0, np.abs(gold))


def accuracy(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Fraction of correct predictions."""
    return float(is_correct(gold, predicted).mean())


def f1(gold: np.ndarray, predicted: np.ndarray) -> float:
    """2 TP / (2 TP + FP + FN) of label 1; 0 if there is neither a positive nor a prediction of one."""
    positive, claimed = gold == 1, predicted == 1
    total = positive.sum() + claimed.sum()
    return float(2 * (positive & claimed).sum() / total) if total else 0.0


def matthews_correlation(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Pearson's correlation of two sets of binary labels (Matthews 1975); 0 if either is constant."""
    return pearson(gold, predicted)


def pearson(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Linear correlation; 0 if either is constant (a constant answer says nothing)."""
    if np.ptp(gold) == 0 or np.ptp(predicted) == 0:
        return 0.0
    return float(np.corrcoef(gold, predicted)[0, 1])


def spearman(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Correlation of ranks, ties sharing their mean rank; 0 if either is constant."""
    return pearson(stats.rankdata(gold), stats.rankdata(predicted))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews_correlation": matthews_correlation,
    "pearson": pearson,
    "spearman": spearman,
}


def worst_for(gold: np.ndarray, predicted: np.ndarray, *, classes: int, top: float) -> np.ndarray:
    """``predicted`` with NaN replaced by the worst answer: it can never score better than any readable one.

    classes: number of labels (the next label is taken); 0 for scores from 0 to ``top`` (the farther end is taken).
    """
    worst = (gold + 1) % classes if classes else np.where(gold > top / 2, 0.0, top)
    return np.where(np.isnan(predicted), worst, predicted)
