"""Theorem 5 and its neighbours: reference values, order of the bounds, simulation of M2, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import beta, kstest

import privlora.lab.wishart.bounds.noisy as noisy
from privlora.accounting import PoissonSampling
from privlora.accounting.projection.gaussian import gaussian_delta
from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier
from privlora.lab.wishart.bounds.noisy import (
    Form,
    captured_tail,
    corollary_1,
    loss_given_projection,
    split_noise_multiplier,
    theorem_5,
    theorem_5_noise_multiplier,
)


def mixture(epsilon: float, sigma: float, rank: int, dimension: int) -> float:
    """E delta_G(epsilon; X / sigma^2), X ~ Beta(r/2, (d-r)/2): the exact delta for differences of rank one."""
    energy = (np.arange(20_000) + 0.5) / 20_000
    density = beta.pdf(energy, rank / 2, (dimension - rank) / 2)
    return float((gaussian_delta(epsilon, energy / sigma**2) * density).mean())


@pytest.mark.parametrize("r", [3, 12])
def test_lemma_16(r: int) -> None:
    """The loss of simulated releases M (V + E), by the densities of their columns with pseudo-inverses of M^2."""
    d, m, sigma, draws = 9, 2, 0.7, 20_000
    rng = np.random.default_rng(r)
    z = rng.standard_normal((d, r)) / math.sqrt(r)
    v, other = rng.standard_normal((2, d, m))
    whole = z @ z.T
    inverse = np.linalg.pinv(whole @ whole, rcond=1e-9, hermitian=True) / sigma**2
    y = whole @ (v + sigma * rng.standard_normal((draws, d, m)))
    squares = [(x * (inverse @ x)).sum((1, 2)) for x in (y - whole @ v, y - whole @ other)]
    losses = (squares[1] - squares[0]) / 2
    mean, variance = loss_given_projection(z, v - other, sigma)
    assert losses.mean() == pytest.approx(mean, abs=5 * math.sqrt(variance / draws))
    assert losses.var() == pytest.approx(variance, rel=0.05)
    assert kstest((losses - mean) / math.sqrt(variance), "norm").pvalue > 1e-3
    if r >= d:
        assert variance == pytest.approx((np.linalg.norm(v - other) / sigma) ** 2)
    with pytest.raises(PrivacyError):
        loss_given_projection(z, v[:-1], sigma)


@pytest.mark.parametrize(
    ("epsilon", "sigma", "r", "d", "k", "s", "printed", "exact", "rank_one"),
    [
        (1, 0.75, 64, 2048, 1, 0.07, 5.227679e-3, 3.885474e-4, 2.528828e-6),
        (1, 0.75, 64, 2048, 10, 0.07, 5.227881e-3, 3.887493e-4, 2.528828e-6),
        (4, 0.25, 256, 2048, 1, 0.2, 9.072881e-2, 4.221612e-2, 6.166476e-3),
        (1, 1.2, 4, 20, 1, 0.6, 1.444241e-1, 3.061745e-2, 2.344992e-3),
    ],
)
def test_theorem_5_at_fixed_threshold(
    epsilon: float, sigma: float, r: int, d: int, k: int, s: float,
    printed: float, exact: float, rank_one: float,
) -> None:  # fmt: skip
    forms: tuple[tuple[Form, float], ...] = (
        ("two-sided", printed),
        ("exact", exact),
    )
    for form, delta in forms:
        bound = theorem_5(epsilon, sigma, r, d, k, threshold=s, form=form)
        assert bound.delta == pytest.approx(delta, rel=5e-7)
        assert bound.delta == bound.gaussian + bound.failure
        best = theorem_5(epsilon, sigma, r, d, k, form=form)
        assert rank_one <= best.delta <= bound.delta
    assert mixture(epsilon, sigma, r, d) == pytest.approx(rank_one, rel=1e-5)


@pytest.mark.parametrize(
    ("d", "r", "epsilon", "printed", "exact"),
    [
        (64, 4, 1, (0.7649, 0.8499), (0.6452, 0.7159)),
        (64, 32, 1, (1.1087, 1.1351), (0.9319, 0.9536)),
        (256, 32, 1, (0.6530, 0.6975), (0.5498, 0.5869)),
        (2048, 16, 1, (0.1984, 0.2192), (0.1673, 0.1847)),
        (2048, 64, 0.5, (0.3182, 0.3379), (0.2538, 0.2694)),
        (2048, 64, 1, (0.3012, 0.3198), (0.2535, 0.2691)),
        (2048, 64, 4, (0.2741, 0.2911), (0.2527, 0.2684)),
        (2048, 256, 1, (0.5067, 0.5228), (0.4260, 0.4394)),
        (2048, 1843, 1, (1.1566, 1.1600), (0.9711, 0.9739)),
        (4096, 8, 1, (0.1196, 0.1352), (0.1009, 0.1139)),
        (4096, 64, 4, (0.1946, 0.2069), (0.1794, 0.1908)),
    ],
)
def test_noise_of_theorem_5(
    d: int, r: int, epsilon: float, printed: tuple[float, float], exact: tuple[float, float]
) -> None:
    """Over that of the plain Gaussian mechanism, at delta = 1e-5, for differences of rank 1 and 128."""
    plain = gaussian_noise_multiplier(epsilon, 1e-5)
    forms: tuple[tuple[Form, tuple[float, float]], ...] = (("two-sided", printed), ("exact", exact))
    for form, ratios in forms:
        for k, ratio in zip((1, 128), ratios, strict=True):
            sigma = theorem_5_noise_multiplier(epsilon, 1e-5, r, d, k, form=form)
            assert sigma / plain == pytest.approx(ratio, abs=6e-5)


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 8.848), (1, 4.444), (4, 1.174)])
def test_printed_form_costs_something_without_projection(epsilon: float, sigma: float) -> None:
    found = theorem_5_noise_multiplier(epsilon, 1e-5, 8, 8, 1, form="two-sided")
    assert found == pytest.approx(sigma, abs=5e-4)
    plain = gaussian_noise_multiplier(epsilon, 1e-5)
    assert theorem_5_noise_multiplier(epsilon, 1e-5, 8, 8, 1) == pytest.approx(plain, rel=1e-8)


def test_any_rank_tail() -> None:
    assert float(captured_tail(0.08, 64, 2048, 1)) == pytest.approx(2.844e-11, rel=2e-4)
    assert float(captured_tail(0.08, 64, 2048, None)) == pytest.approx(7.687e-11, rel=2e-4)
    s = np.linspace(0, 1, 30)
    tails = captured_tail(s, 4, 20, None)
    assert (captured_tail(s, 4, 20, 1) <= tails + 1e-15).all()
    assert (np.diff(tails) <= 1e-12).all()
    assert tails[0] == 1
    assert tails[-1] == 0
    assert captured_tail(s, 20, 20, 1)[:-1].tolist() == [1.0] * 29


@pytest.mark.parametrize("k", [1, 2, 6])
def test_simulated_energy_stays_below_the_tail(k: int) -> None:
    """Equal singular values, (d, r) = (60, 6); exact at k = 1, and any rank is covered by the rank-free tail."""
    rng, draws = np.random.default_rng(k), 4000
    q = np.linalg.qr(rng.standard_normal((draws, 60, 6))).Q
    energy = (q[:, :k] ** 2).sum((1, 2)) / k
    observed = (energy > 0.2).mean()
    error = 5 * math.sqrt(observed * (1 - observed) / draws)
    for tail in (captured_tail(0.2, 6, 60, k), captured_tail(0.2, 6, 60, None)):
        assert observed <= float(tail) + error
    if k == 1:
        assert observed == pytest.approx(float(captured_tail(0.2, 6, 60, 1)), abs=error)


def test_simulated_release() -> None:
    """Lemma 16 by the output itself: densities of M (V + E) with pseudo-inverses, (d, r, sigma) = (20, 4, 0.3)."""
    rng, draws, sigma = np.random.default_rng(5), 6000, 0.3
    z = rng.standard_normal((draws, 20, 4)) / 2
    m = z @ z.mT
    v = np.zeros((20, 2))
    v[0] = 0.6, 0.8  # rank one, norm one; the neighbouring query is zero
    y = m @ (v + sigma * rng.standard_normal((draws, 20, 2)))
    inverse = np.linalg.pinv(m @ m, rcond=1e-10)
    squares = [np.einsum("bim,bij,bjm->b", y - c, inverse, y - c) for c in (m @ v, 0)]
    loss = (squares[1] - squares[0]) / (2 * sigma**2)
    excess = np.clip(-np.expm1(1.0 - loss), 0, None)
    assert excess.mean() == pytest.approx(0.2913834, abs=5 * excess.std() / math.sqrt(draws))
    assert mixture(1.0, sigma, 4, 20) == pytest.approx(0.2913834, abs=1e-6)


def test_theorem_5_lies_between_exact_and_plain() -> None:
    for r, d, sigma, epsilon in ((4, 20, 0.3, 2.0), (64, 256, 1.0, 0.5), (200, 256, 2.0, 1.0)):
        bound = theorem_5(epsilon, sigma, r, d, None).delta
        assert mixture(epsilon, sigma, r, d) <= bound <= float(gaussian_delta(epsilon, sigma**-2))


def test_corollary_1_keeps_its_promise() -> None:
    for r, d, sigma in ((1000, 200_000, 0.75), (64, 2048, 0.3), (2000, 10**6, 2.0)):
        promise = corollary_1(1.0, sigma, r, d, 1)
        assert promise.amplifies
        at = theorem_5(1.0, sigma, r, d, 1, threshold=promise.threshold, form="two-sided")
        assert at.gaussian == pytest.approx(promise.baseline / 2, rel=1e-9)
        assert at.failure <= promise.failure
        assert at.delta < promise.baseline
    assert not corollary_1(1.0, 3.0, 60, 64, 1).amplifies
    assert not corollary_1(1.0, 3.0, 64, 64, 1).amplifies


def test_a_frozen_projection_is_not_covered_because_a_gradient_can_lie_in_its_range() -> None:
    """The record with loss 1/2 |W - W0|^2 has the gradient W - W0 at the second step: all of it is captured."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((8, 200))
    second_gradient = rng.standard_normal((30, 200)) @ a.T @ a
    captured = {
        name: np.linalg.norm(second_gradient @ np.linalg.qr(basis.T).Q) ** 2
        / np.linalg.norm(second_gradient) ** 2
        for name, basis in (("frozen", a), ("fresh", rng.standard_normal((8, 200))))
    }
    assert captured["frozen"] == pytest.approx(1.0)
    assert captured["fresh"] < 0.15


