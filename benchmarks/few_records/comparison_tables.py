"""Tables of the study of few records, from its finished cells.

    python benchmarks/few_records/comparison_tables.py

Writes the tables beside the results, as comparison.md. A value is the mean over seeds of the held-out loss in nats, ±
its standard error; a seed is other records, other batches and other noise.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from comparison import RESULTS, Rows, read_rows, score
from comparison_cells import UNTRAINED

OURS = "span-prism"
DENSE = ("prism", "prism, 50 steps", "prism, public start", "dp-adamw", "dp-adamw, 50 steps", "dp-sgd")


@dataclass(frozen=True)
class Value:
    """Of one cell over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 for one seed."""
        return stdev(self.values) / len(self.values) ** 0.5 if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.error:.4f}" if self.error else "")

    def ahead_of(self, other: Value) -> str:
        """How much smaller than ``other``, also in standard errors of the difference."""
        gap = other.mean - self.mean
        error = (self.error**2 + other.error**2) ** 0.5
        return f"{gap:+.4f}" + (f" ({gap / error:+.1f} SE)" if error else "")


@dataclass(frozen=True)
class Table:
    """All reported cells of a task at one epsilon."""

    task: str
    epsilon: float | None
    values: dict[tuple[str, int], Value]
    """(row, records)."""
    hardest: dict[tuple[str, int], Value]
    rates: dict[str, float]
    untrained: float

    @property
    def title(self) -> str:
        return f"{self.task}, " + ("without privacy" if self.epsilon is None else f"ε = {self.epsilon:g}")

    @property
    def records(self) -> list[int]:
        return sorted({records for _, records in self.values})

    @property
    def rows(self) -> list[str]:
        """Best first, at the number of records that most rows have."""
        at = max(self.records, key=lambda m: sum(m == records for _, records in self.values))
        rows = {row for row, _ in self.values}
        last = float("inf")
        return sorted(rows, key=lambda r: self.values[r, at].mean if (r, at) in self.values else last)

    def to_markdown(self) -> str:
        heads = "".join(f" M = {m} |" for m in self.records)
        lines = [
            f"## {self.title}",
            "",
            f"Untouched: {self.untrained:.4f}.",
            "",
            f"| row | rate |{heads} hardest tenth, M = {self.records[len(self.records) // 2]} |",
            "|" + "---|" * (3 + len(self.records)),
        ]
        middle = self.records[len(self.records) // 2]
        for row in self.rows:
            cells = "".join(f" {self.values.get((row, m), '')} |" for m in self.records)
            hardest = self.hardest.get((row, middle))
            change = "" if hardest is None else f"{hardest.mean:+.3f}"
            lines.append(f"| {row} | {self.rates[row]:g} |{cells} {change} |")
        return "\n".join([*lines, "", *self.leads(), ""])

    def leads(self) -> list[str]:
        """How far ahead our row is of the best row that adds noise in all coordinates of an adapter."""
        found = []
        for m in self.records:
            rivals = {row: self.values[row, m] for row in DENSE if (row, m) in self.values}
            if rivals and (OURS, m) in self.values:
                best = min(rivals, key=lambda row: rivals[row].mean)
                lead = self.values[OURS, m].ahead_of(rivals[best])
                found.append(f"M = {m}: {OURS} is {lead} ahead of {best}.")
        return found


def tables_of(rows: Rows) -> list[Table]:
    """One for each task and epsilon."""
    untrained = {row["cell"]["task"]: score(row) for row in rows if row["cell"]["row"] == UNTRAINED}
    reported = [row for row in rows if row["cell"]["role"] == "report" and row["cell"]["row"] != UNTRAINED]
    places = sorted(
        {(row["cell"]["task"], row["cell"]["epsilon"]) for row in reported},
        key=lambda place: (place[0], place[1] is None, place[1]),
    )
    found = []
    for task, epsilon in places:
        here = [row for row in reported if (row["cell"]["task"], row["cell"]["epsilon"]) == (task, epsilon)]
        keys = {(row["cell"]["row"], row["cell"]["records"]) for row in here}
        of = {
            key: [row for row in here if (row["cell"]["row"], row["cell"]["records"]) == key] for key in keys
        }
        found.append(
            Table(
                task=task,
                epsilon=epsilon,
                values={key: Value(tuple(map(score, some))) for key, some in of.items()},
                hardest={key: Value(tuple(row["hardest"] for row in some)) for key, some in of.items()},
                rates={row["cell"]["row"]: row["cell"]["rate"] for row in here},
                untrained=untrained[task],
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    tables = tables_of(read_rows(chosen.results))
    text = "# Few records\n\nMade by benchmarks/few_records/comparison_tables.py.\n\n"
    text += "\n".join(table.to_markdown() for table in tables)
    chosen.results.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
