"""The pictures of a profile: a step by stages, steps over the run, micro-batches by rows and width."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from privlora.pages.figures import ACCENT, INK, MUTED, SECOND, THIRD, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import duration
from privlora.profiling.facts import Facts
from privlora.profiling.trace import PER_BATCH
from privlora.stages import AVERAGING, CHARGE, INSTALL, NOISE, OPTIMIZER

_SEEN = 0.0005  # a smaller share is in the table alone
_ONCE = {CHARGE, NOISE, OPTIMIZER, AVERAGING, INSTALL}


@in_style
def stages_figure(facts: Facts) -> Markup:
    """A bar for each stage, in the order of a step: seconds by the clock, and CPU seconds as a line beneath."""
    lines = [line for line in facts["stages"] if line["share"] >= _SEEN]
    figure, (axes,) = grid(1, 1, WIDTH, 0.9 + 0.33 * len(lines))
    y = np.arange(len(lines))[::-1]
    axes.barh(
        y, [line["wall"] for line in lines], height=0.62, color=[_colour(line["stage"]) for line in lines]
    )
    axes.barh(y - 0.4, [line["cpu"] for line in lines], height=0.1, color=MUTED)
    most = max([line["wall"] for line in lines] + [line["cpu"] for line in lines] + [1e-9])
    for place, line in zip(y, lines, strict=True):
        axes.annotate(
            f"{line['share']:.1%} · {duration(line['wall'])}",
            (max(line["wall"], line["cpu"]), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_yticks(y, [line["words"] for line in lines], color=INK)
    axes.set_xlim(0, 1.22 * most)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds of a median step")
    for colour, words in (
        (ACCENT, "with every micro-batch"),
        (SECOND, "once a step"),
        (MUTED, "CPU seconds (thin)"),
    ):
        axes.barh([np.nan], [np.nan], color=colour, label=words)
    axes.legend(loc="lower right")
    return inline_svg(figure, "seconds of a step by stage")


@in_style
def steps_figure(facts: Facts) -> Markup:
    """Left: seconds of each step. Middle: against what was drawn. Right: rows and width of micro-batches."""
    figure, (left, middle, right) = grid(1, 3, WIDTH, 2.9)
    steps = facts["every_step"]
    calm = [each for each in steps if not each["profiler"]]
    traced = [each for each in steps if each["profiler"]]
    # Steps under the profiler take as long as it likes: above the others they stand at the edge.
    top = 1.15 * max(each["seconds"] for each in calm or traced)
    for some, colour, words in ((calm, ACCENT, None), (traced, SECOND, "with torch's profiler on")):
        for axes, key in ((left, "step"), (middle, "positions")):
            for mark, outside in (("o", False), ("^", True)):
                shown = [e for e in some if (e["seconds"] > top) is outside]
                axes.plot(
                    [e[key] for e in shown],
                    [min(e["seconds"], 0.97 * top) for e in shown],
                    mark,
                    color=colour,
                    markersize=5 if outside else 3.5,
                    markeredgewidth=0,
                    label=words if shown and not (outside and len(shown) < len(some)) else None,
                )
    if traced:
        left.legend(loc="best", fontsize=8)
    fit = facts["fit"]
    if fit is not None:
        ends = np.array([0, max(each["positions"] for each in steps)])
        middle.plot(ends, fit["fixed"] + fit["per_position"] * ends, color=MUTED, linewidth=1)
    left.set(title="seconds of each step", xlabel="step")
    middle.set(title="seconds by what was drawn", xlabel="positions of the step")
    for axes in (left, middle):
        axes.set_ylim(0, top)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _micro_batches(right, facts)
    return inline_svg(figure, "steps and micro-batches")


def _micro_batches(axes: Axes, facts: Facts) -> None:
    micro = facts["micro_batches"]
    shapes = np.array(micro["shapes"], dtype=float).reshape(-1, 3)
    axes.set(title="micro-batches", xlabel="width, positions", ylabel="rows")
    if not len(shapes):
        return
    axes.plot(shapes[:, 1], shapes[:, 0], "o", color=THIRD, alpha=0.5, markersize=4, markeredgewidth=0)
    axes.set_ylim(0, 1.25 * shapes[:, 0].max())
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    widths = np.linspace(0.9 * shapes[:, 1].min(), 1.1 * shapes[:, 1].max(), 60)
    limit = micro["allowed"] / widths
    inside = limit < axes.get_ylim()[1]
    if inside.mean() > 0.25:
        axes.plot(
            widths[inside], limit[inside], color=MUTED, linewidth=1, label="as many tokens as are allowed"
        )
        axes.legend(loc="upper right", fontsize=8)


def _colour(stage: str) -> str:
    return ACCENT if stage in PER_BATCH else SECOND if stage in _ONCE else THIRD