def test_refuses_what_is_no_argument() -> None:
    for bad in ((0.0, 1.0, 4, 8, 1), (1.0, 0.0, 4, 8, 1), (1.0, 1.0, 0, 8, 1), (1.0, 1.0, 4, 8, 0)):
        with pytest.raises(PrivacyError):
            theorem_5(*bad)
    with pytest.raises(PrivacyError):
        theorem_5(1.0, 1.0, 4, 8, 1, threshold=0.0)
    with pytest.raises(PrivacyError):
        theorem_5_noise_multiplier(1.0, 0.0, 4, 8, 1)
    with pytest.raises(PrivacyError):
        captured_tail(1.5, 4, 8, 1)


@pytest.fixture
def noise_by_delta(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """Plain calibration replaced by sigma = 1 - log10(delta), to be fast."""

    def calibrate(sampling: object, steps: object, target: object, delta: float) -> SimpleNamespace:
        return SimpleNamespace(noise_multiplier=1 - math.log10(delta))

    monkeypatch.setattr(noisy, "calibrate_noise_multiplier", calibrate)
    return lambda delta: calibrate(None, None, None, delta).noise_multiplier


def test_split_takes_the_best_share_of_delta(noise_by_delta: Callable[[float], float]) -> None:
    def with_share(share: float, ranks: int) -> float:
        energy = beta.isf(share * 1e-5 / (500 * ranks), 32, 992)
        return noise_by_delta((1 - share) * 1e-5) * energy**0.5

    for ranks in (1, 128):
        best = min(with_share(share, ranks) for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5))
        found = split_noise_multiplier(
            PoissonSampling(0.02), 500, 2.0, 1e-5, ((64, 2048),), gradient_rank=ranks
        )
        assert found == pytest.approx(best, rel=1e-9)


def test_split_sums_the_failures_of_layers_and_never_exceeds_no_projection(
    noise_by_delta: Callable[[float], float],
) -> None:
    arguments = (PoissonSampling(0.02), 500, 2.0, 1e-5)
    one, two = (
        split_noise_multiplier(*arguments, sizes) for sizes in (((64, 2048),), ((64, 2048), (64, 2049)))
    )
    assert one < two < 1.02 * one
    assert split_noise_multiplier(*arguments, ((60, 64),)) == noise_by_delta(1e-5)
    assert split_noise_multiplier(*arguments, ((64, 64),)) == noise_by_delta(1e-5)
    with pytest.raises(PrivacyError, match="gradient_rank"):
        split_noise_multiplier(*arguments, ((64, 2048),), gradient_rank=0)
