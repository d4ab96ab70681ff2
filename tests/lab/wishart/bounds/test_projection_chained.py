"""M1: Lemma 2, the corrected Lemma 14 against simulation, Theorems 3 and 4, and what a public M costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from privlora.accounting.projection.gaussian import gaussian_delta
from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier
from privlora.lab.wishart.bounds.matrix import (
    ColumnChange,
    exposed_sensitivity,
    m1_coefficient,
    m1_noise,
    public_m1_delta,
    public_m1_noise,
    redraw_residual,
    residual_bound,
    split_projection,
    theorem_3,
    theorem_4,
)
from privlora.lab.wishart.bounds.vector import Bound, VectorQuery, theorem_1

CHANGE = ColumnChange(span=3, outside_share=0.5, inside_alignment=0.99, outside_alignment=0.999)


def test_lemma_2_is_theorem_1_for_what_is_not_exposed() -> None:
    smaller = theorem_1(VectorQuery(397, 197, 0.999), 1e-6)
    assert residual_bound(400, 200, CHANGE, 1e-6) == smaller
    assert residual_bound(400, 3, CHANGE, 1e-6) == Bound(0.0, 0.0)
    assert residual_bound(400, 200, ColumnChange(3, 0.0, 0.9, 0.9), 1e-6) == Bound(0.0, 0.0)


def exposed_norms(d: int, r: int, p: int, h: np.ndarray, draws: int) -> np.ndarray:
    """||M_par h|| in simulation; U is the span of the first p coordinates."""
    rng, norms = np.random.default_rng(r + p), []
    for _ in range(draws):
        z = rng.standard_normal((d, r)) / math.sqrt(r)
        rows = np.linalg.qr(z[:p].T).Q
        norms.append(np.linalg.norm(z @ (rows @ (rows.T @ (z.T @ h)))))
    return np.array(norms)


@pytest.mark.parametrize(
    ("r", "p", "claimed", "quantile", "refuted"),
    [
        (50, 1, 1.327, 2.740, True),
        (100, 3, 0.827, 2.010, True),
        (100, 10, 1.177, 2.025, True),
        (100, 50, 2.342, 2.030, False),
        (50, 80, 4.684, 2.718, False),
    ],
)
def test_lemma_14(r: int, p: int, claimed: float, quantile: float, refuted: bool) -> None:
    """As its proof defines it, the bound is exceeded for h in U wherever p is well below r; corrected, it holds."""
    d, k, t = 200, min(p, r), math.sqrt(2 * math.log(2 / 0.05))
    printed = (math.sqrt(d) + math.sqrt(k) + t) * (math.sqrt(k) + t) / r
    assert printed == pytest.approx(claimed, abs=6e-4)
    norms = exposed_norms(d, r, p, np.eye(d)[0], 60)
    assert np.quantile(norms, 0.95) == pytest.approx(quantile, rel=0.15)
    assert (norms > printed).mean() == (1.0 if refuted else pytest.approx(0.0, abs=0.05))
    assert (norms < exposed_sensitivity(d, r, p, 1.0, 0.0, 0.05)).all()
    mixed = np.zeros(d)
    mixed[[0, d - 1]] = 0.6, 0.8
    assert (exposed_norms(d, r, p, mixed, 20) < exposed_sensitivity(d, r, p, 0.6, 0.8, 0.05)).all()


def by_hand(z: np.ndarray, p: int) -> tuple[np.ndarray, np.ndarray]:
    """M_par and M_perp where U is the span of the first p coordinates, by a projector in R^r."""
    rows = z[:p]
    inside = rows.T @ np.linalg.pinv(rows @ rows.T) @ rows
    return z @ inside @ z.T, z @ (np.eye(z.shape[1]) - inside) @ z.T


@pytest.mark.parametrize(("r", "p"), [(6, 2), (6, 6), (4, 7)])
def test_lemma_12(r: int, p: int) -> None:
    rng = np.random.default_rng(r)
    z = rng.standard_normal((10, r)) / math.sqrt(r)
    others = np.zeros((10, 9))
    others[:p] = rng.standard_normal((p, 9))  # of rank p, whatever their number
    found = split_projection(z, others)
    for ours, theirs in zip((found.exposed, found.residual), by_hand(z, p), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    np.testing.assert_allclose(found.exposed + found.residual, z @ z.T, atol=1e-12)
    np.testing.assert_allclose(found.residual @ others, 0, atol=1e-12)
    assert found.dimension == min(r, p)
    assert (np.abs(found.residual).max() < 1e-12) == (r <= p)


def test_lemma_13() -> None:
    """Whatever M V_-j shows, the residual is a Wishart matrix beside it; and Z redrawn so has the law of Z."""
    d, r, p, draws = 8, 5, 2, 2000
    rng = np.random.default_rng(1)
    z = rng.standard_normal((d, r)) / math.sqrt(r)
    others = rng.standard_normal((d, p))
    again = [redraw_residual(z, others, rng) for _ in range(draws)]
    splits = [split_projection(each, others) for each in again]
    for each, split in zip(again[:50], splits[:50], strict=True):
        np.testing.assert_allclose(each @ (each.T @ others), z @ (z.T @ others), atol=1e-12)
        np.testing.assert_allclose(split.exposed, splits[0].exposed, atol=1e-12)
    basis = np.linalg.qr(others, mode="complete").Q[:, p:]
    inner = np.array([basis.T @ split.residual @ basis for split in splits]) * r
    normal = rng.standard_normal((draws, d - p, r - p))
    wishart = normal @ normal.mT
    assert scipy.stats.ks_2samp(np.einsum("nii", inner), np.einsum("nii", wishart)).pvalue > 1e-3
    assert scipy.stats.ks_2samp((inner**2).sum((1, 2)), (wishart**2).sum((1, 2))).pvalue > 1e-3
    fresh = []
    for _ in range(draws):
        start = rng.standard_normal((d, r)) / math.sqrt(r)
        fresh.append(redraw_residual(start, others, rng) * math.sqrt(r))
    entries = np.array(fresh).reshape(draws, -1)
    assert scipy.stats.kstest(entries.sum(1) / math.sqrt(d * r), "norm").pvalue > 1e-3
    np.testing.assert_allclose(entries.T @ entries / draws, np.eye(d * r), atol=6 / math.sqrt(draws))


def test_equations_7_and_8() -> None:
    """The printed quotient is that of Theorem 3's sensitivity to the norm's, and in the rank-deficient regime short."""
    d, r, q, failure = 2048, 64, 3, 1e-6
    t = math.sqrt(2 * math.log(2 / failure))
    change = ColumnChange(span=100, outside_share=0.5, inside_alignment=0.99, outside_alignment=0.999)
    distances = change.inside_distance, change.outside_distance
    chain = q * exposed_sensitivity(d, r, 100, *distances, failure)
    by_norm = (math.sqrt(d) + math.sqrt(r) + t) ** 2 / r * math.sqrt(q) * change.distance
    assert m1_coefficient(d, r, 100, q, failure) == pytest.approx(chain / by_norm, rel=1e-12)
    short = math.sqrt(q) * (math.sqrt(r) + t) / (math.sqrt(d) + math.sqrt(r) + t)
    assert m1_coefficient(d, r, 100, q, failure) == pytest.approx(short, rel=1e-12)
    assert m1_coefficient(d, r, 3, q, failure) < short  # with Lemma 14 as printed
    assert m1_coefficient(512, 64, 64, 10, failure) == pytest.approx(
        1.175, abs=1e-3
    )  # worse than by the norm


def test_noise_of_m1_in_the_rank_deficient_regime() -> None:
    """By the norm, by the direction, exactly, and without M: each is less than the one before."""
    sigmas = [
        m1_noise(1.0, 1e-5, 64, 2048, by_norm=True),
        m1_noise(1.0, 1e-5, 64, 2048),
        public_m1_noise(1.0, 1e-5, 64, 2048),
        gaussian_noise_multiplier(1.0, 1e-5),
    ]
    assert sigmas == pytest.approx([201.7, 45.82, 22.53, 3.731], rel=1e-3)
    assert public_m1_delta(1.0, sigmas[2], 64, 2048) == pytest.approx(1e-5, rel=1e-9)


@pytest.mark.parametrize("m", [1, 4])
def test_m1_with_that_noise_is_private(m: int) -> None:
    """delta of simulated public M, a rank-m difference of norm 1: E delta_G(epsilon, ||M Delta||^2 / sigma^2)."""
    d, r, delta = 30, 5, 0.02
    rng = np.random.default_rng(m)
    difference = rng.standard_normal((d, m))
    difference /= np.linalg.norm(difference)
    z = rng.standard_normal((20_000, d, r)) / math.sqrt(r)
    energy = ((z @ (z.mT @ difference)) ** 2).sum((1, 2))
    for by_norm in (False, True):
        sigma = m1_noise(1.0, delta, r, d, by_norm=by_norm)
        assert gaussian_delta(1.0, energy / sigma**2).mean() < delta


def test_theorem_4_adds_its_parts() -> None:
    found = theorem_4(400, 200, CHANGE, 20.0, tail=1e-6, failure=1e-6, exposed_delta=2e-6)
    assert found.residual == residual_bound(400, 200, CHANGE, 1e-6)
    assert found.total.epsilon == found.residual.epsilon + found.exposed.epsilon
    assert found.total.delta == pytest.approx(found.residual.delta + 2e-6 + 1e-6)
    eta = (found.sensitivity / 20.0) ** 2
    assert float(gaussian_delta(found.exposed.epsilon, eta)) == pytest.approx(2e-6, rel=1e-6)
    distance = math.sqrt(2 * (0.5 * 0.01 + 0.5 * 0.001))
    wide = math.sqrt(400) + math.sqrt(200) + math.sqrt(2 * math.log(2 / 1e-6))
    assert found.sensitivity < wide**2 / 200 * distance  # the paper's baseline, by the operator norm of M


def test_theorem_3_is_group_privacy() -> None:
    assert theorem_3(Bound(0.5, 1e-6), 1) == Bound(0.5, 1e-6)
    chain = theorem_3(Bound(0.5, 1e-6), 4)
    assert chain.epsilon == 2.0
    assert chain.delta == pytest.approx(1e-6 * math.expm1(2.0) / math.expm1(0.5))
    assert theorem_3(Bound(0.0, 0.01), 7).delta == pytest.approx(0.07)
    assert theorem_3(Bound(900.0, 1e-6), 3).delta == 1.0


@pytest.mark.parametrize(
    ("d", "r", "ratio"),
    [(64, 16, 2.52), (64, 64, 1.49), (64, 1024, 1.04), (512, 128, 2.28), (512, 4096, 1.06)],
)
def test_public_m1_needs_more_noise_than_no_projection(d: int, r: int, ratio: float) -> None:
    plain = gaussian_noise_multiplier(1.0, 1e-3)
    below, above = (public_m1_delta(1.0, plain * (ratio + half), r, d) for half in (-0.005, 0.005))
    assert above < 1e-3 < below
    assert public_m1_delta(1.0, plain, r, d) > 1e-3


def test_public_m1_by_simulation() -> None:
    rng, draws = np.random.default_rng(0), 20_000
    z = rng.standard_normal((draws, 10, 3)) / math.sqrt(3)
    energy = ((z @ z[:, :1].mT)[..., 0] ** 2).sum(1)
    assert energy.mean() == pytest.approx((3 + 10 + 1) / 3, abs=5 * energy.std() / math.sqrt(draws))
    sample = gaussian_delta(1.0, energy / 4.0)
    assert public_m1_delta(1.0, 2.0, 3, 10) == pytest.approx(
        sample.mean(), abs=5 * sample.std() / math.sqrt(draws)
    )


def test_refuses_outside_its_conditions() -> None:
    with pytest.raises(PrivacyError, match="spread="):
        residual_bound(400, 5, ColumnChange(3, 0.5, 0.9, 0.5), 1e-6)
    with pytest.raises(PrivacyError, match="out of range"):
        residual_bound(4, 8, ColumnChange(4, 0.5, 0.9, 0.9), 1e-6)
    for bad in ((-1, 0.5, 0.9, 0.9), (3, 1.5, 0.9, 0.9), (3, 0.5, 0.0, 0.9), (3, 0.5, 0.9, 1.1)):
        with pytest.raises(PrivacyError):
            ColumnChange(*bad)
    with pytest.raises(PrivacyError, match="noise"):
        theorem_4(400, 200, CHANGE, 0.0, tail=1e-6, failure=1e-6, exposed_delta=1e-6)
    with pytest.raises(PrivacyError):
        exposed_sensitivity(10, 4, 11, 1.0, 0.0, 0.05)
    with pytest.raises(PrivacyError):
        theorem_3(Bound(1.0, 0.1), 0)
    with pytest.raises(PrivacyError):
        public_m1_delta(1.0, 1.0, 4, 1)
