"""The average is one of Z, at rank r, and starts at the first iterate."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates import Coordinates, FactorCoordinates, TangentCoordinates
from privlora.coordinates.starts import factor_start, tangent_start
from privlora.geometry.fixed_rank import point_from_factors
from privlora.optimizers import IterateAverage

RANK = 2


def at(space: str, a: Tensor, b: Tensor) -> Coordinates:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=RANK, target_modules=["q_proj"])
    if space == "tangent":
        return TangentCoordinates(adapter, [point_from_factors(a, b)], torch.float64)
    return FactorCoordinates(adapter, [(a, b)], scale=1.0, dtype=torch.float64)


def move(coordinates: Coordinates, a: Tensor, b: Tensor) -> None:
    if isinstance(coordinates, TangentCoordinates):
        coordinates.points = [point_from_factors(a, b)]
    else:
        coordinates.left, coordinates.right = [a], [b]


def dense(average: IterateAverage) -> Tensor:
    ((a, b),) = average.factors()
    return a @ b.mT


@pytest.mark.parametrize("space", ["tangent", "factors"])
def test_it_is_the_moving_average_of_z_while_that_has_rank_r(space: str) -> None:
    # All iterates share their column and row spaces, so their mean has rank r and nothing is cut off.
    left, right = (torch.randn(2, 16, RANK, dtype=torch.float64) for _ in range(2))
    iterates = [left @ torch.randn(2, RANK, RANK, dtype=torch.float64) for _ in range(30)]
    coordinates = at(space, iterates[0], right)
    average = IterateAverage(coordinates, decay=0.8)
    expected = torch.zeros(2, 16, 16, dtype=torch.float64)
    for t, a in enumerate(iterates, start=1):
        move(coordinates, a, right)
        average.update()
        weight = max(0.2, 10 / (9 + t))
        expected = (1 - weight) * expected + weight * a @ right.mT
        torch.testing.assert_close(dense(average), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("space", ["tangent", "factors"])
def test_it_is_cut_back_to_rank_r(space: str) -> None:
    def pair() -> tuple[Tensor, Tensor]:
        a, b = (torch.randn(2, 16, RANK, dtype=torch.float64) for _ in range(2))
        return a, b

    coordinates = at(space, *pair())
    average = IterateAverage(coordinates, decay=0.5)
    for _ in range(12):
        move(coordinates, *pair())
        average.update()
    before = dense(average)
    a, b = pair()
    move(coordinates, a, b)
    average.update()
    weight = 10 / (9 + 13)
    mixture = (1 - max(weight, 0.5)) * before + max(weight, 0.5) * a @ b.mT
    u, s, vh = torch.linalg.svd(mixture)
    best = (u[..., :RANK] * s[:, None, :RANK]) @ vh[:, :RANK]
    torch.testing.assert_close(dense(average), best, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("uneven", [1.0, 1e-6])
def test_factors_of_any_gauge_are_averaged_alike(uneven: float) -> None:
    """Also where their columns nearly depend on each other, and where one is zero."""
    a, b = (torch.randn(2, 16, RANK, dtype=torch.float64) for _ in range(2))
    first = at("factors", a, b)
    turn = torch.tensor([[1.0, 1.0], [1.0, 1.0 + uneven]], dtype=torch.float64)
    ends = []
    for left, right in ((2 * a, b), (2 * a @ turn, b @ torch.linalg.inv(turn).mT)):
        average = IterateAverage(first, decay=0.5)
        average._count = 10  # past the iterates of weight 1
        average.coordinates = at("factors", left, right)
        average.update()
        ends.append(dense(average))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-8)
    average.coordinates = at("factors", a * torch.tensor([1.0, 0.0]), b)
    before = dense(average)
    average.update()
    mixture = 0.5 * before + 0.5 * (a * torch.tensor([1.0, 0.0])) @ b.mT
    u, s, vh = torch.linalg.svd(mixture)
    best = (u[..., :RANK] * s[:, None, :RANK]) @ vh[:, :RANK]
    torch.testing.assert_close(dense(average), best, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("init", ["random", "w0-subspace"])
def test_both_spaces_can_be_averaged_from_a_start_at_zero(init: str) -> None:
    adapter = LowRankAdapter(tiny_model(), rank=RANK)
    for coordinates in (
        tangent_start(adapter, init, seed=0),
        factor_start(adapter, init, seed=0, scale=2.0),
    ):
        average = IterateAverage(coordinates, decay=0.9)
        average.update()
        assert all(float((a @ b.mT).abs().max()) == 0.0 for a, b in average.factors())


def test_it_changes_neither_the_state_nor_the_model() -> None:
    coordinates = tangent_start(LowRankAdapter(tiny_model(), rank=RANK), "random", seed=0)
    before = {name: t.clone() for name, t in coordinates.state_dict().items()}
    IterateAverage(coordinates, 0.9).update()
    assert all(torch.equal(t, before[name]) for name, t in coordinates.state_dict().items())
