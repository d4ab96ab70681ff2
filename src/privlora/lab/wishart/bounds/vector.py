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

    For one release of a fresh secret M. What holds for better aligned pairs too is `alignment.guaranteed_delta`.

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


def student_rule(rank: int, *points: float) -> tuple[Floats, Floats]:
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
    angles, weights = student_rule(query.rank, theta - math.pi / 2, theta / 2, math.pi / 2)
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
