"""Tables and the figure of the federated study, from its finished cells.

    python benchmarks/federated/study_tables.py --results benchmarks/results/federated/study.jsonl \\
        --figure docs/figures/federated-study.png

Writes the tables beside the results, as study.md. A value is the mean over seeds of the held-out loss in nats, ± its
standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))

from finished import Rows, Value, read_rows
from study import RESULTS, score
from study_cells import CLIENTS, ROWS, SPLITS

from privlora.pages.figures import ACCENT, FOURTH, MUTED, SECOND, THIRD, grid, in_style, png

CENTRAL, UNTRAINED = "central prism", "zero training"
PUBLISHED = ("fedavg", "ffa", "fedask")
_CONTROLS = (CENTRAL, "central dp-adamw", "each alone", UNTRAINED)
_EVERYWHERE = (CENTRAL, "central dp-adamw", UNTRAINED)
_APART = (*_CONTROLS, "fedsa")  # of the figure; fedsa has no common adapter
_COLOURS = dict(zip(SPLITS, (ACCENT, SECOND, THIRD, FOURTH, MUTED), strict=True))


@dataclass(frozen=True)
class Table:
    """All reported cells of a task at one epsilon and number of clients a round."""

    task: str
    epsilon: float | None
    per_round: int
    values: dict[tuple[str, str], Value]
    """(row, split)."""
    rates: dict[str, float]

    @property
    def splits(self) -> list[str]:
        return [
            split for split in SPLITS if any(split == s for row, s in self.values if row not in _CONTROLS)
        ]

    @property
    def rows(self) -> list[str]:
        return [row for row in ROWS if any(row == r for r, _ in self.values)]

    def value(self, row: str, split: str) -> Value | None:
        """Of a run in one place the same for every split."""
        return self.values.get((row, split), self.values.get((row, "iid")) if row in _EVERYWHERE else None)

    def over_splits(self, row: str) -> Value | None:
        """The mean over splits, for each seed that has all of them."""
        found = [self.value(row, split) for split in self.splits]
        if any(one is None for one in found):
            return None
        present = [one.values for one in found if one is not None]
        count = min(map(len, present))
        return Value(digits=3, values=tuple(mean(values[i] for values in present) for i in range(count)))

    @property
    def title(self) -> str:
        who = "" if self.per_round == CLIENTS else f", {self.per_round} of {CLIENTS} clients a round"
        return f"{self.task}, {shown(self.epsilon)}{who}"


def shown(epsilon: float | None) -> str:
    return "without privacy" if epsilon is None else f"ε = {epsilon:g}"


def _chosen_for(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row["cell"][name] for name in ("task", "epsilon", "row"))


def selections(rows: Rows) -> dict[tuple[Any, ...], dict[float, float]]:
    """(task, epsilon, row): loss of each rate that was tried, on records that are not reported on."""
    found: dict[tuple[Any, ...], dict[float, float]] = {}
    for row in rows:
        if row["cell"]["role"] == "selection":
            found.setdefault(_chosen_for(row), {})[row["cell"]["rate"]] = score(row)
    return found


def tables(rows: Rows) -> list[Table]:
    """Of all reported cells with the rate that was chosen, in the order of tasks, clients a round and epsilons."""
    chosen = {key: min(of, key=lambda rate: of[rate]) for key, of in selections(rows).items()}
    reported = [
        row
        for row in rows
        if row["cell"]["role"] == "report"
        and row["cell"]["rate"] == chosen.get(_chosen_for(row), row["cell"]["rate"])
    ]
    found = []
    places = dict.fromkeys(
        (r["cell"]["task"], r["cell"]["per_round"], r["cell"]["epsilon"]) for r in reported
    )
    for task, per_round, epsilon in sorted(places, key=lambda p: (p[0], -p[1], -(p[2] or 1e9))):
        losses: dict[tuple[str, str], dict[int, float]] = {}
        rates = {}
        for one in reported:
            cell = one["cell"]
            everywhere = cell["row"] in _CONTROLS
            if (cell["task"], cell["epsilon"]) != (task, epsilon):
                continue
            if cell["per_round"] != per_round and not everywhere:
                continue
            losses.setdefault((cell["row"], cell["split"]), {})[cell["seed"]] = score(one)
            rates[cell["row"]] = cell["rate"]
        values = {
            key: Value(digits=3, values=tuple(of[seed] for seed in sorted(of))) for key, of in losses.items()
        }
        found.append(Table(task, epsilon, per_round, values, rates))
    return found


def markdown(table: Table) -> str:
    """One line a row: its rate, each split, their mean, and how far it is behind the run in one place."""
    heads = ["rule", "rate", *table.splits, "mean", "behind central prism"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    central = table.values.get((CENTRAL, "iid"))
    for row in table.rows:
        over = table.over_splits(row)
        behind = "" if over is None or central is None or row == CENTRAL else over.minus(central)
        cells = [_text(table.value(row, split)) for split in table.splits]
        rate = f"{table.rates[row]:g}" if table.rates[row] else ""
        lines.append("| " + " | ".join([row, rate, *cells, _text(over), behind]) + " |")
    return "\n".join(lines)


def summary(found: Sequence[Table]) -> str:
    """One line a table with all clients in each round: what it was made to find out, in means over splits."""
    named = ("central dp-adamw", "joint", "tan", "alt", *PUBLISHED)
    heads = ["task", "privacy", CENTRAL, *named, "joint behind central", "tan or alt ahead of all three"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for table in found:
        values = {row: table.over_splits(row) for row in (CENTRAL, *named)}
        present = {row: value for row, value in values.items() if value is not None}
        if table.per_round != CLIENTS or len(present) < len(values):
            continue
        ours = min((present["tan"], present["alt"]), key=lambda value: value.mean)
        rival = min((present[row] for row in PUBLISHED), key=lambda value: value.mean)
        cells = [f"{value.mean:.3f}" for value in present.values()]
        gaps = [present["joint"].minus(present[CENTRAL]), rival.minus(ours)]
        lines.append("| " + " | ".join([table.task, shown(table.epsilon), *cells, *gaps]) + " |")
    return "\n".join(lines)


def _text(value: Value | None) -> str:
    return "" if value is None else str(value)


def rates_table(rows: Rows) -> str:
    """Losses of the runs by which rates were chosen."""
    found = selections(rows)
    tried = sorted({rate for of in found.values() for rate in of})
    lines = [
        "| task | privacy | rule | " + " | ".join(f"{rate:g}" for rate in tried) + " |",
        "|---" * (len(tried) + 3) + "|",
    ]
    order = list(ROWS)
    for (task, epsilon, row), of in sorted(
        found.items(), key=lambda item: (item[0][0], -(item[0][1] or 1e9), order.index(item[0][2]))
    ):
        best = min(of.values())
        texts = [
            f"**{of[x]:.3f}**" if of.get(x) == best else f"{of[x]:.3f}" if x in of else "" for x in tried
        ]
        lines.append(f"| {task} | {shown(epsilon)} | {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def page(rows: Rows) -> str:
    """The tables as a page."""
    found = tables(rows)
    parts = [
        "# The federated study",
        f"{len(rows)} cells. Held-out loss in nats, mean ± standard error over seeds.",
    ]
    parts += ["## In short", "Means over splits.", summary(found)]
    for table in found:
        seeds = sorted({len(v.values) for (row, _), v in table.values.items() if row != UNTRAINED})
        parts += [
            f"## {table.title}",
            f"Seeds of each value: {' or '.join(map(str, seeds))}.",
            markdown(table),
        ]
    parts += ["## Rates", "Bold: chosen. Losses on records that are not reported on.", rates_table(rows)]
    return "\n\n".join(parts) + "\n"


@in_style
def draw(found: Sequence[Table]) -> Figure:
    """A panel an epsilon: each row's loss on every split, and the runs in one place as lines."""
    wide = min(2, len(found))
    high = -(-len(found) // wide)
    figure, panels = grid(high, wide, 6.2 * wide, 6.4 * high + 0.5)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    legend: dict[str, Any] = {}
    for axes, table in zip(panels, found, strict=False):
        over = {row: table.over_splits(row) for row in table.rows}
        rows = [row for row in table.rows if row not in _APART and over[row] is not None]
        rows.sort(key=lambda row: -(over[row].mean))  # type: ignore[union-attr]
        for split in table.splits:
            for height, row in enumerate(rows):
                value = table.value(row, split)
                if value is not None:
                    apart = 0.64 / len(table.splits)
                    offset = apart * (table.splits.index(split) - (len(table.splits) - 1) / 2)
                    legend[split] = axes.errorbar(
                        value.mean,
                        height + offset,
                        xerr=value.error or 0.0,
                        fmt="o",
                        markersize=4,
                        linewidth=1.2,
                        color=_COLOURS[split],
                    )
        for name, dashes in (("central prism", "-"), ("central dp-adamw", (0, (4, 3)))):
            value = table.over_splits(name)
            if value is not None:
                legend[name] = axes.axvline(value.mean, color=MUTED, linestyle=dashes, linewidth=1.2)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("held-out loss (nats)")
        axes.set_title(table.title)
    figure.legend(legend.values(), legend, fontsize=9, loc="outside lower center", ncols=len(legend))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--task", default="reviews", help="of the figure")
    args = parser.parse_args()
    rows = read_rows(args.results)
    args.results.with_suffix(".md").write_text(page(rows), encoding="utf-8")
    if args.figure is not None:
        found = [t for t in tables(rows) if (t.task, t.per_round) == (args.task, CLIENTS)]
        args.figure.write_bytes(png(draw(found)))


if __name__ == "__main__":
    main()
