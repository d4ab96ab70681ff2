"""Tangent coordinates weighed by the singular values, against dense gradients and in their own metric."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.config import MethodSettings, checked
from privlora.coordinates import SpectralMetricCoordinates, TangentCoordinates
from privlora.coordinates.spectral_metric import MAX_METRIC_POWER
from privlora.coordinates.starts import tangent_start
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, Tangent, random_point

RANK = 3


def coordinates(
    values: tuple[float, ...] = (3.0, 1.0, 0.5),
    *,
    power: float = 1.0,
    right_weight: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> SpectralMetricCoordinates:
    """Random points with these singular values in every module."""
    generator = torch.Generator().manual_seed(0)
    adapter = LowRankAdapter(tiny_model(dtype=dtype), rank=RANK)
    points = []
    for group in adapter.groups:
        point = random_point(len(group.sites), group.m, group.n, RANK, generator)
        s = torch.tensor(values, dtype=dtype).expand_as(point.S).clone()
        points.append(Point(point.U.to(dtype), s, point.V.to(dtype)))
    return SpectralMetricCoordinates(adapter, points, dtype, right_weight=right_weight, power=power)


def dense_gradients(c: TangentCoordinates, units: int) -> list[Tensor]:
    """One (units, L, m, n) a group."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(units, len(g.sites), g.m, g.n, generator=generator, dtype=torch.float64).to(c.dtype)
        for g in c.adapter.groups
    ]


def captured(c: TangentCoordinates, dense: list[Tensor]) -> Captured:
    """As the adapter gives them: by the operands that are installed."""
    p, q = [], []
    for group, g in zip(c.adapter.groups, dense, strict=True):
        left, right = c.adapter.met(group)
        p += list((g @ right).unbind(dim=1))
        q += list((g.mT @ left).unbind(dim=1))
    return Captured(p, q)


def normal(c: TangentCoordinates, seed: int = 2) -> list[Tangent]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Tangent(*parts)
        for parts in c.standard_normal(lambda shape: torch.randn(shape, generator=generator).double())
    ]


def test_a_weight_is_the_power_of_its_value_over_the_mean_and_the_rest_is_one_scale() -> None:
    for power in (0.5, 1.0, 2.0):
        for a, b in coordinates(power=power).weights():
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a[:, 0] / a[:, 1], torch.full_like(a[:, 0], 3.0**power))
            torch.testing.assert_close(a[:, 0] / a[:, 2], torch.full_like(a[:, 0], 6.0**power))
    right = coordinates(right_weight=0.3)
    for a, b in right.weights():
        torch.testing.assert_close(b, 0.3 * a)


@pytest.mark.parametrize("values", [(0.0, 0.0, 0.0), (1e-38, 1e-38, 1e-38), (2.0, 2.0, 2.0)])
def test_values_that_are_alike_or_none_have_one_weight(values: tuple[float, ...]) -> None:
    c = coordinates(values, dtype=torch.float32)
    for group, (a, _) in zip(c.adapter.groups, c.weights(), strict=True):
        expected = ((group.m + group.n - RANK) / (group.m + group.n)) ** 0.5
        torch.testing.assert_close(a, torch.full_like(a, expected))


def test_a_direction_that_is_empty_still_counts_a_tenth() -> None:
    for a, _ in coordinates((3.0, 0.0, 0.0)).weights():
        assert float((a[:, 1] / a[:, 0]).min()) == pytest.approx(0.1 / 3**0.5, rel=1e-6)
        torch.testing.assert_close(a[:, 1], a[:, 2])


