"""Every aggregation rule at equal privacy on one model and task: held-out loss over splits, epsilons and seeds.

    python benchmarks/federated/study.py --assets ASSETS
    python benchmarks/federated/study.py --assets ASSETS --splits "Dir(0.5)" "Dir(1.0)" --epsilons 6 none
    python benchmarks/federated/study.py --assets ASSETS --per-round 4
    python benchmarks/federated/study.py --assets ASSETS --tasks sst2 authors

Each finished cell is a line of benchmarks/results/federated/study.jsonl, and cells that are there are not run again, so
a command can be stopped and repeated, and cells can be added. Without ASSETS nothing is run. `study_tables.py` makes
the tables and figures.

ASSETS holds models/ (Hugging Face folders) and data/ (gzipped JSON lines), as in ``study_data.py``. Rates are chosen
for each row, task and epsilon from one grid, by runs with another seed on the iid split with all clients, scored on
held-out records that are not reported on: from 0.016 on, up or down the grid as long as that helps. They are used at
every split.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from finished import Finished, best_along, epsilon_of, exit_without_models, finite_or_inf, study_parser
from study_cells import CLIENTS, ROWS, SPLITS, TASKS, Cell, Runner, exists

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "federated" / "study.jsonl"
RATES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
FIRST_RATE = RATES.index(0.016)
SEEDS, SELECTION_SEED = (0, 1, 2), 100
_UNTRAINED = "zero training"
_EVERYWHERE = (
    "central prism",
    "central dp-adamw",
    _UNTRAINED,
)  # of which splits and clients make no difference


def selection(task: str, row: str, epsilon: float | None, rate: float) -> Cell:
    """What is run to choose a rate."""
    return Cell(
        task=task,
        row=row,
        split="iid",
        epsilon=epsilon,
        per_round=CLIENTS,
        seed=SELECTION_SEED,
        rate=rate,
        role="selection",
    )


def score(row: dict[str, Any]) -> float:
    """Held-out loss, inf for a run that diverged; of fedsa, which has no common adapter, the mean over clients."""
    value = row["loss"]
    if row["cell"]["row"] == "fedsa":
        value = sum(row["of_clients"]) / len(row["of_clients"])
    return finite_or_inf(value)


def best_rate(loss: Callable[[float], float]) -> float:
    """Of the grid: the next one is tried as long as it is better. loss: of the selection run with a rate."""
    return best_along(RATES, FIRST_RATE, loss)


def reports(
    task: str, row: str, epsilon: float | None, rate: float, chosen: argparse.Namespace
) -> Iterator[Cell]:
    """The cells of a row that are reported."""
    alike = row in _EVERYWHERE
    splits = ["iid"] if alike else chosen.splits
    for split, seed in itertools.product(splits, [SEEDS[0]] if row == _UNTRAINED else chosen.seeds):
        per_round = CLIENTS if alike or row == "each alone" else chosen.per_round
        cell = Cell(
            task=task,
            row=row,
            split=split,
            epsilon=epsilon,
            per_round=per_round,
            seed=seed,
            rate=rate,
            role="report",
        )
        if exists(cell):
            yield cell


class Study:
    """A file of finished cells, and what runs those that are missing."""

    def __init__(self, out: Path, runner: Runner) -> None:
        self.finished, self.runner = Finished(out), runner

    def run(self, cell: Cell) -> float:
        """Its loss, also where it was run before."""
        return score(self.finished.find(cell.to_dict(), lambda: self.runner.run(cell)))

    def rate(self, task: str, row: str, epsilon: float | None) -> float:
        if row == _UNTRAINED:
            return 0.0
        return best_rate(lambda rate: self.run(selection(task, row, epsilon, rate)))


def parsed() -> argparse.Namespace:
    parser = study_parser(__doc__, RESULTS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["reviews"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["iid", "domain", "Dir(0.1)"])
    parser.add_argument("--epsilons", nargs="+", type=epsilon_of, default=[3.0, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--per-round", type=int, default=CLIENTS)
    return parser.parse_args()


def main() -> None:
    chosen = parsed()
    exit_without_models(chosen.assets)
    torch.set_num_threads(1)
    study = Study(chosen.out, Runner(chosen.assets))
    study.finished.tell_machine()
    for task in chosen.tasks:
        rates = {
            (e, row): study.rate(task, row, e)
            for e in chosen.epsilons
            for row in chosen.rows
            if exists(selection(task, row, e, RATES[FIRST_RATE]))
        }
        for cell in planned(task, rates, chosen):
            study.run(cell)


def planned(
    task: str, rates: dict[tuple[float | None, str], float], chosen: argparse.Namespace
) -> list[Cell]:
    """All reported cells, a seed after the other, so that what is there at any time can be compared."""
    cells = [cell for (e, row), rate in rates.items() for cell in reports(task, row, e, rate, chosen)]
    order = {epsilon: number for number, epsilon in enumerate(chosen.epsilons)}
    return sorted(cells, key=lambda cell: (cell.seed, order[cell.epsilon], list(SPLITS).index(cell.split)))


if __name__ == "__main__":
    main()
