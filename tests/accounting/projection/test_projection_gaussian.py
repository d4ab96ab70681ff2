"""The Gaussian curve against its definition, far into the tails, and at its ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from privlora.accounting.projection.gaussian import gaussian_delta
from privlora.errors import PrivacyError


@pytest.mark.parametrize("epsilon", [-3.0, -0.2, 0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("eta", [1e-3, 0.2, 1.0, 7.0, 60.0])
def test_is_the_integral_of_its_definition(epsilon: float, eta: float) -> None:
    mu = math.sqrt(eta)
    start = epsilon / mu + mu / 2  # where the loss mu x - mu^2 / 2 exceeds epsilon

    def excess(x: float) -> float:
        return float(norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x))

    expected = quad(excess, start, max(start, mu) + 40, epsabs=0, epsrel=1e-10, points=[mu], limit=200)[0]
    assert float(gaussian_delta(epsilon, eta)) == pytest.approx(expected, rel=1e-8, abs=1e-290)


def test_keeps_its_digits_where_both_terms_agree() -> None:
    # 60-digit arithmetic.
    for epsilon, eta, exact in (
        (1, 0.01, 1.2369692480e-25),
        (10, 1.0, 1.6205119e-22),
        (1e-3, 1e-6, 8.3315e-5),
    ):
        assert float(gaussian_delta(epsilon, eta)) == pytest.approx(exact, rel=1e-3)
    ratio = gaussian_delta([30.0], 1.0) / norm.cdf(0.5 - 30.0)
    assert 0.02 < float(ratio[0]) < 0.05  # about 1 / (epsilon + 1)


def test_order_and_ends() -> None:
    eta = np.geomspace(1e-4, 1e3, 30)
    for epsilon in (0.0, 0.1, 1.0, 8.0):
        assert (np.diff(gaussian_delta(epsilon, eta)) >= 0).all()
    assert gaussian_delta([-1.0, 0.0, 1.0], 0.0).tolist() == [1 - math.exp(-1), 0.0, 0.0]
    assert gaussian_delta([-1.0, 5.0, -math.inf, math.inf], [math.inf, math.inf, 1.0, 1.0]).tolist() == [
        1,
        1,
        1,
        0,
    ]
    assert gaussian_delta(np.zeros((3, 1)), np.ones(4)).shape == (3, 4)


def test_reverse_order_is_the_other_half_of_one_curve() -> None:
    eps = np.linspace(0.01, 5, 40)
    there, back = gaussian_delta(eps, 2.0), gaussian_delta(-eps, 2.0)
    assert np.allclose(back, 1 - np.exp(-eps) + np.exp(-eps) * there, rtol=1e-14)


def test_refuses_what_is_no_argument() -> None:
    for epsilon, eta in ((1.0, -1.0), (1.0, math.nan), (math.nan, 1.0)):
        with pytest.raises(PrivacyError):
            gaussian_delta(epsilon, eta)
