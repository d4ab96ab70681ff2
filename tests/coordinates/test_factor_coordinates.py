"""Factor coordinates are the plain parameters of LoRA."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import FactorCoordinates

RANK, SCALE = 3, 1.7


@pytest.fixture
def c() -> FactorCoordinates:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=RANK)
    pairs = [
        tuple(torch.randn(len(g.sites), size, RANK, dtype=torch.float64) for size in (g.m, g.n))
        for g in adapter.groups
    ]
    return FactorCoordinates(adapter, pairs, SCALE, torch.float64)


def test_they_are_the_gradients_of_both_factors(c: FactorCoordinates) -> None:
    # loss = sum over modules of <G, s left right^T>
    left = [t.clone().requires_grad_(True) for t in c.left]
    right = [t.clone().requires_grad_(True) for t in c.right]
    dense = [torch.randn(len(g.sites), g.m, g.n, dtype=torch.float64) for g in c.adapter.groups]
    loss = sum((SCALE * a @ b.mT * g).sum() for a, b, g in zip(left, right, dense, strict=True))
    expected = torch.autograd.grad(loss, [*left, *right])
    captured = Captured(
        [p[None] for g, b in zip(dense, c.right, strict=True) for p in g @ b],
        [q[None] for g, a in zip(dense, c.left, strict=True) for q in g.mT @ a],
    )
    vector = c.to_vector(c.weighted_sum(captured, torch.ones(1)))
    got = [a for a, _ in vector] + [b for _, b in vector]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    norm = sum(t.square().sum() for t in expected)
    assert float(c.norms_squared(captured)) == pytest.approx(float(norm), rel=1e-12)


def test_their_dimension_counts_both_factors(c: FactorCoordinates) -> None:
    assert c.dimension == sum(RANK * (s.m + s.n) for s in c.adapter.sites)
    assert not c.intrinsic


def test_factors_carry_the_scale_and_the_model_sees_it(c: FactorCoordinates) -> None:
    for name, (a, b) in c.named_factors().items():
        (site,) = (s for s in c.adapter.sites if s.name == name)
        torch.testing.assert_close(a @ b.T, (site.left * site.mid) @ site.right.T)
    torch.testing.assert_close(c.factors()[0][0], SCALE * c.left[0])


def test_their_norm_depends_on_the_gauge_which_is_what_tangent_coordinates_remove(
    c: FactorCoordinates,
) -> None:
    scaled = FactorCoordinates(
        c.adapter, [(4 * a, b / 4) for a, b in zip(c.left, c.right, strict=True)], SCALE, torch.float64
    )
    for one, other in zip(c.factors(), scaled.factors(), strict=True):
        torch.testing.assert_close(one[0] @ one[1].mT, other[0] @ other[1].mT)
    dense = [torch.randn(len(g.sites), g.m, g.n, dtype=torch.float64) for g in c.adapter.groups]

    def norm(at: FactorCoordinates) -> float:
        p = [p[None] for g, b in zip(dense, at.right, strict=True) for p in g @ b]
        q = [q[None] for g, a in zip(dense, at.left, strict=True) for q in g.mT @ a]
        return float(at.norms_squared(Captured(p, q)))

    assert norm(scaled) > 4 * norm(c)
