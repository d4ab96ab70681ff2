"""The fair table of benchmarks/results/fair.jsonl, as benchmarks/results/fair.md has it.

    python benchmarks/fair/tables.py benchmarks/results/fair.jsonl --figures docs/figures

A score is the gain over the untouched model as a share of the best row's on that task, in the mean over tasks. Own
best: for each task the rate whose loss is least in the mean of the choosing seeds, on their half of the held-out
records; what counts are the other seeds, on the other half. One multiple: of each row's default, one for all tasks,
chosen likewise. Default: the row's own rate. How far a row is behind the first has the standard error of a bootstrap
that draws choosing and report seeds anew and chooses again, so that it counts what chance there is in the choice of a
rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from privlora.pages.figures import ACCENT, MUTED, SECOND, grid, in_style, png

CHOOSING = (100, 101, 102)
SEEDS = (*CHOOSING, 0, 1, 2, 3, 4)
RESAMPLES = 2000


@dataclass(frozen=True)
class Runs:
    """A row's runs of one task. powers: (R,) of the root of two, times the default rate. choosing: (R, 3) losses of the
    choosing seeds on their records; report: (R, 5), of the others on the others. before: of the untouched model."""

    powers: np.ndarray
    choosing: np.ndarray
    report: np.ndarray
    rates: np.ndarray
    before: float

    def best(self, choosing: np.ndarray | None = None) -> int:
        return int(np.argmin((self.choosing if choosing is None else choosing).mean(axis=1)))

    @property
    def at_edge(self) -> bool:
        return self.best() in (0, len(self.powers) - 1)

    def at(self, power: int) -> np.ndarray:
        """(5,) losses at that multiple of the default; those of the nearest that was run."""
        found: np.ndarray = self.report[int(np.argmin(abs(self.powers - power)))]
        return found


Group = tuple[str, int, float]
"""Model, steps, epsilon."""


def by_cell(path: Path, *, seeds: int | None = None) -> Iterator[tuple[dict[str, Any], Runs]]:
    """Each cell of a file, with the runs of all of its lines; seeds: of those with so many alone."""
    teams: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if seeds is None or len(line["seeds"]) == seeds:
            teams[json.dumps(line["cell"], sort_keys=True)].append(line)
    for lines in teams.values():
        chosen = np.isin(lines[0]["seeds"], CHOOSING)
        powers = np.concatenate([line["powers"] for line in lines])
        order = np.argsort(powers)

        def of(name: str, lines: list[dict[str, Any]] = lines, order: np.ndarray = order) -> np.ndarray:
            joined: np.ndarray = np.concatenate([np.array(line[name], float) for line in lines])[order]
            return joined

        runs = Runs(
            powers[order],
            of("choosing")[:, chosen],
            of("report")[:, ~chosen],
            of("rates"),
            lines[0]["before"][1],
        )
        yield lines[0]["cell"], runs


def read(path: Path) -> dict[Group, dict[str, dict[str, Runs]]]:
    """Group -> task -> row -> its runs."""
    found: dict[Group, dict[str, dict[str, Runs]]] = defaultdict(lambda: defaultdict(dict))
    for cell, runs in by_cell(path):
        clip = f" at clip norm {cell['clip_norm']:g}" if "clip_norm" in cell else ""
        group = cell["model"] + clip, cell["steps"], cell["epsilon"]
        found[group][cell["task"]][cell["row"]] = runs
    return found


@dataclass(frozen=True)
class Standing:
    """A row over the tasks. behind: the first row's score less its own, and error: its standard error."""

    row: str
    score: float
    behind: float
    error: float
    shared: float
    default: float
    at_edge: int


def standings(tasks: dict[str, dict[str, Runs]], rows: Sequence[str]) -> list[Standing]:
    """Of rows that all of ``tasks`` have, the best first."""
    names = list(tasks)
    unit = {
        t: max(tasks[t][r].before - tasks[t][r].report[tasks[t][r].best()].mean() for r in rows)
        for t in names
    }

    def score(task: str, losses: np.ndarray, before: float) -> float:
        return float((before - losses.mean()) / unit[task])

    own = {
        r: np.mean([score(t, tasks[t][r].report[tasks[t][r].best()], tasks[t][r].before) for t in names])
        for r in rows
    }
    order = sorted(rows, key=lambda r: -own[r])
    resampled = _resampled(tasks, rows, unit)
    found = []
    for r in order:
        apart = resampled[order[0]] - resampled[r]
        runs = [tasks[t][r] for t in names]
        powers = sorted(set.intersection(*(set(one.powers.tolist()) for one in runs)))

        def chosen(power: int, runs: list[Runs] = runs) -> float:
            rows_of = [one.choosing[list(one.powers).index(power)] for one in runs]
            # The halves of the held-out records differ, but only differences between rates count here.
            return float(
                np.mean([-losses.mean() / unit[t] for t, losses in zip(names, rows_of, strict=True)])
            )

        best = max(powers, key=chosen)
        at = [
            float(np.mean([score(t, one.at(power), one.before) for t, one in zip(names, runs, strict=True)]))
            for power in (best, 0)
        ]
        edges = sum(one.at_edge for one in runs)
        found.append(
            Standing(r, float(own[r]), float(own[order[0]] - own[r]), float(apart.std()), *at, edges)
        )
    return found


