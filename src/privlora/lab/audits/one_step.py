"""White-box audit of one private step: can an attacker who knows everything else tell whether one unit was there?

The game of Nasr et al. ("Tight auditing of differentially private machine learning", 2023), on one release: the
attacker knows the state, the other units' gradients and the canary's gradient, and sees the release. Three statistics
are played, and share the error probability:

    alignment   <release, canary's contribution>, each tensor weighted by one over its noise variance: tight for a
                Gaussian mechanism of the claimed sensitivity and noise, and far above it where a tensor has no noise
    energy      ||release||^2: sees a scale that depends on the data, as a division by the realised batch size does
    replay      alignment less that of a second process that was started the same way, on empty batches: noise from a
                seed that repeats cancels

Variances and thresholds are learnt on the first trials and judged on the others, so the confidence holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured
from privlora.auditing.bounds import (
    Errors,
    Floats,
    accuracy_mu,
    gaussian_epsilon,
    judged_errors,
    largest_refuted,
    rate_at_least,
)
from privlora.auditing.gradient_canaries import GradientCanaries, bounded
from privlora.coordinates import Vector
from privlora.errors import ConfigError
from privlora.mechanisms import GaussianMechanism
from privlora.precision import own_context

# The part of the error probability that goes to each statistic.
_SHARES = {"alignment": 0.9, "energy": 0.05, "replay": 0.05}
_PILOT = 200  # trials of each world to learn from, or a fifth of all if that is less

# More trials than the normal approximation asks for: learnt thresholds and variances are not exact.
_MARGIN = 1.3
_LARGEST_MU = 12.0  # of epsilon above 100: what more would show takes the accountant gigabytes


@dataclass(frozen=True)
class Audited:
    """epsilon_lower: with probability ``confidence`` the true epsilon at ``delta`` is at least this.

    It assumes releases of the kind that is claimed, with a noise multiplier that the audit finds. trials: in each
    world.
    """

    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    confidence: float
    trials: int

    @property
    def violated(self) -> bool:
        """More leaks than is claimed."""
        return self.epsilon_lower > self.epsilon_claimed


@dataclass(frozen=True)
class StepAudit(Audited):
    """Of one step whose batch is known, so that sampling amplifies nothing. statistic: which gave the bound."""

    statistic: str


def trials_for(
    noise_multiplier: float, delta: float, *, share: float = 0.85, confidence: float = 0.95
) -> int:
    """Trials of each world after which a correct Gaussian step's bound is ``share`` of its epsilon, nine times in ten.

    From the normal approximation of the number of right guesses. The smaller epsilon, the more: at delta 1e-5 about
    28,000 at epsilon 1, 4,500 at 3 and 1,300 at 8.
    """
    mu = 1 / noise_multiplier
    wanted = share * gaussian_epsilon(mu, delta)
    found = largest_refuted(lambda smaller: gaussian_epsilon(smaller, delta) < wanted, mu)
    accuracy = float(ndtr(mu / 2))
    slope = math.exp(-(mu**2) / 8) / math.sqrt(2 * math.pi) / 2  # of the accuracy in mu
    quantiles = float(ndtri(1 - (1 - confidence) * _SHARES["alignment"]) + ndtri(0.9))
    judged = accuracy * (1 - accuracy) / 2 * (quantiles / (slope * (mu - found))) ** 2
    return _PILOT + math.ceil(_MARGIN * judged)


@own_context()
def audit_step(
    mechanism: GaussianMechanism,
    claimed: StepEvent,
    others: GradientCanaries,
    canary: GradientCanaries,
    *,
    delta: float = 1e-5,
    trials: int = 1000,
    confidence: float = 0.95,
    twin: GaussianMechanism | None = None,
) -> StepAudit:
    """Play ``trials`` releases with and as many without the one canary.

    mechanism: built with ``Uncharged`` as its ledger. claimed: of one release; its sampling is left out of the game.
    others: the rest of the batch, small next to C. twin: the mechanism built again in the same way, as a restarted
    process would; without it "replay" is not played.

    Raises ConfigError for fewer than 100 trials, which could not show anything.
    """
    if mechanism.noising.correlated is not None or claimed.sampling.cycle > 1:
        fix = "audit a mechanism with independent noise and Poisson sampling"
        raise ConfigError("one step by itself promises nothing where several are priced together", fix=fix)
    if trials < 100:
        raise ConfigError(f"trials={trials} is too few for a bound", fix="play at least 100 trials")
    scores = _play(mechanism, twin, others, canary, trials)
    pilot = min(_PILOT, trials // 5)
    worlds = {"alignment": scores.weighted(scores.products, pilot), "energy": scores.energies}
    if twin is not None:
        worlds["replay"] = scores.weighted(scores.products - scores.replayed, pilot)
    alone = replace(claimed, sampling=PoissonSampling(1.0))
    bounds = {}
    for name, (absent, present) in worlds.items():
        errors = judged_errors(absent, present, pilot)
        certain = 1 - (1 - confidence) * _SHARES[name]
        bounds[name] = _epsilon_lower(alone, errors, scores.shares(mechanism, pilot), delta, certain)
    best = max(bounds, key=lambda name: bounds[name])
    return StepAudit(bounds[best], epsilon([(alone, 1)], delta), delta, confidence, trials, best)


@dataclass(frozen=True)
class _Scores:
    """Of all trials, worlds first (0: without the canary). products: (2, trials, tensors) <release, contribution>;
    replayed: the same of the twin's empty releases; sizes: ||contribution||^2; energies: (2, trials) ||release||^2."""

    products: Floats
    replayed: Floats
    sizes: Floats
    energies: Floats

    def shares(self, mechanism: GaussianMechanism, pilot: int) -> Floats:
        """||contribution||^2 / C^2 of judged trials, (2, trials - pilot): 1 unless projected after clipping."""
        longest = mechanism.clip_norm / mechanism.expected_batch_size
        shares: Floats = self.sizes[:, pilot:].sum(axis=-1) / longest**2
        return shares

    def weighted(self, products: Floats, pilot: int) -> Floats:
        """(2, trials): sum_k (products_k - sizes_k / 2) / variance_k, variances per unit of size from the pilot."""
        carries = self.sizes > 0
        standard = np.where(carries, products / np.sqrt(np.where(carries, self.sizes, 1.0)), 0.0)
        absent = standard[0, :pilot]  # (pilot, tensors); the mean is of what others add
        variances = ((absent - absent.mean(axis=0)) ** 2).mean(axis=0)
        # A tensor without noise decides alone, but for rounding.
        variances = np.maximum(variances, 1e-10 * self.sizes.max() + 1e-300)
        weighted: Floats = ((products - self.sizes / 2) / variances).sum(axis=-1)
        return weighted


