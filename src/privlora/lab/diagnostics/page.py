"""Writing diagnostics: one self-contained page, the series as JSON, and a PNG of each figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from privlora.errors import RunError
from privlora.lab.diagnostics.experiments import Diagnostics
from privlora.lab.diagnostics.gauges import Clipping, NoiseEnergy, NoiseRatio, Sensitivity
from privlora.lab.diagnostics.preconditioning import Preconditioned, PreconditioningStudy
from privlora.lab.diagnostics.sweep import Band, GaugeSweep
from privlora.pages.figures import (
    ACCENT,
    FOURTH,
    INK,
    MUTED,
    SECOND,
    THIRD,
    WIDTH,
    grid,
    in_style,
    inline_svg,
    png,
)
from privlora.pages.numbers import number
from privlora.pages.template import fill
from privlora.training.files import write_atomically
from privlora.version import __version__

_COLOURS = {
    "dp-adamw": SECOND,
    "prism rank": ACCENT,
    "prism scalar": THIRD,
    "prism paper": FOURTH,
    "lora-rite": THIRD,
    "dp-sgd": FOURTH,
}
_MARKERS = {"dp-adamw": "o", "prism scalar": "^", "prism paper": "D"}
_LAW: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}
_FEW_DECADES = 1.5
_FLOOR = 1e-12  # where differences that are exactly zero are drawn on a logarithmic axis


@in_style
def draw_noise_ratio(result: NoiseRatio) -> Figure:
    """Figure 1: the ratio of the noise norms over steps."""
    figure, (axes,) = grid(1, 1, WIDTH, 3.2)
    axes.axhline(1, color=ACCENT, linewidth=1.2, label="PRISM")
    axes.plot(result.steps, result.ratio, color=SECOND, linewidth=0.9, alpha=0.6, marker="o", markersize=3)
    average = f"average of {result.window}"
    axes.plot(result.steps, result.moving_average, color=SECOND, linewidth=2.2, label=average)
    axes.plot(result.steps, result.by_law, **_LAW, label="closed forms")
    _finish(axes, "", xlabel="step", ylabel="noise on Z, factors over PRISM")
    axes.set_ylim(0, 1.12 * max(1.0, *result.ratio))
    return figure


@in_style
def draw_gauge_sensitivity(result: list[Sensitivity]) -> Figure:
    """Figures 2 and 6: sizes of steps across gauges, and how far they lie apart."""
    figure, (sizes, spread) = grid(1, 2, WIDTH, 3.4)
    _bands(sizes, result, "size of the step on Z")
    _spread(spread, result, "ρ: largest less smallest")
    return figure


@in_style
def draw_noise_energy(result: NoiseEnergy) -> Figure:
    """Figure 3: noise energy against S_t."""
    figure, (axes,) = grid(1, 1, WIDTH, 3.9)
    order = np.argsort(result.factor_statistic)
    s = np.array(result.factor_statistic)
    axes.plot(s[order], result.noise_std**2 * s[order], color=MUTED, linestyle=":", label="τ²Sₜ alone")
    axes.plot(s[order], np.array(result.law)[order], **_LAW, label="laws")
    axes.plot(s[order], np.array(result.prism_law)[order], **_LAW)
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 3.5, "alpha": 0.6}
    axes.plot(s, result.factors, color=SECOND, label="factors: τ²Sₜ + bilinear", **dots)
    axes.plot(s, result.prism, color=ACCENT, label="PRISM: τ²Σr(m+n−r)", **dots)
    _finish(axes, "xy", xlabel="Sₜ of the factors", ylabel="energy of the noise on Z")
    return figure


@in_style
def draw_clipping(result: Clipping) -> Figure:
    """Figures 5 and 7-11: who is clipped, and by how much."""
    figure, panels = grid(2, 2, WIDTH, 6.2)
    names = ("fraction of examples clipped", "mean clip coefficient")
    for axes, sets, name in zip(panels[:2], (result.fraction, result.coefficient), names, strict=True):
        for one in sets:
            values, look = np.array(one.values), _look(one.method)
            axes.plot(one.gauges, values[:, 0], **look)
            dashed = {**look, "linestyle": (0, (3, 2)), "label": None, "markerfacecolor": "none"}
            axes.plot(one.gauges, values[:, -1], **dashed)
        title = "solid: first step, dashed: last"
        _finish(axes, "x", xlabel="gauge c", ylabel=name, ylim=(-0.04, 1.06), title=title)
        axes.set_xticks(sets[0].gauges)
    _bands(panels[2], result.coefficient, "mean clip coefficient")
    _spread(panels[3], result.coefficient, "largest less smallest")
    return figure


@in_style
def draw_gauge_sweep(result: GaugeSweep) -> Figure:
    """Figures 12 and 13: noise at a fixed Z against the gauge, and the amplification."""
    figure, (noise, ratio) = grid(1, 2, WIDTH, 3.9)
    c = np.array(result.gauges)
    bands = {"factors": SECOND, "bilinear": MUTED, "prism": ACCENT}
    for name, colour in bands.items():
        band: Band = getattr(result, name)
        noise.fill_between(c, band.p10, band.p90, color=colour, alpha=0.22, linewidth=0)
        noise.plot(c, band.median, color=colour, linewidth=2, label=name)
    for energy in (result.factor_law_energy, result.prism_law_energy):
        noise.plot(c, np.sqrt(energy), **_LAW)
    title = f"median and 10–90 % of {result.draws} draws"
    _finish(noise, "xy", xlabel="gauge c", ylabel="noise on Z, Frobenius norm", title=title)
    best = int(np.argmin(result.amplification))
    least = f"least: {number(result.amplification[best], 3)} at c = {number(float(c[best]), 2)}"
    ratio.axhline(1, color=ACCENT, linewidth=1.2)
    ratio.plot(c, result.amplification, color=SECOND, linewidth=2)
    ratio.plot(c[best], result.amplification[best], "o", color=SECOND, markersize=5, label=least)
    _finish(ratio, "xy", xlabel="gauge c", ylabel="factors over PRISM", title="amplification")
    return figure


@in_style
def draw_preconditioning(result: PreconditioningStudy) -> Figure:
    """Figures 4, 14 and 15 above; 16, 18 and 19 below."""
    figure, panels = grid(2, 3, WIDTH, 6.4)
    ratio = "after over before"
    titles = {"preconditioned": "noise after preconditioning", "raw": "noise before", "amplification": ratio}
    for axes, (name, title) in zip(panels[:3], titles.items(), strict=True):
        for curve in result.curves:
            axes.plot(curve.noise_multipliers, getattr(curve, name), **_look(curve.method))
        y = "" if name == "amplification" else "Frobenius norm on Z"
        _finish(axes, "y", xlabel="noise multiplier σ", ylabel=y, title=title, legend=axes is panels[0])
    over = {"aggressiveness": "largest scaling of a coordinate", "amplification": ratio}
    for axes, (name, title) in zip(panels[3:5], over.items(), strict=True):
        for run in result.runs:
            axes.plot(run.steps, getattr(run, name), **{**_look(run.method), "marker": ""})
        for run in result.runs if name == "aggressiveness" else ():
            if run.bound:
                dashed = {**_look(run.method), "marker": "", "linestyle": ":", "label": "Theorem 3.5"}
                axes.plot(run.steps, run.bound, **dashed)
        _finish(axes, "y", xlabel="step", title=title, legend=name == "aggressiveness")
    _by_step(panels[5], [(run.aggressiveness, run) for run in result.runs], "largest scaling")
    return figure


@in_style
def draw_gram_stress(result: Sequence[Preconditioned]) -> Figure:
    """Figures 17 and 20: conditioning of the Gram matrices a method rests on."""
    figure, (stress, against) = grid(1, 2, WIDTH, 3.6)
    for run in result:
        stress.plot(run.steps, run.stress, **{**_look(run.method), "marker": ""})
    name = "1 / √λₘᵢₙ, largest over modules"
    _finish(stress, "y", xlabel="step", title=name)
    _by_step(against, [(run.stress, run) for run in result], name)
    return figure


def _look(method: str) -> dict[str, Any]:
    """How a method is drawn: a line that may coincide with another is broken."""
    return {
        "color": _COLOURS.get(method, ACCENT if method.startswith("prism") else MUTED),
        "linestyle": (0, (2, 2)) if method == "prism scalar" else "-",
        "marker": _MARKERS.get(method, "s"),
        "label": "DP-AdamW" if method == "dp-adamw" else method.replace("prism", "PRISM"),
        **{"linewidth": 1.8, "markersize": 4.5},
    }


def _bands(axes: Axes, sets: list[Sensitivity], name: str) -> None:
    """Min, max, quartiles and mean over gauges at each step."""
    for one in sets:
        values, look = np.array(one.values), {**_look(one.method), "marker": ""}
        steps, quarters = np.arange(1, values.shape[1] + 1), np.quantile(values, (0, 0.25, 0.75, 1), axis=0)
        axes.fill_between(steps, quarters[0], quarters[3], color=look["color"], alpha=0.15, linewidth=0)
        axes.fill_between(steps, quarters[1], quarters[2], color=look["color"], alpha=0.25, linewidth=0)
        axes.plot(steps, np.mean(values, axis=0), **look)
    _finish(axes, "", xlabel="step", ylabel=name, title="smallest to largest of five gauges")


def _spread(axes: Axes, sets: list[Sensitivity], name: str) -> None:
    """max - min over gauges; zeros lie on the floor of the logarithmic axis."""
    for one in sets:
        steps, spread = np.arange(1, len(one.spread) + 1), np.maximum(np.array(one.spread), _FLOOR)
        axes.plot(steps, spread, **{**_look(one.method), "marker": ""})
    _finish(axes, "y", xlabel="step", ylabel=name, title="spread over gauges")


def _by_step(axes: Axes, runs: Sequence[tuple[Sequence[float], Preconditioned]], name: str) -> None:
    """Amplification against something, a dot a step."""
    for x, run in runs:
        look = {**_look(run.method), "linestyle": "", "markeredgewidth": 0, "label": None}
        axes.plot(x, run.amplification, **look)
    _finish(axes, "xy", xlabel=name, title="after over before", legend=False)


def _finish(axes: Axes, logarithmic: str, *, legend: bool = True, **said: Any) -> None:
    """Labels, limits and scales ("x", "y", "xy"); on the latter decades, where there are few also 2 and 5."""
    axes.set(**said, **{f"{side}scale": "log" for side in logarithmic})
    axes.margins(y=0.1)
    if said.get("xlabel") == "step":
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for axis in (getattr(axes, f"{side}axis") for side in logarithmic):
        low, high = sorted(axis.get_view_interval())
        few = low > 0 and math.log10(high / low) < _FEW_DECADES
        axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=7))
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 3)))
        axis.set_minor_locator(NullLocator())
    if legend:
        axes.legend(fontsize=8.5)


_PRIVATE = (
    "Computed from private records with noise of a known seed: keep all of this page where the records are"
)


FIGURES: Final[dict[str, tuple[str, str, Callable[[Any], Figure]]]] = {
    "noise-ratio": ("Noise on Z over steps", "Figure 1: above 1 throughout", draw_noise_ratio),
    "gauge-sensitivity": (
        "Steps from five gauges of one start",
        "Figures 2 and 6: persistent for factor methods, near zero for PRISM after a warm-up",
        draw_gauge_sensitivity,
    ),
    "noise-energy": (
        "Noise energy against Sₜ = Σ(m‖B‖² + n‖A‖²)",
        "Figure 3: linear in Sₜ for factor methods; low and nearly constant for PRISM",
        draw_noise_energy,
    ),
    "clipping": (
        "Clipping across gauges",
        "Figures 5 and 7–11: the gauge decides who is clipped in factor space",
        draw_clipping,
    ),
    "gauge-sweep": (
        "Gauge sweep at a fixed Z",
        "Figures 12 and 13: a V over c for factor methods, flat for PRISM",
        draw_gauge_sweep,
    ),
    "preconditioning": (
        "Noise after preconditioning",
        "Figures 4, 14–16, 18 and 19: nearly independent of σ for DP-AdamW; lower for PRISM",
        draw_preconditioning,
    ),
    "gram-stress": (
        "Conditioning of the Gram matrices",
        "Figures 17 and 20: higher for DP-AdamW",
        draw_gram_stress,
    ),
}
"""Name -> title, which of the paper's figures it is and what the paper says, and what draws it."""


