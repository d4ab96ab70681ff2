"""Privacy of M2 (clip the whole gradient, add noise, project on a fresh random subspace), composed over steps.

Given the projection M, which may be published, one release is a Gaussian mechanism whose squared sensitivity is the
captured energy s. Its curve is therefore E F(s) with F(s) = delta_G(epsilon; s / sigma^2). For a difference of rank one
s is X ~ Beta(r/2, (d-r)/2), and the curve E F(X) is exact. For any rank and any layers under one clip, s is only known
to be below X in increasing convex order. F increases in s; it is convex up to s* = 2 sigma^2 (sqrt(1 + epsilon^2) - 1)
and concave above. The larger of F and its tangent at a point b >= s* is convex and increasing, hence

    E F(s) <= min over b >= s* of E max(F(X), F(b) + F'(b) (X - b)),

the rank-free bound. It is the curve of a pair of distributions, so it composes: with Poisson sampling, separately for
adding and for removing a unit, through the privacy loss distribution (PLD) that connects dots of the curve (Doroshenko
et al. 2022; Zhu, Dong, Wang 2022 for adaptive composition). Every approximation is rounded up, in double precision.

This holds for projections drawn afresh in each step, independently of data and history, and for add-or-remove-one
only. It does not cover frozen projections or releases without noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privlora.accounting.events import PoissonSampling, Projections, StepEvent
from privlora.accounting.projection.energy import EnergyLaw, dominating_energy
from privlora.accounting.projection.gaussian import Floats, gaussian_delta
from privlora.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from collections.abc import Sequence

from scipy.special import gammaln, logsumexp, xlog1py, xlogy

from privlora.accounting.projection.energy import log_moment


def rank_free_rdp(
    orders: Sequence[int], noise_multiplier: float, projections: Projections, sample_rate: float
) -> Floats:
    """RDP of one M2 step with Poisson sampling, add-or-remove-one, for differences of any rank: an upper bound.

        D_lambda <= ln( sum_j C(lambda, j) (1-q)^(lambda-j) q^j 1F1(r/2; d/2; j(j-1) / (2 sigma^2)) ) / (lambda - 1)

    the moments of Mironov, Talwar, Zhang (2019) with 1F1 instead of exp. The exponential function is convex and
    increasing, so at every order a difference of rank one in a single layer is the worst case. Looser than the PLD, and
    computed by nothing that it shares.

    Args:
        orders: integers lambda >= 2.
        noise_multiplier: sigma = std of the noise per projected coordinate / clip_norm of the whole gradient, > 0.
        projections: (rank, input dimension) of each layer under that clip; the largest 1F1 counts. Empty for the
            Gaussian mechanism.
        sample_rate: q, in (0, 1].

    Returns:
        D_lambda, (len(orders),), nats.
    """
    j = np.arange(max(orders) + 1)
    exponents = j * (j - 1) / (2 * noise_multiplier**2)
    moments = [log_moment(exponents, rank, dimension) for rank, dimension in projections if rank < dimension]
    everything = len(moments) < len(projections) or not projections
    log_moments = exponents if everything else np.max(moments, axis=0)
    log_factorial = gammaln(j + 1.0)
    result = []
    for order in orders:
        k = j[: order + 1]
        log_binomial = log_factorial[order] - log_factorial[k] - log_factorial[order - k]
        log_weights = log_binomial + xlogy(k, sample_rate) + xlog1py(order - k, -sample_rate)
        result.append(logsumexp(log_weights + log_moments[k]) / (order - 1))
    return np.maximum(np.array(result), 0.0)


Curve = Callable[[Floats], Floats]
"""delta of one release without sampling, at any real epsilons (n,)."""

# Dots are one grid step apart near zero and this share of the loss apart beyond.
_DOTS_PER_LOSS = 300
_LARGEST_LOSS = 1e4
_NEGLIGIBLE = 1e-15  # where the curve falls below, the loss counts as infinite
_CHUNK = 256
_BISECTIONS = 45


def rank_free_delta(epsilon: ArrayLike, noise_multiplier: float, projections: Projections) -> Floats:
    """delta of one M2 release of the whole data, for differences of any rank: an upper bound, within rounding.

    Args:
        epsilon: any real numbers (n,).
        noise_multiplier: sigma = std of the noise per projected coordinate / clip_norm of the whole gradient, > 0.
        projections: (rank, input dimension) of each layer under that clip.

    Raises:
        PrivacyError: there is no noise or no projection, or one of them is unusable.
    """
    check_step(noise_multiplier, projections)
    eps = np.asarray(epsilon, np.float64)
    law = dominating_energy(projections)
    values = gaussian_delta(eps[:, None], law.points / noise_multiplier**2)
    delta = values @ law.weights
    bent = inflection(eps, noise_multiplier) < 1.0  # elsewhere the curve is convex on the whole of [0, 1]
    if bent.any():
        eps, values = eps[bent], values[bent]
        at = _best_tangent(eps, values, noise_multiplier, law)[:, None]
        tangents = _tangent(eps[:, None], at, noise_multiplier, law.points)
        delta[bent] = np.maximum(values, tangents) @ law.weights
    return np.minimum(delta, 1.0)


def rank_free_pld(
    noise_multiplier: float, projections: Projections, sample_rate: float, grid: float
) -> PrivacyLossDistribution:
    """The PLD of one M2 step with Poisson sampling, add-or-remove-one: pessimistic, for differences of any rank.

    Args:
        noise_multiplier, projections: as in `rank_free_delta`.
        sample_rate: q, in (0, 1].
        grid: spacing of the discretised loss.

    Raises:
        PrivacyError: as `rank_free_delta`, or `sample_rate` is out of range.
    """
    check_step(noise_multiplier, projections, sample_rate)
    return connect_dots(lambda eps: rank_free_delta(eps, noise_multiplier, projections), sample_rate, grid)


def check_step(noise_multiplier: float, projections: Projections, sample_rate: float = 1.0) -> None:
    """PrivacyError unless a sampled step with noise and a projection is described."""
    event = StepEvent(PoissonSampling(sample_rate), noise_multiplier, projections)
    if sample_rate == 0 or noise_multiplier == 0 or not event.projections:
        raise PrivacyError(
            f"[{event.describe()}] has no curve of a projection",
            why="without noise nothing is private, without sampling nothing is spent",
            fix="give sample_rate and noise_multiplier above 0 and at least one (rank, dimension)",
        )


def inflection(eps: Floats, sigma: float) -> Floats:
    """s*, where F turns from convex to concave."""
    return 2 * sigma**2 * (np.hypot(1.0, eps) - 1)


def slope(eps: Floats, energy: Floats, sigma: float) -> Floats:
    """F'(s) = phi(sqrt(eta)/2 - epsilon/sqrt(eta)) / (2 sigma^2 sqrt(eta)), eta = s / sigma^2."""
    mu = np.sqrt(energy) / sigma
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slope = np.exp(-((mu / 2 - eps / mu) ** 2) / 2) / (math.sqrt(2 * math.pi) * 2 * sigma**2 * mu)
    return np.nan_to_num(slope, nan=0.0, posinf=np.finfo(float).max)


