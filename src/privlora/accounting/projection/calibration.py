"""What other analyses of M2 ask for, to set beside `calibrate_noise_multiplier(..., projections=...)`.

The noise multipliers of this module and of that function have one unit, the std of the noise per projected
coordinate over the clip_norm of the whole gradient, and may be compared directly.
"""

from __future__ import annotations

import math
from functools import lru_cache

from privlora.accounting.accountants import DEFAULT_GRID, check_delta
from privlora.accounting.calibration import calibrate_noise_multiplier, find_noise
from privlora.accounting.events import PoissonSampling, Projections, StepEvent
from privlora.errors import PrivacyError

# Shares of delta that are tried for the event that a projection captures too much.
_FAILURE_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


def rank_one_epsilon(event: StepEvent, steps: int, delta: float, *, grid: float = DEFAULT_GRID) -> float:
    """epsilon of `steps` projected steps whose differences all have rank one: exact, but for rounding upwards.

    Only for linear heads on one feature vector per unit. It is a property of the model, which the accountants
    cannot check, so events, ledgers and `epsilon` always state the rank-free bound, which is at worst a little larger.

    Args:
        event: a step with one projection; its sampling is plain Poisson.
        steps: how often it happens, at least 1.
        delta: total delta, in (0, 1).
        grid: spacing of the discretised privacy loss.

    Raises:
        PrivacyError: delta is out of range, or the event has not exactly one projection of lower rank.
    """
    from privlora.accounting.projection.composition import rank_one_pld

    check_delta(delta)
    if len(event.projections) != 1 or not event.is_cheaper_by_projection or event.noise_multiplier == 0:
        raise PrivacyError(
            f"[{event.describe()}] is not one noisy projection to a lower rank",
            why="with several layers the difference of two gradients is no longer of rank one",
            fix="use privlora.accounting.epsilon, which covers any rank and any layers",
        )
    (rank, dimension), q = event.projections[0], event.sampling.sample_rate
    if q == 0:
        return 0.0
    step = rank_one_pld(event.noise_multiplier, rank, dimension, q, grid)
    return max(0.0, float(step.self_compose(steps).get_epsilon_for_delta(delta)))


def rank_one_noise_multiplier(
    sampling: PoissonSampling,
    steps: int,
    target_epsilon: float,
    delta: float,
    rank: int,
    dimension: int,
    *,
    tolerance: float = 1e-5,
    grid: float = DEFAULT_GRID,
) -> float:
    """The noise multiplier with which `rank_one_epsilon` meets the target: never below, to a relative `tolerance`.

    Raises:
        PrivacyError: as `rank_one_epsilon`, or no sensible noise reaches the target.
    """

    @lru_cache
    def spent(sigma: float) -> float:
        event = StepEvent(sampling, sigma, ((rank, dimension),))
        return min(rank_one_epsilon(event, steps, delta, grid=grid), 1e3 * target_epsilon)

    plain = calibrate_noise_multiplier(
        sampling, steps, target_epsilon, delta, tolerance=1e-3
    ).noise_multiplier
    start = plain * math.sqrt(rank / dimension)  # a little too low
    sigma = find_noise(spent, target_epsilon, 0.1 * start, start=start, factor=1.02, rtol=tolerance / 4)
    while spent(sigma) > target_epsilon:
        sigma *= 1 + tolerance / 2
    return sigma


def split_noise_multiplier(
    sampling: PoissonSampling,
    steps: int,
    target_epsilon: float,
    delta: float,
    projections: Projections,
    *,
    gradient_rank: int = 1,
) -> float:
    """The noise multiplier that Theorem 5 of Hu et al. (2026) asks for over many steps (their Appendix F.2).

    A share of delta pays, by a union over steps, layers and singular directions, for the event that some
    projection captures more than s of the energy; otherwise the steps are Gaussian with sensitivity C sqrt(s).
    The best of seven shares, or no projection at all.

    Args:
        sampling, steps, target_epsilon, delta, projections: as in `calibrate_noise_multiplier`.
        gradient_rank: k, the largest rank of one unit's gradient in one layer.

    Raises:
        PrivacyError: `gradient_rank` is not positive, or as `calibrate_noise_multiplier`.
    """
    if gradient_rank < 1:
        raise PrivacyError(f"gradient_rank={gradient_rank} is not positive", fix="give 1 for a linear head")
    event = StepEvent(sampling, 0.0, projections)  # checks the projections
    plain = calibrate_noise_multiplier(sampling, steps, target_epsilon, delta).noise_multiplier
    if not event.is_cheaper_by_projection:
        return plain
    found = [plain]
    for share in _FAILURE_SHARES:
        energy = _energy_exceeded_with(share * delta / (steps * gradient_rank), event.projections)
        rest = calibrate_noise_multiplier(sampling, steps, target_epsilon, (1 - share) * delta)
        found.append(rest.noise_multiplier * math.sqrt(energy))
    return min(found)


def _energy_exceeded_with(probability: float, projections: Projections) -> float:
    """s with sum over layers of P(X_l > s) = probability, rounded up by less than 1e-12; 1 if none is below."""
    from scipy.special import betaincc

    low, high = 0.0, 1.0
    for _ in range(48):
        s = (low + high) / 2
        exceeded = sum(float(betaincc(r / 2, (d - r) / 2, s)) for r, d in projections)
        low, high = (s, high) if exceeded > probability else (low, s)
    return high
