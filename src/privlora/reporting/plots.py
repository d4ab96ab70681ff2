"""The figures of the report, as inline SVG."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from privlora.pages.figures import ACCENT, INK, MUTED, SECOND, THIRD, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import nats, number
from privlora.reporting.parties import size
from privlora.reporting.wording import Report, loss_unit
from privlora.rounding import rounded_up

_HALF = 5.0  # inches
_LANES, _VALUES = 600, 256  # modules of a plot, and singular values of each
_LONGEST_LABEL = 34
_BINS = 24
_DOTS: dict[str, Any] = {"marker": "o", "linestyle": "", "color": INK, "markersize": 3, "markeredgewidth": 0}
_LEGEND: dict[str, Any] = {"ncols": 3, "borderpad": 0, "handlelength": 1.2}


@in_style
def epsilon_plot(report: Report) -> Markup | None:
    """Epsilon after each number of steps, with the target."""
    points = [p for p in report["epsilon_over_steps"] if p["epsilon"] is not None]
    if not points:
        return None
    figure, (axes,) = grid(1, 1, _HALF, 3.1)
    steps, values = [p["step"] for p in points], [p["epsilon"] for p in points]
    target = report["target_epsilon"]
    if target is not None:
        axes.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        _note(axes, f"target {number(target)}", (0, target), (4, 5), color=MUTED)
    axes.fill_between(steps, values, color=ACCENT, alpha=0.1, linewidth=0)
    axes.plot(steps, values, color=ACCENT, linewidth=2)
    axes.plot(steps[-1], values[-1], "o", color=ACCENT, markersize=6)
    _note(axes, f"ε = {rounded_up(values[-1])}", (steps[-1], values[-1]), (0, 9), ha="right")
    axes.margins(y=0.16)
    axes.set(xlabel="noisy steps", ylabel="ε", xlim=(0, steps[-1] * 1.04))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylim(bottom=0)
    return inline_svg(figure, f"epsilon over steps, {rounded_up(values[-1])} at step {steps[-1]}")


@in_style
def loss_plot(report: Report) -> Markup | None:
    """Held-out loss (mean over records) over steps, with a band of one standard error."""
    rows = _evaluated(report)
    if not rows:
        return None
    figure, (axes,) = grid(1, 1, _HALF, 3.1)
    _plot_loss(axes, rows)
    last, unit = rows[-1]["step"], "round" if "federation" in report else "step"
    margin = max(last, 1) * 0.04
    axes.set(xlabel=unit, ylabel=loss_unit(report).removeprefix("in "), xlim=(-margin, last + margin))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    first, last = (nats(rows[end]["loss_per_example"]) for end in (0, -1))
    return inline_svg(figure, f"held-out loss, {first} at first and {last} at last")


def _evaluated(report: Report) -> list[Mapping[str, Any]]:
    return [row for row in report["evaluation"] if row["loss_per_example"] is not None]


def _plot_loss(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Losses of evaluations, whose first and last value are written out."""
    steps = np.array([row["step"] for row in rows])
    loss = np.array([row["loss_per_example"] for row in rows])
    error = np.array([row["standard_error"] or 0.0 for row in rows])
    axes.fill_between(steps, loss - error, loss + error, color=SECOND, alpha=0.16, linewidth=0)
    axes.plot(steps, loss, color=SECOND, linewidth=2)
    ends = [0, -1] if len(rows) > 1 else [0]
    axes.errorbar(steps[ends], loss[ends], error[ends], fmt="o", color=SECOND, markersize=6, capsize=3)
    above = 1 if loss[-1] <= loss[0] else -1  # the side of the first point on which the curve is not
    for end, offset, side in zip(ends, ((8, 10 * above), (-6, -12 * above)), ("left", "right"), strict=False):
        _note(axes, nats(loss[end]), (steps[end], loss[end]), offset, ha=side, va="center")
    axes.margins(y=0.2)


