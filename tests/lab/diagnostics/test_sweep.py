"""What the gauge sweep has to show, for several shapes."""

from __future__ import annotations

import math

import pytest
import torch

from privlora.errors import ModelError
from privlora.geometry.fixed_rank import Point, random_point
from privlora.lab.diagnostics.sweep import GaugeSweep, _distance, gauge_sweep

SHAPES = [(24, 60, 4), (60, 24, 8), (16, 16, 16), (5, 200, 1), (64, 48, 3)]


def _sweep(m: int, n: int, r: int, **options: float) -> GaugeSweep:
    g = torch.Generator().manual_seed(m + n)
    left, right = 0.05 * torch.randn(m, r, generator=g), torch.randn(n, r, generator=g)
    arguments = {"noise_std": 0.02, "seed": 3, **options}
    return gauge_sweep(left, right, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("m", "n", "r"), SHAPES)
def test_factor_noise_varies_and_prism_does_not(m: int, n: int, r: int) -> None:
    sweep = _sweep(m, n, r)
    assert len(sweep.gauges) == 61
    assert (sweep.gauges[0], sweep.gauges[-1]) == pytest.approx((1e-3, 1e3))
    assert sweep.factor_decades >= 3
    measured = [median**2 for median in sweep.factors.median]
    assert math.log10(max(measured) / min(measured)) >= 3
    assert sweep.prism_variation < 1e-6
    for energy in sweep.prism_law_energy:
        assert energy == pytest.approx(0.02**2 * r * (m + n - r), rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_medians_follow_the_laws(scale: float) -> None:
    sweep = _sweep(24, 60, 4, scale=scale)
    for law, band in ((sweep.factor_law_energy, sweep.factors), (sweep.prism_law_energy, sweep.prism)):
        for energy, low, median, high in zip(law, band.p10, band.median, band.p90, strict=True):
            assert low < median < high
            assert median == pytest.approx(energy**0.5, rel=0.1)
    for ratio, f, p in zip(sweep.amplification, sweep.factors.median, sweep.prism.median, strict=True):
        assert ratio == f / p


def test_noise_is_least_where_corollary_2_3_says() -> None:
    sweep = _sweep(24, 60, 4)
    least = sweep.gauges[sweep.factor_law_energy.index(min(sweep.factor_law_energy))]
    assert abs(math.log10(least / sweep.quietest_gauge)) <= 0.051  # half the spacing of the grid
    # The bilinear part has no gauge.
    assert max(sweep.bilinear.median) / min(sweep.bilinear.median) < 1.3


@pytest.mark.parametrize("part", ["U", "S", "V"])
def test_a_point_that_moves_is_seen(part: str) -> None:
    base = random_point(1, 9, 7, 3, torch.Generator().manual_seed(0))
    parts = {"U": base.U, "S": base.S, "V": base.V}
    parts[part] = parts[part] + 1e-4 * torch.randn(parts[part].shape, dtype=torch.float64)
    assert _distance(base, base) < 1e-12
    assert _distance(base, Point(**parts)) > 1e-5


def test_repeatable_and_chunked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sweep(24, 60, 4, gauges=3) == _sweep(24, 60, 4, gauges=3)
    assert _sweep(24, 60, 4, gauges=3, seed=4) != _sweep(24, 60, 4, gauges=3)
    monkeypatch.setattr("privlora.lab.diagnostics.sweep._MOST_NORMALS", 1)
    one_by_one = _sweep(24, 60, 4, gauges=3)
    assert one_by_one.factor_law_energy == _sweep(24, 60, 4, gauges=3).factor_law_energy
    assert one_by_one.prism.median == pytest.approx(_sweep(24, 60, 4, gauges=3).prism.median, rel=0.1)


def test_refusals() -> None:
    with pytest.raises(ModelError, match="rank-deficient"):
        gauge_sweep(torch.zeros(6, 2), torch.randn(5, 2), noise_std=1.0, seed=0)
