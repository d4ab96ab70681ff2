"""The figures of a study's page: utility against privacy and learning rate, as inline SVG.

Every figure is a grid of small panels with one line for each method; a method has the same colour, dash and marker
in all of them. Bars are one standard error over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from privlora.lab.studies.summary import Summary
from privlora.pages.figures import HUES, INK, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import number

_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
_MARKERS = "osD^vPX*"
_PANEL = 2.45  # inches, the height of one
_LEVEL = (0, (1, 2))  # dots, of a method without noise
_ACROSS, _LINE = 2, 0.19  # of the legend: names in a line, inches to a line

Points = list[tuple[float, float, float | None]]
"""x, mean and standard error."""


@dataclass(frozen=True)
class _Panel:
    """A task's lines. x: what is to the right. levels: of methods without noise. before: the score of no training."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    ticks: Sequence[float]
    before: float | None
    lower_is_better: bool
    levels: Mapping[str, float] = field(default_factory=dict)


def utility_figure(summary: Summary, rule: Mapping[str, Any], rank: int) -> Markup | None:
    """A panel for each task, score against epsilon, and one for the mean over tasks."""
    epsilons = summary["epsilon"]
    cells = [cell for cell in rule["cells"] if cell["rank"] == rank and cell["mean"] is not None]
    if not epsilons or not cells:
        return None
    panels = []
    if overall := [line for line in rule["overall"] if line["rank"] == rank]:
        lines = _by_method([{**line, "mean": line["mean_score"], "standard_error": None} for line in overall])
        panels.append(_Panel("mean over tasks", "ε", "share of the best gain", lines, epsilons, 0.0, False))
    for task in summary["tasks"]:
        mine = [cell for cell in cells if cell["task"] == task["name"]]
        lines = _by_method([cell for cell in mine if cell["epsilon"]])
        levels = {cell["method"]: cell["mean"] for cell in mine if not cell["epsilon"]}
        of = (task["untouched"], task["lower_is_better"], levels)
        panels.append(_Panel(task["name"], "ε", _axis(task), lines, epsilons, *of))
    label = f"score against epsilon, {rule['rule']} rates, rank {rank}"
    return _drawn(summary, panels, min(3, len(panels)), label)


def rate_figure(summary: Summary, rank: int) -> Markup | None:
    """Tasks downwards, epsilons to the right: score of the selection runs against the learning rate."""
    curves = [curve for curve in summary["learning_rate_curves"] if curve["rank"] == rank]
    epsilons = sorted({curve["epsilon"] for curve in curves}, key=lambda epsilon: epsilon or math.inf)
    panels = []
    for task, epsilon in product(summary["tasks"], epsilons):
        lines = {
            curve["method"]: [(p["learning_rate"], p["mean"], p["standard_error"]) for p in curve["points"]]
            for curve in curves
            if (curve["task"], curve["epsilon"]) == (task["name"], epsilon)
        }
        rates = sorted({x for points in lines.values() for x, _, _ in points})
        title = f"{task['name']}, {f'ε = {number(epsilon)}' if epsilon else 'no noise'}"
        of = (task["untouched_on_selection_records"], task["lower_is_better"])
        ticks = rates[:: max(1, math.ceil(len(rates) / 5))]
        panels.append(_Panel(title, "learning rate", _axis(task), lines, ticks, *of))
    return _drawn(summary, panels, len(epsilons), f"score against learning rate, rank {rank}")


@in_style
def _drawn(summary: Summary, panels: Sequence[_Panel], columns: int, label: str) -> Markup | None:
    """As wide as the page, with a legend above, in the page's colours."""
    if not panels:
        return None
    looks = _looks(summary)
    rows, lines = math.ceil(len(panels) / columns), math.ceil(len(looks) / _ACROSS)
    figure, axes = grid(rows, columns, WIDTH, 0.5 + _PANEL * rows + _LINE * lines)
    for one in axes[len(panels) :]:
        one.set_axis_off()
    for one, panel in zip(axes, panels, strict=False):
        _lines(one, panel, looks)
    handles = [Line2D([], [], **look, label=name) for name, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=_ACROSS, labelcolor=INK, handlelength=2.4)
    return inline_svg(figure, label)


def _looks(summary: Summary) -> dict[str, dict[str, Any]]:
    """Colour, dash and marker of each method, by its place in the study's file."""
    return {
        method["label"]: {
            "color": HUES[i % len(HUES)],
            "linestyle": _DASHES[i // len(HUES) % len(_DASHES)],
            "marker": _MARKERS[i % len(_MARKERS)],
            **{"linewidth": 1.5, "markersize": 4, "markeredgewidth": 0},
        }
        for i, method in enumerate(summary["methods"])
    }


def _by_method(cells: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    """The points of each method's line, against epsilon."""
    lines: dict[str, Points] = {}
    for cell in cells:
        lines.setdefault(cell["method"], []).append((cell["epsilon"], cell["mean"], cell["standard_error"]))
    return lines


def _lines(axes: Axes, panel: _Panel, looks: dict[str, dict[str, Any]]) -> None:
    """One line for each method, and a level for each without noise."""
    axes.set_xscale("log")
    for name, points in panel.lines.items():
        if points:
            x, mean, error = (np.array(column, dtype=float) for column in zip(*sorted(points), strict=True))
            axes.errorbar(x, mean, np.nan_to_num(error), **looks[name], elinewidth=1)
    axes.margins(x=0.08, y=0.1)
    _keep_in_sight(axes, panel)
    for name, level in panel.levels.items():
        looks[name] |= {"linestyle": _LEVEL, "marker": ""}
        axes.axhline(level, color=looks[name]["color"], linewidth=1, linestyle=_LEVEL)
    axes.xaxis.set_major_locator(FixedLocator(list(panel.ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 2)))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)


def _keep_in_sight(axes: Axes, panel: _Panel) -> None:
    """What does worse than no training leaves the panel instead of flattening the rest."""
    means, before = [mean for points in panel.lines.values() for _, mean, _ in points], panel.before
    if not means or before is None:
        return
    best = min(means) if panel.lower_is_better else max(means)
    limit = before + 0.15 * (before - best)
    if panel.lower_is_better and best < before < limit < max(means):
        axes.set_ylim(bottom=best - 0.1 * (limit - best), top=limit)
    elif not panel.lower_is_better and min(means) < limit < before < best:
        axes.set_ylim(bottom=limit, top=best + 0.1 * (best - limit))


def _axis(task: Mapping[str, Any]) -> str:
    return "nats per token" if task["metric"] == "loss" else str(task["words"])
