"""Every optimizer of every method recovers a low-rank matrix, with and without noise, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates import Coordinates, FactorCoordinates, TangentCoordinates
from privlora.geometry.fixed_rank import Point, random_point
from privlora.mechanisms import Release
from privlora.methods import METHODS
from privlora.optimizers import TANGENT_OPTIMIZERS, FactorAdamW, Optimizer

RANK = 3
NAMES = sorted({(row.space, optimizer) for row in METHODS.values() for optimizer in row.optimizers})


class Recovery:
    """loss = sum over modules of ||Z - target||^2 / 2, whose gradient with respect to Z is Z - target."""

    def __init__(
        self, space: str, optimizer: str, target_rank: int = RANK, *, from_zero: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.adapter = LowRankAdapter(tiny_model(), rank=RANK, target_modules=["q_proj", "down_proj"])
        points, self.targets = [], []
        for g in self.adapter.groups:
            start, target = (
                random_point(len(g.sites), g.m, g.n, RANK, generator, torch.float32) for _ in "ab"
            )
            points.append(Point(start.U, torch.zeros_like(start.S), start.V) if from_zero else start)
            self.targets.append(
                (target.U[..., :target_rank] * target.S[:, None, :target_rank]) @ target.V.mT[:, :target_rank]
            )
        self.coordinates: Coordinates
        self.optimizer: Optimizer
        if space == "tangent":
            self.coordinates = TangentCoordinates(self.adapter, points)
            self.optimizer = TANGENT_OPTIMIZERS[optimizer](self.coordinates)
        else:
            pairs = [(p.U * p.S[:, None], p.V) for p in points]
            self.coordinates = FactorCoordinates(self.adapter, pairs, scale=1.0)
            self.optimizer = FactorAdamW(self.coordinates)

    def gradients(self) -> Iterator[Tensor]:
        for (a, b), target in zip(self.coordinates.factors(), self.targets, strict=True):
            yield a @ b.mT - target

    def loss(self) -> float:
        return sum(float(g.square().sum()) for g in self.gradients()) / 2

    def step(self, learning_rate: float, noise_std: float = 0.0) -> None:
        raw = []
        for group, g in zip(self.adapter.groups, self.gradients(), strict=True):
            left, right = (
                torch.stack([getattr(s, side) for s in group.sites]).detach() for side in ("left", "right")
            )
            raw.append((g @ right, g.mT @ left))
        noise = self.coordinates.standard_normal(torch.randn)
        vector = [
            tuple(t + noise_std * xi for t, xi in zip(parts, xis, strict=True))
            for parts, xis in zip(self.coordinates.to_vector(raw), noise, strict=True)
        ]
        self.optimizer.step(Release(vector, noise_std, step=1), learning_rate)


@pytest.mark.parametrize(("space", "optimizer"), NAMES)
@pytest.mark.parametrize("target_rank", [RANK, 1])
def test_it_recovers_a_matrix_without_noise(space: str, optimizer: str, target_rank: int) -> None:
    # From zero towards rank 1, most directions of the second moments are empty: they must not be blown up.
    problem = Recovery(space, optimizer, target_rank, from_zero=target_rank == 1 and optimizer != "paper")
    before = problem.loss()
    for _ in range(250):
        problem.step(0.03)
    assert problem.loss() < 1e-2 * before


@pytest.mark.parametrize(("space", "optimizer"), NAMES)
def test_it_descends_under_noise(space: str, optimizer: str) -> None:
    problem = Recovery(space, optimizer)
    before = problem.loss()
    for _ in range(250):
        problem.step(0.01, noise_std=0.1)
    assert problem.loss() < 0.3 * before


@pytest.mark.parametrize(("space", "optimizer"), NAMES)
def test_the_step_is_proportional_to_the_learning_rate(space: str, optimizer: str) -> None:
    def moved(rate: float) -> Tensor:
        problem = Recovery(space, optimizer)
        problem.optimizer.load_state_dict(problem.optimizer.state_dict())
        before = [a @ b.mT for a, b in problem.coordinates.factors()]
        problem.step(rate)
        after = [a @ b.mT for a, b in problem.coordinates.factors()]
        return torch.cat([(y - x).flatten() for x, y in zip(before, after, strict=True)])

    small, large = moved(1e-3), moved(2e-3)
    assert float((large - 2 * small).norm()) < 0.02 * float(large.norm())
    assert float(moved(0.0).norm()) < 1e-5


def test_adamw_is_torchs_adamw() -> None:
    problem: Any = Recovery("factors", "adamw")
    coordinates = problem.coordinates
    theirs = [t.detach().clone().requires_grad_(True) for t in (*coordinates.left, *coordinates.right)]
    torch_adamw = torch.optim.AdamW(theirs, lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(20):
        vector = coordinates.standard_normal(torch.randn)
        rate = 0.01 * (step + 1)
        torch_adamw.param_groups[0]["lr"] = rate
        for parameter, gradient in zip(theirs, [a for a, _ in vector] + [b for _, b in vector], strict=True):
            parameter.grad = gradient.clone()
        torch_adamw.step()
        problem.optimizer.step(Release(vector, 0.1, step + 1), rate)
        for ours, reference in zip((*coordinates.left, *coordinates.right), theirs, strict=True):
            assert torch.equal(ours.detach(), reference.detach())
    assert all(p.grad is None for p in coordinates.left)
