"""Figures 1-3 and 5-11 on traces made by hand, and the study that makes real ones."""

from __future__ import annotations

import math

import pytest
from diagnostics_cases import tiny_bench

from privlora.lab.diagnostics.bench import Trace
from privlora.lab.diagnostics.gauges import (
    GaugeStudy,
    clipping,
    gauge_sensitivity,
    gauge_study,
    noise_energy,
    noise_ratio,
)


def _trace(method: str, size: float) -> Trace:
    steps = [size * t for t in (1.0, 2.0, 3.0)]
    return Trace(
        method=method,
        noise_std=0.5,
        step_norm=steps,
        clip_fraction=[size / 10, math.nan, 0.5],
        clip_coefficient=[1.0, math.nan, size / 10],
        noise_energy=[size, 4 * size, 9 * size],
        law_energy=[size, size, size],
        factor_statistic=[size, 2 * size, 3 * size] if method == "dp-adamw" else [],
    )


@pytest.fixture
def study() -> GaugeStudy:
    return GaugeStudy(
        (0.5, 1.0, 2.0),
        [_trace("dp-adamw", size) for size in (7.0, 4.0, 1.0)],
        [_trace("prism rank", 1.0) for _ in range(3)],
    )


def test_noise_ratio_is_that_of_the_plain_start(study: GaugeStudy) -> None:
    study.prism[1].noise_energy[:] = [4.0, 4.0, 1.0]
    found = noise_ratio(study)
    assert found.steps == [1, 2, 3]
    assert found.ratio == [1.0, 2.0, 6.0]
    assert found.by_law == [2.0, 2.0, 2.0]
    assert (found.window, found.moving_average) == (1, found.ratio)  # at most a third of three steps


def test_moving_average_looks_back(study: GaugeStudy) -> None:
    energy = [float(t * t) for t in range(1, 10)]
    study.factors[1].noise_energy[:] = energy
    study.prism[1].noise_energy[:] = [1.0] * 9
    for trace in (study.factors[1], study.prism[1]):
        trace.law_energy[:] = [1.0] * 9
    found = noise_ratio(study, window=2)
    assert found.window == 2
    assert found.moving_average == [1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5]
    assert noise_ratio(study).window == 3


def test_sensitivity_is_the_range_over_gauges(study: GaugeStudy) -> None:
    factors, prism = gauge_sensitivity(study)
    assert (factors.method, factors.spread) == ("dp-adamw", [6.0, 12.0, 18.0])
    assert factors.values[0] == [7.0, 14.0, 21.0]
    assert (prism.method, prism.spread) == ("prism rank", [0.0, 0.0, 0.0])


def test_steps_without_an_example_have_no_clipping(study: GaugeStudy) -> None:
    found = clipping(study, 1.5)
    assert found.clip_norm == 1.5
    fraction, coefficient = found.fraction[0], found.coefficient[0]
    assert fraction.spread[0] == pytest.approx(0.6)
    assert math.isnan(fraction.spread[1])
    assert (fraction.spread[2], coefficient.spread[0]) == (0.0, 0.0)
    assert coefficient.spread[2] == pytest.approx(0.6)


def test_noise_energy_pairs_both_methods_at_each_gauge_and_step(study: GaugeStudy) -> None:
    found = noise_energy(study)
    assert found.gauge == [0.5] * 3 + [1.0] * 3 + [2.0] * 3
    assert found.factor_statistic == [7.0, 14.0, 21.0, 4.0, 8.0, 12.0, 1.0, 2.0, 3.0]
    assert found.factors[3:6] == [4.0, 16.0, 36.0]
    assert found.prism == [1.0, 4.0, 9.0] * 3
    assert found.law[:3] == [7.0] * 3


def test_a_real_study() -> None:
    with tiny_bench() as bench:
        study = gauge_study(bench, steps=2, gauges=(0.5, 1.0))
    factors, prism = gauge_sensitivity(study)
    assert min(factors.spread) > 0.01
    assert max(prism.spread) < 1e-4 * min(min(row) for row in prism.values)
    for e, law in zip(noise_energy(study).factors, noise_energy(study).law, strict=True):
        assert 0.8 < e / law < 1.2
