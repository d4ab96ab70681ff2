"""The same run from several gauges of one start (PRISM Figures 1-3 and 5-11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from privlora.lab.diagnostics.bench import Contender, FactorPairs, Trace, Workbench

GAUGES = (0.25, 0.5, 1.0, 2.0, 4.0)
WINDOW = 25


@dataclass(frozen=True)
class GaugeStudy:
    """Traces of the factor baseline, of PRISM and of other factor methods, each in the order of ``gauges``."""

    gauges: tuple[float, ...]
    factors: list[Trace]
    prism: list[Trace]
    others: list[list[Trace]] = field(default_factory=list)

    @property
    def methods(self) -> list[list[Trace]]:
        """The traces of every method."""
        return [self.factors, self.prism, *self.others]


@dataclass(frozen=True)
class NoiseRatio:
    """||N_Z||_F of the factor baseline over PRISM's, step by step from the same start (Figure 1).

    by_law: the same ratio of root expected energies. window: of the trailing moving average, in steps.
    """

    steps: list[int]
    ratio: list[float]
    moving_average: list[float]
    by_law: list[float]
    window: int


@dataclass(frozen=True)
class Sensitivity:
    """How one quantity differs between gauges, for one method: rows are gauges, columns steps.

    spread: max - min over gauges at each step (rho_t); a step at which nothing was measured is NaN.
    """

    method: str
    gauges: list[float]
    values: list[list[float]]
    spread: list[float]


@dataclass(frozen=True)
class NoiseEnergy:
    """||N_Z||_F^2 against S_t, over all gauges and steps (Figure 3).

    PRISM's energy has no S_t of its own: each value stands at the S_t of the baseline's run at the same gauge and step.
    ``law`` and ``prism_law``: tau^2 S_t + the bilinear term, and tau^2 r (m + n - r) summed over modules.
    """

    noise_std: float
    gauge: list[float]
    factor_statistic: list[float]
    factors: list[float]
    law: list[float]
    prism: list[float]
    prism_law: list[float]


@dataclass(frozen=True)
class Clipping:
    """Clip fraction and mean clip coefficient for each gauge, over steps (Figures 5 and 7-11)."""

    clip_norm: float
    fraction: list[Sensitivity]
    coefficient: list[Sensitivity]


def gauge_study(
    bench: Workbench, *, steps: int, gauges: tuple[float, ...] = GAUGES, also: tuple[str, ...] = ()
) -> GaugeStudy:
    """Run the baseline, PRISM and the methods ``also`` from every gauge of the bench's start, with the plan's noise.

    gauges: positive, with 1 among them.
    """
    sigma = bench.plan.event.noise_multiplier

    def traces(make: Callable[[FactorPairs], Contender]) -> list[Trace]:
        return [bench.run(make(bench.rescaled(c)), steps=steps, noise_multiplier=sigma) for c in gauges]

    return GaugeStudy(
        gauges,
        traces(bench.factor_contender),
        traces(bench.tangent_contender),
        [traces(partial(bench.factor_contender, name=name)) for name in also],
    )


def noise_ratio(study: GaugeStudy, window: int = WINDOW) -> NoiseRatio:
    """Figure 1, from the runs at the gauge 1. The window is at most a third of the steps."""
    one = study.gauges.index(1.0)
    factors, prism = study.factors[one], study.prism[one]
    ratio = np.sqrt(np.array(factors.noise_energy) / np.array(prism.noise_energy))
    by_law = np.sqrt(np.array(factors.law_energy) / np.array(prism.law_energy))
    window = max(1, min(window, len(ratio) // 3))
    average = [float(ratio[max(0, t + 1 - window) : t + 1].mean()) for t in range(len(ratio))]
    steps = list(range(1, len(ratio) + 1))
    return NoiseRatio(steps, ratio.tolist(), average, by_law.tolist(), window)


def gauge_sensitivity(study: GaugeStudy) -> list[Sensitivity]:
    """Figures 2 and 6: ||Z_(t+1) - Z_t||_F across gauges, and rho_t, of every method."""
    return [_sensitivity(study, traces, "step_norm") for traces in study.methods]


def noise_energy(study: GaugeStudy) -> NoiseEnergy:
    """Figure 3."""
    found = NoiseEnergy(study.factors[0].noise_std, [], [], [], [], [], [])
    for c, factors, prism in zip(study.gauges, study.factors, study.prism, strict=True):
        found.gauge.extend([c] * len(factors.noise_energy))
        found.factor_statistic.extend(factors.factor_statistic)
        found.factors.extend(factors.noise_energy)
        found.law.extend(factors.law_energy)
        found.prism.extend(prism.noise_energy)
        found.prism_law.extend(prism.law_energy)
    return found


def clipping(study: GaugeStudy, clip_norm: float) -> Clipping:
    """Figures 5 and 7-11."""
    names = ("clip_fraction", "clip_coefficient")
    fraction, coefficient = ([_sensitivity(study, each, name) for each in study.methods] for name in names)
    return Clipping(clip_norm, fraction, coefficient)


def _sensitivity(study: GaugeStudy, traces: list[Trace], name: str) -> Sensitivity:
    values = [getattr(trace, name) for trace in traces]
    spread = np.max(values, axis=0) - np.min(values, axis=0)
    return Sensitivity(traces[0].method, list(study.gauges), values, spread.tolist())