def render(diagnostics: Diagnostics) -> str:
    """The page: no script, no resource from elsewhere; every text of a user is escaped."""
    figures = []
    for name, result in diagnostics.figures.items():
        title, paper, draw = FIGURES[name]
        figures.append((name, title, paper, inline_svg(draw(result), title)))
    return fill(
        "diagnostics.html.j2",
        "privlora.lab.diagnostics",
        title=f"Diagnostics · {diagnostics.facts['model']}",
        banner=None if diagnostics.public else ("PRIVATE", _PRIVATE),
        public=diagnostics.public,
        facts=diagnostics.facts,
        rows=[(name.replace("_", " "), _shown(value)) for name, value in diagnostics.facts.items()],
        figures=figures,
        version=__version__,
    )


def write(diagnostics: Diagnostics, output: Path) -> list[Path]:
    """Write diagnostics.html, diagnostics.json and NAME.png into ``output``, or ``output``/private if not public.

    Files of those names are replaced. Returns them, the page and the series first. Raises RunError if nothing can be
    written.
    """
    folder = output if diagnostics.public else output / "private"
    make_folder(folder, private=not diagnostics.public)
    series = json.dumps(diagnostics.to_dict(), indent=1, allow_nan=False) + "\n"
    content: dict[str, str | bytes] = {"diagnostics.html": render(diagnostics), "diagnostics.json": series}
    for name, result in diagnostics.figures.items():
        _, _, draw = FIGURES[name]
        content[f"{name}.png"] = png(draw(result))
    for name, written in content.items():
        write_atomically(folder / name, written)
    return [folder / name for name in content]


def make_folder(folder: Path, *, private: bool) -> None:
    """Create a folder, for its owner alone if private. Raises RunError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if private:
            folder.chmod(0o700)
    except OSError as error:
        fix = "give a writable folder as --output"
        raise RunError(f"cannot create {str(folder)!r}: {error.strerror}", fix=fix) from None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return number(value) if isinstance(value, int | float) else "–" if value is None else str(value)
