"""Releasing M v without noise: one unit vector v under a fresh secret Wishart matrix M (Theorem 1, Hu et al. 2026).

M = Z Z^T, Z in R^{d x r} with independent N(0, 1/r) entries. For unit vectors v, v' at alignment rho = <v, v'> the
privacy loss has an exact law in two independent scalars (Lemmas 8 and 9), T ~ Student-t(r) and beta ~ chi^2_{d+r-1}:

    R = rho + sqrt((1 - rho^2) / r) T,     L = (d+1-r)/2 ln R + beta (1-R) / (2R),     L = infinity for R <= 0.

`exact_delta` integrates it; Theorem 1 bounds it. Both are statements about data sets of one collection: those whose
queries are unit vectors and whose neighbours (one record replaced) align at least rho. That has to be guaranteed, M
must stay secret, and each M serves one vector. No epsilon holds with delta = 0 unless rho = 1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, gammainc, gammaincc, gammaln, stdtr, stdtrit

from privlora.accounting.projection.gaussian import Floats
from privlora.lab.wishart.bounds.gaussian import in_range, solve_epsilon

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_SMALLEST = 1e-280  # of a tail of the chi-square law, below which its logarithm is found otherwise
_TERMS = 5000


@dataclass(frozen=True)
class VectorQuery:
    """A query whose values are unit vectors, released as M v.

    dimension: d. rank: r, the columns of Z, at least 1 (it may exceed d). alignment: rho, the least inner product of
    the values at two neighbouring data sets (one record replaced) of the collection that is protected, in (0, 1].

    Raises:
        PrivacyError: a size is below 1, or rho is outside (0, 1].
    """

    dimension: int
    rank: int
    alignment: float

    def __post_init__(self) -> None:
        in_range(self.dimension >= 1 and self.rank >= 1, dimension=self.dimension, rank=self.rank)
        in_range(0 < self.alignment <= 1, alignment=self.alignment)

    @property
    def support_failure(self) -> float:
        """Probability that M v lies where M v' never does: F_t(r)(-rho sqrt(r / (1 - rho^2)))."""
        if self.alignment == 1:
            return 0.0
        return float(stdtr(self.rank, -self.alignment * math.sqrt(self.rank / (1 - self.alignment**2))))

    @property
    def angle(self) -> float:
        """theta, the angle whose cosine is rho, in radians."""
        return math.acos(self.alignment)

    @property
    def log_weight(self) -> float:
        """a = (d + 1 - r) / 2, the factor of ln R in the loss."""
        return (self.dimension + 1 - self.rank) / 2


@dataclass(frozen=True)
class Bound:
    """(epsilon, delta)-DP under replacing one record, on the data sets that a theorem's conditions describe."""

    epsilon: float
    delta: float


def theorem_1(query: VectorQuery, tail: float, *, improved: bool = False) -> Bound:
    """Theorem 1 of Hu et al. (2026), with the leading coefficient (d - r + 1)/2 that makes it true.

    With t the Student-t(r) quantile at 1 - delta', K = t sqrt((1 - rho^2)/r) and kappa the chi^2_{d+r-1} quantile,

        delta = support_failure + 3 delta',
        epsilon = (d-r+1)/2 ln(rho + K) + (1 - rho + K) kappa / (2 (rho - K)).

    `improved` gives a smaller epsilon for the same delta and any rank: the largest loss over |R - rho| <= K and
    beta <= kappa, and over all alignments from rho to 1 (it is not monotone in rho by itself).

    Args:
        tail: delta' in (0, 1/2), paid three times.

    Raises:
        PrivacyError: delta' is out of range; rho <= K, the spread (the alignment condition); r > d + 1
            without `improved`, where the printed formula is another one; kappa < d - r + 1, where a larger alignment
            might be worse.
    """
    d, r, rho = query.dimension, query.rank, query.alignment
    in_range(0 < tail < 0.5, tail=tail)
    in_range(r <= d + 1 or improved, rank=r, dimension=d)
    slope = float(stdtrit(r, 1 - tail)) / math.sqrt(r)
    spread = slope * math.sqrt(1 - rho**2)
    kappa = float(chdtri(d + r - 1, tail))
    in_range(rho > spread, alignment=rho, spread=spread)
    in_range(kappa >= d - r + 1, tail=tail, kappa=kappa)
    low, high, a = rho - spread, rho + spread, query.log_weight
    if improved:
        # rho + K = cos + slope sin of the angle: its largest value over smaller angles is at tan = slope.
        widest = high if math.sqrt(1 - rho**2) <= slope * rho else math.hypot(1, slope)
        at_high = max(a, 0.0) * math.log(max(1.0, widest))
        epsilon = max(at_high, a * math.log(low) + kappa * (1 - low) / (2 * low), 0.0)
    else:
        epsilon = a * math.log(high) + kappa * (1 - low) / (2 * low)
    return Bound(epsilon, query.support_failure + 3 * tail)