def _tangent(eps: Floats, at: Floats, sigma: float, points: Floats) -> Floats:
    """The tangent of F at `at`, evaluated at `points`; arguments broadcast."""
    return gaussian_delta(eps, at / sigma**2) + slope(eps, at, sigma) * (points - at)


def _best_tangent(eps: Floats, values: Floats, sigma: float, law: EnergyLaw) -> Floats:
    """Tangent points (n,), chosen so that the tangent's upper bound on F has the smallest mean under the law.

    `values` (n, m) is F at the law's points. Every tangent point from s* on gives a valid bound. The best one is the
    mean of the law's points at which the tangent is above F, or else one whose tangent meets F in a point of the law.
    """
    floor, rows = inflection(eps, sigma), np.arange(len(eps))
    low, high = np.zeros(len(eps), int), np.full(len(eps), len(law.points) - 1)
    while (low < high).any():  # the first point that lies below the tangent at the mean from there on
        middle = (low + high) // 2
        at = np.maximum(law.upper_means[middle], floor)
        below = _tangent(eps, at, sigma, law.points[middle]) >= values[rows, middle]
        low, high = np.where(below, low, middle + 1), np.where(below, middle, high)
    before = np.maximum(high - 1, 0)
    start, end = (np.maximum(law.upper_means[index], floor) for index in (before, high))
    for _ in range(_BISECTIONS):
        at = (start + end) / 2
        below = _tangent(eps, at, sigma, law.points[before]) >= values[rows, before]
        start, end = np.where(below, start, at), np.where(below, at, end)
    return end


