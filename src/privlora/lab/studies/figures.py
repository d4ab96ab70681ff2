"""The figure of a study's page: utility against privacy, a panel for each task, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from privlora.lab.studies.summary import Summary
from privlora.pages.figures import HUES, INK, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import number

_MARKERS, _DASHES = "osD^vPX*", ("-", "--", "-.")
_PANEL, _LINE = 2.6, 0.19  # inches: the height of a panel, and of a line of the legend
_ACROSS, _NAMES = 3, 2  # panels beside each other, and names of the legend


@in_style
def utility_figure(summary: Summary, rule: Mapping[str, Any], rank: int) -> Markup | None:
    """Score against epsilon; bars are one standard error over seeds, dotted lines are methods without noise."""
    cells = [cell for cell in rule["cells"] if cell["rank"] == rank and cell["mean"] is not None]
    if not any(cell["epsilon"] for cell in cells):
        return None
    tasks, methods = summary["tasks"], summary["methods"]
    columns = min(_ACROSS, len(tasks))
    rows, lines = math.ceil(len(tasks) / columns), math.ceil(len(methods) / _NAMES)
    figure, axes = grid(rows, columns, WIDTH, _PANEL * rows + _LINE * lines)
    for one, task in zip(axes, tasks, strict=False):
        for place, method in enumerate(methods):
            own = [c for c in cells if (c["task"], c["method"]) == (task["name"], method["label"])]
            look: dict[str, Any] = {"color": HUES[place % 8], "label": method["label"], "linewidth": 1.5}
            dashes, marker = _DASHES[place // 8 % 3], _MARKERS[place % 8]
            if method["private"]:
                points = sorted((c["epsilon"], c["mean"], c["standard_error"] or 0.0) for c in own)
                x, mean, error = zip(*points, strict=True) if points else ((), (), ())
                one.errorbar(x, mean, error, linestyle=dashes, marker=marker, markersize=4, **look)
            elif own:
                one.axhline(own[0]["mean"], linestyle=":", **look)
        one.set(xscale="log", title=task["name"], xlabel="ε", ylabel=_unit(task))
        one.set_xticks(summary["epsilon"], map(number, summary["epsilon"]), minor=False)
        one.minorticks_off()
    for one in axes[len(tasks) :]:
        one.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=_NAMES, labelcolor=INK)
    return inline_svg(figure, f"score against epsilon, {rule['rule']} rates, rank {rank}")


def _unit(task: Mapping[str, Any]) -> str:
    return "nats per token" if task["metric"] == "loss" else str(task["words"])
