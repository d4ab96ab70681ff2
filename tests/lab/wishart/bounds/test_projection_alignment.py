"""Alignment from means and ball noise, and what a least alignment guarantees."""

from __future__ import annotations

import math

import numpy as np
import pytest

from privlora.auditing.bounds import gaussian_epsilon
from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.vector import (
    VectorQuery,
    alignment_of_mean,
    alignment_slack,
    ball_noise_alignment,
    exact_delta,
    exact_epsilon,
    guaranteed_delta,
    guaranteed_epsilon,
    largest_rise,
)


def psi(phi: np.ndarray, a: float, kappa: float) -> np.ndarray:
    """ln of the density of the angle given kappa, up to a constant; -inf beyond a right angle."""
    cosine = np.cos(phi)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = -a * np.log(cosine) - kappa / (2 * cosine)
    return np.where((np.abs(phi) < math.pi / 2) & (cosine > 0), value, -np.inf)


def angular_delta(epsilon: float, theta: float, a: float, kappa: float) -> float:
    """The delta of two angles that are theta apart, given kappa."""
    phi = np.linspace(-math.pi / 2, math.pi / 2, 8001)
    here, there = psi(phi, a, kappa), psi(phi - theta, a, kappa)
    total = np.exp(here - here.max()).sum()
    return float(
        np.clip(np.exp(here - here.max()) - np.exp(epsilon + there - here.max()), 0, None).sum() / total
    )


def test_the_angle_given_kappa_makes_up_the_exact_delta() -> None:
    """The first step of the proof: delta is the mean over kappa of that of a location family of angles."""
    d, r, rho, epsilon, draws = 20, 4, 0.9, 1.0, 400
    rng = np.random.default_rng(0)
    y = (z := rng.standard_normal((draws, d, r))) @ z[:, :1].mT
    kappa = (y[..., 0] ** 2).sum(1) / np.hypot(y[:, 0, 0], y[:, 1, 0])
    sample = np.array([angular_delta(epsilon, math.acos(rho), (d + 1 - r) / 2, k) for k in kappa])
    exact = exact_delta(epsilon, VectorQuery(d, r, rho))
    assert sample.mean() == pytest.approx(exact, abs=5 * sample.std() / math.sqrt(draws))


@pytest.mark.parametrize("a", [-3.0, 0.5, 8.5, 160.0])
def test_delta_grows_with_the_angle_where_the_proof_says_so(a: float) -> None:
    """Second step: given kappa, up to the theta at which a rise inside the dip may exceed epsilon."""
    checked = 0
    for epsilon in (0.05, 0.5, 3.0):
        for share in (0.05, 0.3, 0.7, 0.95, 1.0, 1.5):
            kappa = 2 * abs(a) * share
            for theta in (0.02, 0.2, 0.8, 1.4):
                if a > 0 and share < 1 and largest_rise(-math.log(share), a, theta) > epsilon:
                    continue
                curve = [angular_delta(epsilon, angle, a, kappa) for angle in np.linspace(0, theta, 7)]
                assert (np.diff(curve) >= -1e-9).all()
                checked += 1
    assert checked > 20


def test_delta_may_fall_with_the_angle_where_the_proof_does_not_say_so() -> None:
    """Two humps, shifted by nearly the distance between them, overlap again. So the slack is not for nothing."""
    assert angular_delta(0.05, 1.5, 8.5, 3.0) < angular_delta(0.05, 1.2, 8.5, 3.0) - 1e-4


@pytest.mark.parametrize(("a", "share"), [(8.5, 0.1), (8.5, 0.6), (160.0, 0.97)])
def test_largest_rise_bounds_every_rise_inside_the_dip(a: float, share: float) -> None:
    hump = math.acos(share)
    start = np.linspace(-hump, hump, 400)
    for theta in (0.01, 0.1, 0.5, 1.5):
        steps = np.linspace(0, theta, 40)[:, None]
        with np.errstate(invalid="ignore"):
            rise = psi(start + steps, a, 2 * a * share) - psi(start, a, 2 * a * share)
        assert np.nanmax(rise) <= largest_rise(-math.log(share), a, theta) + 1e-9


def test_the_guarantee_covers_better_aligned_pairs() -> None:
    for d, r, rho in ((20, 4, 0.9), (2000, 4, 0.9999), (100, 30, 0.9), (10, 40, 0.5)):
        for epsilon in (0.0, 0.5, 4.0):
            bound = guaranteed_delta(epsilon, VectorQuery(d, r, rho))
            for closer in (rho, 1 - (1 - rho) / 3, 1 - (1 - rho) / 30, 1.0):
                assert exact_delta(epsilon, VectorQuery(d, r, closer)) <= bound


def test_the_guarantee_costs_nothing_where_the_mechanism_is_of_use() -> None:
    assert alignment_slack(0.0, VectorQuery(10, 11, 0.5)) == 0
    for d, r, rho, delta in ((768, 64, 0.9999, 3e-6), (1000, 500, 0.999, 3e-6), (1000, 100, 0.99, 3e-4)):
        query = VectorQuery(d, r, rho)
        exact = exact_epsilon(delta, query)
        assert alignment_slack(exact, query) < 1e-14
        assert guaranteed_epsilon(delta, query) == pytest.approx(exact, rel=1e-7)
    assert guaranteed_epsilon(1e-3, VectorQuery(100, 4, 0.5)) == math.inf
    falling = [alignment_slack(e, VectorQuery(2000, 4, 0.9999)) for e in (0, 0.1, 1, 10, 100, 1e4)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 0.5
    assert falling[-1] < 1e-9


@pytest.mark.parametrize(("rho", "gamma", "d", "bound"), [(0.5, 1, 500, 0.7109), (0.0, 2, 1000, 0.7858)])
def test_ball_noise(rho: float, gamma: float, d: int, bound: float) -> None:
    found = ball_noise_alignment(rho, gamma, d, 0.01)
    assert found == pytest.approx(bound, abs=5e-5)
    assert rho < found < (rho + gamma**2) / (1 + gamma**2)


def test_ball_noise_refuses_few_dimensions() -> None:
    with pytest.raises(PrivacyError, match="failure="):
        ball_noise_alignment(0.0, 1.0, 4, 1e-6)
    with pytest.raises(PrivacyError, match="radius="):
        ball_noise_alignment(0.0, 0.2, 100, 1e-6)


def test_alignment_of_a_mean() -> None:
    rng = np.random.default_rng(0)
    rho = alignment_of_mean(10, 0.4)
    assert rho == 1 - 2 / 16
    for _ in range(200):
        rows = rng.standard_normal((11, 3)) + np.array([1.5, 0, 0])
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)
        u, w = rows[:10].mean(0), rows[1:].mean(0)
        lengths = np.linalg.norm(u), np.linalg.norm(w)
        if min(lengths) >= 0.4:
            assert u @ w / (lengths[0] * lengths[1]) >= rho
    with pytest.raises(PrivacyError, match="alignment="):
        alignment_of_mean(2, 0.5)


def test_gaussian_noise_of_the_same_size_costs_less() -> None:
    """The numbers of the guide: N(0, 1/r) on each coordinate of v against M v."""
    query = VectorQuery(384, 64, alignment_of_mean(2000, 0.3))
    assert exact_epsilon(1e-6, query) == pytest.approx(0.130, abs=5e-4)
    assert gaussian_epsilon(math.sqrt(2 * (1 - query.alignment) * 64), 1e-6) == pytest.approx(0.097, abs=5e-4)
