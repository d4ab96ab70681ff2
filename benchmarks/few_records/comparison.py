"""Methods for few records at equal privacy: held-out loss over numbers of records, epsilons and seeds.

    python benchmarks/few_records/comparison.py --assets ASSETS --cache CACHE
    python benchmarks/few_records/comparison.py --assets ASSETS --cache CACHE --records 50 1600 --epsilons 1 none

Each finished cell is a line of benchmarks/results/few_records/comparison.jsonl, and cells that are there are not run
again, so a command can be stopped and repeated, and cells can be added. CACHE keeps the models that methods start from.
Without ASSETS nothing is run. `comparison_tables.py` makes the tables.

ASSETS holds models/ (Hugging Face folders) and data/ (gzipped JSON lines). Learning rates are chosen for all methods
alike, for each row, number of records and epsilon, by a run with other records, scored on held-out ones that are not
reported on: on a grid a factor of 2 wide, up or down from a first guess as long as that helps. `--rates other` takes
those of the other task, as who has no records of this kind to try on would; give it an `--out` of its own. Rows called
"rehearsed" take the rates that an advice (`privlora plan --advise`) finds on public texts, and no record is tried on.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

sys.path.append(str(Path(__file__).parents[1]))

from comparison_cells import ROWS, TASKS, UNTRAINED, Cell, Runner
from finished import Finished, best_along, epsilon_of, exit_without_models, finite_or_inf, study_parser

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "few_records" / "comparison.jsonl"
SEEDS, SELECTION_SEEDS = (0, 1, 2, 3, 4), (100,)
_ASTRAY = 1.05  # times the loss of the start: a run that ends above it diverged
_FARTHEST = 12  # factors of 2 from a first guess
_NO_NOISE = 64.0  # in the place of an epsilon, where rates of one are where the search of another begins


def score(row: dict[str, Any]) -> float:
    """Held-out loss, inf for a run that diverged."""
    return finite_or_inf(row["loss"])


class Study:
    """A file of finished cells, and what runs those that are missing."""

    def __init__(self, out: Path, runner: Runner, rates: Literal["own", "other"] = "own") -> None:
        self.finished, self.runner, self.rates = Finished(out), runner, rates
        self._rates: dict[tuple[str, str, int, float | None], float] = {}

    def run(self, cell: Cell) -> float:
        """Its loss, also where it was run before."""
        return score(self.finished.find(cell.to_dict(), lambda: self.runner.run(cell)))

    def rate(self, task: str, row: str, records: int, epsilon: float | None) -> float:
        """Of the grid: from the rate of the number of records nearest to these on, or the row's first guess, the next
        one is tried as long as it is better. With noise alone that of the row whose noise it is."""
        if row == UNTRAINED:
            return 0.0
        if ROWS[row].noise_alone:
            return self.rate(task, ROWS[row].name, records, epsilon)
        if ROWS[row].rehearsed:
            return self.rehearsed_rate(task, row, records, epsilon)
        if (task, row, records, epsilon) in self._rates:
            return self._rates[task, row, records, epsilon]

        def loss(rate: float, row: str = row) -> float:
            return mean(
                self.run(
                    Cell(
                        task=TASKS[task].other if self.rates == "other" else task,
                        row=row,
                        records=records,
                        epsilon=epsilon,
                        seed=seed,
                        rate=rate,
                        role="selection",
                    )
                )
                for seed in SELECTION_SEEDS
            )

        # Where all of two rates end far above the start, the smaller loss says nothing of where to go.
        astray = _ASTRAY * loss(0.0, UNTRAINED)

        first = self._first_rate(task, row, records, epsilon)
        rates = [first * 2.0**power for power in range(-_FARTHEST, _FARTHEST + 1)]
        found = best_along(rates, _FARTHEST, loss, astray)
        self._rates[task, row, records, epsilon] = found
        return found

    def _first_rate(self, task: str, row: str, records: int, epsilon: float | None) -> float:
        """That of the row with the nearest noise in a step's mean, as far as one was chosen."""

        def distance(key: tuple[str, str, int, float | None]) -> float:
            return abs(math.log((key[3] or _NO_NOISE) * key[2] / ((epsilon or _NO_NOISE) * records)))

        known = [key for key in self._rates if key[:2] == (task, row)]
        return self._rates[min(known, key=distance)] if known else ROWS[row].first_rate

    def rehearsed_rate(self, task: str, row: str, records: int, epsilon: float | None) -> float:
        """That of the row in rehearsals on public texts."""
        found = self.choice(task, records, epsilon)
        (rate,) = (r["learning_rate"] for r in found["rows"] if r["name"] == ROWS[row].name)
        return float(rate)

    def choice(self, task: str, records: int, epsilon: float | None) -> dict[str, Any]:
        """What an advice takes, and why; also where it was found before."""
        cell = Cell(
            task=task, row="auto", records=records, epsilon=epsilon, seed=0, rate=0.0, role="rehearsal"
        )
        found = self.finished.find(cell.to_dict(), lambda: {"choice": self.runner.advise(cell)})
        return dict(found["choice"])


def parsed() -> argparse.Namespace:
    parser = study_parser(__doc__, RESULTS)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["abstracts"])
    parser.add_argument("--rates", choices=("own", "other"), default="own")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--records", nargs="+", type=int, default=[50, 200, 1600])
    parser.add_argument("--epsilons", nargs="+", type=epsilon_of, default=[1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    return parser.parse_args()


def main() -> None:
    chosen = parsed()
    exit_without_models(chosen.assets)
    torch.set_num_threads(1)
    study = Study(chosen.out, Runner(chosen.assets, chosen.cache), chosen.rates)
    study.finished.tell_machine()
    for task in chosen.tasks:
        places = [(e, records) for e in chosen.epsilons for records in chosen.records]
        for epsilon, records in places:
            rates = {row: study.rate(task, row, records, epsilon) for row in chosen.rows}
            # A seed after the other, so that what is there at any time can be compared.
            for seed in chosen.seeds:
                for row, rate in rates.items():
                    if row != UNTRAINED or (epsilon, records, seed) == (*places[0], chosen.seeds[0]):
                        study.run(
                            Cell(
                                task=task,
                                row=row,
                                records=records,
                                epsilon=epsilon,
                                seed=seed,
                                rate=rate,
                                role="report",
                            )
                        )


if __name__ == "__main__":
    main()