@in_style
def noise_plot(report: Report) -> Markup | None:
    """The noise of one step on each weight, on other draws: a lane for each module, next to its closed form if any."""
    noise = report["noise"] or {"modules": []}
    modules = few([m for m in noise["modules"] if m["measured"] is not None and m["closed_form"] != 0])
    if not modules:
        return None
    modules, lanes, kinds = _in_lanes(modules)
    compared = all(m["closed_form"] is not None for m in modules)
    panels = {"width_ratios": (3, 1.3), "sharey": True} if compared else {}
    figure, (norms, *ratio) = grid(1, 1 + compared, WIDTH, _height(lanes, kinds), **panels)
    measured = np.array([m["measured"] for m in modules])
    largest = measured.max()
    if compared:
        closed = np.array([m["closed_form"] for m in modules])
        largest = max(largest, closed.max())
        norms.vlines(
            closed, lanes - 0.5, lanes + 0.5, color=ACCENT, linewidth=3, alpha=0.5, label="closed form"
        )
        _plot_ratios(ratio[0], measured / closed - 1, lanes, noise, modules)
    norms.plot(measured, lanes, label=f"measured, {noise['draws']} draws", **_DOTS)
    norms.set_xlabel("root mean square of the noise on W in one step, Frobenius norm")
    norms.set_xlim(0, 1.08 * largest)
    norms.legend(loc="lower left", bbox_to_anchor=(0, 1), **_LEGEND)
    _label_kinds(norms, lanes, kinds)
    beside = ", measured against closed form" if compared else ""
    return inline_svg(figure, f"noise on the weights{beside}, for each module")


def _plot_ratios(
    axes: Axes,
    ratios: np.ndarray,
    lanes: np.ndarray,
    noise: Mapping[str, Any],
    modules: Sequence[Mapping[str, Any]],
) -> None:
    if noise["intrinsic"]:  # chi-square with r (m + n - r) degrees of freedom a draw (PRISM Theorem 3.1)
        freedom = np.array([m["r"] * (m["m"] + m["n"] - m["r"]) for m in modules])
        spread = 1.96 / np.sqrt(2 * noise["draws"] * freedom)
        axes.barh(lanes, 2 * spread, 1.0, left=-spread, color=ACCENT, alpha=0.18, linewidth=0)
    axes.axvline(0, color=ACCENT, linewidth=1)
    axes.plot(ratios, lanes, **_DOTS)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=1, symbol=" %"))
    axes.xaxis.set_major_locator(MaxNLocator(4, symmetric=True))
    axes.set_xlabel("measured against closed form")
    axes.tick_params(labelleft=False, left=False)
    axes.grid(visible=False, axis="y")


@in_style
def spectrum_plot(report: Report) -> Markup | None:
    """Singular values of the update Z: modules downwards, index to the right, logarithmic colour."""
    modules, lanes, kinds = _in_lanes(few(report["adapter"]["modules"]))
    spectra = [m["singular_values"][:_VALUES] for m in modules]
    ranks = max(
        map(len, spectra), default=0
    )  # updates that are trained densely may have more in larger modules
    picture = np.full((int(lanes.max(initial=0)) + 1, ranks), np.nan)
    for lane, values in zip(lanes.astype(int), spectra, strict=True):
        picture[lane, : len(values)] = np.array(values, dtype=float)
    top = float(np.nanmax(picture, initial=0.0))
    if not top > 0:
        return None
    bottom = max(float(picture[picture > 0].min()), top * 1e-3)
    figure, (axes,) = grid(1, 1, WIDTH, _height(lanes, kinds))
    image = axes.imshow(
        np.ma.masked_invalid(np.maximum(picture, bottom)),
        norm=LogNorm(bottom, top if top > bottom else bottom * 1.01),
        cmap=colormaps["viridis"].resampled(64),
        aspect="auto",
        interpolation="none",
        extent=(0.5, ranks + 0.5, len(picture) - 0.5, -0.5),
    )
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(min(ranks, 16), integer=True))
    axes.set_xlabel("index of the singular value")
    ticks, written = np.geomspace(bottom, top, 6), FuncFormatter(lambda value, _: number(value, 2))
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30, fraction=0.06, ticks=ticks, format=written)
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    assert bar.solids is not None
    bar.solids.set(rasterized=False, edgecolor="face")
    bar.set_label("singular value of Z")
    _label_kinds(axes, lanes, kinds)
    axes.spines[:].set_visible(False)
    return inline_svg(figure, "singular values of the update for each module")


