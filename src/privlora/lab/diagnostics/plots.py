"""One drawing for each diagnostic. Each takes a result and returns a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from privlora.lab.diagnostics.gauges import Clipping, NoiseEnergy, NoiseRatio, Sensitivity
from privlora.lab.diagnostics.preconditioning import Preconditioned, PreconditioningStudy, StressSeries
from privlora.lab.diagnostics.style import colour_of, dashes_of, marker_of
from privlora.lab.diagnostics.sweep import Band, GaugeSweep
from privlora.pages.figures import ACCENT, INK, MUTED, SECOND, WIDTH, grid, in_style
from privlora.pages.numbers import number

_DASHED = (0, (4, 3))
_LABEL_GAP = 13.0  # points between the names of two lines
_FEW_DECADES = 1.5
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FLOOR = 1e-12  # where differences that are exactly zero are drawn on a logarithmic axis


@in_style
def draw_noise_ratio(result: NoiseRatio) -> Figure:
    """Figure 1: the ratio of the noise norms over steps."""
    figure, (axes,) = grid(1, 1, WIDTH, 3.2)
    steps, factors, prism = result.steps, SECOND, ACCENT
    axes.axhline(1, color=prism, linewidth=1.2)
    axes.plot(steps, result.ratio, color=factors, linewidth=0.9, alpha=0.6, marker="o", markersize=3)
    axes.plot(steps, result.moving_average, color=factors, linewidth=2.2)
    axes.plot(steps, result.by_law, color=INK, linewidth=1, linestyle=_DASHED)
    axes.set(xlabel="step", ylabel="noise on Z, factors over PRISM")
    axes.set_ylim(0, 1.12 * max(1.0, *result.ratio))
    _integer_steps(axes)
    _label_lines(
        axes,
        [
            (result.moving_average[-1], f"average of {result.window}", factors),
            (result.by_law[-1], "closed forms", INK),
            (1.0, "PRISM", prism),
        ],
    )
    return figure


@in_style
def draw_gauge_sensitivity(result: list[Sensitivity]) -> Figure:
    """Figures 2 and 6: sizes of steps across gauges, and how far they lie apart."""
    figure, (sizes, spread) = grid(1, 2, WIDTH, 3.4)
    ends = [_band(sizes, one) for one in result]
    _label_lines(sizes, ends)
    sizes.set(xlabel="step", ylabel="size of the step on Z", title="smallest to largest of five gauges")
    _spread(spread, result)
    spread.set(ylabel="ρ: largest less smallest", title="spread over gauges")
    return figure


@in_style
def draw_noise_energy(result: NoiseEnergy) -> Figure:
    """Figure 3: noise energy against S_t."""
    figure, (axes,) = grid(1, 1, WIDTH, 3.9)
    order = np.argsort(result.factor_statistic)
    s = np.array(result.factor_statistic)
    first_order = result.noise_std**2 * s
    axes.plot(s[order], first_order[order], color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    for law in (result.law, result.prism_law):
        axes.plot(s[order], np.array(law)[order], color=INK, linewidth=1, linestyle=_DASHED)
    for values, colour in ((result.factors, SECOND), (result.prism, ACCENT)):
        axes.plot(s, values, "o", color=colour, markersize=3.5, alpha=0.6, markeredgewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="Sₜ of the factors", ylabel="energy of the noise on Z")
    axes.margins(y=0.1)
    _log_ticks(axes.xaxis)
    _log_ticks(axes.yaxis)
    for c in sorted(set(result.gauge)):
        where = [i for i, gauge in enumerate(result.gauge) if gauge == c]
        axes.annotate(
            f"c = {c:g}",
            (float(s[where].max()), 0),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=8,
        )
    high, low = order[-1], order[0]
    _label_lines(
        axes,
        [
            (result.factors[high], "factors: τ²Sₜ + bilinear", SECOND),
            (result.prism[high], "PRISM: τ²Σr(m+n−r)", ACCENT),
        ],
    )
    axes.annotate(
        "τ²Sₜ alone",
        (s[low], first_order[low]),
        (12, 2),
        textcoords="offset points",
        color=MUTED,
        fontsize=8.5,
        va="top",
    )
    return figure


@in_style
def draw_clipping(result: Clipping) -> Figure:
    """Figures 5 and 7-11: who is clipped, and by how much."""
    figure, panels = grid(2, 2, WIDTH, 6.2)
    for axes, sets, name in (
        (panels[0], result.fraction, "fraction of examples clipped"),
        (panels[1], result.coefficient, "mean clip coefficient"),
    ):
        for one in sets:
            values, colour = np.array(one.values), colour_of(one.method)
            axes.plot(one.gauges, values[:, 0], color=colour, linewidth=2, marker=marker_of(one.method))
            axes.plot(
                one.gauges,
                values[:, -1],
                color=colour,
                linewidth=1.3,
                linestyle=(0, (3, 2)),
                marker=marker_of(one.method),
                markerfacecolor="none",
                markersize=5,
            )
        axes.set(xscale="log", xlabel="gauge c", ylabel=name, ylim=(-0.04, 1.06))
        axes.set_title("solid: first step, dashed: last")
        axes.xaxis.set_major_locator(FixedLocator(sets[0].gauges))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        _label_lines(
            axes,
            [(one.values[-1][0], _short(one.method), colour_of(one.method)) for one in sets],
        )
    ends = [_band(panels[2], one) for one in result.coefficient]
    _label_lines(panels[2], ends)
    panels[2].set(xlabel="step", ylabel="mean clip coefficient", title="smallest to largest of five gauges")
    _spread(panels[3], result.coefficient)
    panels[3].set(ylabel="largest less smallest", title="spread of the coefficient over gauges")
    return figure


@in_style
def draw_gauge_sweep(result: GaugeSweep) -> Figure:
    """Figures 12 and 13: noise at a fixed Z against the gauge, and the amplification."""
    figure, (noise, ratio) = grid(1, 2, WIDTH, 3.9)
    c = np.array(result.gauges)

    def band(values: Band, colour: str) -> None:
        noise.fill_between(c, values.p10, values.p90, color=colour, alpha=0.22, linewidth=0)
        noise.plot(c, values.median, color=colour, linewidth=2)

    band(result.factors, SECOND)
    band(result.bilinear, MUTED)
    band(result.prism, ACCENT)
    for energy in (result.factor_law_energy, result.prism_law_energy):
        noise.plot(c, np.sqrt(energy), color=INK, linewidth=0.9, linestyle=_DASHED)
    noise.set(xscale="log", yscale="log", xlabel="gauge c", ylabel="noise on Z, Frobenius norm")
    noise.set_title("median and 10–90 % of 64 draws" if result.draws == 64 else f"{result.draws} draws")
    _label_lines(
        noise,
        [
            (result.factors.median[-1], "factors", SECOND),
            (result.bilinear.median[-1], "bilinear part", MUTED),
            (result.prism.median[-1], "PRISM", ACCENT),
        ],
    )
    ratio.axhline(1, color=ACCENT, linewidth=1.2)
    ratio.plot(c, result.amplification, color=SECOND, linewidth=2)
    best = int(np.argmin(result.amplification))
    ratio.plot(c[best], result.amplification[best], "o", color=SECOND, markersize=5)
    ratio.annotate(
        f"least: {number(result.amplification[best], 3)} at c = {number(float(c[best]), 2)}",
        (c[best], result.amplification[best]),
        (0, -9),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=8.5,
    )
    ratio.set(
        xscale="log", yscale="log", xlabel="gauge c", ylabel="factors over PRISM", title="amplification"
    )
    ratio.set_ylim(bottom=min(result.amplification) * 0.3)
    for axes in (noise, ratio):
        _log_ticks(axes.xaxis)
        _log_ticks(axes.yaxis)
    return figure


@in_style
def draw_preconditioning(result: PreconditioningStudy) -> Figure:
    """Figures 4, 14 and 15 above; 16, 18 and 19 below."""
    figure, panels = grid(2, 3, WIDTH, 6.4)
    ratio = "after over before"
    curves = (
        ("preconditioned", "noise after preconditioning"),
        ("raw", "noise before"),
        ("amplification", ratio),
    )
    for axes, (name, title) in zip(panels[:3], curves, strict=True):
        for curve in result.curves:
            axes.plot(
                curve.noise_multipliers,
                getattr(curve, name),
                color=colour_of(curve.method),
                linestyle=dashes_of(curve.method),
                linewidth=1.8,
                marker=marker_of(curve.method),
                markersize=4.5,
                alpha=0.9,
            )
        axes.set(
            xlabel="noise multiplier σ",
            ylabel="Frobenius norm on Z" if name != "amplification" else "",
            yscale="log",
            title=title,
        )
        _log_ticks(axes.yaxis)
    over = (("aggressiveness", "largest scaling of a coordinate"), ("amplification", ratio))
    for axes, (name, title) in zip(panels[3:5], over, strict=True):
        for run in result.runs:
            colour, line = colour_of(run.method), dashes_of(run.method)
            axes.plot(run.steps, getattr(run, name), color=colour, linestyle=line, linewidth=1.8)
        axes.set(xlabel="step", yscale="log", title=title)
        _integer_steps(axes)
        _log_ticks(axes.yaxis)
    for run in result.runs:
        _by_step(panels[5], run.aggressiveness, run)
    panels[5].set(
        xscale="log", yscale="log", xlabel="largest scaling", title="after over before; darker is later"
    )
    _log_ticks(panels[5].xaxis)
    _log_ticks(panels[5].yaxis)
    _legend(figure, [curve.method for curve in result.curves])
    return figure


@in_style
def draw_gram_stress(result: list[StressSeries]) -> Figure:
    """Figures 17 and 20: conditioning of the Gram matrices a method rests on."""
    figure, (stress, against) = grid(1, 2, WIDTH, 3.6)
    for run in result:
        colour, line = colour_of(run.method), dashes_of(run.method)
        stress.plot(run.steps, run.stress, color=colour, linestyle=line, linewidth=2)
        _by_step(against, run.stress, run)
    stress.set(xlabel="step", yscale="log", title="1 / √λₘᵢₙ of Gram matrices, largest over modules")
    _integer_steps(stress)
    against.set(
        xscale="log",
        yscale="log",
        xlabel="1 / √λₘᵢₙ, largest over modules",
        ylabel="amplification",
        title="darker is later",
    )
    _log_ticks(stress.yaxis)
    _log_ticks(against.xaxis)
    _log_ticks(against.yaxis)
    _legend(figure, [run.method for run in result])
    return figure


def _band(axes: Axes, one: Sensitivity) -> tuple[float, str, str]:
    """Min, max, quartiles and mean over gauges at each step; returns the label of its end."""
    values, colour = np.array(one.values), colour_of(one.method)
    steps = np.arange(1, values.shape[1] + 1)
    low, high = np.quantile(values, (0.25, 0.75), axis=0)
    axes.fill_between(
        steps, np.min(values, axis=0), np.max(values, axis=0), color=colour, alpha=0.15, linewidth=0
    )
    axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
    mean = np.mean(values, axis=0)
    axes.plot(steps, mean, color=colour, linewidth=2)
    _integer_steps(axes)
    return float(mean[-1]), _short(one.method), colour


def _spread(axes: Axes, sets: list[Sensitivity]) -> None:
    """max - min over gauges; zeros lie on the floor of the logarithmic axis."""
    ends = []
    for one in sets:
        values = np.maximum(np.array(one.spread), _FLOOR)
        colour = colour_of(one.method)
        axes.plot(np.arange(1, len(values) + 1), values, color=colour, linewidth=2)
        zero = 0.0 in one.spread and not any(value > 0 for value in one.spread)
        ends.append((float(values[-1]), f"{_short(one.method)}{', exactly 0' if zero else ''}", colour))
    axes.set(xlabel="step", yscale="log")
    axes.margins(y=0.12)
    _integer_steps(axes)
    _log_ticks(axes.yaxis)
    _label_lines(axes, ends)


def _by_step(axes: Axes, x: Sequence[float], run: Preconditioned | StressSeries) -> None:
    colour = colour_of(run.method)
    shades = np.linspace(0.25, 1.0, len(run.steps))
    for place, height, shade in zip(x, run.amplification, shades, strict=True):
        axes.plot(
            place,
            height,
            marker_of(run.method),
            color=colour,
            alpha=float(shade),
            markersize=4.5,
            markeredgewidth=0,
        )


def _label_lines(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """(height, name, colour) of lines, written at the right edge and moved apart; call it when the axes are final."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    left = axes.get_xlim()[0]  # any place will do
    rows = sorted((float(to_axes.transform((left, y))[1]), text, colour) for y, text, colour in labels)
    gap = _LABEL_GAP / _panel_points(axes)
    heights = [min(max(height, 0.0), 1.0) for height, _, _ in rows]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    for height, (_, text, colour) in zip(heights, rows, strict=True):
        axes.annotate(
            text,
            (1, height),
            (5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )


def _panel_points(axes: Axes) -> float:
    """About how high a panel is."""
    figure, specification = axes.get_figure(root=True), axes.get_gridspec()
    assert figure is not None
    assert specification is not None
    return 72 * figure.get_figheight() / specification.nrows


def _legend(figure: Figure, methods: list[str]) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=colour_of(name),
            linestyle=dashes_of(name),
            marker=marker_of(name),
            markersize=5,
            linewidth=1.8,
        )
        for name in methods
    ]
    names = [_short(name) for name in methods]
    figure.legend(handles, names, loc="outside upper left", ncols=len(methods), handlelength=2.4)


def _log_ticks(axis: Axis) -> None:
    """Decades as plain powers; where there are few, also 2 and 5."""
    low, high = sorted(axis.get_view_interval())
    few = low > 0 and math.log10(high / low) < _FEW_DECADES
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=7))
    axis.set_major_formatter(FuncFormatter(_power))
    axis.set_minor_locator(NullLocator())


def _power(value: float, _: int) -> str:
    exponent = round(math.log10(value)) if value > 0 else 0
    if 0.1 <= value < 1000:
        return f"{value:g}"
    return f"10{str(exponent).translate(_RAISED)}"


def _integer_steps(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _short(method: str) -> str:
    return "DP-AdamW" if method == "dp-adamw" else method.replace("prism", "PRISM")
