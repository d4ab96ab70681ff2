"""The Gaussian mechanism as a baseline: its noise and epsilon for one release, and the tail that bounds its curve."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import ndtr

from privlora.accounting.projection.gaussian import Floats, epsilon_and_mu, gaussian_delta
from privlora.errors import PrivacyError


def in_range(holds: bool, **values: object) -> None:
    """Raise PrivacyError, with the names of ``values``, unless they are in the range that a docstring states."""
    if not holds:
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        raise PrivacyError(f"{named} is out of range", fix="see the docstring for what holds")


def two_sided_tail(epsilon: ArrayLike, eta: ArrayLike) -> Floats:
    """P(|L| > epsilon) = Phi(mu/2 - epsilon/mu) + Phi(-mu/2 - epsilon/mu), the tau of Theorem 5 as printed.

    Never below `gaussian_delta`; 1 for every epsilon < 0. Arguments and errors as there.
    """
    eps, mu = epsilon_and_mu(epsilon, eta)
    with np.errstate(divide="ignore", invalid="ignore"):
        tail = np.minimum(1.0, ndtr(mu / 2 - eps / mu) + ndtr(-mu / 2 - eps / mu))
    tail = np.where(np.isinf(mu), 1.0, tail)
    return np.where(mu == 0, np.where(eps < 0, 1.0, 0.0), tail)


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """sigma (noise std / sensitivity) for which one Gaussian release is exactly (epsilon, delta)-DP.

    Raises:
        PrivacyError: epsilon is not positive and finite, or delta is not in (0, 1).
    """
    in_range(0 < epsilon < math.inf, epsilon=epsilon)
    return solve_noise(lambda sigma: float(gaussian_delta(epsilon, sigma**-2.0)), delta)


def solve_epsilon(curve: Callable[[float], float], delta: float, limit: float = 0.0) -> float:
    """The least epsilon >= 0 with curve(epsilon) <= delta, for a curve that falls to `limit`; inf if there is none.

    Raises:
        PrivacyError: delta is not in (0, 1).
    """
    in_range(0 < delta < 1, delta=delta)
    if limit >= delta:
        return math.inf
    if curve(0.0) <= delta:
        return 0.0
    high = 1.0
    while curve(high) > delta:
        high *= 2

    def excess(epsilon: float) -> float:
        return math.log(max(curve(epsilon), 1e-300) / delta)

    return float(brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12))


def solve_noise(curve: Callable[[float], float], delta: float) -> float:
    """The noise multiplier with curve(noise multiplier) = delta, for a curve that falls from above delta to below it.

    Raises:
        PrivacyError: delta is not in (0, 1).
    """
    in_range(0 < delta < 1, delta=delta)

    def excess(log_sigma: float) -> float:
        return math.log(max(curve(math.exp(log_sigma)), 1e-300) / delta)

    low = high = 0.0
    while excess(high) > 0:
        high += 1
    while excess(low) < 0:
        low -= 1
    return math.exp(float(brentq(excess, low, high, xtol=1e-13)))
