"""The figures of a study's page: utility against privacy, learning rate and rank, as inline SVG.

Every figure is a grid of small panels with one line for each method; a method has the same colour, dash and marker
in all of them. Bars are one standard error over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from privlora.lab.studies.summary import Summary
from privlora.pages.figures import HUES, INK, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import number

_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
_MARKERS = "osD^vPX*"
_PANEL = 2.45  # inches, the height of one
_LEVEL = (0, (1, 2))  # dots, of a method without noise
_LETTERS, _LINE = 14, 0.19  # of the legend: letters to an inch, inches to a line
_COLUMNS = 3

Points = list[tuple[float, float, float | None]]
"""x, mean and standard error."""


@in_style
def utility_figure(summary: Summary, rule: Mapping[str, Any], rank: int) -> Markup | None:
    """A panel for each task, score against epsilon, and one for the mean over tasks."""
    epsilons = summary["epsilon"]
    cells = [cell for cell in rule["cells"] if cell["rank"] == rank and cell["mean"] is not None]
    if not epsilons or not cells:
        return None
    overall = [line for line in rule["overall"] if line["rank"] == rank]
    count = len(summary["tasks"]) + bool(overall)
    figure, axes = _grid(count, min(_COLUMNS, count))
    looks = _looks(summary)
    if overall:
        panel = axes.pop(0)
        standings = [{**line, "mean": line["mean_score"], "standard_error": None} for line in overall]
        lines = _by_method(standings, "epsilon")
        _lines(panel, lines, looks)
        _keep_in_sight(panel, lines, 0.0, lower_is_better=False)
        _epsilons(panel, epsilons)
        panel.set(title="mean over tasks", ylabel="share of the best gain")
    for panel, task in zip(axes, summary["tasks"], strict=True):
        mine = [cell for cell in cells if cell["task"] == task["name"]]
        lines = _by_method([cell for cell in mine if cell["epsilon"]], "epsilon")
        _lines(panel, lines, looks)
        _keep_in_sight(panel, lines, task["untouched"], lower_is_better=task["lower_is_better"])
        _levels(panel, {c["method"]: c["mean"] for c in mine if not c["epsilon"]}, looks)
        _epsilons(panel, epsilons)
        panel.set(title=task["name"], ylabel=_axis(task))
    for method in summary["methods"]:
        if not method["private"]:  # shown as a level
            looks[method["label"]] |= {"linestyle": _LEVEL, "marker": ""}
    return _finish(figure, looks, f"score against epsilon, {rule['rule']} rates, rank {rank}")


@in_style
def rate_figure(summary: Summary, rank: int) -> Markup | None:
    """Tasks downwards, epsilons to the right: score of the selection runs against the learning rate."""
    curves = [curve for curve in summary["learning_rate_curves"] if curve["rank"] == rank]
    if not curves:
        return None
    columns = sorted({curve["epsilon"] for curve in curves}, key=lambda epsilon: epsilon or math.inf)
    figure, axes = _grid(len(summary["tasks"]) * len(columns), len(columns))
    looks = _looks(summary)
    for index, panel in enumerate(axes):
        task, epsilon = summary["tasks"][index // len(columns)], columns[index % len(columns)]
        lines = {
            curve["method"]: [(p["learning_rate"], p["mean"], p["standard_error"]) for p in curve["points"]]
            for curve in curves
            if (curve["task"], curve["epsilon"]) == (task["name"], epsilon)
        }
        _lines(panel, lines, looks)
        before = task["untouched_on_selection_records"]
        _keep_in_sight(panel, lines, before, lower_is_better=task["lower_is_better"])
        rates = sorted({x for points in lines.values() for x, _, _ in points})
        _ticks(panel, rates[:: max(1, math.ceil(len(rates) / 5))])
        where = f"ε = {number(epsilon)}" if epsilon else "no noise"
        panel.set(title=f"{task['name']}, {where}")
        if index % len(columns) == 0:
            panel.set_ylabel(_axis(task))
        if index >= len(axes) - len(columns):
            panel.set_xlabel("learning rate")
    return _finish(figure, looks, f"score against learning rate, rank {rank}")


@in_style
def rank_figure(summary: Summary, rule: Mapping[str, Any]) -> Markup | None:
    """Tasks downwards, epsilons to the right: score against the rank; None for a single rank."""
    ranks, epsilons = summary["rank"], summary["epsilon"]
    if len(ranks) < 2 or not epsilons:
        return None
    figure, axes = _grid(len(summary["tasks"]) * len(epsilons), len(epsilons))
    looks = _looks(summary)
    for index, panel in enumerate(axes):
        task, epsilon = summary["tasks"][index // len(epsilons)], epsilons[index % len(epsilons)]
        mine = [
            cell
            for cell in rule["cells"]
            if (cell["task"], cell["epsilon"]) == (task["name"], epsilon) and cell["mean"] is not None
        ]
        _lines(panel, _by_method(mine, "rank"), looks)
        _ticks(panel, ranks)
        panel.set(title=f"{task['name']}, ε = {number(epsilon)}")
        if index % len(epsilons) == 0:
            panel.set_ylabel(_axis(task))
        if index >= len(axes) - len(epsilons):
            panel.set_xlabel("rank")
    return _finish(figure, looks, f"score against rank, {rule['rule']} rates")


def _looks(summary: Summary) -> dict[str, dict[str, Any]]:
    """Colour, dash and marker of each method, by its place in the study's file."""
    return {
        method["label"]: {
            "color": HUES[i % len(HUES)],
            "linestyle": _DASHES[i // len(HUES) % len(_DASHES)],
            "marker": _MARKERS[i % len(_MARKERS)],
        }
        for i, method in enumerate(summary["methods"])
    }


def _by_method(cells: Iterable[Mapping[str, Any]], x: str) -> dict[str, Points]:
    """The points of each method's line."""
    lines: dict[str, Points] = {}
    for cell in cells:
        lines.setdefault(cell["method"], []).append((cell[x], cell["mean"], cell["standard_error"]))
    return lines


def _lines(axes: Axes, lines: Mapping[str, Points], looks: Mapping[str, dict[str, Any]]) -> None:
    """One line for each method, set a little apart so that bars do not hide each other."""
    axes.set_xscale("log")
    shown = [(name, sorted(points)) for name, points in lines.items() if points]
    xs = [x for _, points in shown for x, _, _ in points]
    apart = (max(xs) / min(xs)) ** 0.006 if xs and max(xs) > min(xs) else 1.01
    for place, (name, points) in enumerate(shown):
        x, mean, error = (np.array(column, dtype=float) for column in zip(*points, strict=True))
        axes.errorbar(
            x * apart ** (place - (len(shown) - 1) / 2),
            mean,
            np.nan_to_num(error),
            **looks[name],
            linewidth=1.5,
            markersize=4,
            markeredgewidth=0,
            elinewidth=1,
        )
    axes.margins(x=0.08, y=0.1)


def _levels(axes: Axes, levels: Mapping[str, float], looks: Mapping[str, dict[str, Any]]) -> None:
    """Methods without noise: a level, or its value at the edge of the panel if it lies far outside."""
    if not levels:
        return
    low, high = axes.get_ylim()
    span = high - low
    for name, level in levels.items():
        if low - 0.4 * span <= level <= high + 0.4 * span:
            axes.axhline(level, color=looks[name]["color"], linewidth=1, linestyle=_LEVEL)
            continue
        below = level < low
        axes.annotate(
            f"{name}: {level:.3f} {'↓' if below else '↑'}",
            (0.03, 0.03 if below else 0.97),
            xycoords="axes fraction",
            ha="left",
            va="bottom" if below else "top",
            color=looks[name]["color"],
            fontsize=8,
        )


def _keep_in_sight(
    axes: Axes, lines: Mapping[str, Points], before: float | None, *, lower_is_better: bool
) -> None:
    """What does worse than no training leaves the panel instead of flattening the rest."""
    means = [mean for points in lines.values() for _, mean, _ in points]
    if not means or before is None:
        return
    best = min(means) if lower_is_better else max(means)
    limit = before + 0.15 * (before - best)
    if lower_is_better and best < before < limit < max(means):
        axes.set_ylim(bottom=best - 0.1 * (limit - best), top=limit)
    elif not lower_is_better and min(means) < limit < before < best:
        axes.set_ylim(bottom=limit, top=best + 0.1 * (best - limit))


def _epsilons(axes: Axes, epsilons: Sequence[float]) -> None:
    _ticks(axes, epsilons)
    axes.set_xlabel("ε")


def _ticks(axes: Axes, values: Iterable[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 2)))
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _axis(task: Mapping[str, Any]) -> str:
    return "nats per token" if task["metric"] == "loss" else str(task["words"])


def _grid(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    rows = math.ceil(count / columns)
    # As wide as the page, so that letters keep their size.
    figure, axes = grid(rows, columns, WIDTH, 0.5 + _PANEL * rows)
    for one in axes[count:]:
        one.set_axis_off()
    return figure, axes[:count]


def _finish(figure: Figure, looks: Mapping[str, dict[str, Any]], label: str) -> Markup:
    """Add the legend and turn into SVG in the page's colours."""
    handles = [
        Line2D([], [], **look, label=name, linewidth=1.5, markersize=4, markeredgewidth=0)
        for name, look in looks.items()
    ]
    width, height = figure.get_size_inches()
    columns = max(1, min(len(handles), int(width * _LETTERS / (max(map(len, looks)) + 6))))
    # Many methods with long names must not take the panels' height.
    figure.set_size_inches(width, height + _LINE * math.ceil(len(handles) / columns))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        labelcolor=INK,
        handlelength=2.4,
    )
    return inline_svg(figure, label)
