"""Logarithms of chi-square tails that do not underflow."""

from __future__ import annotations

import numpy as np
from scipy.special import gammainc, gammaincc, gammaln

from privlora.accounting.projection.gaussian import Floats

_SMALLEST = 1e-280
_TERMS = 5000


def log_chi2_sf(at: Floats, degrees: int) -> Floats:
    """ln P(chi^2_degrees > at); 0 where `at` <= 0, -inf at infinity. Elementwise, float64."""
    shape, z = degrees / 2, np.maximum(at, 0.0) / 2
    with np.errstate(divide="ignore"):
        result = np.log(gammaincc(shape, z))
    deep = (gammaincc(shape, z) < _SMALLEST) & np.isfinite(z)
    result[deep] = _prefactor(shape, z[deep]) + np.log(_upper_fraction(shape, z[deep]))
    return result


def log_chi2_cdf(at: Floats, degrees: int) -> Floats:
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
