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
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from privlora.pages.figures import ACCENT, INK, MUTED, SECOND, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import nats, number
from privlora.reporting.wording import Report, loss_unit
from privlora.rounding import rounded_up

_HALF = 5.0  # inches
_LANES, _VALUES = 600, 256  # modules of a plot, and singular values of each
_LONGEST_LABEL = 34


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
        axes.annotate(
            f"target {number(target)}", (0, target), (4, 5), textcoords="offset points", color=MUTED
        )
    axes.fill_between(steps, values, color=ACCENT, alpha=0.1, linewidth=0)
    axes.plot(steps, values, color=ACCENT, linewidth=2)
    axes.plot(steps[-1], values[-1], "o", color=ACCENT, markersize=6)
    axes.annotate(
        f"ε = {rounded_up(values[-1])}",
        (steps[-1], values[-1]),
        (0, 9),
        textcoords="offset points",
        ha="right",
    )
    axes.margins(y=0.16)
    axes.set(xlabel="steps released", ylabel="ε", xlim=(0, steps[-1] * 1.04))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylim(bottom=0)
    return inline_svg(figure, f"epsilon over steps, {rounded_up(values[-1])} at step {steps[-1]}")


@in_style
def loss_plot(report: Report) -> Markup | None:
    """Held-out loss (mean over records) over steps, with a band of one standard error."""
    rows = [row for row in report["evaluation"] if row["loss_per_example"] is not None]
    if not rows:
        return None
    figure, (axes,) = grid(1, 1, _HALF, 3.1)
    steps, loss = plot_loss(axes, rows)
    margin = max(steps[-1], 1) * 0.04
    unit = "round" if "federation" in report else "step"
    axes.set(xlabel=unit, ylabel=loss_unit(report).removeprefix("in "), xlim=(-margin, steps[-1] + margin))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return inline_svg(figure, f"held-out loss, {nats(loss[0])} at first and {nats(loss[-1])} at last")


