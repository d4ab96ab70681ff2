"""Confidence intervals by resampling examples: of one score, and of the difference of two on the same examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from privlora.errors import ConfigError

Statistic = Callable[[np.ndarray], float]
"""A score of the examples with these indices (with repetition)."""


@dataclass(frozen=True)
class Interval:
    """low and high end, and the confidence in (0, 1) with which the interval holds the score of the population."""

    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class Difference:
    """Score of the first minus that of the second; it is significant at the level if the interval excludes 0."""

    value: float
    interval: Interval


def bootstrap_interval(
    statistic: Statistic,
    strata: np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of ``statistic`` (Efron 1981); examples are drawn anew within each stratum.

    It says how much the score would vary over other examples of the same kind, not over other training runs. Where
    every example scores the same (all correct) it has no width.

    Args:
        statistic: takes an int64 array of example indices.
        strata: (n,) which part each example belongs to; the size of each part is kept.
        confidence: in (0, 1).
        resamples: at least 100.
        seed: public; the same seed gives the same interval.

    Raises:
        ConfigError: ``confidence`` or ``resamples`` is out of range.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} is not in (0, 1)", fix="use 0.95")
    if resamples < 100:
        raise ConfigError(f"resamples={resamples} says little about a tail", fix="use 1000")
    parts = tuple(np.flatnonzero(strata == part) for part in np.unique(strata))
    if any(len(part) < 2 for part in parts):
        return Interval(float("nan"), float("nan"), confidence)  # one example has no spread
    found = bootstrap(
        parts,
        lambda *chosen: statistic(np.concatenate(chosen)),
        n_resamples=resamples,
        batch=100,
        vectorized=False,
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(found.low), float(found.high), confidence)


def paired_difference(
    first: Statistic,
    second: Statistic,
    strata: np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Difference:
    """How much better the first of two models is on the same examples; arguments as in ``bootstrap_interval``."""

    def difference(chosen: np.ndarray) -> float:
        return first(chosen) - second(chosen)

    interval = bootstrap_interval(difference, strata, confidence=confidence, resamples=resamples, seed=seed)
    return Difference(difference(np.arange(len(strata))), interval)
