"""What each figure shows, in words and numbers of this run; the paper's claim beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from privlora.lab.diagnostics import plots
from privlora.lab.diagnostics.gauges import Clipping, NoiseEnergy, NoiseRatio, Sensitivity
from privlora.lab.diagnostics.preconditioning import PreconditioningStudy, StressSeries
from privlora.lab.diagnostics.sweep import GaugeSweep
from privlora.pages.numbers import number


@dataclass(frozen=True)
class FigureText:
    """How one diagnostic is shown. paper: which of its figures, and what it says; finding: what this run says."""

    title: str
    paper: str
    draw: Callable[[Any], Figure]
    finding: Callable[[Any], str]


def _noise_ratio(result: NoiseRatio) -> str:
    first, last = result.ratio[0], result.ratio[-1]
    worst = max(abs(r / law - 1) for r, law in zip(result.ratio, result.by_law, strict=True))
    return (
        f"The factor noise moves Z by {number(first)} times PRISM's at the first step and by {number(last)} times at "
        f"the last, which is {'more' if last > 1 else 'less'} than PRISM's. The closed forms give each ratio within "
        f"{_percent(worst)}. The level is a matter of the start and of lora_alpha, which scale the clipped gradients "
        "on Z as well, so by itself it favours neither method."
    )


def _gauge_sensitivity(result: Sequence[Sensitivity]) -> str:
    parts = [f"{one.method} {number(_most(one.spread))}" for one in result]
    return (
        f"The largest difference between steps from different gauges: {'; '.join(parts)}. All runs share their batches "
        "and the numbers behind their noise, so nothing but the gauge differs. Sizes alone are compared: a rule that "
        "normalises its steps shows little here, whatever the gauge does to their direction."
    )


def _noise_energy(result: NoiseEnergy) -> str:
    span = max(result.factor_statistic) / min(result.factor_statistic)
    off = max(abs(e / law - 1) for e, law in zip(result.factors, result.law, strict=True))
    spread = max(result.prism_law) / min(result.prism_law) - 1
    return (
        f"Sₜ spans a factor of {number(span)}, and the energy of the factor noise follows its law within "
        f"{_percent(off)} in every step. The law of PRISM's noise varies by {number(spread, 2)} (relative). PRISM's "
        "points stand at the Sₜ of the DP-AdamW run of the same gauge and step."
    )


def _clipping(result: Clipping) -> str:
    clipped = [f"{one.method} {_range([row[0] for row in one.values])}" for one in result.fraction]
    spread = [f"{one.method} {number(_most(one.spread))}" for one in result.coefficient]
    return (
        f"Clipped of the same examples at the first step, over gauges: {'; '.join(clipped)}. Largest difference of the "
        f"mean coefficient between gauges, over all steps: {'; '.join(spread)}."
    )


def _gauge_sweep(result: GaugeSweep) -> str:
    nearest = result.gauges[min(range(len(result.gauges)), key=lambda i: result.amplification[i])]
    return (
        f"One Z ({result.module}, {result.m} × {result.n}, rank {result.r}) at {len(result.gauges)} gauges. The energy "
        f"of the factor noise varies by {number(result.factor_decades)} orders of magnitude; what fixes PRISM's law, "
        "its energy and the point that each gauge's factors give, varies by "
        f"{number(result.prism_variation, 2)} (relative). The energy of the factor noise is least at c = "
        f"{number(result.quietest_gauge)}; the least of the medians drawn here, at c = {number(nearest, 2)}, is "
        f"{number(min(result.amplification))} times PRISM's."
    )


def _preconditioning(result: PreconditioningStudy) -> str:
    parts = []
    for curve in result.curves:
        low, high = min(curve.preconditioned), max(curve.preconditioned)
        parts.append(f"{curve.method} {number(low)} to {number(high)}")
    return (
        f"Means after {result.burn_in} steps of burn-in, at the noise that ε = {_listed(result.epsilons)} needs; "
        f"below, step by step at ε = {number(result.stepwise_epsilon)}. Noise on Z after preconditioning, over all σ: "
        f"{'; '.join(parts)}. Where noise dominates the second moments, preconditioning takes σ out of it "
        "(Proposition A.29). The learning rate multiplies these levels, so they say nothing about utility."
    )


def _gram_stress(result: Sequence[StressSeries]) -> str:
    parts = [f"{run.method} {number(max(run.stress))}" for run in result]
    return (
        f"Largest value of each run: {'; '.join(parts)}. The optimizers rank and scalar rest on the orthonormal U and "
        "V, whose Gram matrices are the identity; paper rests on balanced factors of Z."
    )


TEXTS: dict[str, FigureText] = {
    "noise-ratio": FigureText(
        "Noise on Z over steps",
        "Figure 1: above 1 throughout",
        plots.draw_noise_ratio,
        _noise_ratio,
    ),
    "gauge-sensitivity": FigureText(
        "Steps from five gauges of one start",
        "Figures 2 and 6: persistent for factor methods, near zero for PRISM after a warm-up",
        plots.draw_gauge_sensitivity,
        _gauge_sensitivity,
    ),
    "noise-energy": FigureText(
        "Noise energy against Sₜ = Σ(m‖B‖² + n‖A‖²)",
        "Figure 3: linear in Sₜ for factor methods; low and nearly constant for PRISM",
        plots.draw_noise_energy,
        _noise_energy,
    ),
    "clipping": FigureText(
        "Clipping across gauges",
        "Figures 5 and 7–11: the gauge decides who is clipped in factor space",
        plots.draw_clipping,
        _clipping,
    ),
    "gauge-sweep": FigureText(
        "Gauge sweep at a fixed Z",
        "Figures 12 and 13: a V over c for factor methods, flat for PRISM",
        plots.draw_gauge_sweep,
        _gauge_sweep,
    ),
    "preconditioning": FigureText(
        "Noise after preconditioning",
        "Figures 4, 14–16, 18 and 19: nearly independent of σ for DP-AdamW; lower for PRISM",
        plots.draw_preconditioning,
        _preconditioning,
    ),
    "gram-stress": FigureText(
        "Conditioning of the Gram matrices",
        "Figures 17 and 20: higher for DP-AdamW",
        plots.draw_gram_stress,
        _gram_stress,
    ),
}


def _most(values: Sequence[float]) -> float:
    """The largest that is a number."""
    return max((v for v in values if not math.isnan(v)), default=float("nan"))


def _percent(value: float) -> str:
    return f"{number(100 * value, 3)} %"


def _range(values: Sequence[float]) -> str:
    low, high = _percent(min(values)), _percent(max(values))
    return low if low == high else f"{low} to {high}"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(number(v) for v in values)
