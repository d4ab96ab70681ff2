"""Tables and figure of the study of few records, from its finished cells.

    python benchmarks/few_records/comparison_tables.py [--figure docs/figures/few-records.png]

Writes the tables beside the results, as comparison.md. A value is the mean over seeds of the held-out loss in nats, ±
its standard error; a seed is other records, other batches and other noise. What a row is ahead by is told in standard
errors of the difference of two such means.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from comparison import RESULTS, score
from comparison_cells import UNTRAINED
from finished import Rows, Value, read_rows

from privlora.pages.figures import HUES, MUTED, WIDTH, grid, in_style, png

OURS = ("span-prism", "guided-prism")
REHEARSED = ", rehearsed"
DENSE = (
    "prism",
    "prism, automatic",
    "prism, 50 steps",
    "prism, public start",
    "prism, automatic, public start",
    "dp-adamw",
    "dp-adamw, automatic",
    "dp-adamw, 50 steps",
    "dp-sgd",
    "dp-sgd, automatic",
    "dp-sgd, 50 steps",
)
DRAWN = (
    "span-prism",
    "guided-prism",
    "prism, automatic",
    "pe-sgd-fix",
    "dp-sgd, automatic",
    "dp-adamw, automatic",
    "dp-sgd",
    "prism",
)
_MARKS = "oDs^v<>P"
Place = tuple[float | None, int]  # epsilon and records


@dataclass(frozen=True)
class Task:
    """All reported cells of one: place -> row -> value."""

    name: str
    untrained: float
    losses: dict[Place, dict[str, Value]]
    hardest: dict[Place, dict[str, Value]]
    accuracies: dict[Place, dict[str, Value]]
    rates: dict[Place, dict[str, float]]
    choices: dict[Place, dict[str, Any]]
    """What an advice took, where it was asked."""

    def along(self, axis: Literal["records", "epsilon"]) -> list[Place]:
        """Places that differ in one alone: in records at the epsilon of most, or in epsilon at the records of most."""
        fixed = 0 if axis == "records" else 1
        by: dict[Any, list[Place]] = defaultdict(list)
        for place in self.losses:
            by[place[fixed]].append(place)
        chosen = max(by.values(), key=len)
        return sorted(chosen, key=lambda place: (place[0] is None, place[0] or 0.0, place[1]))

    def to_markdown(self) -> str:
        lines = [f"## {self.name}", "", f"Untouched: {self.untrained:.4f}.", ""]
        by_records, by_epsilon = self.along("records"), self.along("epsilon")
        lines += self.table(by_records, [f"M = {m}" for _, m in by_records])
        if len(by_epsilon) > 1:
            lines += self.table(by_epsilon, [_epsilon(e) for e, _ in by_epsilon])
        return "\n".join([*lines, *self.leads(), "", *self.rates_table(), ""])

    def table(self, places: list[Place], heads: list[str]) -> list[str]:
        """Rows best first at the first place, and there the loss's change on the hardest tenth of records, and how many
        of the next tokens are the likeliest."""
        first = places[0]
        rows = dict.fromkeys(row for place in places for row in self.losses[place])
        ranked = sorted(rows, key=lambda r: self.losses[first][r].mean if r in self.losses[first] else 1e9)
        lines = [
            "| method |"
            + "".join(f" {head} |" for head in heads)
            + f" hardest tenth, {heads[0]} | accuracy, {heads[0]} |",
            "|" + "---|" * (3 + len(heads)),
        ]
        for row in ranked:
            cells = "".join(f" {self.losses[place].get(row, '')} |" for place in places)
            hardest, accuracy = self.hardest[first].get(row), self.accuracies[first].get(row)
            ends = ("", "") if hardest is None else (f"{hardest.mean:+.3f}", f"{100 * accuracy.mean:.2f} %")
            lines.append(f"| {row} |{cells} {ends[0]} | {ends[1]} |")
        return [*lines, ""]

    def rates_table(self) -> list[str]:
        places = sorted(self.rates, key=lambda place: (place[0] is None, place[0] or 0.0, place[1]))
        lines = ["Learning rates:", "", "| method |" + "".join(f" {_epsilon(e)}, {m} |" for e, m in places)]
        lines.append("|" + "---|" * (1 + len(places)))
        for row in dict.fromkeys(row for place in places for row in self.rates[place]):
            found = (self.rates[place].get(row) for place in places)
            lines.append(f"| {row} |" + "".join(f" {'' if r is None else f'{r:.2g}'} |" for r in found))
        return lines

    def leads(self) -> list[str]:
        """How far ahead our rows are of the best row that adds noise in all coordinates and reads no public text; what
        auto took, against the best of the others at its rehearsed rate."""
        found = []
        for place in sorted(self.losses, key=lambda p: (p[0] is None, p[0] or 0.0, p[1])):
            here = self.losses[place]
            where = f"M = {place[1]}, {_epsilon(place[0])}"
            rivals = {row: here[row] for row in DENSE if row in here}
            if rivals:
                best = min(rivals, key=lambda row: rivals[row].mean)
                found += [
                    f"* {where}: {row} is {rivals[best].minus(here[row])} ahead of {best}."
                    for row in OURS
                    if row in here
                ]
            tried = {row.removesuffix(REHEARSED): v for row, v in here.items() if row.endswith(REHEARSED)}
            if place in self.choices and len(tried) > 1:
                took = self.choices[place]["row"]
                other = min((row for row in tried if row != took), key=lambda row: tried[row].mean)
                lead = tried[other].minus(tried[took])
                found.append(
                    f"* {where}: auto takes {took}, which is {lead} ahead of {other} at its rehearsed rate."
                )
        return found


def _epsilon(epsilon: float | None) -> str:
    return "no privacy" if epsilon is None else f"ε = {epsilon:g}"


def tasks_of(rows: Rows) -> list[Task]:
    """In the order in which they were begun."""
    found = []
    for name in dict.fromkeys(row["cell"]["task"] for row in rows):
        here = [row for row in rows if row["cell"]["task"] == name]
        reported = [row for row in here if row["cell"]["role"] == "report"]
        if {row["cell"]["row"] for row in reported} <= {UNTRAINED}:
            continue
        (untrained,) = {score(row) for row in reported if row["cell"]["row"] == UNTRAINED}
        found_values: dict[str, dict[Place, dict[str, list[float]]]] = {
            kind: defaultdict(lambda: defaultdict(list)) for kind in ("loss", "hardest", "accuracy")
        }
        rates: dict[Place, dict[str, float]] = defaultdict(dict)
        for row in reported:
            cell = row["cell"]
            if cell["row"] != UNTRAINED:
                place = cell["epsilon"], cell["records"]
                for kind, values in found_values.items():
                    values[place][cell["row"]].append(score(row) if kind == "loss" else row[kind])
                rates[place][cell["row"]] = cell["rate"]
        choices = {
            (row["cell"]["epsilon"], row["cell"]["records"]): row["choice"]
            for row in here
            if row["cell"]["role"] == "rehearsal"
        }
        found.append(
            Task(name, untrained, *map(_values, found_values.values()), dict(rates), choices),
        )
    return found


def _values(lists: dict[Place, dict[str, list[float]]]) -> dict[Place, dict[str, Value]]:
    return {place: {row: Value(tuple(v)) for row, v in rows.items()} for place, rows in lists.items()}


@in_style
def figure(tasks: list[Task]) -> bytes:
    """Change of the held-out loss over records and over epsilon, a panel each, as PNG."""
    axes_of = ("records", "epsilon")
    shown = [(task, axis) for task in tasks for axis in axes_of if len(task.along(axis)) > 1]  # type: ignore[arg-type]
    lines = -(-len(shown) // 2)
    panels, axes = grid(lines, 2, WIDTH, 0.6 + 3.1 * lines)
    for ax, (task, axis) in zip(axes, shown, strict=False):
        places = task.along(axis)  # type: ignore[arg-type]
        for row, hue, mark in zip(DRAWN, HUES, _MARKS, strict=True):
            here = [(i, task.losses[p][row]) for i, p in enumerate(places) if row in task.losses[p]]
            ax.errorbar(
                [i for i, _ in here],
                [v.mean - task.untrained for _, v in here],
                yerr=[v.error or 0.0 for _, v in here],
                label=row,
                color=hue,
                marker=mark,
                markersize=5,
                linewidth=2 if row in (*OURS, "prism, automatic") else 1.1,
                elinewidth=1,
            )
        ax.axhline(0, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        ax.set_ylabel("change of the held-out loss, nats")
        ax.grid(axis="x", visible=False)
        if axis == "records":
            ax.set_xticks(range(len(places)), [str(m) for _, m in places])
            ax.set_xlabel("private records")
            ax.set_title(f"{task.name}, {_epsilon(places[0][0])}")
        else:
            ax.set_xticks(range(len(places)), ["none" if e is None else f"{e:g}" for e, _ in places])
            ax.set_xlabel("ε")
            ax.set_title(f"{task.name}, {places[0][1]} records")
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    panels.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1.4
    )
    return png(panels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, help="a .png to write")
    chosen = parser.parse_args()
    tasks = tasks_of(read_rows(chosen.results))
    text = "# Few records\n\nMade by benchmarks/few_records/comparison_tables.py.\n\n"
    text += "\n".join(task.to_markdown() for task in tasks)
    chosen.results.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    if chosen.figure is not None:
        chosen.figure.write_bytes(figure(tasks))


if __name__ == "__main__":
    main()
