"""The exact curve of the Gaussian mechanism, from which every curve of a projection is made.

A query of sensitivity Delta with noise N(0, sigma^2) has eta = Delta^2 / sigma^2. Its privacy loss L is
N(eta/2, eta), and its exact curve is that of Balle and Wang (2018),

    delta_G(epsilon; eta) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu),   mu = sqrt(eta).

The classical sigma = Delta sqrt(2 ln(1.25/delta)) / epsilon is absent on purpose: it is not valid above epsilon = 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
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
    eps, mu = epsilon_and_mu(epsilon, eta)
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


def epsilon_and_mu(epsilon: ArrayLike, eta: ArrayLike) -> tuple[Floats, Floats]:
    """Both in the shape to which they broadcast, float64; mu = sqrt(eta). PrivacyError as in `gaussian_delta`."""
    eps, squared = np.broadcast_arrays(np.asarray(epsilon, np.float64), np.asarray(eta, np.float64))
    if not (np.all(squared >= 0) and not np.any(np.isnan(eps))):
        raise PrivacyError(
            "eta is negative or NaN, or epsilon is NaN",
            fix="give eta = sensitivity^2 / noise variance, at least 0, and a real epsilon",
        )
    return eps, np.sqrt(squared)
