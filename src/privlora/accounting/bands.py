"""Noise multipliers of a step whose noise is correlated with that of others, or shared with a count; without torch.

Correlated noise: see `mechanisms.banded`, of which c are the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

_ROUNDING: Final = 1e-12  # by which the norm of c stays below 1
_BARRED: Final = 1e100
_COUNTS_SHARE: Final = 0.01
"""Share of 1 / sigma^2 that the count takes: the noise on the sum is 0.5 % larger, that on the count is 5 sigma."""


@lru_cache(maxsize=64)
def band_coefficients(bands: int, steps: int) -> tuple[float, ...]:
    """c of the Toeplitz C of ``bands`` bands that leaves least noise in the sums of a run's releases; its norm is 1.

    Least is `prefix_error`, sought by L-BFGS-B from the first coefficients of (1 - x)^(-1/2).
    """
    from scipy.optimize import minimize

    start = np.array([math.comb(2 * k, k) / 4**k for k in range(min(bands, steps))])
    if len(start) == 1:
        return (1.0,) + (0.0,) * (bands - 1)

    def loss(tail: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = _error_and_gradient(np.concatenate([[1.0], tail]), steps)
        # In logarithms steps are of the size of c; where 1 / c has a pole within the circle, the way is barred.
        return (math.log(value), gradient[1:] / value) if value < _BARRED else (math.log(_BARRED), 0 * tail)

    found = minimize(loss, start[1:], jac=True, method="L-BFGS-B", options={"maxiter": 1000})
    c = np.concatenate([[1.0], found.x, np.zeros(bands - len(start))])
    c /= np.linalg.norm(c) * (1 + _ROUNDING)
    return tuple(c.tolist())


def prefix_error(coefficients: Sequence[float], steps: int) -> float:
    """Mean over t of the variance of the noise in y_1 + … + y_t, for white noise of variance 1 and columns of norm 1.

    It is |c|^2 sum_k (T - k) s_k^2 / T, where s_k are the partial sums of the power series of 1 / c: (T + 1) / 2 for a
    single band.
    """
    return _error_and_gradient(np.asarray(coefficients, dtype=float), steps)[0] / steps


def noise_in_sums(bands: int, steps: int) -> float:
    """Of the noise in sums of releases, root mean square over a run: as a part of that of independent noise of the same
    sigma."""
    if bands == 1:
        return 1.0
    return math.sqrt(prefix_error(band_coefficients(bands, steps), steps) / prefix_error((1.0,), steps))


def row_norms(coefficients: Sequence[float], steps: int) -> np.ndarray:
    """(steps,): the norm of each row of C^-1, by which a step's noise is larger than white noise of the same sigma."""
    return np.sqrt(np.cumsum(_filtered(np.asarray(coefficients, dtype=float), _impulse(steps)) ** 2))


def _error_and_gradient(c: np.ndarray, steps: int) -> tuple[float, np.ndarray]:
    sums = _filtered(c, np.ones(steps))
    left = np.arange(steps, 0, -1)
    energy, norm = float(left @ sums**2), float(c @ c)
    # d sums = -(1 / c) * shift(sums) dc, so its adjoint runs the filter backwards.
    back = _filtered(c, (2 * left * sums)[::-1])[::-1]
    slopes = [-float(back[k:] @ sums[: steps - k]) for k in range(len(c))]
    return energy * norm, np.array(slopes) * norm + energy * 2 * c


def _filtered(c: np.ndarray, values: np.ndarray) -> np.ndarray:
    """x with c * x = values."""
    from scipy.signal import lfilter

    found: np.ndarray = lfilter([1.0], c, values)
    return found


def _impulse(steps: int) -> np.ndarray:
    found = np.zeros(steps)
    found[:1] = 1.0
    return found


def split_noise_multiplier(noise_multiplier: float) -> tuple[float, float]:
    """Noise multiplier of the sum and standard deviation of the count in one release of (sum / C, count).

    A unit moves the sum by at most C, and the count (of +1/2 and -1/2) by 1/2. So both together are one Gaussian
    mechanism with 1/sigma^2 = 1/sigma_sum^2 + 1/(2 sigma_count)^2 (Andrew et al. 2021, Theorem 1).

    >>> split_noise_multiplier(1.0)
    (1.005037815259212, 5.0)
    """
    return noise_multiplier / math.sqrt(1 - _COUNTS_SHARE), noise_multiplier / (2 * math.sqrt(_COUNTS_SHARE))
