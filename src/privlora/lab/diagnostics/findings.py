"""What each figure shows, in numbers of this run; the paper's claim beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from privlora.lab.diagnostics import plots
from privlora.lab.diagnostics.gauges import Clipping, NoiseEnergy, NoiseRatio, Sensitivity
from privlora.lab.diagnostics.preconditioning import Preconditioned, PreconditioningStudy
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
    worst = max(abs(r / law - 1) for r, law in zip(result.ratio, result.by_law, strict=True))
    return (
        f"The factor noise moves Z by {number(result.ratio[0])} times PRISM's at the first step and by "
        f"{number(result.ratio[-1])} times at the last. The closed forms give each ratio within {_percent(worst)}. The "
        "level follows from the start and lora_alpha, so by itself it favours neither method."
    )


def _gauge_sensitivity(result: Sequence[Sensitivity]) -> str:
    return (
        f"The largest difference between steps from different gauges: {_most(result)}. All runs share their batches "
        "and the numbers behind their noise, so nothing but the gauge differs. Sizes alone are compared: a rule that "
        "normalises its steps shows little here."
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
    first = {one.method: [row[0] for row in one.values] for one in result.fraction}
    clipped = (f"{name} {_percent(min(shares))} to {_percent(max(shares))}" for name, shares in first.items())
    return (
        f"Clipped of the same examples at the first step, over gauges: {'; '.join(clipped)}. Largest difference of the "
        f"mean coefficient between gauges, over all steps: {_most(result.coefficient)}."
    )


def _gauge_sweep(result: GaugeSweep) -> str:
    return (
        f"One Z ({result.module}, {result.m} × {result.n}, rank {result.r}) at {len(result.gauges)} gauges. The energy "
        f"of the factor noise varies by {number(result.factor_decades)} orders of magnitude; PRISM's law varies by "
        f"{number(result.prism_variation, 2)} (relative). The factor noise is least at c = "
        f"{number(result.quietest_gauge)}; the least median drawn here is {number(min(result.amplification))} times "
        "PRISM's."
    )


def _preconditioning(result: PreconditioningStudy) -> str:
    parts = (
        f"{curve.method} {number(min(curve.preconditioned))} to {number(max(curve.preconditioned))}"
        for curve in result.curves
    )
    return (
        f"Means after {result.burn_in} steps, at the noise of ε = {', '.join(map(number, result.epsilons))}. "
        f"Below, step by step at ε = {number(result.stepwise_epsilon)}. Noise on Z after preconditioning, over all σ: "
        f"{'; '.join(parts)}. Where noise dominates the second moments, preconditioning takes σ out of it "
        "(Proposition A.29). The learning rate multiplies these levels, so they say nothing about utility."
    )


def _gram_stress(result: Sequence[Preconditioned]) -> str:
    parts = (f"{run.method} {number(max(run.stress))}" for run in result)
    return (
        f"Largest value of each run: {'; '.join(parts)}. The optimizers rank and scalar rest on the orthonormal U and "
        "V, whose Gram matrices are the identity; paper rests on balanced factors of Z."
    )


def _most(sets: Sequence[Sensitivity]) -> str:
    """The largest spread of each method that is a number."""
    most = {one.method: [value for value in one.spread if not math.isnan(value)] for one in sets}
    return "; ".join(f"{name} {number(max(found, default=math.nan))}" for name, found in most.items())


def _percent(value: float) -> str:
    return f"{number(100 * value, 3)} %"


_TITLES = {
    "noise-ratio": ("Noise on Z over steps", "Figure 1: above 1 throughout"),
    "gauge-sensitivity": (
        "Steps from five gauges of one start",
        "Figures 2 and 6: persistent for factor methods, near zero for PRISM after a warm-up",
    ),
    "noise-energy": (
        "Noise energy against Sₜ = Σ(m‖B‖² + n‖A‖²)",
        "Figure 3: linear in Sₜ for factor methods; low and nearly constant for PRISM",
    ),
    "clipping": (
        "Clipping across gauges",
        "Figures 5 and 7–11: the gauge decides who is clipped in factor space",
    ),
    "gauge-sweep": (
        "Gauge sweep at a fixed Z",
        "Figures 12 and 13: a V over c for factor methods, flat for PRISM",
    ),
    "preconditioning": (
        "Noise after preconditioning",
        "Figures 4, 14–16, 18 and 19: nearly independent of σ for DP-AdamW; lower for PRISM",
    ),
    "gram-stress": ("Conditioning of the Gram matrices", "Figures 17 and 20: higher for DP-AdamW"),
}
TEXTS = {
    name: FigureText(*words, getattr(plots, f"draw_{place}"), globals()[f"_{place}"])
    for name, words in _TITLES.items()
    for place in [name.replace("-", "_")]
}
