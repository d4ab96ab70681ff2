"""Projection after the noise, gradient embedding perturbation, and spans in tangent coordinates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import kstest
from test_span import EXPECTED, N, decoded, dense, mechanism_on, space_of, units
from tiny_models import PUBLIC_TEXTS, everything_in_double, one_batch, tiny_model, uneven_examples
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import (
    ProjectedSpanCoordinates,
    ResidualSpanCoordinates,
    SpanCoordinates,
    SpanSpace,
    TangentCoordinates,
    TangentSpanCoordinates,
)
from privlora.coordinates.span import flattened, unit_vectors
from privlora.geometry.fixed_rank import point_from_factors
from privlora.training.gradients import micro_batch_gradients
from privlora.training.texts.public_gradients import public_gradients


def clipped(v: Tensor, norm: float) -> Tensor:
    """Rows v min(1, norm / |v|)."""
    return v * (norm / v.norm(dim=1, keepdim=True)).clamp(max=1)


def basis(space: SpanSpace, k: int) -> Tensor:
    """V (p, k), the leading directions."""
    g, gram = dense(space)
    values, vectors = (t.flip(-1)[..., :k] for t in torch.linalg.eigh(gram))
    return g.T @ vectors / values.sqrt()


def released(space: SpanSpace, captured: Captured, clipping: str, clip_norm: float = 1.0) -> Tensor:
    mechanism = mechanism_on(space, clipping, clip_norm=clip_norm)
    mechanism.accumulate(captured)
    return decoded(space, mechanism.release().vector)


def test_normalised_gradients_are_projected_with_a_ridge() -> None:
    space = space_of(ProjectedSpanCoordinates, ridge=0.3, top_k=0)
    g, k = dense(space)
    captured = units(space, 5)
    h = unit_vectors(space.inner, captured)
    mean = (h / h.norm(dim=1, keepdim=True)).sum(dim=0) / EXPECTED
    expected = g.T @ torch.linalg.solve(k + 0.3 * k.trace() / N * torch.eye(N).double(), g @ mean)
    torch.testing.assert_close(released(space, captured, "normalized"), expected, rtol=4e-4, atol=1e-9)
    own = g.norm(dim=1).median()
    assert space.norm_floor() == pytest.approx(1e-3 * float(own), rel=1e-6)


def test_clipped_gradients_are_projected_on_leading_directions() -> None:
    space = space_of(ProjectedSpanCoordinates, top_k=3)
    captured = units(space, 5)
    h = unit_vectors(space.inner, captured)
    v = basis(space, 3)
    expected = v @ v.T @ clipped(h, 2.0).sum(dim=0) / EXPECTED
    torch.testing.assert_close(released(space, captured, "flat", 2.0), expected, rtol=4e-4, atol=1e-9)


@pytest.mark.parametrize("beside", [0.0, 0.3, 1.0])
def test_what_lies_beside_the_span_counts_in_part(beside: float) -> None:
    space = space_of(ProjectedSpanCoordinates, top_k=3, beside=beside)
    vector = space.standard_normal(lambda shape: torch.randn(shape, dtype=torch.float64))
    v, whole = basis(space, 3), flattened(vector)
    along = v @ (v.T @ whole)
    torch.testing.assert_close(
        flattened(space.decode(vector)).double(), along + beside * (whole - along), rtol=4e-4, atol=1e-6
    )


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_noise_has_the_size_that_optimizers_are_told(ridge: float) -> None:
    space = space_of(ProjectedSpanCoordinates, top_k=4, ridge=ridge, beside=0.3)
    mechanism = mechanism_on(space, "flat", sigma=0.8, seed=5)
    draws = torch.stack([decoded(space, mechanism.release().vector) for _ in range(400)])
    expected = space.decoded_std(0.8 / EXPECTED)
    assert float(draws.square().mean().sqrt()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_what_is_left_of_projected_noise_has_its_law(ridge: float) -> None:
    space = space_of(ProjectedSpanCoordinates, top_k=4, ridge=ridge)
    tau = 0.8 / EXPECTED
    mechanism = mechanism_on(space, "flat", sigma=0.8, seed=5)
    v = basis(space, 4)
    values = space.span.values
    stds = tau * values / (values + ridge * dense(space)[1].trace() / N)
    draws = torch.stack([decoded(space, mechanism.release().vector) for _ in range(600)])
    torch.testing.assert_close(draws @ v @ v.T, draws, rtol=1e-5, atol=1e-8)
    squares = ((draws @ v) / stds).square().sum(dim=1)
    assert kstest(squares.numpy(), "chi2", args=(4,)).pvalue > 0.01
    assert float(draws.square().mean().sqrt()) == pytest.approx(space.decoded_std(tau), rel=0.05)


@pytest.mark.parametrize(("embedding", "residual"), [(1.0, 0.2), (50.0, 0.3), (0.01, 1e3)])
def test_both_parts_are_clipped_each_to_its_norm(embedding: float, residual: float) -> None:
    space = space_of(ResidualSpanCoordinates, top_k=3)
    space.embedding_clip, space.residual_clip = embedding, residual
    captured = units(space, 5)
    h = unit_vectors(space.inner, captured)
    v = basis(space, 3)
    e = h @ v
    expected = v @ clipped(e, embedding).sum(dim=0) + clipped(h - e @ v.T, residual).sum(dim=0)
    found = released(space, captured, "normalized")
    torch.testing.assert_close(found, expected / EXPECTED, rtol=4e-4, atol=1e-9)
    columns = space.encode(captured).columns
    assert columns.shape == (5, 3 + space.inner.dimension)
    assert float(columns.norm(dim=1).max()) <= 1 + 1e-12
    parts = columns.split([3, space.inner.dimension], dim=1)
    assert all(float(part.norm(dim=1).max()) <= 0.5**0.5 + 1e-12 for part in parts)


def test_both_parts_of_a_unit_that_is_no_number_are_left_out() -> None:
    space = space_of(ResidualSpanCoordinates, top_k=3)
    captured = units(space, 4)
    captured.p[0][1], captured.q[1][2] = float("nan"), float("inf")
    good = Captured(
        [t[torch.tensor([0, 3])] for t in captured.p], [t[torch.tensor([0, 3])] for t in captured.q]
    )
    expected = released(space, good, "normalized")
    torch.testing.assert_close(released(space, captured, "normalized"), expected, rtol=1e-12, atol=0)


def test_noise_of_both_parts_has_its_law() -> None:
    c0, c1, k, tau = 2.0, 0.3, 4, 0.8 / EXPECTED
    space = space_of(ResidualSpanCoordinates, top_k=k)
    space.embedding_clip, space.residual_clip = c0, c1
    mechanism = mechanism_on(space, sigma=0.8, seed=5)
    v = basis(space, k)
    draws = torch.stack([decoded(space, mechanism.release().vector) for _ in range(400)])
    along = draws @ v
    beside = draws - along @ v.T
    root = 2**0.5 * tau
    squares = along.square().sum(dim=1) / (root**2 * (c0**2 + c1**2))
    assert kstest(squares.numpy(), "chi2", args=(k,)).pvalue > 0.01
    rest = beside.square().sum(dim=1) / (root * c1) ** 2
    assert kstest(rest.numpy(), "chi2", args=(space.inner.dimension - k,)).pvalue > 0.01
    assert float(draws.square().mean().sqrt()) == pytest.approx(space.decoded_std(tau), rel=0.05)


def test_without_the_rest_it_is_the_orthonormal_coordinates_of_the_span() -> None:
    space = space_of(SpanCoordinates, alpha=0.5, ridge=0.0, top_k=3)
    captured = units(space, 5)
    v = basis(space, 3)
    e = unit_vectors(space.inner, captured) @ v
    expected = v @ clipped(e, 0.5).sum(dim=0) / EXPECTED
    torch.testing.assert_close(released(space, captured, "flat", 0.5), expected, rtol=4e-4, atol=1e-9)


@pytest.mark.parametrize("kind", [ProjectedSpanCoordinates, ResidualSpanCoordinates])
def test_scores_are_coefficients_of_the_texts(kind: type[SpanSpace]) -> None:
    space = space_of(kind, top_k=0)
    z = torch.linspace(-1, 1, N).double()
    gradient = space.span.gradients.combined(z)
    embedding = space.span.along(gradient[None], -0.5)[0]
    vector: Any = space._unflattened(gradient)
    if isinstance(space, ResidualSpanCoordinates):
        vector = [(embedding / 2**0.5,), *vector]
    torch.testing.assert_close(space.scores(vector), z.abs(), rtol=1e-6, atol=1e-8)


def test_in_tangent_coordinates_no_factor_plays_a_part() -> None:
    with everything_in_double():
        adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=3).attach()
        generator = torch.Generator().manual_seed(2)
        spectrum = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
        given = []
        for group in adapter.groups:
            u, v = (
                torch.linalg.qr(torch.randn(len(group.sites), size, 3, generator=generator).double()).Q
                for size in (group.m, group.n)
            )
            given.append((u * spectrum, v))
        turn = torch.linalg.qr(torch.randn(3, 3, generator=generator).double()).Q * torch.tensor(
            [1.0, 1e2, 1e4]
        )
        seen = []
        for gauge in (torch.eye(3).double(), turn.double()):
            pairs = [(a @ gauge, b @ torch.linalg.inv(gauge).mT) for a, b in given]
            points = [point_from_factors(a, b) for a, b in pairs]
            space = TangentSpanCoordinates(TangentCoordinates(adapter, points, torch.float64), ridge=1.0)
            space.install()
            space.refresh = lambda space=space: public_gradients(space.inner, PUBLIC_TEXTS, max_tokens=10**6)
            space.prepare()
            captured, _ = micro_batch_gradients(adapter, one_batch(uneven_examples(), double=True))
            columns = space.encode(captured).columns
            z = torch.stack([space.span.of_texts(y, 0.0) for y in columns])
            seen.append((space.span.gradients.gram(), z))
    (gram, z), (gram_again, z_again) = seen
    torch.testing.assert_close(gram_again, gram, rtol=1e-8, atol=1e-9 * float(gram.abs().max()))
    torch.testing.assert_close(z_again, z, rtol=1e-7, atol=1e-9 * float(z.abs().max()))
    assert float(z.norm()) > 0


def test_a_decoded_tangent_is_tangent() -> None:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=3).attach()
    points = [
        point_from_factors(
            torch.randn(len(g.sites), g.m, 3).double(), torch.randn(len(g.sites), g.n, 3).double()
        )
        for g in adapter.groups
    ]
    space = TangentSpanCoordinates(TangentCoordinates(adapter, points, torch.float64))
    space.refresh = lambda: public_gradients(space.inner, PUBLIC_TEXTS, max_tokens=10**6)
    space.prepare()
    vector = space.decode(space.standard_normal(lambda shape: torch.randn(shape, dtype=torch.float64)))
    nearest = space.inner.nearest(vector)
    assert float((flattened(vector) - flattened(nearest)).norm()) < 1e-9 * float(flattened(vector).norm())
