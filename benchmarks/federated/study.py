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
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
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

Rows = list[dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """The finished cells, without what was said of the machine."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "cell" in row]


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
    return float(value) if math.isfinite(value) else math.inf


def best_rate(loss: Callable[[float], float]) -> float:
    """Of the grid: the next one is tried as long as it is better. loss: of the selection run with a rate."""
    for side in (range(FIRST_RATE + 1, len(RATES)), range(FIRST_RATE - 1, -1, -1)):
        best = RATES[FIRST_RATE]
        for number in side:
            if loss(RATES[number]) >= loss(best):
                break
            best = RATES[number]
        if best != RATES[FIRST_RATE]:
            break
    return best


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
        self.out, self.runner = out, runner
        self.rows = {json.dumps(row["cell"]): row for row in read_rows(out)}

    def run(self, cell: Cell) -> float:
        """Its loss, also where it was run before."""
        key = json.dumps(cell.to_dict())
        if key not in self.rows:
            started, cpu = time.perf_counter(), time.process_time()
            found = self.runner.run(cell)
            spent = {
                "seconds": round(time.perf_counter() - started, 2),
                "cpu_seconds": round(time.process_time() - cpu, 2),
            }
            self.rows[key] = {"cell": cell.to_dict(), **found, **spent}
            self.append(self.rows[key])
            print(
                cell.role,
                cell.row,
                cell.split,
                cell.epsilon,
                cell.seed,
                cell.rate,
                score(self.rows[key]),
                flush=True,
            )
        return score(self.rows[key])

    def rate(self, task: str, row: str, epsilon: float | None) -> float:
        if row == _UNTRAINED:
            return 0.0
        return best_rate(lambda rate: self.run(selection(task, row, epsilon, rate)))

    def append(self, row: dict[str, Any]) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with open(self.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _epsilon(text: str) -> float | None:
    return None if text == "none" else float(text)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["reviews"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["iid", "domain", "Dir(0.1)"])
    parser.add_argument("--epsilons", nargs="+", type=_epsilon, default=[3.0, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--per-round", type=int, default=CLIENTS)
    return parser.parse_args()


def main() -> None:
    chosen = parsed()
    if not (chosen.assets / "models").is_dir():
        print(f"skipped: there are no models in {chosen.assets}")
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    torch.set_num_threads(1)
    study = Study(chosen.out, Runner(chosen.assets))
    study.append({"machine": describe_machine()})
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