def theorem_1_at(query: VectorQuery, delta: float, *, improved: bool = False) -> Bound:
    """Theorem 1 with all of `delta` spent: delta' = (delta - support_failure) / 3. Errors as in `theorem_1`."""
    left = (delta - query.support_failure) / 3
    in_range(0 < left < 0.5, delta=delta, support_failure=query.support_failure)
    return theorem_1(query, left, improved=improved)


def exact_delta(epsilon: float, query: VectorQuery) -> float:
    """The exact delta at `epsilon` >= 0 of a pair at alignment exactly rho, by a one-dimensional integral.

    For one release of a fresh secret M. What holds for better aligned pairs too is `guaranteed_delta`.

    Raises:
        PrivacyError: epsilon is negative or not finite.
    """
    _check_epsilon(epsilon)
    if query.alignment == 1:
        return 0.0
    at, side, log_ratio, weights = _where_loss_exceeds(epsilon, query)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        tails, other = _log_tails(at, side, query), _log_tails(at / np.exp(log_ratio), side, query)
        # The bracket p - e^epsilon q is non-negative: both are masses of the set where the loss exceeds epsilon.
        gap = np.minimum(epsilon + (query.rank - 1) * log_ratio + other - tails, 0.0)
        bracket = np.where(np.isneginf(tails), 0.0, np.exp(tails) * -np.expm1(gap))
    return min(1.0, query.support_failure + float(weights @ bracket))


def loss_tail(epsilon: float, query: VectorQuery) -> float:
    """P(L > epsilon) for `epsilon` >= 0, by the same integral; its quantiles are the "exact" curve of Figure 1.

    Raises:
        PrivacyError: epsilon is negative or not finite.
    """
    _check_epsilon(epsilon)
    if query.alignment == 1:
        return 0.0
    at, side, _, weights = _where_loss_exceeds(epsilon, query)
    return min(1.0, query.support_failure + float(weights @ np.exp(_log_tails(at, side, query))))


@lru_cache(maxsize=64)
def exact_epsilon(delta: float, query: VectorQuery, *, quantile_of_loss: bool = False) -> float:
    """The epsilon at which `exact_delta` (or, on request, `loss_tail`) is `delta`; inf if the support term exceeds it.

    Raises:
        PrivacyError: delta is not in (0, 1).
    """
    curve = loss_tail if quantile_of_loss else exact_delta
    return solve_epsilon(lambda epsilon: curve(epsilon, query), delta, query.support_failure)


def _student_rule(rank: int, *points: float) -> tuple[Floats, Floats]:
    """Quadrature for T ~ Student-t(r) between the first and the last of `points` (angles u, T = sqrt(r) tan u).

    Panels are dense where T is likely, and shrink geometrically towards every point.

    Returns:
        nodes u (n,) and weights (n,) that hold the density of T.
    """
    bulk = math.atan(14 / math.sqrt(rank)) if rank > 4 else math.pi / 2
    cuts, steps = [np.array(points), np.linspace(-bulk, bulk, 121)], np.geomspace(1e-10, 1.0, 40)
    for left, right in itertools.pairwise(points):
        cuts += [left + (right - left) * steps, right + (left - right) * steps]
    edges = np.unique(np.clip(np.concatenate(cuts), points[0], points[-1]))
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    angles = (middle[:, None] + half[:, None] * _NODES).ravel()
    widths = (half[:, None] * _WEIGHTS).ravel()
    constant = math.lgamma((rank + 1) / 2) - math.lgamma(rank / 2) - math.log(math.pi) / 2
    return angles, widths * np.exp(constant + (rank - 1) * np.log(np.cos(angles)))


def _where_loss_exceeds(epsilon: float, query: VectorQuery) -> tuple[Floats, Floats, Floats, Floats]:
    """For each R: the beta at which L = epsilon, the sign of 1 - R, ln R, and the quadrature weight of R.

    L exceeds epsilon for larger beta where R < 1, and for smaller beta where R > 1.
    """
    # With rho = cos theta, R = cos(u - theta) / cos u: R = 0 at theta - pi/2 and R = 1 at theta / 2.
    theta = query.angle
    angles, weights = _student_rule(query.rank, theta - math.pi / 2, theta / 2, math.pi / 2)
    ratio = np.cos(angles - theta) / np.cos(angles)
    below = -2 * np.sin(angles - theta / 2) * math.sin(theta / 2) / np.cos(angles)  # 1 - R, exact near R = 1
    log_ratio = np.where(np.abs(below) < 0.5, np.log1p(-np.minimum(below, 0.5)), np.log(ratio))
    with np.errstate(divide="ignore", invalid="ignore"):
        at = 2 * ratio * (epsilon - query.log_weight * log_ratio) / below
    return np.where(below == 0, np.inf, at), np.where(below >= 0, 1.0, -1.0), log_ratio, weights


