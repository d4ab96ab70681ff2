"""Laws of the fixed-rank manifold, each against its dense definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from fixed_rank_cases import (
    MODULES,
    Case,
    a_point,
    a_tangent,
    assert_close,
    assert_tangent,
    assert_valid,
    cases,
    dense_projection,
    dense_truncation,
    laws,
    normal,
    seeded,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from privlora.errors import ModelError
from privlora.geometry.fixed_rank import (
    Point,
    Tangent,
    average,
    factors,
    point_at_zero,
    point_from_factors,
    project,
    project_dense,
    random_point,
    retract,
    standard_normal_tangent,
    tangent_dimension,
    transport,
)

# --- projection and coordinates ---


@laws
@given(cases())
def test_projection_is_the_orthogonal_projection(case: Case) -> None:
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    point = a_point(m, n, r, spectrum, g)
    G, H, xi = normal(g, MODULES, m, n), normal(g, MODULES, m, n), a_tangent(point, g)
    projected = project_dense(point, G)
    X = projected.embedding(point)
    assert_tangent(point, projected)
    assert_close(X, dense_projection(point, G), G)
    assert_close(project_dense(point, X).embedding(point), X, G)  # idempotent
    assert_close((X * H).sum(), (G * project_dense(point, H).embedding(point)).sum(), G.norm() * H.norm())
    # Optimal: the residual is normal to every tangent vector, and any displacement lengthens it.
    residual = G - X
    assert abs((residual * xi.embedding(point)).sum()) < 1e-11
    for size in (1e-3, -1e-3):
        assert (G - projected.add(xi, alpha=size).embedding(point)).norm() > residual.norm()


def test_projection_stays_orthogonal_when_most_of_the_gradient_lies_along_the_point() -> None:
    g = seeded(13)
    point = a_point(9, 7, 3, "plain", g)
    G = 1e8 * point.embedding() + normal(g, MODULES, 9, 7)
    assert_tangent(point, project_dense(point, G))


@laws
@given(cases())
def test_coordinates_are_isometric(case: Case) -> None:
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    point = a_point(m, n, r, spectrum, g)
    xi, eta = a_tangent(point, g), a_tangent(point, g)
    X, Y = xi.embedding(point), eta.embedding(point)
    assert_close(xi.inner(eta), (X * Y).sum(dim=(-2, -1)), X.norm() * Y.norm())
    assert_close(xi.norm_squared(), X.square().sum(dim=(-2, -1)), X.norm() ** 2)
    assert_close(xi.add(eta, alpha=-0.5).embedding(point), X - 0.5 * Y, X)
    assert_close(xi.scale(3.0).embedding(point), 3 * X, X)
    per_module = torch.tensor([2.0, -1.0], dtype=torch.float64)
    assert_close(xi.scale(per_module).embedding(point), per_module[:, None, None] * X, X)
    assert Tangent.zero(point).embedding(point).count_nonzero() == 0


@laws
@given(cases())
def test_squared_norm_from_the_products_that_training_computes(case: Case) -> None:
    """||P(G)||^2 = ||GV||^2 + ||G^T U||^2 - ||U^T G V||^2 (PRISM Eq. 15 in orthonormal coordinates)."""
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    point = a_point(m, n, r, spectrum, g)
    G = normal(g, MODULES, m, n)
    P, Q = G @ point.V, G.mT @ point.U
    squares = [X.square().sum(dim=(-2, -1)) for X in (P, Q, point.U.mT @ P)]
    assert_close(project(point, P, Q).norm_squared(), squares[0] + squares[1] - squares[2], G.norm() ** 2)


@laws
@given(cases(), st.sampled_from(("far", "near", "same")))
def test_transport_is_the_projection_at_the_new_point(case: Case, distance: str) -> None:
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    old = a_point(m, n, r, spectrum, g)
    xi = a_tangent(old, g)
    new = {
        "far": random_point(MODULES, m, n, r, g),
        "near": retract(old, a_tangent(old, g), 1e-3),
        "same": old,
    }
    moved, X = transport(old, new[distance], xi), xi.embedding(old)
    assert_tangent(new[distance], moved)
    assert_close(moved.embedding(new[distance]), dense_projection(new[distance], X), X)


# --- retraction and average ---


def crippled(tangent: Tangent, kind: str) -> Tangent:
    """The tangent vector with blocks set to zero, or with one direction left in Up and Vp."""
    if kind == "zero":
        return tangent.scale(0.0)
    if kind == "M only":
        return Tangent(tangent.M, 0 * tangent.Up, 0 * tangent.Vp)
    if kind == "Up only":
        return Tangent(0 * tangent.M, tangent.Up, 0 * tangent.Vp)
    if kind == "rank one":
        same = torch.ones_like(tangent.M[:, :1])
        return Tangent(0 * tangent.M, tangent.Up[:, :, :1] @ same, tangent.Vp[:, :, :1] @ same)
    return tangent


@settings(laws, max_examples=200)
@given(
    cases(),
    st.sampled_from(("full", "zero", "M only", "Up only", "rank one")),
    st.sampled_from((-0.5, 1.0, 1e-6, 1e4, 0.0)),
)
def test_retraction_is_the_truncated_svd(case: Case, kind: str, step: float) -> None:
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    point = a_point(m, n, r, spectrum, g)
    xi = crippled(a_tangent(point, g), kind)
    target = point.embedding() + step * xi.embedding(point)
    expected = dense_truncation(target, r)
    new = retract(point, xi, step)
    assert_valid(new)
    assert_close(new.embedding(), expected, target, tol=1e-11)


@laws
@given(
    cases(), st.sampled_from((1, 2, 5)), st.sampled_from((0, 1, 40)), st.sampled_from((-0.5, 1e-6, 1e4, 0.0))
)
def test_a_step_at_some_leading_triplets_keeps_the_others(case: Case, k: int, more: int, step: float) -> None:
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    point = a_point(m, n, r, spectrum, g).extended(more)
    assert point.rank == r + min(more, m - r, n - r)
    for _ in range(3):
        frame, rest = point.split(min(k, r))
        assert_close(frame.joined(rest).embedding(), point.embedding(), tol=0.0)
        xi = a_tangent(frame, g)
        target = point.embedding() + step * xi.embedding(frame)
        point = retract(point, xi, step)
        assert_valid(point)
        assert_close(point.embedding(), dense_truncation(target, point.rank), target, tol=1e-11)


def test_retraction_is_first_order_exact() -> None:
    g = seeded(0)
    point = a_point(20, 14, 4, "plain", g)
    xi = a_tangent(point, g).scale(0.1)
    Z, X = point.embedding(), xi.embedding(point)
    sizes = [10**-k for k in (1, 1.5, 2, 2.5, 3)]
    errors = [float((retract(point, xi, t).embedding() - Z - t * X).norm()) for t in sizes]
    slope = stats.linregress([math.log(t) for t in sizes], [math.log(e) for e in errors]).slope
    assert slope == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("spectrum", ["plain", "zero"])
def test_a_step_of_zero_stays(spectrum: str) -> None:
    g = seeded(1)
    point = a_point(9, 7, 3, spectrum, g)
    same = retract(point, a_tangent(point, g), 0.0)
    assert_close(same.U, point.U, tol=1e-13)
    assert_close(same.S, point.S, tol=1e-13)
    if spectrum == "zero":  # Z = 0 does not tie the signs of V to those of U
        assert_close(same.V.abs(), point.V.abs(), tol=1e-13)
    else:
        assert_close(same.V, point.V, tol=1e-13)


@laws
@given(cases(), st.sampled_from(("far", "near", "same")), st.sampled_from((0.0, 0.1, 0.5, 1.0)))
def test_average_is_the_truncated_svd(case: Case, distance: str, weight: float) -> None:
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    first = a_point(m, n, r, spectrum, g)
    second = {
        "far": a_point(m, n, r, "1e4", g),
        "near": retract(first, a_tangent(first, g), 1e-4),
        "same": first,
    }
    target = (1 - weight) * first.embedding() + weight * second[distance].embedding()
    mean = average((first, second[distance]), weight)
    assert_valid(mean)
    assert_close(mean.embedding(), dense_truncation(target, r), target, tol=1e-11)


# --- points and factors ---


def a_gauge(r: int, cond: float, generator: torch.Generator) -> Tensor:
    left, right = (torch.linalg.qr(normal(generator, MODULES, r, r)).Q for _ in range(2))
    return (left * torch.logspace(0, math.log10(cond), r).double()) @ right


@laws
@given(cases(), st.sampled_from((1.0, 10.0, 1e2, 1e4)))
def test_every_gauge_gives_the_same_point(case: Case, cond: float) -> None:
    m, n, r, _, seed = case
    g = seeded(seed)
    point = a_point(m, n, r, "plain", g)
    largest = point.U.abs().topk(2, dim=-2).values
    assume(bool((largest[:, 0] - largest[:, 1] > 1e-6).all()))  # a tie leaves the sign undetermined
    expected = point_from_factors(*factors(point))
    R = a_gauge(r, cond, g)
    A, B = factors(point)
    actual = point_from_factors(A @ R, B @ torch.linalg.inv(R).mT)
    for a, b in ((actual.U, expected.U), (actual.S, expected.S), (actual.V, expected.V)):
        assert (a - b).abs().max() < 1e-12 * max(
            1.0, cond / 10
        )  # forming A R and B R^-T rounds by eps * cond


@laws
@given(cases(), st.booleans())
def test_factors_reproduce_the_point(case: Case, balanced: bool) -> None:
    m, n, r, spectrum, seed = case
    g = seeded(seed)
    point = a_point(m, n, r, spectrum, g)
    A, B = factors(point, balanced)
    Z = point.embedding()
    assert_close(A @ B.mT, Z, Z)
    if balanced:
        assert_close(A.mT @ A, B.mT @ B, A.norm() ** 2)
    else:
        assert_close(B, point.V)
    again = point_from_factors(A, B, completion=g)
    assert_valid(again)
    assert_close(again.embedding(), Z, Z)


@pytest.mark.parametrize("present", [0, 1, 2])
def test_missing_directions_are_drawn_and_present_ones_kept(present: int) -> None:
    g = seeded(3)
    A = normal(g, MODULES, 9, present) @ normal(g, MODULES, present, 3)
    B = normal(g, MODULES, 5, 3)
    with pytest.raises(ModelError, match=r"A \(2, 9, 3\) is rank-deficient in 2 module"):
        point_from_factors(A, B)
    point, same, other = (point_from_factors(A, B, completion=seeded(s)) for s in (1, 1, 2))
    assert_valid(point)
    assert_close(point.embedding(), A @ B.mT, A.norm() * B.norm())
    assert_close(point.U @ (point.U.mT @ A), A, A)
    assert_close(point.V @ (point.V.mT @ B), B, B)
    assert torch.equal(point.U, same.U)
    assert (point.U @ point.U.mT - other.U @ other.U.mT).norm() > 0.1


def test_the_lora_start_keeps_the_subspace_of_lora_a() -> None:
    lora_A = normal(seeded(4), MODULES, 3, 12)
    start = point_from_factors(torch.zeros(MODULES, 8, 3).double(), lora_A.mT, completion=seeded(5))
    assert_valid(start)
    assert start.S.count_nonzero() == 0
    assert_close(lora_A @ start.V @ start.V.mT, lora_A, lora_A)


def test_point_at_zero_spans_the_given_bases() -> None:
    g = seeded(6)
    U0, V0 = normal(g, MODULES, 8, 3), normal(g, MODULES, 5, 3)
    point = point_at_zero(U0, V0)
    assert_valid(point)
    assert point.S.count_nonzero() == 0
    assert_close(point.U @ (point.U.mT @ U0), U0, U0)
    assert_close(point.V @ (point.V.mT @ V0), V0, V0)
    with pytest.raises(ModelError, match="V0"):
        point_at_zero(U0, torch.zeros_like(V0))


def test_a_rank_above_the_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"rank 4 exceeds min\(m, n\) = 3"):
        point_from_factors(torch.ones(1, 3, 4), torch.ones(1, 9, 4))
    with pytest.raises(ModelError, match="rank 4"):
        point_at_zero(torch.ones(1, 9, 4), torch.ones(1, 3, 4))


# --- noise ---


def noise_map(point: Point) -> Tensor:
    """The linear map from standard normal draws to the dense noise, (m n) x draws, column by column."""
    (_, m, r), n = point.U.shape, point.V.shape[-2]
    draws = r * (r + m + n)
    batch = Point(*(x.expand(draws, *x.shape[1:]) for x in (point.U, point.S, point.V)))
    blocks = iter(torch.eye(draws, dtype=torch.float64).split([r * r, m * r, n * r], dim=-1))
    noise = standard_normal_tangent(batch, lambda shape: next(blocks).reshape(shape))
    return noise.embedding(batch).flatten(1).mT


@laws
@given(cases())
def test_noise_covariance_is_the_projector(case: Case) -> None:
    """So noise reaches, with equal variance, every direction a gradient can, at any conditioning."""
    m, n, r, spectrum, seed = case
    m, n = min(m, 8), min(n, 8)
    point = a_point(m, n, r, spectrum, seeded(seed), modules=1)
    noise = noise_map(point)
    ambient = torch.eye(m * n, dtype=torch.float64).reshape(m * n, m, n)
    projector = dense_projection(point, ambient).flatten(1).mT
    assert (noise @ noise.mT - projector).abs().max() < 1e-13
    assert torch.linalg.matrix_rank(projector) == tangent_dimension(m, n, r)


@pytest.mark.parametrize("spectrum", ["plain", "1e8", "deficient", "zero"])
def test_squared_norm_of_the_noise_is_chi_square(spectrum: str) -> None:
    m, n, r, draws = 7, 5, 2, 4000
    point = a_point(m, n, r, spectrum, seeded(7), modules=1)
    batch = Point(*(x.expand(draws, *x.shape[1:]) for x in (point.U, point.S, point.V)))
    energy = a_tangent(batch, seeded(8)).norm_squared().numpy()
    law = stats.chi2(tangent_dimension(m, n, r)).cdf
    assert stats.kstest(energy, law).pvalue > 0.01
    for wrong_variance in (2 / 3, 3 / 2):
        assert stats.kstest(wrong_variance * energy, law).pvalue < 1e-9
    for wrong_dimension in (-1, 1):
        wrong = stats.chi2(tangent_dimension(m, n, r) + wrong_dimension).cdf
        assert stats.kstest(energy, wrong).pvalue < 1e-9


# --- batching, memory and single precision ---


def test_modules_of_a_batch_do_not_mix() -> None:
    g = seeded(9)
    point = a_point(9, 7, 3, "plain", g)
    xi = a_tangent(point, g)
    both = retract(point, xi, -0.3).embedding()
    second = Point(point.U[1:], point.S[1:], point.V[1:])
    alone = retract(second, Tangent(xi.M[1:], xi.Up[1:], xi.Vp[1:]), -0.3)
    assert_close(alone.embedding(), both[1:])


def test_nothing_dense_is_formed() -> None:
    """A dense float32 matrix of this shape would take 40 GB."""
    m = n = 100_000
    g = seeded(10)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=g)

    point = random_point(1, m, n, 2, g, torch.float32)
    xi = project(point, draw((1, m, 2)), draw((1, n, 2))).add(standard_normal_tangent(point, draw))
    new = retract(point, xi, -0.1)
    assert_valid(average((point, new), 0.5), tol=1e-5)
    assert_tangent(new, transport(point, new, xi), tol=1e-4)
    assert_close(point_from_factors(*factors(new)).S, new.S, new.S, tol=1e-4)


def test_float32_agrees_with_float64() -> None:
    g = seeded(11)
    point64 = a_point(256, 128, 16, "1e4", g)
    xi64 = a_tangent(point64, g)
    point = Point(point64.U.float(), point64.S.float(), point64.V.float())
    xi = Tangent(xi64.M.float(), xi64.Up.float(), xi64.Vp.float())
    G = normal(g, MODULES, 256, 128)
    exact = project_dense(point64, G).embedding(point64)
    assert_close(project_dense(point, G.float()).embedding(point).double(), exact, exact, tol=1e-5)
    target = point64.embedding() - 0.01 * xi64.embedding(point64)
    new64, new = retract(point64, xi64, -0.01), retract(point, xi, -0.01)
    assert new.U.dtype == torch.float32
    assert_close(new.embedding().double(), new64.embedding(), target, tol=1e-5)
    moved = transport(point64, new64, xi64).embedding(new64)
    assert_close(transport(point, new, xi).embedding(new).double(), moved, moved, tol=1e-5)


def test_float32_orthonormality_does_not_drift() -> None:
    g = seeded(12)
    point = random_point(3, 40, 30, 4, g, torch.float32)
    for _ in range(300):
        xi = standard_normal_tangent(point, lambda shape: torch.randn(shape, generator=g))
        point = retract(point, xi, -0.1)
    assert_valid(point, tol=2e-6)