@in_style
def rounds_plot(report: Report) -> Markup | None:
    """Three panels over rounds: clients that answered of those asked, bytes of a round, held-out loss."""
    rounds, evaluated = report["federation"]["rounds"], _evaluated(report)
    log = few(rounds["log"])
    if not log:
        return None
    heights = (1.0, 1.0, 1.3) if evaluated else (1.0, 1.0)
    figure, panels = grid(len(heights), 1, WIDTH, 1.75 * len(heights), sharex=True, height_ratios=heights)
    numbers = np.array([one["round"] for one in log])
    # bars of many rounds touch: gaps between them would be all that is seen
    width = 0.72 if len(log) <= 60 else 1.0
    _attendance(panels[0], log, numbers, width)
    for side, name, colour, whose in (
        (-1, "down", MUTED, "to all clients"),
        (1, "up", THIRD, "from all clients"),
    ):
        counts = [one[f"bytes_{name}"] for one in log]
        panels[1].bar(numbers + side * width / 4, counts, width / 2, color=colour, linewidth=0, label=whose)
    panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    panels[1].yaxis.set_major_locator(MaxNLocator(4))
    panels[1].margins(y=0.08)
    for axes, what in zip(panels, ("clients", "bytes"), strict=False):
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(what)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.97), columnspacing=1.4, **_LEGEND)
    if evaluated:
        _plot_loss(panels[2], evaluated)
        panels[2].set_ylabel("held-out loss")
    panels[-1].set_xlabel("round")
    panels[-1].set_xlim(-0.4 if evaluated else 0.4, log[-1]["round"] + 0.6)
    panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    figure.align_ylabels(panels)
    label = f"{rounds['done']} of {rounds['planned']} rounds done, {rounds['void']} void"
    return inline_svg(figure, f"{label}: clients that answered, bytes and held-out loss in each")


def _attendance(axes: Axes, log: list[dict[str, Any]], numbers: np.ndarray, width: float) -> None:
    """A bar as high as those asked, filled as far as those that answered; void rounds are crossed."""
    asked, answered, void = (np.array([one[name] for one in log]) for name in ("asked", "answered", "void"))
    axes.bar(numbers, asked, width, color=ACCENT, alpha=0.16, linewidth=0, label="asked")
    axes.bar(numbers, answered, width, color=ACCENT, linewidth=0, label="answered")
    if void.any():
        middles = asked[void] / 2
        axes.plot(numbers[void], middles, "x", color=SECOND, markersize=7, markeredgewidth=1.8, label="void")
    axes.set_ylim(0, max(asked) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


@in_style
def texts_plot(report: Report) -> Markup:
    """How long the texts are, and how probable to the base model."""
    quality = report["quality"]
    figure, (length, odds) = grid(1, 2, WIDTH, 3.1)
    tokens = np.array(quality["tokens_per_text"], dtype=float)
    perplexity = np.array([p for p in quality["perplexity_per_text"] if p is not None], dtype=float)
    low, high = tokens.min(initial=1.0), tokens.max(initial=1.0)
    width = max(1.0, np.ceil((high - low + 1) / _BINS))
    _histogram(length, tokens, np.arange(low - 0.5, high + width + 0.5, width), ACCENT)
    length.set(xlabel="tokens of a text", ylabel="texts")
    if len(perplexity):
        first, last = np.log(perplexity.min()), np.log(perplexity.max())
        if last - first < 1e-3:
            first, last = first - 0.1, last + 0.1
        odds.set_xscale("log")
        _histogram(odds, perplexity, np.exp(np.linspace(first, last, _BINS + 1)), SECOND)
        near = last - first < 2 * np.log(10)
        odds.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if near else (1.0,), numticks=8))
        odds.xaxis.set_minor_locator(NullLocator())
        odds.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _in_short(value)))
    odds.set_xlabel("perplexity of a text under the base model")
    return inline_svg(figure, f"lengths and perplexities of {len(tokens)} texts")


