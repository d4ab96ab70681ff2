"""Tangent coordinates at a fixed base: the model's term, gradients beside it, sums instead of retractions."""

from __future__ import annotations

import pytest
import torch
from tiny_models import one_batch, tiny_model, uneven_examples
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import FixedTangentCoordinates, TangentCoordinates
from privlora.coordinates.tangent import points_to_tensors
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, Tangent, random_point
from privlora.mechanisms import Release
from privlora.optimizers import TANGENT_OPTIMIZERS
from privlora.optimizers.tangent import TangentRank
from privlora.stacked import joined
from privlora.stacked.adapter import StackedAdapter
from privlora.training.gradients import micro_batch_gradients

R = 2
SIMPLE = ["sgd", "scalar", "rank"]


def base_points(adapter: LowRankAdapter) -> list[Point]:
    generator = torch.Generator().manual_seed(0)
    return [random_point(len(g.sites), g.m, g.n, R, generator) for g in adapter.groups]


def fixed(rank: int = 2 * R, weight: float = 1.0) -> FixedTangentCoordinates:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=rank, target_modules=["q_proj", "up_proj"])
    return FixedTangentCoordinates(adapter, base_points(adapter), torch.float64, right_weight=weight)


def plain(weight: float = 1.0) -> TangentCoordinates:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=R, target_modules=["q_proj", "up_proj"])
    return TangentCoordinates(adapter, base_points(adapter), torch.float64, right_weight=weight)


def noise(c: TangentCoordinates, seed: int, tau: float = 0.1) -> Release:
    generator = torch.Generator().manual_seed(seed)
    vector = c.standard_normal(lambda s: tau * torch.randn(s, generator=generator, dtype=torch.float64))
    return Release(vector, tau, seed)


def tangents(c: TangentCoordinates, seed: int) -> list[Tangent]:
    return [Tangent(*parts) for parts in noise(c, seed, 0.3).vector]


def dense(c: TangentCoordinates) -> list[Tensor]:
    return [a @ b.mT for a, b in c.factors()]


def test_the_models_update_is_the_base_plus_what_moved() -> None:
    c = fixed()
    for z, point in zip(dense(c), c.points, strict=True):
        torch.testing.assert_close(z, point.embedding())
    steps = tangents(c, 1), tangents(c, 2)
    for step in steps:
        c.move(step, -0.7)
    pairs = zip(c.points, *steps, c.moved(), c.adapter.groups, dense(c), strict=True)
    for point, one, two, moved, group, z in pairs:
        expected = point.embedding() - 0.7 * (one.embedding(point) + two.embedding(point))
        torch.testing.assert_close(z, expected)
        torch.testing.assert_close(point.embedding() + moved.embedding(point), expected)
        for k, site in enumerate(group.sites):
            assert site.left.shape == (site.m, 2 * R)
            torch.testing.assert_close((site.left * site.mid) @ site.right.T, expected[k])


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("balanced", [False, True])
def test_gradients_are_seen_as_plain_coordinates_see_them_at_the_base(balanced: bool, weight: float) -> None:
    found = []
    for c in (fixed(weight=weight), plain(weight)):
        with c.adapter:
            captured, _ = micro_batch_gradients(c.adapter, one_batch(uneven_examples()))
        norms = c.norms_squared(captured)
        if balanced:
            captured = c.evened(captured).formed()
        vector = c.to_vector(c.weighted_sum(captured, torch.linspace(0.2, 1, captured.units)))
        found.append((norms, vector))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=0)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_gradients_are_taken_where_the_model_stands_and_measured_at_the_base() -> None:
    c = fixed()
    c.move(tangents(c, 3), 1.0)
    with c.adapter:
        captured, _ = micro_batch_gradients(c.adapter, one_batch(uneven_examples()))
    found = c.to_vector(c.weighted_sum(captured, torch.ones(captured.units)))
    # G by autograd at W0 + Z + xi, with the low-rank term as plain weights
    model = tiny_model(dtype=torch.float64)
    for group, z in zip(c.adapter.groups, dense(c), strict=True):
        for site, update in zip(group.sites, z, strict=True):
            model.get_submodule(site.name).weight.data += update
    adapter = LowRankAdapter(model, rank=R, target_modules=["q_proj", "up_proj"])
    at_zero = TangentCoordinates(
        adapter, [Point(p.U, torch.zeros_like(p.S), p.V) for p in c.points], torch.float64
    )
    with adapter:
        captured, _ = micro_batch_gradients(adapter, one_batch(uneven_examples()))
    expected = at_zero.to_vector(at_zero.weighted_sum(captured, torch.ones(captured.units)))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", SIMPLE)
def test_the_first_step_of_an_optimizer_is_the_plain_one_before_it_is_retracted(name: str) -> None:
    one, other = fixed(), plain()
    before = dense(other)
    for c in (one, other):
        TANGENT_OPTIMIZERS[name](c).step(noise(c, 4), 1e-5)
    for z, w, start in zip(dense(one), dense(other), before, strict=True):
        moved = z - start
        assert float((moved - (w - start)).norm()) < 1e-3 * float(moved.norm())