def connect_dots(curve: Curve, sample_rate: float, grid: float) -> PrivacyLossDistribution:
    """The PLD whose curve is the lower convex hull, in e^epsilon, of dots on the sampled `curve`.

    With P and Q the pair behind `curve`, sampling gives (qP + (1-q)Q, Q) when the unit is removed and the pair in
    reverse when it is added. At -epsilon a curve is 1 - e^-epsilon + e^-epsilon times the other direction's curve at
    epsilon, so both directions need positive epsilons only.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    removed = _until_negligible(lambda eps: _removed(curve, sample_rate, eps), grid)
    added = (
        removed if sample_rate == 1 else _until_negligible(lambda eps: _added(curve, sample_rate, eps), grid)
    )

    def pmf(
        forward: tuple[NDArray[np.int64], Floats], backward: tuple[NDArray[np.int64], Floats]
    ) -> pld_pmf.PLDPmf:
        dots, deltas = forward
        other_dots, other_deltas = backward[0][:0:-1], backward[1][:0:-1]  # without the dot at zero
        losses = -other_dots * grid
        mirrored = -np.expm1(losses) + np.exp(losses) * other_deltas
        both = np.concatenate([-other_dots, dots])
        falling = np.minimum.accumulate(np.clip(np.concatenate([mirrored, deltas]), 0.0, 1.0))
        hull = _lower_hull(both * grid, falling)
        with np.errstate(over="ignore"):  # corners may be far apart where almost no mass lies
            return pld_pmf.create_pmf_pessimistic_connect_dots(grid, both[hull], falling[hull])

    pmf_removed = pmf(removed, added)
    return (
        PrivacyLossDistribution(pmf_removed)
        if sample_rate == 1
        else PrivacyLossDistribution(pmf_removed, pmf(added, removed))
    )


def _lower_hull(losses: Floats, deltas: Floats) -> list[int]:
    """Indices of the dots (n,) that are corners of the lower convex hull of delta over e^epsilon, from (0, 1) on.

    Every dot is rounded up by its own amount, so the line through close dots need not be convex, as the curve of a pair
    of distributions must be. The true curve is convex and at or below every dot, hence below every chord.
    """
    eps, delta = [-math.inf, *losses.tolist()], [1.0, *deltas.tolist()]
    hull = [0]
    for new in range(1, len(eps)):
        while len(hull) > 1:
            first, last = hull[-2:]
            # How far last is on the way from first to new, in e^epsilon without overflow.
            share = math.expm1(eps[first] - eps[last]) / math.expm1(eps[first] - eps[new])
            share *= math.exp(eps[last] - eps[new])
            if delta[last] - delta[first] <= share * (delta[new] - delta[first]):
                break
            hull.pop()
        hull.append(new)
    return [index - 1 for index in hull[1:]]


def _removed(curve: Curve, q: float, eps: Floats) -> Floats:
    """H(qP + (1-q)Q | Q) at epsilon >= 0: q curve(ln((e^epsilon - 1 + q) / q))."""
    inner = np.where(
        eps < 1,
        np.log(np.expm1(np.minimum(eps, 1.0)) + q),
        eps + np.log1p(-(1 - q) * np.exp(-eps)),
    )
    return q * curve(inner - math.log(q))


def _added(curve: Curve, q: float, eps: Floats) -> Floats:
    """H(Q | qP + (1-q)Q) at epsilon >= 0: m curve(epsilon + ln(q/m)), m = 1 - e^epsilon (1-q), zero for m <= 0."""
    rest = q - (1 - q) * np.expm1(np.minimum(eps, 1 - math.log1p(-q)))
    inside = rest > 0
    deltas = np.zeros_like(eps)
    deltas[inside] = rest[inside] * curve(eps[inside] + math.log(q) - np.log(rest[inside]))
    return deltas


def _until_negligible(deltas_at: Curve, grid: float) -> tuple[NDArray[np.int64], Floats]:
    """Dots (multiples of the grid, from 0) up to the first at which the curve is negligible, and its values."""
    dots = _dots(grid)
    values: list[Floats] = []
    for start in range(0, len(dots), _CHUNK):
        values.append(deltas_at(grid * dots[start : start + _CHUNK].astype(np.float64)))
        if values[-1][-1] <= _NEGLIGIBLE:
            break
    deltas = np.concatenate(values)
    count = len(deltas) if deltas[-1] > _NEGLIGIBLE else int(np.argmax(deltas <= _NEGLIGIBLE)) + 1
    return dots[:count], deltas[:count]


@lru_cache(maxsize=8)
def _dots(grid: float) -> NDArray[np.int64]:
    dots = [0]
    while dots[-1] * grid < _LARGEST_LOSS:
        dots.append(dots[-1] + max(1, dots[-1] // _DOTS_PER_LOSS))
    return np.array(dots)