def _histogram(axes: Axes, values: np.ndarray, edges: np.ndarray, colour: str) -> None:
    """With its median."""
    axes.hist(values, list(edges), color=colour, alpha=0.85, linewidth=0.6, edgecolor="white")
    middle = float(np.median(values))
    axes.axvline(middle, color=INK, linewidth=1)
    place = {"xycoords": ("data", "axes fraction"), "color": INK, "va": "bottom"}
    _note(axes, f"median {_in_short(middle)}", (middle, 1), (4, 2), **place)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylim(bottom=0)


def _in_short(value: float) -> str:
    """For a figure: 26.5, 1 300, 2.3e5."""
    if value >= 1e5:
        return f"{value:.2g}".replace("e+0", "e")
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def _note(axes: Axes, text: str, at: tuple[float, float], by: tuple[float, float], **options: Any) -> None:
    """A text next to a point. by: how far, in points."""
    axes.annotate(text, at, by, textcoords="offset points", **options)


def few(rows: list[Any]) -> list[Any]:
    """All of them, or of thousands, which nobody could tell apart, one in so many."""
    return rows[:: -(-len(rows) // _LANES)] if rows else rows


def by_kind(names: Sequence[str]) -> dict[str, list[int]]:
    """Indices of the modules of each kind (the name without its layer), in the order of layers.

    >>> by_kind(["h.0.attn.q", "h.0.mlp", "h.1.attn.q", "head"])
    {'attn.q': [0, 2], 'mlp': [1], 'head': [3]}
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for index, name in enumerate(names):
        parts = re.match(r"(?:.*?\.)?(\d+)\.(.+)", name, re.DOTALL)
        kind, layer = (parts[2], int(parts[1])) if parts else (name, 0)
        found.setdefault(kind, []).append((layer, index))
    return {kind: [index for _, index in sorted(members)] for kind, members in found.items()}


def labels(kinds: Sequence[str]) -> list[str]:
    """Names for an axis: where they are long, without their common parts and cut in the middle."""
    if len(kinds) > 1 and max(map(len, kinds)) > _LONGEST_LABEL:
        parts = [kind.split(".") for kind in kinds]
        least = min(map(len, parts)) - 1  # something must be left
        first = min(_shared(parts), least)
        last = min(_shared([p[::-1] for p in parts]), least - first)
        kinds = [".".join(p[first : len(p) - last]) for p in parts]
    return [
        _cut("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in kind)) for kind in kinds
    ]


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """How many leading elements are equal."""
    columns = enumerate(zip(*parts, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, parts)))


def _cut(name: str) -> str:
    half = _LONGEST_LABEL // 2
    return name if len(name) <= _LONGEST_LABEL else f"{name[:half]}…{name[1 - half :]}"


def _in_lanes(modules: list[Any]) -> tuple[list[Any], np.ndarray, dict[str, float]]:
    """The modules kind after kind, their vertical places, with an empty lane between two kinds, and each kind's."""
    order, lanes, centres = list[Any](), list[float](), dict[str, float]()
    for kind, members in by_kind([m["name"] for m in modules]).items():
        start = lanes[-1] + 2 if lanes else 0.0
        order += [modules[i] for i in members]
        lanes += [start + i for i in range(len(members))]
        centres[kind] = (start + lanes[-1]) / 2
    return order, np.array(lanes), centres


def _height(lanes: np.ndarray, kinds: Mapping[str, float]) -> float:
    """Of a figure, inches."""
    return 1.1 + max(0.27 * len(kinds), min(0.075 * (lanes.max() + 2), 9.0))


def _label_kinds(axes: Axes, lanes: np.ndarray, kinds: Mapping[str, float]) -> None:
    axes.set_yticks(list(kinds.values()), labels(list(kinds)), color=INK)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(lanes.max() + 1, -1)
