"""The figures of the web page, as inline SVG whose colours follow the page's light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from privlora.reporting.wording import Report, nats, number, rounded_up

# matplotlib wants fixed colours: these stand for the page's CSS variables and are replaced in the SVG
INK, MUTED, GRID, ACCENT, SECOND = "#0a0b0c", "#1a1b1c", "#2a2b2c", "#3a3b3c", "#4a4b4c"
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", ACCENT: "--accent", SECOND: "--second"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.titlesize": 9.5,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
}
_HALF, _FULL = 5.0, 10.2  # inches of width
_LONGEST_LABEL = 34


def epsilon_plot(report: Report) -> Markup | None:
    """Epsilon after each number of steps, with the target."""
    points = [p for p in report["epsilon_over_steps"] if p["epsilon"] is not None]
    if not points:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = _single(_HALF, 3.1)
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
        axes.set_ylim(bottom=0)
        return inline_svg(figure, f"epsilon over steps, {rounded_up(values[-1])} at step {steps[-1]}")


def loss_plot(report: Report) -> Markup | None:
    """Held-out loss per example over steps, with a band of one standard error."""
    rows = [row for row in report["evaluation"] if row["loss_per_example"] is not None]
    if not rows:
        return None
    steps = np.array([row["step"] for row in rows])
    loss = np.array([row["loss_per_example"] for row in rows])
    error = np.array([row["standard_error"] or 0.0 for row in rows])
    with matplotlib.rc_context(STYLE):
        figure, axes = _single(_HALF, 3.1)
        axes.fill_between(steps, loss - error, loss + error, color=SECOND, alpha=0.16, linewidth=0)
        axes.plot(steps, loss, color=SECOND, linewidth=2)
        ends = [0, -1] if len(rows) > 1 else [0]
        axes.errorbar(steps[ends], loss[ends], error[ends], fmt="o", color=SECOND, markersize=6, capsize=3)
        above = 1 if loss[-1] <= loss[0] else -1  # the side of the first point on which the curve is not
        for end, offset, side in zip(
            ends, ((8, 10 * above), (-6, -12 * above)), ("left", "right"), strict=False
        ):
            label = nats(loss[end])
            place = (steps[end], loss[end])
            axes.annotate(label, place, offset, textcoords="offset points", ha=side, va="center")
        margin = max(steps[-1], 1) * 0.04
        axes.set(xlabel="step", ylabel="nats per token", xlim=(-margin, steps[-1] + margin))
        axes.margins(y=0.2)
        return inline_svg(figure, f"held-out loss, {nats(loss[0])} at first and {nats(loss[-1])} at last")


def noise_plot(report: Report) -> Markup | None:
    """The noise of one step on each weight: closed form against fresh draws, one lane for each module."""
    noise = report["noise"]
    if noise is None:
        return None
    modules = [m for m in noise["modules"] if m["measured"] is not None and m["closed_form"]]
    if not modules:
        return None
    kinds = by_kind([m["name"] for m in modules])
    modules = [modules[i] for members in kinds.values() for i in members]
    lanes = _lanes(kinds)
    closed = np.array([m["closed_form"] for m in modules])
    measured = np.array([m["measured"] for m in modules])
    with matplotlib.rc_context(STYLE):
        figure, (size, ratio) = _figure(_FULL, _height(kinds), columns=2, width_ratios=(3, 1.3), sharey=True)
        size.vlines(
            closed, lanes - 0.5, lanes + 0.5, color=ACCENT, linewidth=3, alpha=0.5, label="closed form"
        )
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
            xlabel="root mean square of the noise on W in one step, Frobenius norm",
            xlim=(0, 1.08 * max(measured.max(), closed.max())),
        )
        size.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderpad=0, handlelength=1.2
        )
        if noise["intrinsic"]:  # chi-square with r (m + n - r) degrees of freedom a draw (PRISM Theorem 3.1)
            freedom = np.array([m["r"] * (m["m"] + m["n"] - m["r"]) for m in modules])
            spread = 1.96 / np.sqrt(2 * noise["draws"] * freedom)
            ratio.barh(lanes, 2 * spread, 1.0, left=-spread, color=ACCENT, alpha=0.18, linewidth=0)
        ratio.axvline(0, color=ACCENT, linewidth=1)
        ratio.plot(measured / closed - 1, lanes, "o", color=INK, markersize=3, markeredgewidth=0)
        ratio.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=1, symbol=" %"))
        ratio.xaxis.set_major_locator(MaxNLocator(4, symmetric=True))
        ratio.set_xlabel("measured against closed form")
        _label_kinds(size, kinds, lanes)
        ratio.tick_params(labelleft=False, left=False)
        ratio.grid(visible=False, axis="y")
        return inline_svg(figure, "noise on the weights, measured against closed form, for each module")


def spectrum_plot(report: Report) -> Markup | None:
    """Singular values of the update Z: modules downwards, index to the right, logarithmic colour."""
    modules = report["adapter"]["modules"]
    spectra = [[np.nan if v is None else v for v in m["singular_values"]] for m in modules]
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
    with matplotlib.rc_context(STYLE):
        figure, axes = _single(_FULL, _height(kinds))
        ranks = values.shape[1]
        image = axes.imshow(
            np.ma.masked_invalid(np.maximum(picture, bottom)),
            norm=LogNorm(bottom, top if top > bottom else bottom * 1.01),
            cmap="viridis",
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
        bar.set_label("singular value of Z")
        _label_kinds(axes, kinds, lanes)
        axes.spines[:].set_visible(False)
        return inline_svg(figure, "singular values of the update for each module")


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


def _single(width: float, height: float) -> tuple[Figure, Axes]:
    figure, (axes,) = _figure(width, height)
    return figure, axes


def _figure(
    width: float,
    height: float,
    *,
    columns: int = 1,
    width_ratios: Sequence[float] | None = None,
    sharey: bool = False,
) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(
        1, columns, squeeze=False, sharey=sharey, gridspec_kw={"width_ratios": width_ratios}
    )[0]
    for one in axes:
        one.grid(visible=True)
        one.tick_params(length=0)
    return figure, axes


def inline_svg(figure: Figure, label: str) -> Markup:
    """The figure as an <svg> element without identifiers of its own, sized by the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": label}):  # the same report gives the same bytes
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    head = re.search(r'viewBox="[^"]*"', svg)
    assert head is not None
    svg = f'<svg role="img" aria-label="{escape(label)}" {head[0]}>' + svg[svg.index(">") + 1 :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg)  # matplotlib escaped every text