def test_weights_do_not_ask_how_large_the_update_is() -> None:
    small, large = coordinates((3e-6, 1e-6, 5e-7)), coordinates((3e4, 1e4, 5e3))
    for (a, _), (b, _) in zip(small.weights(), large.weights(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("values", [(3.0, 1.0, 0.5), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_layers_compute_with_the_update_itself(values: tuple[float, ...]) -> None:
    c = coordinates(values)
    for group, point in zip(c.adapter.groups, c.points, strict=True):
        for k, site in enumerate(group.sites):
            assert site.left is not None
            assert site.mid is not None
            torch.testing.assert_close(site.left * site.mid @ site.right.T, point.embedding()[k])


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("right_weight", [0.3, 1.0, 3.0])
def test_a_vector_is_as_long_as_was_measured_and_has_the_entries_that_are_promised(
    power: float, right_weight: float
) -> None:
    c = coordinates(power=power, right_weight=right_weight)
    dense = dense_gradients(c, 4)
    units = captured(c, dense)
    measured = c.norms_squared(units)
    by_module = c.module_norms_squared(units)
    torch.testing.assert_close(by_module.sum(dim=0), measured)
    for unit, alone in enumerate(torch.eye(4, dtype=torch.float64)):
        vector = c.to_vector(c.weighted_sum(units, alone))
        assert float(sum(t.square().sum() for parts in vector for t in parts)) == pytest.approx(
            float(measured[unit]), rel=1e-12
        )
        for point, g, (a, b), (core, up, vp) in zip(c.points, dense, c.weights(), vector, strict=True):
            M = point.U.mT @ g[unit] @ point.V
            left, right = a[:, None, :], b[:, :, None]
            torch.testing.assert_close(core, (left**2 + right**2).sqrt() * M)
            torch.testing.assert_close(up, (g[unit] @ point.V - point.U @ M) * left)
            torch.testing.assert_close(vp, (g[unit].mT @ point.U - point.V @ M.mT) * b[:, None, :])


@pytest.mark.parametrize("evened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [(3.0, 1.0, 0.5), (1.0, 1e-6, 0.0), (0.0, 0.0, 0.0)])
def test_what_is_released_is_never_longer_than_what_was_measured(
    values: tuple[float, ...], dtype: torch.dtype, evened: bool
) -> None:
    # Also for P and Q that no dense gradient gives, as rounding in bfloat16 makes them, along U and V or beside them.
    c = coordinates(values, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    for scale in (1e-6, 1.0, 1e6):
        for inside in (0.0, 1.0):
            p, q = [], []
            for group, point in zip(c.adapter.groups, c.points, strict=True):
                for k in range(len(group.sites)):
                    for made, size, basis, times in (
                        (p, group.m, point.U, 1.0),
                        (q, group.n, point.V, scale),
                    ):
                        draw = torch.randn(6, size, RANK, generator=generator).to(dtype)
                        within = basis[k] @ (basis[k].T @ draw)
                        made.append(times * (within if inside else draw))
            units = Captured(p, q)
            found = c.evened(units) if evened else None
            norms = c.norms_squared(units) if found is None else found.norms_squared
            for unit, alone in enumerate(torch.eye(6, dtype=torch.float64)):
                sums = c.weighted_sum(units, alone) if found is None else c.evened_sum(found, alone)
                released = sum(t.double().square().sum() for parts in c.to_vector(sums) for t in parts)
                slack = 1e-5 if dtype == torch.float32 else 1e-10
                assert float(released) <= float(norms[unit]) * (1 + slack)


def test_sums_of_evened_units_are_those_of_formed_ones() -> None:
    c = coordinates()
    units = captured(c, dense_gradients(c, 5))
    found = c.evened(units)
    weights = torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = c.evened_sum(found, weights), c.weighted_sum(found.formed(), weights)
    for xs, ys in zip(one, other, strict=True):
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    alone = torch.eye(5, dtype=torch.float64)[3]
    vector = c.to_vector(c.evened_sum(found, alone))
    assert float(sum(t.square().sum() for parts in vector for t in parts)) <= float(
        found.norms_squared[3]
    ) * (1 + 1e-6)


def test_a_gradient_moves_z_as_the_effect_of_its_vector_says() -> None:
    """<coordinates of G, v> = <G, what v does to Z>: the direction of steepest descent in the metric."""
    c = coordinates(right_weight=0.5)
    dense = [g[0] for g in dense_gradients(c, 1)]
    units = captured(c, [g[None] for g in dense])
    vector = c.to_vector(c.weighted_sum(units, torch.ones(1)))
    drawn = normal(c)
    moved = c.gradients(drawn)
    for point, g, there, v, step in zip(c.points, dense, vector, drawn, moved, strict=True):
        inner = sum(float((x * y).sum()) for x, y in zip(there, (v.M, v.Up, v.Vp), strict=True))
        assert inner == pytest.approx(float((g * step.embedding(point)).sum()), rel=1e-9)
    for step, point, (left, right) in zip(
        moved, c.points, c.weight_effect([(v.M, v.Up, v.Vp) for v in drawn]), strict=True
    ):
        torch.testing.assert_close(left @ right.mT, step.embedding(point))


def test_noise_is_white_and_moves_z_as_far_as_the_law_says() -> None:
    c = coordinates((3.0, 1.0, 0.1), right_weight=0.5)
    energies = torch.zeros(3, dtype=torch.float64)
    squares = torch.zeros(len(c.adapter.groups), dtype=torch.float64)
    count = 60
    for seed in range(count):
        drawn = normal(c, seed)
        energies += sum(
            (torch.stack([t.square().sum() for t in (v.M, v.Up, v.Vp)]) for v in drawn), torch.zeros(3)
        )
        moved = c.gradients(drawn)
        squares += torch.stack(
            [step.embedding(p).square().sum() for step, p in zip(moved, c.points, strict=True)]
        )
    sizes = [
        sum(len(g.sites) * RANK * size(g) for g in c.adapter.groups)
        for size in (lambda g: RANK, lambda g: g.m - RANK, lambda g: g.n - RANK)
    ]
    torch.testing.assert_close(energies / count, torch.tensor(sizes).double(), rtol=0.12, atol=0)
    by_site = dict(zip((s.name for s in c.adapter.sites), c.expected_squares(), strict=True))
    for group, found in zip(c.adapter.groups, squares / count, strict=True):
        law = sum(by_site[site.name] for site in group.sites)
        w = 0.5**2
        assert law == pytest.approx(len(group.sites) * RANK * (group.m + w * (group.n - RANK)))
        assert float(found) == pytest.approx(law, rel=0.15)


def test_columns_in_another_order_and_with_other_signs_change_nothing() -> None:
    """Singular vectors are told but for signs, and those of equal values not even that: weights go with the values."""
    c = coordinates((2.0, 2.0, 0.5))
    turn = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(3)).double()).Q
    whole = torch.block_diag(turn, -torch.eye(1, dtype=torch.float64))
    turned = [Point(p.U @ whole, p.S, p.V @ whole) for p in c.points]
    other = SpectralMetricCoordinates(c.adapter, turned, torch.float64, power=1.0)
    dense = dense_gradients(c, 1)
    moves, norms = [], []
    for each in (c, other):
        each.install()
        units = captured(each, dense)
        norms.append(each.norms_squared(units))
        vector = each.to_vector(each.weighted_sum(units, torch.ones(1)))
        steps = each.gradients([Tangent(*parts) for parts in vector])
        moves.append([t.embedding(p) for t, p in zip(steps, each.points, strict=True)])
    torch.testing.assert_close(norms[0], norms[1])
    for one, two in zip(*moves, strict=True):
        torch.testing.assert_close(one, two)


def test_the_start_makes_them_and_stacks_keep_them() -> None:
    adapter = LowRankAdapter(tiny_model(), rank=RANK)
    plain = tangent_start(adapter, "random", seed=0)
    assert type(plain) is TangentCoordinates
    made = tangent_start(adapter, "random", seed=0, metric_power=0.5, right_weight=0.3)
    assert isinstance(made, SpectralMetricCoordinates)
    assert (made.power, made.right_weight) == (0.5, 0.3)
    assert not made.intrinsic
    assert made.dimension == plain.dimension
    again = made.stacked(adapter, 1)
    assert isinstance(again, SpectralMetricCoordinates)
    assert (again.power, again.right_weight) == (0.5, 0.3)


def test_weights_follow_the_update_from_step_to_step() -> None:
    """From Z = 0 on, whoever moves it: by a step, or by a state that is loaded."""
    c = coordinates((0.0, 0.0, 0.0))
    alike = [a.clone() for a, _ in c.weights()]
    c.move(c.gradients(normal(c)), -0.1)
    moved = c.state_dict()
    other = coordinates((0.0, 0.0, 0.0))
    other.load_state_dict(moved)
    for each in (c, other):
        for group, point, (a, b), before in zip(
            each.adapter.groups, each.points, each.weights(), alike, strict=True
        ):
            assert float((a - before).abs().max()) > 0.05
            torch.testing.assert_close(a[:, 0] / a[:, 1], point.S[:, 0] / point.S[:, 1])
            left, right = each.adapter.met(group)  # what the next gradients are taken with
            torch.testing.assert_close(left, point.U * b[:, None, :])
            torch.testing.assert_close(right, point.V * a[:, None, :])


@pytest.mark.parametrize("power", [-1.0, 2.1, float("nan"), float("inf")])
def test_powers_that_leave_one_direction_are_refused(power: float) -> None:
    with pytest.raises(ConfigError, match="metric_power"):
        coordinates(power=power)
    with pytest.raises(ConfigError, match="metric_power"):
        checked(MethodSettings, {"metric_power": power}, "method")
    assert MethodSettings(metric_power=MAX_METRIC_POWER).metric_power == 2