def test_steps_add_up_whatever_their_order() -> None:
    """With a rule that is linear in releases, as clients' sums are."""
    ends = []
    for order in ((1, 2, 3), (3, 1, 2)):
        c = fixed()
        optimizer = TANGENT_OPTIMIZERS["sgd"](c, beta1=0.0, beta2=0.9, error_feedback=1.0)
        for seed in order:
            optimizer.step(noise(c, seed), 0.5)
        ends.append(dense(c))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_moments_stay_as_they_are_where_the_base_stays() -> None:
    c = fixed()
    optimizer = TangentRank(c, beta1=0.5, beta2=0.5)
    release = noise(c, 5)
    optimizer.step(release, 0.3)
    lefts, rights = optimizer._moments().values()
    for momentum, left, right, parts in zip(optimizer._momentum, lefts, rights, release.vector, strict=True):
        tangent = Tangent(*parts)
        assert torch.equal(momentum.Up, tangent.scale(0.5).Up)
        core, up, vp = parts
        assert torch.equal(left, torch.lerp((core @ core.mT + vp.mT @ vp) / vp.shape[1], 0 * left, 0.5))
        assert torch.equal(right, torch.lerp((core.mT @ core + up.mT @ up) / up.shape[1], 0 * right, 0.5))
    assert all(residual.rank == 0 for residual in optimizer._residuals)


def test_moments_follow_to_another_base() -> None:
    c = fixed()
    optimizer = TangentRank(c, beta1=0.5)
    optimizer.step(noise(c, 5), 0.3)
    before = c.state_dict()
    generator = torch.Generator().manual_seed(9)
    for g, group in enumerate(c.adapter.groups):
        other = random_point(len(group.sites), group.m, group.n, R, generator)
        before[f"{g}.U"], before[f"{g}.V"] = before[f"{g}.U"].clone(), before[f"{g}.V"].clone()
        c.load_state_dict(c.state_dict() | {f"{g}.U": other.U, f"{g}.V": other.V})
    optimizer.transport(before, 0.1)
    for point, momentum in zip(c.points, optimizer._momentum, strict=True):
        assert float((point.U.mT @ momentum.Up).abs().max()) < 1e-12
        assert float((point.V.mT @ momentum.Vp).abs().max()) < 1e-12


def test_a_base_alone_is_a_state_without_a_move() -> None:
    c = fixed()
    c.move(tangents(c, 1), 1.0)
    whole = {name: t.clone() for name, t in c.state_dict().items()}
    moved = dense(c)
    c.load_state_dict({name: t for name, t in whole.items() if name[-1] in "USV"})
    for z, point in zip(dense(c), c.points, strict=True):
        torch.testing.assert_close(z, point.embedding())
    c.load_state_dict(whole)
    for z, kept in zip(dense(c), moved, strict=True):
        assert torch.equal(z, kept)
    with pytest.raises(KeyError):
        c.load_state_dict({name: t for name, t in whole.items() if not name.endswith("Up")})
    with pytest.raises(ConfigError, match="not orthonormal"):
        c.load_state_dict(whole | {"0.U": 2 * whole["0.U"]})
    assert torch.equal(dense(c)[0], moved[0])


def test_its_place_is_the_base_and_the_move() -> None:
    c = fixed()
    places = {c.place()}
    c.move(tangents(c, 1), 1.0)
    places.add(c.place())
    c.load_state_dict(c.state_dict() | {"0.S": 2 * c.points[0].S})
    places.add(c.place())
    assert len(places) == 3


@pytest.mark.parametrize("alike", [True, False])
def test_units_of_a_stack_are_measured_at_their_own_base(alike: bool) -> None:
    """Also where all have the same one, which is met as one."""
    singles = [fixed(), fixed()]
    if not alike:
        other = [
            random_point(*p.U.shape[:2], p.V.shape[1], R, torch.Generator().manual_seed(9))
            for p in singles[1].points
        ]
        singles[1].load_state_dict(singles[1].state_dict() | points_to_tensors(other))
    generator = torch.Generator().manual_seed(5)
    sites = singles[0].adapter.sites
    p, q = (
        [torch.randn(4, size, R, generator=generator, dtype=torch.float64) for size in sizes]
        for sizes in ([s.m for s in sites], [s.n for s in sites])
    )
    owners = torch.tensor([[True, False, True, False], [False, True, False, True]])
    stack = fixed().stacked(StackedAdapter.like(fixed().adapter, 2, torch.zeros(4, dtype=torch.int64)), 2)
    stack.load_state_dict(joined([one.state_dict() for one in singles]))
    norms, balanced = (
        stack.norms_squared(Captured(p, q, owners=owners)),
        stack.evened(Captured(p, q, owners=owners)).formed(),
    )
    for k, single in enumerate(singles):
        own = Captured([t[owners[k]] for t in p], [t[owners[k]] for t in q])
        torch.testing.assert_close(norms[owners[k]], single.norms_squared(own))
        expected = single.evened(own).formed()
        for mine, theirs in zip((*balanced.p, *balanced.q), (*expected.p, *expected.q), strict=True):
            torch.testing.assert_close(mine[owners[k]], theirs)


def test_twice_the_rank_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="cannot hold tangent vectors"):
        fixed(rank=R)
    c = fixed()
    assert c.dimension == sum(R * (site.m + site.n - R) for site in c.adapter.sites)
    assert c.expected_squares() == [R * (site.m + site.n - R) for site in c.adapter.sites]
