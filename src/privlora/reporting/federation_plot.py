"""The figure of a federation's rounds: who answered, how many bytes went each way, and what the adapter became."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from privlora.pages.figures import ACCENT, MUTED, SECOND, THIRD, WIDTH, grid, in_style, inline_svg
from privlora.reporting.federation import size
from privlora.reporting.plots import few, plot_loss
from privlora.reporting.wording import Report


@in_style
def rounds_plot(report: Report) -> Markup | None:
    """Three panels over rounds: clients that answered of those asked, bytes of a round, held-out loss."""
    log = few(report["federation"]["rounds"]["log"])
    if not log:
        return None
    evaluated = [row for row in report["evaluation"] if row["loss_per_example"] is not None]
    heights = (1.0, 1.0, 1.3) if evaluated else (1.0, 1.0)
    figure, panels = grid(len(heights), 1, WIDTH, 1.75 * len(heights), sharex=True, height_ratios=heights)
    _attendance(panels[0], log)
    _traffic(panels[1], log)
    if evaluated:
        plot_loss(panels[2], evaluated)
        panels[2].set_ylabel("held-out loss")
    panels[-1].set_xlabel("round")
    panels[-1].set_xlim(-0.4 if evaluated else 0.4, log[-1]["round"] + 0.6)
    panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    figure.align_ylabels(panels)
    rounds = report["federation"]["rounds"]
    label = f"{rounds['done']} of {rounds['planned']} rounds done, {rounds['void']} void"
    return inline_svg(figure, f"{label}: clients that answered, bytes and held-out loss in each")


def _attendance(axes: Axes, log: list[dict[str, Any]]) -> None:
    """A bar as high as those asked, filled as far as those that answered; void rounds are crossed."""
    numbers, asked, answered = (np.array([one[n] for one in log]) for n in ("round", "asked", "answered"))
    void = np.array([one["void"] for one in log])
    width = _bar(log)
    axes.bar(numbers, asked, width, color=ACCENT, alpha=0.16, linewidth=0, label="asked")
    axes.bar(numbers, answered, width, color=ACCENT, linewidth=0, label="answered")
    if void.any():
        axes.plot(
            numbers[void], asked[void] / 2, "x", color=SECOND, markersize=7, markeredgewidth=1.8, label="void"
        )
    axes.set_ylim(0, max(asked) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("clients")
    _legend(axes)


def _traffic(axes: Axes, log: list[dict[str, Any]]) -> None:
    """Bytes of all clients together: what they were sent, and beside it what they sent."""
    numbers = np.array([one["round"] for one in log])
    half = _bar(log) / 2
    for side, name, colour, label in (
        (-0.5, "bytes_down", MUTED, "to all clients"),
        (0.5, "bytes_up", THIRD, "from all clients"),
    ):
        axes.bar(
            numbers + side * half, [one[name] for one in log], half, color=colour, linewidth=0, label=label
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.margins(y=0.08)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("bytes")
    _legend(axes)


def _bar(log: list[dict[str, Any]]) -> float:
    """Bars of many rounds touch: gaps between them would be all that is seen."""
    return 0.72 if len(log) <= 60 else 1.0


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 0.97), ncols=3, borderpad=0, handlelength=1.2, columnspacing=1.4
    )
