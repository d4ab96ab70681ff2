"""White-box audit of one private step: can an attacker who knows everything else tell whether one unit was there?

The game of Nasr et al. ("Tight auditing of differentially private machine learning", 2023), on one release: the
attacker knows the state, the other units' gradients and the canary's gradient, and sees the release. Two statistics are
played, and share the error probability:

    alignment   <release, canary direction>: tight for a Gaussian mechanism of the claimed sensitivity and noise
    energy      ||release||^2: sees a scale that depends on the data, as a division by the realised batch size does

Thresholds are chosen on the first fifth of the trials and judged on the others, so the confidence holds. A step is a
Gaussian mechanism, so error rates are turned into the mu of Gaussian DP (Dong, Roth and Su 2022) and then into epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import beta, norm

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import Vector
from privlora.errors import ConfigError
from privlora.mechanisms import Mechanism, Release

# The part of the error probability that goes to each statistic.
_SHARES = {"alignment": 0.8, "energy": 0.2}


@dataclass(frozen=True)
class StepAudit:
    """epsilon_lower: with probability ``confidence`` the step's true epsilon at ``delta`` is at least this.

    epsilon_claimed: of one step whose batch the attacker knows (no amplification by sampling). statistic: which of the
    two gave the bound. trials: releases in each world.
    """

    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    confidence: float
    statistic: str
    trials: int

    @property
    def violated(self) -> bool:
        """The step leaks more than it claims."""
        return self.epsilon_lower > self.epsilon_claimed


class Uncharged:
    """Stands in for a ledger where nothing is published: an audit plays on data of its own."""

    def __init__(self) -> None:
        self._count = 0

    def charge(self, event: StepEvent) -> int:
        self._count += 1
        return self._count


def canary_gradient(
    adapter: LowRankAdapter, norm_: float, generator: torch.Generator, site: int | None = None
) -> Captured:
    """One unit whose raw gradient has norm ``norm_`` in every module, or in one module alone, in random directions.

    A mechanism has to bound any gradient. One that is large everywhere hides a module that escapes clipping, so play
    each module too.
    """

    def draw(index: int, rows: int) -> torch.Tensor:
        g = torch.randn(1, rows, adapter.rank, generator=generator)
        size = norm_ if site in (None, index) else 0.0
        return (g * (size / g.norm())).to(adapter.device)

    return Captured(
        [draw(k, s.m) for k, s in enumerate(adapter.sites)],
        [draw(k, s.n) for k, s in enumerate(adapter.sites)],
    )


def audit_step(
    mechanism: Mechanism,
    noise_multiplier: float,
    others: Captured,
    canary: Captured,
    *,
    delta: float = 1e-5,
    trials: int = 1000,
    confidence: float = 0.95,
) -> StepAudit:
    """Play ``trials`` releases with and as many without the canary.

    mechanism: built with ``Uncharged`` as its ledger. noise_multiplier: what is claimed for it. Raises ConfigError for
    fewer than 100 trials, which could not show anything.
    """
    if trials < 100:
        raise ConfigError(f"trials={trials} is too few for a bound", fix="play at least 100 trials")
    direction = mechanism.coordinates.to_vector(
        mechanism.coordinates.weighted_sum(canary, canary.p[0].new_ones(canary.units))
    )

    joined = Captured.cat([others, canary])

    def play(present: bool) -> Release:
        mechanism.accumulate(joined if present else others)
        return mechanism.release()

    worlds = {present: _scores(play, present, direction, trials) for present in (True, False)}
    claimed = epsilon([(StepEvent(PoissonSampling(1.0), noise_multiplier), 1)], delta)
    bounds = {
        name: _epsilon_lower(worlds[True][:, k], worlds[False][:, k], delta, 1 - (1 - confidence) * share)
        for k, (name, share) in enumerate(_SHARES.items())
    }
    best = max(bounds, key=lambda name: bounds[name])
    return StepAudit(bounds[best], claimed, delta, confidence, best, trials)


def _scores(play: Callable[[bool], Release], present: bool, direction: Vector, trials: int) -> np.ndarray:
    """(trials, 2): alignment and energy."""
    scores = np.empty((trials, 2))
    along = _flat(direction)
    for t in range(trials):
        released = _flat(play(present).vector)
        scores[t] = float(released @ along), float(released @ released)
    return scores


def _flat(vector: Vector) -> torch.Tensor:
    return torch.cat([part.flatten() for parts in vector for part in parts]).double()


def _epsilon_lower(present: np.ndarray, absent: np.ndarray, delta: float, confidence: float) -> float:
    """Lower bound on epsilon from scores in both worlds; the side on which ``present`` lies is learnt too."""
    pilot = len(present) // 5
    sign = 1.0 if np.median(present[:pilot]) >= np.median(absent[:pilot]) else -1.0
    present, absent = sign * present, sign * absent
    # Between the two medians: the best place for equal spreads, and robust with few pilot trials.
    threshold = float((np.median(present[:pilot]) + np.median(absent[:pilot])) / 2)
    mu = _mu_lower(present[pilot:], absent[pilot:], threshold, confidence)
    if mu <= 0:
        return 0.0
    return epsilon([(StepEvent(PoissonSampling(1.0), 1.0 / mu), 1)], delta)


def _mu_lower(present: np.ndarray, absent: np.ndarray, threshold: float, confidence: float) -> float:
    """Smallest mu of Gaussian DP that allows these error rates, by Clopper-Pearson bounds on both."""
    alpha = (1 - confidence) / 2
    false_positive = _upper(int((absent > threshold).sum()), len(absent), alpha)
    false_negative = _upper(int((present <= threshold).sum()), len(present), alpha)
    return float(norm.ppf(1 - false_positive) - norm.ppf(false_negative))


def _upper(hits: int, trials: int, alpha: float) -> float:
    return 1.0 if hits == trials else float(beta.ppf(1 - alpha, hits + 1, trials - hits))
