"""Means, spreads and leads of methods over tasks and seeds. Plain numbers in, plain numbers out.

Tasks have different scales, so a run's score is its gain over the untouched model as a share of the best method's mean
gain on that task (at one epsilon and rank): 1 is the best method's mean, 0 no better than no training. Where no method
gains more than the spread over seeds, the spread is the unit, so that a task that nobody learns does not decide.

A lead is the mean over tasks of the mean over seeds of score(method, seed) - score(other, seed). Its interval is a
paired bootstrap (Efron 1979): (task, seed) pairs are drawn anew within each task, so it says how much the lead would
vary over other seeds on these tasks, not over other tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

Values = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Scores by task, method and seed."""

RESAMPLES, CONFIDENCE = 10_000, 0.95


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation and standard error of the mean of n values; NaN where n is too small."""

    mean: float
    standard_deviation: float
    standard_error: float
    count: int


@dataclass(frozen=True)
class Lead:
    """How far a method is ahead of the best other one, in standardised scores; negative if it is behind.

    low, high: 95 % interval by the paired bootstrap. in_errors: lead / standard_error.
    """

    against: str
    lead: float
    standard_error: float
    low: float
    high: float

    @property
    def in_errors(self) -> float:
        if self.standard_error > 0:
            return self.lead / self.standard_error
        return math.copysign(math.inf, self.lead) if self.lead else 0.0


@dataclass(frozen=True)
class Standing:
    """A method over all tasks. mean_score: of standardised scores; mean_place: 1 is best on every task.

    lead: None if there is no other method.
    """

    method: str
    mean_score: float
    mean_place: float
    lead: Lead | None


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more."""
    array = np.asarray(values, dtype=np.float64)
    deviation = float(array.std(ddof=1)) if len(array) > 1 else math.nan
    return Spread(float(array.mean()), deviation, deviation / math.sqrt(len(array)), len(array))


def unit_of_gain(gains: Iterable[Sequence[float]]) -> float:
    """What a task's gains are measured in: the best method's mean gain, or the spread over seeds if that is larger.

    gains: of each method's runs over the untouched model, positive is better. The spread is the root mean square of
    the standard deviations of methods that do no worse than no training (of all, if there is none). 1 if both are 0.
    """
    runs = [np.asarray(of_method, dtype=np.float64) for of_method in gains]
    best = max(float(of_method.mean()) for of_method in runs)
    useful = [of_method for of_method in runs if of_method.mean() >= 0] or runs
    variances = [float(of_method.var(ddof=1)) for of_method in useful if len(of_method) > 1]
    spread_over_seeds = math.sqrt(sum(variances) / len(variances)) if variances else 0.0
    return max(best, spread_over_seeds, 0.0) or 1.0


def standardise(
    of_task: Mapping[str, Mapping[int, float]], untouched: float, *, lower_is_better: bool
) -> dict[str, dict[int, float]]:
    """One task's values by method and seed as shares of the unit of gain; more is better."""
    sign = -1.0 if lower_is_better else 1.0
    gains = {
        method: {seed: sign * (value - untouched) for seed, value in runs.items()}
        for method, runs in of_task.items()
    }
    unit = unit_of_gain([list(runs.values()) for runs in gains.values()])
    return {method: {seed: gain / unit for seed, gain in runs.items()} for method, runs in gains.items()}


def standings(scores: Values) -> list[Standing]:
    """Every method over all tasks, the best mean first. Each method needs a run on each task."""
    tasks = list(scores)
    methods = list(scores[tasks[0]])
    means = np.array([[np.mean(list(scores[task][method].values())) for task in tasks] for method in methods])
    overall = dict(zip(methods, means.mean(axis=1), strict=True))
    ranks = dict(zip(methods, rankdata(-means, axis=0).mean(axis=1), strict=True))
    order = sorted(methods, key=lambda method: -overall[method])
    found = []
    for method in order:
        other = next((rival for rival in order if rival != method), None)
        lead = None if other is None else lead_over(scores, method, other)
        found.append(Standing(method, float(overall[method]), float(ranks[method]), lead))
    return found


def lead_over(scores: Values, method: str, other: str, *, seed: int = 0) -> Lead:
    """Of ``method`` over ``other``, paired by (task, seed); seeds that only one of them has are left out.

    seed: of the resampling, public. NaN where a task has no seed in common.
    """
    differences = [
        np.array([runs[method][s] - runs[other][s] for s in sorted(runs[method]) if s in runs[other]])
        for runs in scores.values()
    ]
    if any(len(difference) == 0 for difference in differences):
        return Lead(other, math.nan, math.nan, math.nan, math.nan)
    lead = float(np.mean([difference.mean() for difference in differences]))
    if any(len(difference) < 2 for difference in differences):
        return Lead(other, lead, math.nan, math.nan, math.nan)
    variances = [difference.var(ddof=1) / len(difference) for difference in differences]
    error = math.sqrt(sum(variances)) / len(differences)
    generator = np.random.default_rng(seed)
    resampled = np.zeros(RESAMPLES)
    for difference in differences:
        drawn = generator.integers(len(difference), size=(RESAMPLES, len(difference)))
        resampled += difference[drawn].mean(axis=1) / len(differences)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Lead(other, lead, error, float(low), float(high))
