"""How well scores tell members from non-members: ROC curve, AUC, balanced accuracy, true positives at few false ones.

A score is any number that is higher for members, such as the negative loss of a canary. Members are the scores of
models that saw the canary (IN), non-members those of models that did not (OUT); each from a model of its own, so
scores are independent. What is measured is one attack: a weak result is no proof of privacy. For lower bounds on
epsilon see `auditing.bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata

from privlora.errors import ConfigError

Floats = NDArray[np.float64]
Scores = Sequence[float] | Floats
_LOW_RATES = (0.01, 0.1)  # of false positives


@dataclass(frozen=True)
class RocCurve:
    """Of the rules "member if score >= threshold", from the strictest (inf: nobody) to the mildest (everybody).

    thresholds, false_positive_rates, true_positive_rates: (unique scores + 1,), rates ascending from 0 to 1.
    """

    thresholds: Floats
    false_positive_rates: Floats
    true_positive_rates: Floats

    @property
    def balanced_accuracy(self) -> float:
        """Best (TPR + TNR) / 2 over all thresholds. Chosen on the scores it judges, so biased upwards: with 200 + 200
        scores that mean nothing it is about 0.53."""
        return float((1 + np.max(self.true_positive_rates - self.false_positive_rates)) / 2)

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The highest TPR of a threshold whose FPR is at most ``false_positive_rate``; nothing is interpolated."""
        return float(self.true_positive_rates[self.false_positive_rates <= false_positive_rate].max())


@dataclass(frozen=True)
class Area:
    """Area under the ROC curve: P(member's score > non-member's) + P(equal) / 2, with a confidence interval."""

    value: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class MembershipResult:
    """One attack. true_positive_rates: TPR at each of a few low FPRs, as pairs (FPR, TPR)."""

    area: Area
    balanced_accuracy: float
    held_out_balanced_accuracy: float
    true_positive_rates: tuple[tuple[float, float], ...]
    members: int
    non_members: int


def roc_curve(members: Scores, non_members: Scores) -> RocCurve:
    """Thresholds at all unique scores.

    Raises:
        ConfigError: there is no score on one side, or a score is NaN.
    """
    positive, negative = _checked(members, non_members, least=1)
    unique = np.unique(np.concatenate([positive, negative]))[::-1]
    thresholds = np.concatenate([[np.inf], unique])

    def rates(scores: Floats) -> Floats:
        # how many are >= each threshold; nobody reaches the first, even with an infinite score
        above = len(scores) - np.searchsorted(np.sort(scores), unique, side="left")
        return np.concatenate([[0.0], above / len(scores)])

    return RocCurve(thresholds, rates(negative), rates(positive))


def area_under_curve(members: Scores, non_members: Scores, *, confidence: float = 0.95) -> Area:
    """AUC with the interval of DeLong, DeLong and Clarke-Pearson (1988), on the logit scale.

    That interval has no width where every member is above every non-member (or below, or all are equal). There, it
    comes from the min(IN, OUT) independent pairs that can be formed, all of which agree: by the exact binomial bound,
    a pair does so with probability at least (alpha / 2)^(1 / pairs).

    Raises:
        ConfigError: there are fewer than two scores on one side, a score is NaN, or confidence is not in (0, 1).
    """
    positive, negative = _checked(members, non_members, least=2)
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} is not in (0, 1)", fix="0.95 is usual")
    ranks = rankdata(np.concatenate([positive, negative]))
    # Placement values: the share of the other side that each score beats.
    above = (ranks[: len(positive)] - rankdata(positive)) / len(negative)
    below = 1 - (ranks[len(positive) :] - rankdata(negative)) / len(positive)
    value = float(above.mean())
    deviation = math.sqrt(above.var(ddof=1) / len(positive) + below.var(ddof=1) / len(negative))
    tail = (1 - confidence) / 2
    if deviation == 0:
        reach = 1 - tail ** (1 / min(len(positive), len(negative)))
        low, high = max(0.0, value - reach), min(1.0, value + reach)
    else:
        width = float(norm.ppf(1 - tail)) * deviation / (value * (1 - value))
        logit = math.log(value / (1 - value))
        low, high = (1 / (1 + math.exp(-x)) for x in (logit - width, logit + width))
    return Area(value, low, high, confidence)


def held_out_balanced_accuracy(members: Scores, non_members: Scores, *, seed: int = 0) -> float:
    """(TPR + TNR) / 2 with the threshold chosen on a random half of the models and judged on the other, both ways.

    seed: public, of the split. Raises ConfigError with fewer than two scores on one side, or a NaN.
    """
    positive, negative = _checked(members, non_members, least=2)
    generator = np.random.default_rng(seed)
    halves = [np.array_split(generator.permutation(scores), 2) for scores in (positive, negative)]
    found = []
    for chosen, judged in ((0, 1), (1, 0)):
        curve = roc_curve(halves[0][chosen], halves[1][chosen])
        threshold = curve.thresholds[np.argmax(curve.true_positive_rates - curve.false_positive_rates)]
        found.append(((halves[0][judged] >= threshold).mean() + (halves[1][judged] < threshold).mean()) / 2)
    return float(np.mean(found))


def judge_membership(members: Scores, non_members: Scores, *, confidence: float = 0.95) -> MembershipResult:
    """All of the above for one attack. Raises ConfigError as they do."""
    curve = roc_curve(members, non_members)
    return MembershipResult(
        area=area_under_curve(members, non_members, confidence=confidence),
        balanced_accuracy=curve.balanced_accuracy,
        held_out_balanced_accuracy=held_out_balanced_accuracy(members, non_members),
        true_positive_rates=tuple((rate, curve.true_positive_rate(rate)) for rate in _LOW_RATES),
        members=len(members),
        non_members=len(non_members),
    )


def _checked(members: Scores, non_members: Scores, *, least: int) -> tuple[Floats, Floats]:
    """Both sides, (scores,). Raises ConfigError for fewer than ``least`` on one, or a NaN."""
    positive, negative = (np.asarray(scores, np.float64).ravel() for scores in (members, non_members))
    if min(len(positive), len(negative)) < least:
        counts = f"{len(positive)} scores of members and {len(negative)} of non-members"
        raise ConfigError(f"{counts} are too few", fix=f"score at least {least} of each kind")
    if np.isnan(positive).any() or np.isnan(negative).any():
        raise ConfigError("a score is NaN", fix="find out why the model's loss is not a number")
    return positive, negative