def _log_tails(at: Floats, side: Floats, query: VectorQuery) -> Floats:
    """ln P(beta > at) on the side R < 1, ln P(beta <= at) on the other."""
    degrees = query.dimension + query.rank - 1
    return np.where(side > 0, _log_chi2_sf(at, degrees), _log_chi2_cdf(at, degrees))


def _check_epsilon(epsilon: float) -> None:
    in_range(0 <= epsilon < math.inf, epsilon=epsilon)


def _log_chi2_sf(at: Floats, degrees: int) -> Floats:
    """ln P(chi^2_degrees > at); 0 where `at` <= 0, -inf at infinity. Elementwise, float64."""
    shape, z = degrees / 2, np.maximum(at, 0.0) / 2
    with np.errstate(divide="ignore"):
        result = np.log(gammaincc(shape, z))
    deep = (gammaincc(shape, z) < _SMALLEST) & np.isfinite(z)
    result[deep] = _prefactor(shape, z[deep]) + np.log(_upper_fraction(shape, z[deep]))
    return result


def _log_chi2_cdf(at: Floats, degrees: int) -> Floats:
    """ln P(chi^2_degrees <= at); -inf where `at` <= 0, 0 at infinity. Elementwise, float64."""
    shape, z = degrees / 2, np.maximum(at, 0.0) / 2
    with np.errstate(divide="ignore"):
        result = np.log(gammainc(shape, z))
    deep = (gammainc(shape, z) < _SMALLEST) & (z > 0)
    result[deep] = _prefactor(shape, z[deep]) - np.log(shape) + np.log(_lower_series(shape, z[deep]))
    return result


def _prefactor(shape: float, z: Floats) -> Floats:
    """ln of e^-z z^shape / Gamma(shape)."""
    return shape * np.log(z) - z - gammaln(shape)


def _upper_fraction(shape: float, z: Floats) -> Floats:
    """Legendre's continued fraction 1/(z+1-s - 1(1-s)/(z+3-s - ...)) by Lentz's method; z is far above shape."""
    b = z + 1 - shape
    c, d = np.full_like(z, 1e300), 1 / b
    value = d.copy()
    for k in range(1, _TERMS):
        step = -k * (k - shape)
        b = b + 2
        d = 1 / (step * d + b)
        c = b + step / c
        value *= c * d
        if np.all(np.abs(c * d - 1) < 1e-15):
            break
    return value


def _lower_series(shape: float, z: Floats) -> Floats:
    """sum over k of z^k / ((s+1) ... (s+k)); z is far below shape."""
    term, value = np.ones_like(z), np.ones_like(z)
    for k in range(1, _TERMS):
        term = term * z / (shape + k)
        value += term
        if np.all(term < 1e-17 * value):
            break
    return value


_LARGEST = 20.0  # of ln c: the slack at c = e^20 is nothing


def guaranteed_delta(epsilon: float, query: VectorQuery) -> float:
    """delta at `epsilon` >= 0 for all pairs that are aligned at least rho: `exact_delta` + `alignment_slack`.

    Raises:
        PrivacyError: epsilon is negative or not finite.
    """
    return min(1.0, exact_delta(epsilon, query) + alignment_slack(epsilon, query))


@lru_cache(maxsize=64)
def guaranteed_epsilon(delta: float, query: VectorQuery) -> float:
    """The epsilon at which `guaranteed_delta` is `delta`; inf if the support term exceeds it.

    Raises:
        PrivacyError: delta is not in (0, 1).
    """
    return solve_epsilon(lambda epsilon: guaranteed_delta(epsilon, query), delta, query.support_failure)