def plot_loss(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of evaluations, whose first and last value are written out."""
    steps = np.array([row["step"] for row in rows])
    loss = np.array([row["loss_per_example"] for row in rows])
    error = np.array([row["standard_error"] or 0.0 for row in rows])
    axes.fill_between(steps, loss - error, loss + error, color=SECOND, alpha=0.16, linewidth=0)
    axes.plot(steps, loss, color=SECOND, linewidth=2)
    ends = [0, -1] if len(rows) > 1 else [0]
    axes.errorbar(steps[ends], loss[ends], error[ends], fmt="o", color=SECOND, markersize=6, capsize=3)
    above = 1 if loss[-1] <= loss[0] else -1  # the side of the first point on which the curve is not
    for end, offset, side in zip(ends, ((8, 10 * above), (-6, -12 * above)), ("left", "right"), strict=False):
        label = nats(loss[end])
        place = (steps[end], loss[end])
        axes.annotate(label, place, offset, textcoords="offset points", ha=side, va="center")
    axes.margins(y=0.2)
    return steps, loss


@in_style
def noise_plot(report: Report) -> Markup | None:
    """The noise of one step on each weight, on other draws: a lane for each module, beside its closed form if any."""
    noise = report["noise"]
    if noise is None:
        return None
    modules = few([m for m in noise["modules"] if m["measured"] is not None and m["closed_form"] != 0])
    if not modules:
        return None
    compared = all(m["closed_form"] is not None for m in modules)
    kinds = by_kind([m["name"] for m in modules])
    modules = [modules[i] for members in kinds.values() for i in members]
    lanes = _lanes(kinds)
    measured = np.array([m["measured"] for m in modules])
    if compared:
        figure, (size, ratio) = grid(1, 2, WIDTH, _height(kinds), width_ratios=(3, 1.3), sharey=True)
        closed = np.array([m["closed_form"] for m in modules])
        size.vlines(
            closed, lanes - 0.5, lanes + 0.5, color=ACCENT, linewidth=3, alpha=0.5, label="closed form"
        )
        _plot_ratios(ratio, measured / closed - 1, lanes, noise, modules)
        largest = max(measured.max(), closed.max())
    else:
        figure, (size,) = grid(1, 1, WIDTH, _height(kinds))
        largest = measured.max()
    size.plot(
        measured,
        lanes,
        "o",
        color=INK,
        markersize=3,
        markeredgewidth=0,
        label=f"measured, {noise['draws']} draws",
    )
    size.set(
        xlabel="root mean square of the noise on W in one step, Frobenius norm", xlim=(0, 1.08 * largest)
    )
    size.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0, handlelength=1.2)
    _label_kinds(size, kinds, lanes)
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
    axes.plot(ratios, lanes, "o", color=INK, markersize=3, markeredgewidth=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=1, symbol=" %"))
    axes.xaxis.set_major_locator(MaxNLocator(4, symmetric=True))
    axes.set_xlabel("measured against closed form")
    axes.tick_params(labelleft=False, left=False)
    axes.grid(visible=False, axis="y")


@in_style
def spectrum_plot(report: Report) -> Markup | None:
    """Singular values of the update Z: modules downwards, index to the right, logarithmic colour."""
    modules = few(report["adapter"]["modules"])
    spectra = [[np.nan if v is None else v for v in m["singular_values"][:_VALUES]] for m in modules]
    longest = max(map(len, spectra), default=0)
    # Updates that are trained densely may have more singular values in larger modules.
    values = np.array([s + [np.nan] * (longest - len(s)) for s in spectra], dtype=float)
    if not np.nanmax(values, initial=0.0) > 0:
        return None
    kinds = by_kind([m["name"] for m in modules])
    lanes = _lanes(kinds)
    picture = np.full((int(lanes.max()) + 1, values.shape[1]), np.nan)
    picture[lanes.astype(int)] = values[[i for members in kinds.values() for i in members]]
    top = float(np.nanmax(values))
    bottom = max(float(values[values > 0].min()), top * 1e-3)
    figure, (axes,) = grid(1, 1, WIDTH, _height(kinds))
    ranks = values.shape[1]
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
    axes.set(xlabel="index of the singular value")
    bar = figure.colorbar(
        image,
        ax=axes,
        pad=0.02,
        aspect=30,
        fraction=0.06,
        ticks=np.geomspace(bottom, top, 6),
        format=FuncFormatter(lambda value, _: number(value, 2)),
    )
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    assert bar.solids is not None
    bar.solids.set(rasterized=False, edgecolor="face")
    bar.set_label("singular value of Z")
    _label_kinds(axes, kinds, lanes)
    axes.spines[:].set_visible(False)
    return inline_svg(figure, "singular values of the update for each module")


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
        _short("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in kind)) for kind in kinds
    ]


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """How many leading elements are equal."""
    columns = enumerate(zip(*parts, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, parts)))


def _short(name: str) -> str:
    half = _LONGEST_LABEL // 2
    return name if len(name) <= _LONGEST_LABEL else f"{name[:half]}…{name[1 - half :]}"


def _lanes(kinds: dict[str, list[int]]) -> np.ndarray:
    """Vertical places of the modules, kind after kind, with an empty lane between two kinds."""
    places: list[int] = []
    place = 0
    for members in kinds.values():
        places += range(place, place + len(members))
        place += len(members) + 1
    return np.array(places, dtype=float)


def _height(kinds: dict[str, list[int]]) -> float:
    modules = sum(len(members) for members in kinds.values())
    return 1.1 + max(0.27 * len(kinds), min(0.075 * (modules + len(kinds)), 9.0))


def _label_kinds(axes: Axes, kinds: dict[str, list[int]], lanes: np.ndarray) -> None:
    start, centres = 0, []
    for members in kinds.values():
        centres.append(lanes[start : start + len(members)].mean())
        start += len(members)
    axes.set_yticks(centres, labels(list(kinds)), color=INK)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(lanes.max() + 1, -1)
