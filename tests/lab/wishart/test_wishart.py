"""The Wishart mechanism keeps its law, states what an attack on its outputs confirms, and refuses misuse."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torch import Tensor

from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.vector import VectorQuery, ball_noise_alignment, exact_delta
from privlora.lab.wishart.mechanism import (
    WishartProjection,
    ball_noise,
    normalised_mean,
    projected_gradient_descent,
    retrieval_scores,
)


def unit(d: int, *entries: float) -> Tensor:
    v = torch.zeros(d, dtype=torch.float64)
    v[: len(entries)] = torch.tensor(entries, dtype=torch.float64)
    return v / v.norm()


def released(v: Tensor, r: int, draws: int) -> Tensor:
    """Releases (draws, d) under as many projections; the same ones for every v."""
    return torch.stack(
        [
            WishartProjection(len(v), r, insecure_seed=s).release_vector(v, alignment=0.999, delta=0.1).value
            for s in range(draws)
        ]
    )


def test_mean_and_spread_of_a_vector_release() -> None:
    v, draws, r = unit(5, 0.6, 0.8), 800, 4
    values = released(v, r, draws)
    error = 5 * values.std(0) / math.sqrt(draws)
    assert ((values.mean(0) - v).abs() < error).all()
    c = unit(5, 1.0, 0.0, 1.0) * 3
    scores, bound = retrieval_scores(c[None], values[0], r)
    assert scores[0] == pytest.approx(float(c @ values[0]))
    variance = float((values @ c).var())
    expected = float(c @ c + (c @ v) ** 2) / r
    assert variance == pytest.approx(expected, rel=5 * math.sqrt(6 / draws))
    assert float(bound[0]) ** 2 >= expected


def test_an_attack_on_outputs_finds_the_stated_delta() -> None:
    """Likelihoods by Lemma 9 of what the object releases, at v and at a v' aligned 0.9: (d, r, epsilon) = (6, 3, 1)."""
    d, r, rho, epsilon, draws = 6, 3, 0.9, 1.0, 2000
    v, w = unit(d, 1.0), unit(d, rho, math.sqrt(1 - rho**2))
    y = r * torch.stack(
        [
            WishartProjection(d, r, insecure_seed=s).release_vector(v, alignment=rho, delta=0.3).value
            for s in range(draws)
        ]
    )  # times r: as if Z had unit variances

    def log_density(u: Tensor) -> Tensor:
        inner = y @ u
        value = (r - d - 1) / 2 * inner.clamp_min(1e-300).log() - y.square().sum(1) / (2 * inner)
        return torch.where(inner > 0, value, -math.inf)

    excess = -torch.expm1(epsilon - (log_density(v) - log_density(w)))
    excess = excess.clamp_min(0)
    stated = exact_delta(epsilon, VectorQuery(d, r, rho))
    assert float(excess.mean()) == pytest.approx(stated, abs=5 * float(excess.std()) / math.sqrt(draws))


def test_epsilon_of_a_release_is_exact_at_its_delta() -> None:
    release = WishartProjection(40, 30).release_vector(unit(40, 1.0), alignment=0.95, delta=0.01)
    assert exact_delta(release.epsilon, VectorQuery(40, 30, 0.95)) == pytest.approx(0.01, rel=1e-6)
    assert release.value.dtype == torch.float64


def test_one_object_makes_one_release() -> None:
    v, matrix = unit(8, 1.0), torch.eye(8)[:, :2]
    ways = {
        "vector": lambda p: p.release_vector(v, alignment=0.99, delta=0.2),
        "M1": lambda p: p.project_then_noise(matrix, 1.0),
        "M2": lambda p: p.noise_then_project(matrix, 1.0),
    }
    for first in ways:
        for second in ways.values():
            projection = WishartProjection(8, 12)
            ways[first](projection)
            with pytest.raises(PrivacyError, match=f"already made a {first} release"):
                second(projection)


def test_only_m2_may_show_its_projection_and_only_afterwards() -> None:
    projection = WishartProjection(8, 4)
    with pytest.raises(PrivacyError, match="before it is used"):
        projection.publish()
    projection.noise_then_project(torch.eye(8), 1.0)
    assert projection.publish().shape == (8, 4)
    secret = WishartProjection(8, 12)
    secret.project_then_noise(torch.eye(8), 1.0)
    with pytest.raises(PrivacyError, match="made a M1 release"):
        secret.publish()
    secret = WishartProjection(8, 12)
    secret.release_vector(unit(8, 1.0), alignment=0.99, delta=0.2)
    with pytest.raises(PrivacyError, match="made a vector release"):
        secret.publish()


def test_m2_noise_lies_in_the_range_with_the_stated_variance() -> None:
    """Z^+ (Y - M V) = Z^T E has covariance sigma^2 Z^T Z."""
    v = torch.randn(20, 1500, dtype=torch.float64)
    projection = WishartProjection(20, 3, insecure_seed=4)
    y = projection.noise_then_project(v, 0.7)
    z = projection.publish()
    assert torch.linalg.matrix_rank(y) == 3
    inner = torch.linalg.pinv(z) @ y - z.mT @ v
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z), inner, upper=False) / 0.7
    assert kstest(white.flatten().numpy(), "norm").pvalue > 1e-3