def alignment_slack(epsilon: float, query: VectorQuery) -> float:
    """By how much the delta of a better aligned pair may exceed that at alignment rho, at most.

    P(kappa < kappa_epsilon), where kappa = beta / sqrt(1 + T^2 / r); 0 if r >= d + 1, and far below any delta in use
    unless epsilon is near 0.

    The exact curve of a vector release is that of a pair at one alignment; a collection of data sets has a least one.
    Write the output in polar form in the plane of v and v', angle phi, radius s. Then kappa = ||y||^2 / s has the
    same law for every v of the plane, and given kappa, phi is v's own angle plus a variable of density g = exp(psi),
    up to a constant,

        psi(phi) = -a ln cos phi - kappa / (2 cos phi),   a = (d + 1 - r) / 2,   |phi| < pi/2.

    If kappa >= 2a (always, for r >= d + 1), psi is concave, so the loss is monotone in phi, and delta grows with the
    angle theta between v and v'. Otherwise psi has a dip between two humps at +-m, sec m = c = 2a / kappa, and is
    concave outside them. If no rise inside the dip, over a distance of theta or less, exceeds epsilon, then the loss
    exceeds epsilon only where phi - theta < -m. There g increases, so that the derivative of delta by theta,
    e^epsilon times the sum of the differences of g(phi - theta) over the intervals of that set, is not negative. Such
    a rise is at most

        min( a (ln c - 1 + 1/c), theta S ),   S = max psi' = (a/c) sqrt(x^2 - 1) (c - x),   x = (c + sqrt(c^2 + 8)) / 4,

    which grows with c. So only a small kappa is not covered, and its probability is what is returned.
    """
    a, theta = query.log_weight, query.angle
    if a <= 0 or theta == 0:
        return 0.0

    log_c = 0.0
    if epsilon > 0:
        # A smaller c than needed is on the safe side.
        enough = largest_rise(_LARGEST, a, theta) <= epsilon
        log_c = _LARGEST if enough else brentq(lambda x: largest_rise(x, a, theta) - epsilon, 0.0, _LARGEST)
    angles, weights = _student_rule(query.rank, 0.0, math.pi / 2)
    shape = (query.dimension + query.rank - 1) / 2
    return min(1.0, 2 * float(weights @ gammainc(shape, a * math.exp(-log_c) / np.cos(angles))))


def largest_rise(log_c: float, a: float, theta: float) -> float:
    """Largest rise of psi inside its dip over a distance <= theta, for ln c = ln(2a / kappa) >= 0."""
    c = math.exp(log_c)
    x = (c + math.sqrt(c * c + 8)) / 4
    slope = a / c * math.sqrt(max(x * x - 1, 0.0)) * (c - x)
    return min(a * (log_c - 1 + 1 / c), theta * slope)


def alignment_of_mean(count: int, smallest_norm: float) -> float:
    """rho = 1 - 2 / (n c)^2 of u / ||u||, u the mean of n vectors of norm at most 1, if ||u|| >= c on both sides.

    Replacing one vector moves u by at most 2/n, hence u/||u|| by at most 2/(n c).

    Raises:
        PrivacyError: n is not a positive integer, c is not in (0, 1], or the mean may turn by a right angle.
    """
    in_range(count >= 1 and 0 < smallest_norm <= 1, count=count, smallest_norm=smallest_norm)
    alignment = 1 - 2 / (count * smallest_norm) ** 2
    in_range(alignment > 0, alignment=alignment)
    return alignment


def ball_noise_alignment(alignment: float, radius: float, dimension: int, failure: float) -> float:
    """Lemma 10: the alignment of (v + z)/||v + z|| and (v' + z)/||v' + z||, z uniform in a ball, shared by both.

    It is at least 1 - (1 - rho)/(1 + x) with probability 1 - `failure`, where x = <z, v + v'> + ||z||^2 is at least

        min over s in [gamma (failure/2)^{1/d}, gamma] of s^2 - s sqrt(2 + 2 rho) sqrt(2 ln(2/failure) / d).

    As x -> gamma^2 in high dimension, the limit is (rho + gamma^2)/(1 + gamma^2). Add `failure` to delta.

    Args:
        alignment: rho in (-1, 1], the least one before. radius: gamma > 0 in units of ||v|| = 1. dimension: d.
        failure: probability in (0, 1) over z.

    Raises:
        PrivacyError: an argument is out of range, the bound is not positive, or it would not grow with rho.
    """
    in_range(-1 < alignment <= 1 and 0 < radius < math.inf, alignment=alignment, radius=radius)
    in_range(dimension >= 1 and 0 < failure < 1, dimension=dimension, failure=failure)
    length, turn = math.sqrt(2 + 2 * alignment), math.sqrt(2 * math.log(2 / failure) / dimension)
    monotone = turn * (2 / length + length / 2) <= 2  # from the derivative in rho, with s / (1 + s^2) <= 1/2
    in_range(monotone, dimension=dimension, failure=failure)
    fall = length * turn
    lowest = radius * (failure / 2) ** (1 / dimension)
    norm = min(max(fall / 2, lowest), radius)  # where the parabola s^2 - s fall is least on the interval
    gain = norm**2 - norm * fall
    in_range(alignment + gain > 0, radius=radius, dimension=dimension)
    return 1 - (1 - alignment) / (1 + gain)
