"""Alignment: where it comes from, how ball noise raises it, and what holds when it is only known to be at least rho.

The exact curve of a vector release is that of a pair at one alignment; a collection of data sets has a least one. Write
the output in polar form in the plane of v and v', angle phi, radius s. Then kappa = ||y||^2 / s has the same law for
every v of the plane, and given kappa, phi is v's own angle plus a variable of density g = exp(psi), up to a constant,

    psi(phi) = -a ln cos phi - kappa / (2 cos phi),   a = (d + 1 - r) / 2,   |phi| < pi/2.

If kappa >= 2a (always, for r >= d + 1), psi is concave, so the loss is monotone in phi, and delta grows with the angle
theta between v and v'. Otherwise psi has a dip between two humps at +-m, sec m = c = 2a / kappa, and is concave outside
them. If no rise inside the dip, over a distance of theta or less, exceeds epsilon, then the loss exceeds epsilon only
where phi - theta < -m. There g increases, so that the derivative of delta by theta, e^epsilon times the sum of the
differences of g(phi - theta) over the intervals of that set, is not negative. Such a rise is at most

    min( a (ln c - 1 + 1/c), theta S ),   S = max psi' = (a/c) sqrt(x^2 - 1) (c - x),   x = (c + sqrt(c^2 + 8)) / 4,

which grows with c. So only a small kappa is not covered, and its probability is `alignment_slack`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc

from privlora.lab.wishart.bounds.gaussian import in_range, solve_epsilon
from privlora.lab.wishart.bounds.vector import VectorQuery, exact_delta, student_rule

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
    """By how much the delta of a better aligned pair may exceed that at alignment rho, at most (see above).

    P(kappa < kappa_epsilon), where kappa = beta / sqrt(1 + T^2 / r); 0 if r >= d + 1, and far below any delta in use
    unless epsilon is near 0.
    """
    a, theta = query.log_weight, query.angle
    if a <= 0 or theta == 0:
        return 0.0

    log_c = 0.0
    if epsilon > 0:
        # A smaller c than needed is on the safe side.
        enough = largest_rise(_LARGEST, a, theta) <= epsilon
        log_c = _LARGEST if enough else brentq(lambda x: largest_rise(x, a, theta) - epsilon, 0.0, _LARGEST)
    angles, weights = student_rule(query.rank, 0.0, math.pi / 2)
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
