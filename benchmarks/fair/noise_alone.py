"""How far noise alone moves the model at each rate of each row of the fair table, and what is gained at such rates.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/fair/noise_alone.py --out benchmarks/results/noise_alone.jsonl
    python benchmarks/fair/noise_alone.py --out benchmarks/results/noise_alone.jsonl --tables benchmarks/results

A line is one row at one rate: the rise of the loss on texts that the model wrote itself, after all steps of a run of
noise and of nothing else. The table has the share of its best gain that each row keeps, on each task of the fair table,
at the rate where that rise is 0.05 to 0.4 nats a token: between measured rates along straight lines over its logarithm.

Other lines are the rates that ``learning_rate: auto`` finds for runs of other steps and batches, and the second table
what runs of sizes.py keep at them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from fair import REPORT, rate_of

sys.path.append(str(Path(__file__).parents[1]))
from sizes import Runs, head
from sizes import line as row_of

MODEL, STEPS, EPSILONS = "stories260K", 24, (1.0, 3.0)
POWERS = range(-4, 5)
SIZES = tuple(
    (steps, batch)
    for batch, counts in (
        (32, (48, 192)),
        (64, (24, 96, 384)),
        (128, (12, 48)),
        (256, (24, 96)),
        (512, (12,)),
        (1024, (24,)),
    )
    for steps in counts
)
"""Of sizes.py, at which it ran two rates or more around those that are found."""
AIMS = (0.05, 0.1, 0.15, 0.2, 0.4)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def measure(data: str, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    from teams import ROWS, Cell, Table

    from privlora.rehearsals.noise_alone import noise_trials, own_texts
    from privlora.rehearsals.trials import Bench
    from privlora.training.promise import plan_privacy

    table = Table(data)
    for epsilon in EPSILONS:
        for row in ROWS:
            cell = Cell(MODEL, "math-questions", row, epsilon, STEPS)
            place = {"model": MODEL, "row": row, "epsilon": epsilon, "steps": STEPS}
            if any(place.items() <= line.items() for line in known):
                continue
            settings = table.settings(cell)
            table.load(settings, cell.task)
            plan = plan_privacy(settings, table.model)
            texts = own_texts(Bench(table.model, table.tokenizer), settings.run.seed)
            with noise_trials(settings, plan, Bench(table.model, table.tokenizer), texts) as trials:
                for power in POWERS:
                    rise = float(trials.losses(rate_of(cell.default, power)).mean()) - trials.untrained
                    yield {**place, "power": power, "rise": round(rise, 6) if math.isfinite(rise) else None}


def settle(data: str, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rate that ``auto`` takes for each size, in entries, as those of sizes.py."""
    from privlora.rehearsals.noise_alone import own_texts, rate_by_noise
    from privlora.rehearsals.trials import Bench

    runs = Runs(Path(data))
    for steps, batch in SIZES:
        place = {
            "model": MODEL,
            "row": "prism, rates in entries",
            "epsilon": 3.0,
            "steps": steps,
            "batch": batch,
        }
        if any(place.items() <= line.items() for line in known):
            continue
        settings, plan = runs.prepare({"task": "math", "steps": steps, "batch": batch, "rate": 1.0})
        method = settings.method.model_copy(update={"learning_rate": None})
        open_yet = settings.model_copy(update={"method": method})
        texts = own_texts(Bench(runs.model, runs.tokenizer), settings.run.seed)
        yield {**place, "rate": rate_by_noise(open_yet, plan, Bench(runs.model, runs.tokenizer), texts)[0]}


def between(at: float, points: list[tuple[float, float]]) -> float | None:
    """Along the lines between points (x, y), x rising; None outside."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return None


def kept(
    lines: list[dict[str, Any]], fair: list[dict[str, Any]]
) -> dict[tuple[str, float, float], list[float]]:
    """(row, epsilon, aim) -> of each task, the share of the row's best gain on it, where its grid goes so far."""
    gains: dict[tuple[str, float, str], dict[int, float]] = defaultdict(dict)
    for line in fair:
        cell = line["cell"]
        if (cell["model"], cell["steps"]) != (MODEL, STEPS):
            continue
        for power, losses in zip(line["powers"], line["report"], strict=True):
            own = [loss for loss, seed in zip(losses, line["seeds"], strict=True) if seed in REPORT]
            gains[cell["row"], cell["epsilon"], cell["task"]][power] = line["before"][1] - sum(own) / len(own)
    rises: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        if (line.get("rise") or 0) > 0:
            rises[line["row"], line["epsilon"]].append((math.log(line["rise"]), line["power"]))
    found: dict[tuple[str, float, float], list[float]] = defaultdict(list)
    for (row, epsilon, _), of in sorted(gains.items()):
        best, points = max(of.values()), sorted(of.items())
        for aim in AIMS:
            power = between(math.log(aim), sorted(rises[row, epsilon]))
            gain = None if power is None else between(power, points)
            if gain is not None:
                found[row, epsilon, aim].append(gain / best)
    return found


def table(lines: list[dict[str, Any]], fair: list[dict[str, Any]]) -> Iterator[str]:
    """As benchmarks/results/sizes.md has it: the mean and the least over tasks."""
    shares = kept(lines, fair)
    yield "| method | epsilon | tasks | " + " | ".join(f"{aim:g}" for aim in AIMS) + " |"
    yield "|---" * (3 + len(AIMS)) + "|"
    for row, epsilon in dict.fromkeys((row, epsilon) for row, epsilon, _ in shares):
        of = [shares[row, epsilon, aim] for aim in AIMS]
        if len({len(each) for each in of}) == 1:
            cells = (f"{sum(each) / len(each):.3f} ({min(each):.2f})" for each in of)
            yield f"| {row} | {epsilon:g} | {len(of[0])} | {' | '.join(cells)} |"


def table_of_sizes(lines: list[dict[str, Any]], sizes: list[dict[str, Any]]) -> Iterator[str]:
    """Also there: the share of the best gain at the rate that was found, or at its two neighbours."""
    gains: dict[tuple[int, int], dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in sizes:
        if run["part"] in ("sizes", "rates"):
            gains[run["steps"], run["batch"]][run["task"]][run["rate"]] = run["before"] - run["loss"]
    tasks = ("math", "pubmed", "biorxiv", "solutions", "sst2")
    yield from head("steps x batch", "rate by noise alone", *tasks)
    for line in sorted(
        (line for line in lines if "batch" in line), key=lambda line: (line["steps"], line["batch"])
    ):
        of = gains[line["steps"], line["batch"]]
        cells = []
        for task in tasks:
            points = sorted((math.log(rate), gain) for rate, gain in of[task].items())
            gain = between(math.log(line["rate"]), points)
            cells.append("" if gain is None else f"{gain / max(of[task].values()):.1%}")
        yield row_of(f"{line['steps']} x {line['batch']}", line["rate"], *cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="study-data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", type=Path, metavar="RESULTS", help="print the tables; run nothing")
    args = parser.parse_args()
    known = read(args.out) if args.out.exists() else []
    if args.tables is not None:
        print("\n".join(table(known, read(args.tables / "fair.jsonl"))))
        print("\n".join(["", *table_of_sizes(known, read(args.tables / "sizes.jsonl"))]))
        return
    import torch

    torch.set_num_threads(1)
    with args.out.open("a", encoding="utf-8") as out:
        for line in chain(measure(args.data, known), settle(args.data, known)):
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(line, flush=True)


if __name__ == "__main__":
    main()
