"""Noise and sum in exact arithmetic: one rounding, to a grid that public numbers fix."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from tiny_models import tiny_model
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.coordinates.starts import tangent_start
from privlora.lab.wishart.mechanism import WishartProjection
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.mechanisms.charges import Uncharged
from privlora.mechanisms.noising import grid_width, noised


def on_grid(values: Tensor, width: float) -> bool:
    steps = values.double() / width
    return bool((steps == steps.round()).all())


@pytest.mark.parametrize("tau", [1e-30, 1e-3, 0.1, 1.0, 4096.0, 4095.999, 4096.001, 7e8])
def test_the_grid_is_a_power_of_two_below_tau_over_4096(tau: float) -> None:
    width = grid_width(tau)
    assert math.frexp(width)[0] == 0.5
    assert tau / 8192 < width <= tau / 4096


@pytest.mark.parametrize("tau", [5e-324, 1e-323, 1e-320, 1e-319, 1e-310])
def test_the_grid_of_tiny_noise_is_not_wider_than_the_noise(tau: float) -> None:
    assert 0 <= grid_width(tau) <= tau


def test_without_noise_there_is_no_grid() -> None:
    assert grid_width(0.0) == 0.0
    total = torch.randn(50, dtype=torch.float64)
    made = noised(total, torch.randn(50, dtype=torch.float64), 0.0, 3.0, torch.float32)
    assert torch.equal(made, (total / 3.0).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("size", "scale", "divisor"),
    [(1.0, 0.37, 7.3), (1e6, 0.37, 7.3), (1e-9, 1e-3, 1e5), (30.0, 2.0**-5, 64.0), (1e9, 1e-4, 0.003)],
)
def test_it_is_the_grid_point_nearest_to_the_exact_value(
    size: float, scale: float, divisor: float, dtype: torch.dtype
) -> None:
    """Large sums cancel against large noise here, so a rounding on the way would show."""
    generator = torch.Generator().manual_seed(1)
    total = (size * torch.randn(400, generator=generator, dtype=torch.float64)).to(dtype)
    xi = torch.randn(400, generator=generator, dtype=torch.float64) - total.double() / scale
    width = grid_width(scale / divisor)
    found = noised(total, xi, scale, divisor, torch.float32)
    assert found.dtype == torch.float32
    assert on_grid(found, width)
    for t, x, got in zip(total.tolist(), xi.tolist(), found.tolist(), strict=True):
        exact = (Fraction(t) + Fraction(scale) * Fraction(x)) / Fraction(divisor)
        slack = 2 * 2.0**-53 * abs(t) / divisor  # of float64 sums
        assert abs(Fraction(got) - exact) <= Fraction(width / 2 + slack)


@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e6])
def test_the_grid_does_not_follow_the_sum(size: float) -> None:
    xi = NoiseSource(insecure_seed=5).standard_normal((400,))
    total = size * NoiseSource(insecure_seed=6).standard_normal((400,))
    width = grid_width(0.37 / 7.3)
    found = noised(total, xi, 0.37, 7.3, torch.float64)
    assert on_grid(found, width)
    assert not on_grid(found, 2 * width)


def test_the_law_stays_normal_and_no_sum_is_all_noise() -> None:
    xi = NoiseSource(insecure_seed=4).standard_normal((20_000,))
    alone = noised(None, xi, 0.7, 4.0, torch.float32).double() / (0.7 / 4)
    assert kstest(alone, "norm").pvalue > 0.01
    assert float(alone.square().sum()) == pytest.approx(float(xi.square().sum()), rel=1e-5)
    assert torch.equal(noised(torch.zeros(20_000), xi, 0.7, 4.0, torch.float32).double() / (0.7 / 4), alone)


def test_noise_stays_in_float64_and_in_the_tangent_space_until_it_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinates = tangent_start(LowRankAdapter(tiny_model(), rank=2), "random", seed=0)
    noise: list[Tensor] = []

    def noted(total: Tensor | None, xi: Tensor, *rest: Any) -> Tensor:
        noise.append(xi)
        return noised(total, xi, *rest)

    monkeypatch.setattr("privlora.mechanisms.noising.noised", noted)
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=1.0,
        event=StepEvent(PoissonSampling(0.1), 1.0),
        expected_batch_size=1.0,
        ledger=Uncharged(),
    )
    mechanism.release()
    assert {t.dtype for t in noise} == {torch.float64}
    for up, vp, point in zip(noise[1::3], noise[2::3], coordinates.points, strict=True):
        # U is orthonormal to float32 rounding only, and projecting twice squares that.
        assert float((point.U.double().mT @ up).abs().max()) < 1e-11
        assert float((point.V.double().mT @ vp).abs().max()) < 1e-11


def test_the_wishart_mechanism_has_the_same_grid() -> None:
    matrix = torch.nn.functional.normalize(torch.randn(12, 3, dtype=torch.float64), dim=0)
    width = grid_width(0.3)
    assert on_grid(WishartProjection(12, 5).project_then_noise(matrix, 0.3), width)
    # With rank above the dimension M can be undone: what was projected lies on the grid.
    square = WishartProjection(4, 50, insecure_seed=3)
    released = square.noise_then_project(matrix[:4], 0.3)
    factor = square.publish()
    inside = torch.linalg.solve(factor @ factor.mT, released)
    torch.testing.assert_close(inside, (inside / width).round() * width, rtol=0, atol=1e-9)