def test_m1_noise_is_white_and_of_the_stated_size() -> None:
    v = torch.nn.functional.normalize(torch.randn(10, 1500), dim=0)
    y = WishartProjection(10, 4, insecure_seed=4).project_then_noise(v, 50.0)
    clean = WishartProjection(10, 4, insecure_seed=4)
    clean.noise_then_project(v, 50.0)
    z = clean.publish()
    noise = (y - z @ (z.mT @ v.double() / v.double().norm(dim=0))) / 50.0
    assert kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3


def test_no_seed_fixes_a_projection() -> None:
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(WishartProjection(4, 8).release_vector(unit(4, 1.0), alignment=0.999, delta=0.2).value)
    assert not torch.equal(*outputs)


def test_refuses_queries_that_theorem_1_does_not_cover() -> None:
    with pytest.raises(PrivacyError, match="not a vector"):
        WishartProjection(8, 12).release_vector(torch.eye(8), alignment=0.9, delta=0.1)
    for query in (2 * unit(8, 1.0), torch.zeros(8), torch.full((8,), math.nan), unit(7, 1.0)):
        with pytest.raises(PrivacyError):
            WishartProjection(8, 12).release_vector(query, alignment=0.9, delta=0.1)
    with pytest.raises(PrivacyError, match="too small"):
        WishartProjection(8, 2).release_vector(unit(8, 1.0), alignment=0.5, delta=1e-6)
    with pytest.raises(PrivacyError, match="norm is not 1"):
        WishartProjection(8, 12).project_then_noise(2 * torch.eye(8), 1.0)
    for release in (WishartProjection(8, 12).project_then_noise, WishartProjection(8, 12).noise_then_project):
        with pytest.raises(PrivacyError, match="noise_std"):
            release(torch.eye(8), 0.0)
    with pytest.raises(PrivacyError):
        WishartProjection(8, 0)


def test_ball_noise_reaches_its_alignment() -> None:
    d, v, w = 500, unit(500, 1.0), unit(500, 0.5, math.sqrt(0.75))
    alignments = []
    for seed in range(600):
        moved = [ball_noise(u, 1.0, insecure_seed=seed) for u in (v, w)]
        alignments.append(float(moved[0] @ moved[1]))
    found = torch.tensor(alignments)
    assert float(found.mean()) == pytest.approx(0.7493, abs=5 * float(found.std()) / math.sqrt(600))
    assert (found > ball_noise_alignment(0.5, 1.0, d, 0.01)).float().mean() > 0.99
    with pytest.raises(PrivacyError):
        ball_noise(v, 0.0)


def test_ball_noise_is_uniform_in_its_ball() -> None:
    """In the plane the direction of v + z sees z: it stays within asin(gamma), and its law is that of a uniform z."""
    angles = []
    for seed in range(800):
        moved = ball_noise(unit(2, 1.0), 0.5, insecure_seed=seed)
        angles.append(math.atan2(float(moved[1]), float(moved[0])))
    uniform = torch.rand(20_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    inside = 0.5 * uniform[uniform.norm(dim=1) <= 1]
    assert max(abs(a) for a in angles) <= math.asin(0.5)
    assert ks_2samp(angles, torch.atan2(inside[:, 1], 1 + inside[:, 0]).numpy()).pvalue > 1e-3


def test_normalised_mean() -> None:
    rows = torch.randn(50, 4) + torch.tensor([5.0, 0, 0, 0])
    mean, alignment = normalised_mean(rows, 0.5)
    assert float(mean.norm()) == pytest.approx(1.0)
    assert alignment == 1 - 2 / 25**2
    short = torch.nn.functional.normalize(rows, dim=1).double().mean(0)
    assert torch.allclose(mean, short / short.norm())
    with pytest.raises(PrivacyError, match="shorter"):
        normalised_mean(torch.randn(400, 20), 0.9)
    with pytest.raises(PrivacyError):
        normalised_mean(rows * math.inf, 0.5)


def test_descent_draws_a_fresh_projection_each_step() -> None:
    target = unit(6, 1.0, 2.0) * 10
    start = torch.zeros(6, dtype=torch.float64)
    result = projected_gradient_descent(
        lambda w: w - target, start, learning_rate=1.0, steps=12, rank=200, alignment=0.9999, delta=1e-4,
        insecure_seed=0,
    )  # fmt: skip
    assert float((result.weights - target).norm()) < 2
    once = WishartProjection(6, 200).release_vector(unit(6, 1.0), alignment=0.9999, delta=1e-4 / 12)
    assert result.epsilon == pytest.approx(12 * once.epsilon)
    assert result.delta == 1e-4
    private = [
        projected_gradient_descent(
            lambda w: w - target, start, learning_rate=1.0, steps=1, rank=200, alignment=0.9999, delta=1e-4
        ).weights
        for _ in range(2)
    ]
    assert not torch.equal(*private)
    with pytest.raises(PrivacyError, match="no direction"):
        projected_gradient_descent(
            lambda w: 0 * w, start, learning_rate=1.0, steps=1, rank=200, alignment=0.9999, delta=1e-4
        )
