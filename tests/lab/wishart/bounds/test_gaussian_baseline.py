"""Noise, epsilon and tails of one Gaussian release, which the bounds of projections are compared with."""

from __future__ import annotations

import numpy as np
import pytest

from privlora.accounting.projection.gaussian import gaussian_delta
from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.gaussian import (
    gaussian_noise_multiplier,
    two_sided_tail,
)


def test_tails_are_above_the_curve() -> None:
    eta = np.geomspace(1e-4, 1e3, 30)
    for epsilon in (0.0, 0.1, 1.0, 8.0):
        curves = [curve(epsilon, eta) for curve in (gaussian_delta, two_sided_tail)]
        assert (curves[0] <= curves[1]).all()
        assert (np.diff(curves[1]) >= 0).all()
    assert two_sided_tail([-1.0, 0.0, 1.0], 0.0).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 7.03183), (1.0, 3.73063), (4.0, 1.08116)])
def test_analytic_noise(epsilon: float, sigma: float) -> None:
    assert gaussian_noise_multiplier(epsilon, 1e-5) == pytest.approx(sigma, abs=5e-6)


def test_refuses_what_is_no_target() -> None:
    for epsilon, delta in ((0.0, 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(PrivacyError):
            gaussian_noise_multiplier(epsilon, delta)