def _play(
    mechanism: GaussianMechanism,
    twin: GaussianMechanism | None,
    others: GradientCanaries,
    canary: GradientCanaries,
    trials: int,
) -> _Scores:
    """Releases of both worlds in turn, and the twin's."""
    adapter = mechanism.coordinates.adapter
    known: tuple[Captured, Captured, list[torch.Tensor], list[float]] | None = None
    products, replayed, sizes, energies = [], [], [], []
    for _ in range(trials):
        for present in (False, True):
            if known is None:
                unit, background = canary.captured(adapter), others.captured(adapter)
                joined = Captured.cat([background, unit])
                evened, factors, _ = bounded(mechanism, unit)
                along = _tensors(
                    mechanism.coordinates.from_partial(mechanism.coordinates.partial_sum(evened, factors))
                )
                along = [t / mechanism.expected_batch_size for t in along]
                known = background, joined, along, _products(along, along)
            mechanism.accumulate(known[1] if present else known[0])
            released = _tensors(mechanism.release().vector)
            products.append(_products(released, known[2]))
            sizes.append(known[3])
            energies.append(sum(_products(released, released)))
            replayed.append([0.0 for _ in released])
            if twin is not None:
                replayed[-1] = _products(_tensors(twin.release().vector), known[2])
                twin.coordinates.advance()
            if mechanism.coordinates.advance():
                known = None
    shape = (trials, 2, -1)
    return _Scores(
        np.reshape(products, shape).swapaxes(0, 1),
        np.reshape(replayed, shape).swapaxes(0, 1),
        np.reshape(sizes, shape).swapaxes(0, 1),
        np.reshape(energies, (trials, 2)).T,
    )


def _tensors(vector: Vector) -> list[torch.Tensor]:
    """The parts of a vector, flattened: one a matrix of a stack, or the whole of what is no stack."""
    parts = [part.double() for parts in vector for part in parts]
    return [t.flatten() for part in parts for t in (part if part.dim() > 2 else [part])]


def _products(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> list[float]:
    return [float(x @ y) for x, y in zip(xs, ys, strict=True)]


def _epsilon_lower(
    claimed: StepEvent, errors: Errors, shares: Floats, delta: float, confidence: float
) -> float:
    """Epsilon of the largest noise that so many right guesses rule out."""
    if not claimed.projections:
        return gaussian_epsilon(accuracy_mu(errors, confidence), delta)
    # M2 publishes its projections: a trial that lets the share s through is right with Phi(mu sqrt(s) / 2) at the most.
    accuracy = rate_at_least(errors.correct, errors.absent + errors.present, confidence)
    lengths = np.sqrt(shares)

    def excess(mu: float) -> float:
        return float(ndtr(mu * lengths / 2).mean()) - accuracy

    if accuracy <= 0.5:
        return 0.0
    mu = float(brentq(excess, 0.0, _LARGEST_MU)) if excess(_LARGEST_MU) > 0 else _LARGEST_MU
    return epsilon([(replace(claimed, noise_multiplier=1 / mu), 1)], delta)
