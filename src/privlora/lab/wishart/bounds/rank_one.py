"""M2 where every difference has rank one, as for a linear head on one feature vector per unit: the exact cost.

The energy that a projection captures of such a difference is X ~ Beta(r/2, (d-r)/2) itself, and the curve E F(X), with
F of `privlora.accounting.projection.composition`. Layers that see several tokens of a unit have no such differences. No
accountant can check that, so events, ledgers and `privlora.accounting.epsilon` state the rank-free bound, which is at
most a little larger.

Noise multipliers have the unit of `calibrate_noise_multiplier(..., projections=...)`, the std of the noise per
projected coordinate over the clip_norm of the whole gradient, and may be compared directly.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincc

from privlora.accounting.accountants import DEFAULT_GRID, check_delta
from privlora.accounting.calibration import calibrate_noise_multiplier, find_noise
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.accounting.projection.composition import check_step, connect_dots, inflection, slope
from privlora.accounting.projection.energy import energy_edges
from privlora.accounting.projection.gaussian import Floats, gaussian_delta
from privlora.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


@lru_cache(maxsize=16)
def energy_cells(rank: int, dimension: int) -> tuple[Floats, Floats, Floats]:
    """X ~ Beta(r/2, (d-r)/2), r < d, cut at quantiles that are evenly spaced in normal scores.

    Returns edges (n+1,) from 0 to 1, and the probability (n,) and the mean of X (n,) in each cell.
    """
    edges = energy_edges(((rank, dimension),))
    shape, rest, mean = rank / 2, (dimension - rank) / 2, rank / dimension
    lower, upper = edges[:-1], edges[1:]
    probabilities = _between(shape, rest, lower, upper)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = mean * _between(shape + 1, rest, lower, upper) / probabilities
    return edges, probabilities, np.clip(np.nan_to_num(means, nan=1.0), lower, upper)


def rank_one_delta(epsilon: ArrayLike, noise_multiplier: float, rank: int, dimension: int) -> Floats:
    """delta of one M2 release of the whole data, for differences of rank one: exact but for rounding upwards.

    Each cell of the energy's law is replaced by its ends where the curve is convex in the energy, by its mean
    where it is concave, and by the line of the steepest slope in the one cell where that changes.

    Arguments and errors as in `rank_free_delta`, for one layer.
    """
    check_step(noise_multiplier, ((rank, dimension),))
    eps = np.asarray(epsilon, np.float64)
    if rank == dimension:
        return gaussian_delta(eps, noise_multiplier**-2)
    edges, probabilities, means = energy_cells(rank, dimension)
    low, high = edges[:-1], edges[1:]
    at_edges = gaussian_delta(eps[:, None], edges / noise_multiplier**2)
    at_means = gaussian_delta(eps[:, None], means / noise_multiplier**2)
    share = (means - low) / (high - low)
    chord = at_edges[:, :-1] * (1 - share) + at_edges[:, 1:] * share
    turn = inflection(eps, noise_multiplier)[:, None]
    steepest = slope(eps[:, None], turn, noise_multiplier)
    bend = np.minimum(at_edges[:, :-1] + steepest * (means - low), at_edges[:, 1:])
    value = np.where(high <= turn, chord, np.where(low >= turn, at_means, bend))
    return np.minimum(value @ probabilities, 1.0)


def rank_one_pld(
    noise_multiplier: float, rank: int, dimension: int, sample_rate: float, grid: float
) -> PrivacyLossDistribution:
    """As `rank_free_pld`, for one layer whose differences all have rank one; see `rank_one_delta`."""
    check_step(noise_multiplier, ((rank, dimension),), sample_rate)
    return connect_dots(lambda eps: rank_one_delta(eps, noise_multiplier, rank, dimension), sample_rate, grid)


def rank_one_epsilon(event: StepEvent, steps: int, delta: float, *, grid: float = DEFAULT_GRID) -> float:
    """epsilon of `steps` projected steps whose differences all have rank one: exact, but for rounding upwards.

    Args:
        event: a step with one projection; its sampling is plain Poisson.
        steps: how often it happens, at least 1.
        delta: total delta, in (0, 1).
        grid: spacing of the discretised privacy loss.

    Raises:
        PrivacyError: delta is out of range, or the event has not exactly one projection of lower rank.
    """
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


def _between(shape: float, rest: float, lower: Floats, upper: Floats) -> Floats:
    """Probability of (lower, upper] under Beta(shape, rest), from whichever tail keeps the digits."""
    below = betainc(shape, rest, upper) - betainc(shape, rest, lower)
    above = betaincc(shape, rest, lower) - betaincc(shape, rest, upper)
    return np.maximum(np.where(betainc(shape, rest, upper) < 0.5, below, above), 0.0)
