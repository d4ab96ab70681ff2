"""The Gaussian mechanism: the baseline of every bound in this room, and the ingredient of most.

A query of sensitivity Delta with noise N(0, sigma^2) has eta = Delta^2 / sigma^2. Its privacy loss L is
N(eta/2, eta), and its exact curve is that of Balle and Wang (2018),

    delta_G(epsilon; eta) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu),   mu = sqrt(eta).

The classical sigma = Delta sqrt(2 ln(1.25/delta)) / epsilon is absent on purpose: it is not valid above epsilon = 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import erfcx, ndtr

from privlora.errors import PrivacyError

Floats = NDArray[np.float64]


def gaussian_delta(epsilon: ArrayLike, eta: ArrayLike) -> Floats:
    """Exact delta of the Gaussian mechanism at `epsilon`; increasing in `eta`, decreasing in `epsilon`.

    Both terms share the factor exp(-(epsilon/mu - mu/2)^2 / 2), so their difference is taken between scaled
    complementary error functions and keeps its digits in the far tail.

    Args:
        epsilon: any real numbers; negative values are the curve's other end, 1 - e^epsilon + e^epsilon delta(-epsilon).
        eta: squared sensitivity over noise variance, at least 0 (0 gives max(0, 1 - e^epsilon)), inf gives 1.

    Returns:
        delta in [0, 1], float64, in the broadcast shape of the arguments.

    Raises:
        PrivacyError: eta is negative or NaN, or epsilon is NaN.
    """
    eps, mu = _arguments(epsilon, eta)
    size = np.abs(eps)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        near, far = size / mu - mu / 2, size / mu + mu / 2
        factor = np.exp(-(near**2) / 2)
        both = factor / 2 * (erfcx(near / math.sqrt(2)) - erfcx(far / math.sqrt(2)))
        apart = ndtr(-near) - factor / 2 * erfcx(far / math.sqrt(2))
        upper = np.where(near > -5, both, apart)
    upper = np.where(mu == 0, 0.0, np.where(np.isinf(mu), 1.0, upper))
    upper = np.where(np.isinf(size), 0.0, np.clip(upper, 0.0, 1.0))
    below = np.minimum(eps, 0.0)
    return np.where(eps < 0, -np.expm1(below) + np.exp(below) * upper, upper)


def one_sided_tail(epsilon: ArrayLike, eta: ArrayLike) -> Floats:
    """P(L > epsilon) = Phi(mu/2 - epsilon/mu), at least `gaussian_delta`, whose arguments and errors it shares."""
    eps, mu = _arguments(epsilon, eta)
    return _beyond(eps, mu, 1.0)


def two_sided_tail(epsilon: ArrayLike, eta: ArrayLike) -> Floats:
    """P(|L| > epsilon) = Phi(mu/2 - epsilon/mu) + Phi(-mu/2 - epsilon/mu), the tau of Theorem 5 as printed.

    Never below `one_sided_tail`; 1 for every epsilon < 0. Arguments and errors as in `gaussian_delta`.
    """
    eps, mu = _arguments(epsilon, eta)
    return np.minimum(1.0, _beyond(eps, mu, 1.0) + _beyond(eps, mu, -1.0))


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """sigma (noise std / sensitivity) for which one Gaussian release is exactly (epsilon, delta)-DP.

    Raises:
        PrivacyError: epsilon is not positive and finite, or delta is not in (0, 1).
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise PrivacyError(
            f"epsilon={epsilon}, delta={delta} is not a target", fix="give epsilon > 0 and 0 < delta < 1"
        )
    low = high = 1.0
    while gaussian_delta(epsilon, high**-2.0) > delta:
        high *= 2
    while gaussian_delta(epsilon, low**-2.0) < delta:
        low /= 2
    return float(brentq(lambda s: float(gaussian_delta(epsilon, s**-2.0)) - delta, low, high, xtol=1e-14))


def gaussian_epsilon(eta: float, delta: float) -> float:
    """The least epsilon >= 0 at which one Gaussian release with squared sensitivity over variance `eta` has `delta`.

    Raises:
        PrivacyError: eta is negative or not finite, or delta is not in (0, 1).
    """
    if not (0 <= eta < math.inf and 0 < delta < 1):
        raise PrivacyError(f"eta={eta}, delta={delta}", fix="give a finite eta >= 0 and 0 < delta < 1")
    if gaussian_delta(0.0, eta) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, eta) > delta:
        high *= 2
    return float(brentq(lambda e: float(gaussian_delta(e, eta)) - delta, 0.0, high, xtol=1e-13))


def _beyond(eps: Floats, mu: Floats, side: float) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        tail = ndtr(side * mu / 2 - eps / mu)
    without_noise = 1.0 if side > 0 else 0.0
    tail = np.where(np.isinf(mu), without_noise, tail)
    return np.where(mu == 0, np.where(eps < 0, without_noise, 0.0), tail)


def _arguments(epsilon: ArrayLike, eta: ArrayLike) -> tuple[Floats, Floats]:
    eps, squared = np.broadcast_arrays(np.asarray(epsilon, np.float64), np.asarray(eta, np.float64))
    if not (np.all(squared >= 0) and not np.any(np.isnan(eps))):
        raise PrivacyError(
            "eta is negative or NaN, or epsilon is NaN",
            fix="give eta = sensitivity^2 / noise variance, at least 0, and a real epsilon",
        )
    return eps, np.sqrt(squared)
