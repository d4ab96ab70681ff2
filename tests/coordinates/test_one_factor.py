"""One-factor coordinates: what is frozen neither carries data, nor noise, nor counts."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import FactorCoordinates, OneFactorCoordinates
from privlora.coordinates.starts import factor_start
from privlora.errors import ConfigError
from privlora.optimizers import FactorLoraFA

RANK, SCALE = 3, 1.7


@pytest.fixture
def c() -> OneFactorCoordinates:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=RANK)
    pairs = [
        tuple(torch.randn(len(g.sites), size, RANK, dtype=torch.float64) for size in (g.m, g.n))
        for g in adapter.groups
    ]
    return OneFactorCoordinates(adapter, pairs, SCALE, torch.float64)


def some_gradients(c: OneFactorCoordinates, units: int = 2) -> Captured:
    sites = c.adapter.sites
    return Captured(
        [torch.randn(units, s.m, RANK, dtype=torch.float64) for s in sites],
        [torch.randn(units, s.n, RANK, dtype=torch.float64) for s in sites],
    )


def test_they_are_the_gradients_of_the_left_factor_alone(c: OneFactorCoordinates) -> None:
    # loss = sum over modules of <G, s left right^T> with right a constant
    left = [t.clone().requires_grad_(True) for t in c.left]
    dense = [torch.randn(len(g.sites), g.m, g.n, dtype=torch.float64) for g in c.adapter.groups]
    loss = sum((SCALE * a @ b.mT * g).sum() for a, b, g in zip(left, c.right, dense, strict=True))
    expected = torch.autograd.grad(loss, left)
    captured = Captured(
        [p[None] for g, b in zip(dense, c.right, strict=True) for p in g @ b],
        [q[None] for g, a in zip(dense, c.left, strict=True) for q in g.mT @ a],
    )
    vector = c.to_vector(c.weighted_sum(captured, torch.ones(1)))
    assert [len(parts) for parts in vector] == [1] * len(expected)
    for (got,), wanted in zip(vector, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    norm = sum(t.square().sum() for t in expected)
    assert float(c.norms_squared(captured)) == pytest.approx(float(norm), rel=1e-12)


def the_other_way(c: OneFactorCoordinates) -> OneFactorCoordinates:
    """The same state; right is trained and left frozen."""
    pairs = list(zip(c.left, c.right, strict=True))
    return OneFactorCoordinates(c.adapter, pairs, SCALE, torch.float64, side="right")


def test_the_right_factor_can_be_the_trained_one(c: OneFactorCoordinates) -> None:
    c = the_other_way(c)
    right = [t.clone().requires_grad_(True) for t in c.right]
    dense = [torch.randn(len(g.sites), g.m, g.n, dtype=torch.float64) for g in c.adapter.groups]
    loss = sum((SCALE * a @ b.mT * g).sum() for a, b, g in zip(c.left, right, dense, strict=True))
    expected = torch.autograd.grad(loss, right)
    captured = Captured(
        [torch.full_like(p[None], torch.nan) for g, b in zip(dense, c.right, strict=True) for p in g @ b],
        [q[None] for g, a in zip(dense, c.left, strict=True) for q in g.mT @ a],
    )
    vector = c.to_vector(c.weighted_sum(captured, torch.ones(1)))
    assert [len(parts) for parts in vector] == [1] * len(expected)
    for (got,), wanted in zip(vector, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    norm = sum(t.square().sum() for t in expected)
    assert float(c.norms_squared(captured)) == pytest.approx(float(norm), rel=1e-12)
    assert c.dimension == sum(RANK * s.n for s in c.adapter.sites)
    assert [t.shape for (t,) in c.standard_normal(torch.zeros)] == [t.shape for t in c.right]
    assert [t.data_ptr() for (t,) in c.trained] == [t.data_ptr() for t in c.right]


def test_the_squares_of_both_sides_add_up(c: OneFactorCoordinates) -> None:
    both = FactorCoordinates(c.adapter, list(zip(c.left, c.right, strict=True)), SCALE, torch.float64)
    captured, other = some_gradients(c), the_other_way(c)
    torch.testing.assert_close(
        c.norms_squared(captured) + other.norms_squared(captured), both.norms_squared(captured)
    )
    pairs = zip(c.expected_squares(), other.expected_squares(), strict=True)
    assert both.expected_squares() == pytest.approx([left + right for left, right in pairs])


def test_copies_train_the_same_side(c: OneFactorCoordinates) -> None:
    stacked = the_other_way(c).stacked(c.adapter, 1)
    assert stacked.side == "right"
    assert [t.shape for (t,) in stacked.trained] == [t.shape for t in c.right]


def test_a_rule_for_the_left_factor_is_refused_on_the_right_one(c: OneFactorCoordinates) -> None:
    FactorLoraFA(c)
    with pytest.raises(ConfigError, match="trains the left factor alone"):
        FactorLoraFA(the_other_way(c))


def test_the_dimension_and_the_noise_are_those_of_the_left_factor(c: OneFactorCoordinates) -> None:
    assert c.dimension == sum(RANK * s.m for s in c.adapter.sites)
    noise = c.standard_normal(lambda shape: torch.ones(shape))
    assert [t.shape for (t,) in noise] == [t.shape for t in c.left]
    assert sum(t.numel() for (t,) in noise) == c.dimension


def test_the_norm_is_below_that_of_both_factors(c: OneFactorCoordinates) -> None:
    both = FactorCoordinates(c.adapter, list(zip(c.left, c.right, strict=True)), c.scale, dtype=torch.float64)
    captured = some_gradients(c)
    assert bool((c.norms_squared(captured) < both.norms_squared(captured)).all())


def test_the_frozen_factor_is_in_the_checkpoint_and_in_the_model(c: OneFactorCoordinates) -> None:
    saved = {name: t.clone() for name, t in c.state_dict().items()}
    c.load_state_dict({name: torch.zeros_like(t) for name, t in saved.items()})
    assert all(float(a.abs().max()) == 0 for pair in c.factors() for a in pair)
    c.load_state_dict(saved)
    for name, (a, b) in c.named_factors().items():
        (site,) = (s for s in c.adapter.sites if s.name == name)
        torch.testing.assert_close(a @ b.T, (site.left * site.mid) @ site.right.T)


@pytest.mark.parametrize("init", ["random", "w0-subspace"])
def test_they_start_where_both_factors_do(init: str) -> None:
    adapter = LowRankAdapter(tiny_model(), rank=RANK)
    one, both = (
        factor_start(adapter, init, seed=3, scale=SCALE, kind=kind)
        for kind in (OneFactorCoordinates, FactorCoordinates)
    )
    assert type(one) is OneFactorCoordinates
    for a, b in zip((*one.left, *one.right), (*both.left, *both.right), strict=True):
        assert torch.equal(a, b)
    assert all(float(b.norm()) > 0 for b in one.right)


def test_coordinates_do_not_write_into_what_they_were_given() -> None:
    adapter = LowRankAdapter(tiny_model(), rank=RANK)
    pairs = [tuple(torch.randn(len(g.sites), size, RANK) for size in (g.m, g.n)) for g in adapter.groups]
    kept = [t.clone() for pair in pairs for t in pair]
    c = OneFactorCoordinates(adapter, pairs, SCALE)
    c.load_state_dict({name: torch.zeros_like(t) for name, t in c.state_dict().items()})
    assert all(torch.equal(a, b) for a, b in zip(kept, (t for pair in pairs for t in pair), strict=True))
