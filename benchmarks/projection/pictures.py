"""The figures of docs/projection-studies.md from the results of attacks.py and heads.py.

python benchmarks/projection/pictures.py --results benchmarks/results/projection --figures docs/figures
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from privlora.pages.figures import ACCENT, FOURTH, INK, MUTED, SECOND, THIRD, grid, in_style, png

LineStyle = Literal["-"] | tuple[int, tuple[int, int]]
DASHED: LineStyle = (0, (4, 3))
DOTTED: LineStyle = (0, (2, 2))
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--figures", type=Path, required=True)
    args = parser.parse_args()
    for name, draw in (("attacks", draw_attacks), ("heads", draw_accuracy)):
        result = json.loads((args.results / f"{name}.json").read_text(encoding="utf-8"))
        (args.figures / f"projection-{name}.png").write_bytes(png(draw(result)))


@in_style
def draw_attacks(result: dict[str, Any]) -> Figure:
    """AUC against rank: without noise, and with it."""
    figure, (left, right) = grid(1, 2, 10.2, 3.6)
    tables = result["tables"]
    for rows, colour, dashes, label in (
        (tables["lora-fa"], SECOND, "-", "LoRA-FA head, loss"),
        ([_known(row) for row in tables["lora-fa"]], THIRD, DASHED, "LoRA-FA head, loss and A"),
        (tables["networks"], ACCENT, "-", "LoRA-FA network, loss"),
    ):
        _areas(left, rows, colour, dashes, label)
    noises = sorted({row["cell"]["settings"]["noise_multiplier"] for row in tables["m2"]})
    for noise, colour in zip(noises, (ACCENT, FOURTH, THIRD), strict=True):
        rows = [row for row in tables["m2"] if row["cell"]["settings"]["noise_multiplier"] == noise]
        _areas(right, rows, colour, "-", f"M2, σ = {noise:g}")
    noise = tables["m1"][0]["cell"]["settings"]["noise_multiplier"]
    _areas(right, tables["m1"], SECOND, DASHED, f"M1, σ = {noise:g}")
    for axes, title in ((left, "without noise"), (right, "heads with noise, canary's loss")):
        axes.set_title(title)
        axes.axhline(0.5, color=MUTED, linewidth=1)
        axes.set_ylim(0.47, 1.02)
        axes.set_ylabel("AUC of the attack")
        _ranks(axes, (16, 32, 64, 128, 256, 512) if axes is left else (16, 32, 64, 128, 256, 512, 1000))
    left.legend(loc="lower right", bbox_to_anchor=(1.0, 0.06))
    right.legend(loc="upper left")
    return figure


@in_style
def draw_accuracy(result: dict[str, Any]) -> Figure:
    """Test accuracy against epsilon at one rank, and against rank at one epsilon."""
    figure, (left, right) = grid(1, 2, 10.2, 3.8)
    looks: dict[str, tuple[str, LineStyle]] = {
        "dp-sgd": (INK, "-"),
        "lora-fa": (FOURTH, "-"),
        "m2": (ACCENT, "-"),
        "m2 by Theorem 5": (ACCENT, DOTTED),
        "project-then-clip": (SECOND, "-"),
        "project-then-clip frozen": (SECOND, DASHED),
    }
    for name, (colour, dashes) in looks.items():
        rows = [row for row in result["against_epsilon"] if row["cell"]["variant"] == name]
        _accuracies(left, rows, "epsilon", colour, dashes, name)
        rows = [row for row in result["against_rank"] if row["cell"]["variant"] == name]
        if name == "dp-sgd":
            right.axhline(rows[0]["test_mean"], color=colour, linewidth=1.6)
        else:
            _accuracies(right, rows, "rank", colour, dashes, name)
    left.axhline(result["no_noise"]["test_mean"], color=MUTED, linewidth=1)
    epsilons = sorted({row["cell"]["epsilon"] for row in result["against_epsilon"]})
    rank = max(row["cell"]["rank"] or 0 for row in result["against_epsilon"])
    epsilon = result["against_rank"][0]["cell"]["epsilon"]
    left.set_title(f"rank {rank} of {result['data']['dimensions']}; grey line: no noise")
    left.set_xlabel("ε")
    _logarithmic(left, epsilons)
    left.legend(loc="lower right")
    right.set_title(f"ε = {epsilon:g}")
    _ranks(right, sorted({row["cell"]["rank"] for row in result["against_rank"] if row["cell"]["rank"]}))
    for axes in (left, right):
        axes.set_ylabel("test accuracy")
    return figure


def _known(row: Row) -> Row:
    return {"cell": row["cell"], **row["known_factors"]}


def _areas(axes: Axes, rows: Sequence[Row], colour: str, dashes: LineStyle, label: str) -> None:
    ranks = [row["cell"]["settings"]["rank"] for row in rows]
    axes.plot(
        ranks, [row["auc"] for row in rows], color=colour, linestyle=dashes, label=label, marker="o", ms=4
    )
    low, high = zip(*(row["auc_interval"] for row in rows), strict=True)
    axes.fill_between(ranks, low, high, color=colour, alpha=0.12, linewidth=0)


def _accuracies(
    axes: Axes, rows: Sequence[Row], key: str, colour: str, dashes: LineStyle, label: str
) -> None:
    x = [row["cell"][key] for row in rows]
    deviations = [row["test_deviation"] for row in rows]
    axes.errorbar(
        x,
        [row["test_mean"] for row in rows],
        yerr=deviations,
        color=colour,
        linestyle=dashes,
        label=label,
        marker="o",
        ms=4,
        elinewidth=0.8,
    )


def _ranks(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_xlabel("rank")
    _logarithmic(axes, ranks)


def _logarithmic(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


if __name__ == "__main__":
    main()