def _resampled(
    tasks: dict[str, dict[str, Runs]], rows: Sequence[str], unit: dict[str, float]
) -> dict[str, np.ndarray]:
    """Row -> (RESAMPLES,) mean scores of drawn seeds, which are the same for all rows: their batches are."""
    generator = np.random.default_rng(0)
    found = {r: np.zeros(RESAMPLES) for r in rows}
    for task, of_rows in tasks.items():
        first = next(iter(of_rows.values()))
        draws = generator.integers(first.choosing.shape[1], size=(RESAMPLES, first.choosing.shape[1]))
        reports = generator.integers(first.report.shape[1], size=(RESAMPLES, first.report.shape[1]))
        for r in rows:
            one = of_rows[r]
            best = one.choosing[:, draws].mean(axis=-1).argmin(axis=0)  # (RESAMPLES,)
            losses = one.report[best[:, None], reports].mean(axis=-1)
            found[r] += (one.before - losses) / unit[task] / len(tasks)
    return found


def tables(found: dict[Group, dict[str, dict[str, Runs]]]) -> Iterator[tuple[str, str]]:
    """(title, markdown) of each group of which all rows have at least two tasks."""
    for (model, steps, epsilon), tasks in sorted(found.items(), key=lambda one: one[0]):
        rows, names = complete(tasks)
        if len(names) < 2 or len(rows) < 2:
            continue
        kept = {t: tasks[t] for t in names}
        lines = [
            "| method | own best rate | behind the first | one multiple | default rate | "
            + " | ".join(names)
            + " |",
            "|---" * (5 + len(names)) + "|",
        ]
        for at in standings(kept, rows):
            behind = f"{at.behind:.3f}, {at.behind / at.error:.1f} SE" if at.behind > 0 else ""
            cells = [f"{at.score:.3f}", behind, f"{at.shared:.3f}", f"{at.default:.3f}"]
            for t in names:
                runs = kept[t][at.row]
                best = runs.report[runs.best()]
                edge = "*" if runs.at_edge else ""
                cells.append(f"{best.mean():.3f} ± {best.std(ddof=1):.3f}{edge}")
            lines.append(f"| {at.row} | {' | '.join(cells)} |")
        yield f"{model}, {steps} steps, ε = {epsilon:g}", "\n".join(lines)


@in_style
def draw(found: dict[Group, dict[str, dict[str, Runs]]]) -> Figure:
    """A panel for each group: every row's score at its own best rate, with two standard errors, and at its default."""
    groups = []
    for group, tasks in sorted(
        found.items(), key=lambda one: (one[0][0] != "stories260K", one[0][1], one[0][2])
    ):
        rows, names = complete(tasks)
        if len(names) > 1 and len(rows) > 1:
            groups.append((group, standings({t: tasks[t] for t in names}, rows), len(names)))
    heights = [len(places) + 1.6 for _, places, _ in groups]
    figure, panels = grid(
        len(groups), 1, 10.2, 0.26 * sum(heights), sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for axes, ((model, steps, epsilon), places, tasks_of) in zip(panels, groups, strict=True):
        for y, at in enumerate(places):
            colour = ACCENT if at.row.startswith("prism") else SECOND
            axes.errorbar(
                at.score, y, xerr=2 * at.error, color=colour, marker="o", markersize=5, elinewidth=1.2
            )
            axes.plot(at.default, y, marker="o", markersize=5, markerfacecolor="none", color=colour)
        axes.set_yticks(range(len(places)), [at.row for at in places])
        axes.set_ylim(len(places) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_title(
            f"{model}, {steps} steps, ε = {epsilon:g}, {tasks_of} tasks", loc="left", fontsize=9, color=MUTED
        )
    panels[-1].set_xlabel(
        "share of the best row's gain: filled, at its own best rate (bars: two standard errors of the distance to the "
        "first);\nhollow, at its default rate"
    )
    return figure


def complete(tasks: dict[str, dict[str, Runs]]) -> tuple[list[str], list[str]]:
    """Rows and tasks that were run together: as many pairs as there are with nothing missing, of two tasks or more if
    two rows have them."""
    every = list(dict.fromkeys(row for of_task in tasks.values() for row in of_task))
    choices = []
    for row in every:  # all rows that have at least this row's tasks
        names = [t for t in tasks if row in tasks[t]]
        rows = [r for r in every if all(r in tasks[t] for t in names)]
        several = len(names) > 1 and len(rows) > 1
        choices.append(((several, len(rows) * math.sqrt(len(names))), rows, names))
    _, rows, names = max(choices, key=lambda choice: choice[0])
    return rows, names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--figures", type=Path, help="write fair.png into this folder")
    args = parser.parse_args()
    found = read(args.path)
    for title, table in tables(found):
        print(f"\n{title}\n\n{table}")
    if args.figures is not None:
        (args.figures / "fair.png").write_bytes(png(draw(found)))


if __name__ == "__main__":
    main()
