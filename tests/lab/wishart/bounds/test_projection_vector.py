"""Theorem 1, its improvement and the exact integral: reference values, simulation, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import gammaln

from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.vector import (
    VectorQuery,
    _log_chi2_cdf,
    _log_chi2_sf,
    exact_delta,
    exact_epsilon,
    loss_tail,
    theorem_1,
    theorem_1_at,
)

# d, r, rho, delta' -> delta, epsilon, improved epsilon, exact epsilon at delta
REFERENCE = [
    (400, 400, 0.5, 1 / 300, 1.0e-2, 737.529, 737.289, 609.51),
    (400, 200, 0.9, 1 / 300, 1.0e-2, 77.2946, 58.3662, 43.678),
    (100, 30, 0.9, 1e-3, 3.0e-3, 59.5594, 37.6355, 19.140),
    (1000, 100, 0.99, 1e-4, 3.0e-4, 63.7784, 19.6030, 7.7554),
    (1000, 500, 0.999, 1e-6, 3.0e-6, 11.6675, 6.8440, 4.8749),
    (768, 64, 0.9999, 1e-6, 3.0e-6, 8.1099, 3.2084, 0.6567),
]


def digits(value: float) -> float:
    """Half a unit of the last digit that is given."""
    text = f"{value}".split(".")[1]
    return 0.5 * 10.0 ** -len(text) * 1.01


@pytest.mark.parametrize("row", REFERENCE)
def test_reference_values(row: tuple[float, ...]) -> None:
    d, r, rho, tail, delta, epsilon, improved, exact = row
    query = VectorQuery(int(d), int(r), rho)
    bound = theorem_1(query, tail)
    assert bound.delta == pytest.approx(delta, rel=1e-8)
    assert bound.epsilon == pytest.approx(epsilon, abs=digits(epsilon))
    assert theorem_1(query, tail, improved=True).epsilon == pytest.approx(improved, abs=1e-3)
    assert exact_epsilon(bound.delta, query) == pytest.approx(
        exact, abs=1e-2 if exact > 600 else digits(exact)
    )


def test_support_term() -> None:
    assert VectorQuery(10, 4, 0.9).support_failure == pytest.approx(7.2500e-3, abs=5e-8)
    assert VectorQuery(10, 16, 0.5).support_failure == pytest.approx(1.72998e-2, abs=5e-8)
    assert VectorQuery(10, 16, 1.0).support_failure == 0


@pytest.mark.parametrize(
    ("d", "r", "rho", "epsilon", "delta"),
    [
        (20, 4, 0.9, 1, 0.21450498),
        (50, 10, 0.95, 2, 0.09415385),
        (100, 30, 0.9, 5, 0.24156584),
        (1000, 100, 0.999, 1, 0.00648166),
    ],
)
def test_exact_delta(d: int, r: int, rho: float, epsilon: float, delta: float) -> None:
    assert exact_delta(epsilon, VectorQuery(d, r, rho)) == pytest.approx(delta, abs=6e-9)


def test_figure_1() -> None:
    """rho = 0.5, delta = 0.01, d = 400, r = 100 ... 400: the dashed curve, and the quantile of the loss."""
    queries = [VectorQuery(400, r, 0.5) for r in (100, 200, 300, 400)]
    bounds = [theorem_1_at(query, 0.01).epsilon for query in queries]
    assert bounds == pytest.approx([792.6, 660.4, 682.0, 737.5], abs=0.06)
    quantiles = [exact_epsilon(0.01, query, quantile_of_loss=True) for query in queries]
    assert quantiles == pytest.approx([419.1, 445.2, 522.9, 610.5], abs=0.06)


def log_density(y: np.ndarray, v: np.ndarray, r: int) -> np.ndarray:
    """Lemma 9: the density of Z Z^T v for Z with unit variances; -inf outside the support."""
    d, inner = v.size, y @ v
    constant = gammaln(r / 2) + r / 2 * math.log(2) + (d - 1) / 2 * math.log(2 * math.pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = (r - d - 1) / 2 * np.log(inner) - (y**2).sum(1) / (2 * inner) - constant
    return np.where(inner > 0, value, -np.inf)


@pytest.mark.parametrize(
    ("d", "r", "rho", "epsilon"), [(20, 4, 0.9, 2.0), (50, 10, 0.95, 2.0), (6, 12, 0.7, 1.0)]
)
def test_simulation_agrees(d: int, r: int, rho: float, epsilon: float) -> None:
    """Outputs are built and weighed with the density of Lemma 9, without the law of the loss; also for r > d + 1."""
    rng, draws = np.random.default_rng(1), 12_000
    v, w = np.eye(d)[0], rho * np.eye(d)[0] + math.sqrt(1 - rho**2) * np.eye(d)[1]
    z = rng.standard_normal((draws, d, r))
    y = (z @ (z.mT @ v)[..., None])[..., 0]
    loss = log_density(y, v, r) - log_density(y, w, r)
    query = VectorQuery(d, r, rho)
    beyond = loss > epsilon
    assert beyond.mean() == pytest.approx(loss_tail(epsilon, query), abs=5 * beyond.std() / math.sqrt(draws))
    excess = np.clip(-np.expm1(epsilon - loss), 0, None)
    assert excess.mean() == pytest.approx(
        exact_delta(epsilon, query), abs=5 * excess.std() / math.sqrt(draws)
    )


def test_bounds_hold_and_the_other_coefficient_does_not() -> None:
    """Also for pairs that are better aligned than rho, which is only the least alignment."""
    for d, r, rho, tail in [
        (40, 41, 0.6, 0.01),
        (400, 20, 0.8, 1e-3),
        (50, 200, 0.9, 1e-4),
        (5000, 30, 0.97, 0.05),
    ]:
        query = VectorQuery(d, r, rho)
        bounds = [theorem_1(query, tail, improved=True)]
        if r <= d + 1:
            bounds.append(theorem_1(query, tail))
            assert bounds[0].epsilon <= bounds[1].epsilon
        for bound in bounds:
            for closer in (rho, (1 + rho) / 2, 0.999, 1.0):
                assert exact_delta(bound.epsilon, VectorQuery(d, r, closer)) <= bound.delta
    # (d + r - 1)/2 in the place of (d - r + 1)/2 states 545.6 here.
    assert exact_delta(545.6, VectorQuery(400, 400, 0.5)) > 0.01


def test_improved_epsilon_does_not_fall_with_the_alignment() -> None:
    """The largest loss over |R - rho| <= K alone is smaller at 0.9 than at 0.97: a minimum must be the worst."""
    epsilons = [
        theorem_1(VectorQuery(10**6, 100, rho), 1e-3, improved=True).epsilon
        for rho in (0.8, 0.9, 0.95, 0.97, 0.99, 1.0)
    ]
    assert epsilons == sorted(epsilons, reverse=True)


def test_exact_delta_falls_with_epsilon_and_alignment() -> None:
    for d, r in ((60, 5), (300, 150), (10, 40)):
        grid = [
            [exact_delta(e, VectorQuery(d, r, rho)) for e in (0, 1, 10, 100)] for rho in (0.5, 0.9, 0.99, 1)
        ]
        assert (np.diff(grid, axis=1) <= 1e-12).all()
        assert (np.diff(grid, axis=0) <= 1e-12).all()


def test_refuses_outside_its_conditions() -> None:
    with pytest.raises(PrivacyError, match="spread="):
        theorem_1(VectorQuery(100, 4, 0.5), 1e-3)
    with pytest.raises(PrivacyError, match="rank=12"):
        theorem_1(VectorQuery(10, 12, 0.99), 1e-3)
    with pytest.raises(PrivacyError, match="support_failure="):
        theorem_1_at(VectorQuery(100, 4, 0.5), 1e-3)
    with pytest.raises(PrivacyError, match="kappa="):
        theorem_1(VectorQuery(100, 1, 0.999), 0.49)
    for bad in ((0, 4, 0.5), (4, 0, 0.5), (4, 4, 0.0), (4, 4, 1.5)):
        with pytest.raises(PrivacyError):
            VectorQuery(*bad)
    assert exact_epsilon(1e-3, VectorQuery(100, 4, 0.5)) == math.inf
    assert exact_epsilon(0.5, VectorQuery(10, 64, 1.0)) == 0.0
    assert 0 < exact_epsilon(1e-9, VectorQuery(384, 64, 1 - 1e-12)) < 1e-3


def test_chi_square_tails_do_not_underflow() -> None:
    at = np.array([0.0, 1.0, 3e3, 9e4])
    assert np.allclose(_log_chi2_sf(at, 2), -at / 2, rtol=1e-12)
    assert np.allclose(_log_chi2_sf(at, 4), -at / 2 + np.log1p(at / 2), rtol=1e-12)
    for degrees in (500, 2001):
        shape, z = degrees / 2, np.array([1e-3, 1.0, 20.0, 100.0])
        step = shape * np.log(z) - z - gammaln(shape + 1)  # P(s, z) = P(s + 1, z) + z^s e^-z / Gamma(s + 1)
        more = np.logaddexp(_log_chi2_cdf(2 * z, degrees + 2), step)
        assert np.allclose(_log_chi2_cdf(2 * z, degrees), more, rtol=1e-12)
        assert _log_chi2_cdf(2 * z, degrees)[0] < -1000
