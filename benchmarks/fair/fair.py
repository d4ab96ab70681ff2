"""Every method with every free ingredient at equal privacy: rates in factors of the root of two, 3 + 5 seeds.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/fair/fair.py --of stories260K/24/1,3,6/all --workers 2 --out benchmarks/results/fair.jsonl
    python benchmarks/fair/tables.py benchmarks/results/fair.jsonl

--of MODEL/STEPS/EPSILONS/ROWS[/TASKS[/STARTS]], as often as wanted, in the order in which it is run. A line of the
file is one team (teams.py): a cell's rates with all seeds. Rates go from half a row's default to 2.8 times it, and on
from there as long as the best, by the choosing seeds on their half of the held-out records, is the first or last.
Lines that are there are not run again, so it can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import queue
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

CHOOSING, REPORT = (100, 101, 102), (0, 1, 2, 3, 4)
SEEDS = (*CHOOSING, *REPORT)
FIRST, MORE, TEAMS = range(-2, 4), 3, 5
SETS = {
    "main": ("prism", "dp-sgd", "dp-sgd + free", "dp-adamw", "dp-adamw + free"),
    "starts": ("dp-sgd + free + start", "dp-adamw + free + start"),
    "units": ("prism, rates in entries", "dp-sgd + free, relative rates"),
    "averaging": ("prism, longer averaging", "dp-sgd + free, longer averaging"),
    "others": (
        "dp-adambc + free",
        "lora+ + free",
        "lora-rite + free",
        "ffa + free",
        "lora-fa + free",
        "riemannian + free",
        "lamb + free",
    ),
}
SETS["all"] = tuple(row for rows in SETS.values() for row in rows)
SETS["long"] = ("prism", "dp-sgd", "dp-sgd + free", "dp-sgd + free, relative rates", "dp-adamw + free")
SETS["geometry"] = ("prism", "dp-sgd + free, relative rates", "dp-sgd + free", "dp-adamw + free")
SETS["schedules"] = (
    "prism, linear schedule",
    "prism, cosine schedule",
    "prism, longer averaging",
    "prism, no averaging",
)
SETS["why"] = (
    "dp-sgd + free + start, relative rates",
    "riemannian + free + start, relative rates",
    "lora-fa + free + start, relative rates",
    "prism, no error feedback",
    "prism, random start",
    "prism, optimizer sgd",
    "prism, right weight 0.25",
    "prism, random start, right weight 0.1",
    "prism, flat clipping",
    "ffa + free, relative rates",
)
SETS["parts"] = ("dp-sgd + spectral", "dp-sgd + averaging", "prism, flat clipping", "prism, no averaging")


def rate_of(default: float, power: int) -> float:
    return float(f"{default * 2 ** (power / 2):.4g}")


def next_powers(done: dict[int, float], first: Sequence[int] = FIRST) -> list[int]:
    """What to try next; nothing where the best has worse on both sides. done: power -> mean loss of choosing seeds."""
    if not done:
        return list(first)
    best = min(done, key=lambda power: done[power])
    if done[best] == float("inf") or best == min(done):
        return [min(done) - k for k in range(MORE, 0, -1)]
    if best == max(done):
        return [max(done) + k for k in range(1, MORE + 1)]
    return []


def choosing_mean(line: dict[str, Any], k: int) -> float:
    chosen = [loss for loss, seed in zip(line["choosing"][k], line["seeds"], strict=True) if seed in CHOOSING]
    return sum(chosen) / len(chosen)


def work(
    cells: Any,
    found: Any,
    known: list[dict[str, Any]],
    data: str,
    tokens: dict[str, int],
    seeds: tuple[int, ...],
    first: Sequence[int],
    ends: float,
) -> None:
    """One process: whole cells, one after the other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    from teams import Cell, Table

    table = Table(data)
    while time.time() < ends:
        try:
            cell = Cell(**cells.get(timeout=0.5))
        except queue.Empty:
            return
        place = cell.place
        lines = [line for line in known if line["cell"] == place]
        done = {power: choosing_mean(line, k) for line in lines for k, power in enumerate(line["powers"])}
        for _ in range(TEAMS - len(lines)):
            powers = next_powers(done, first)
            if not powers or time.time() > ends:
                break
            table.tokens = tokens.get(cell.model, tokens[""])
            try:
                line = table.run(cell, [rate_of(cell.default, power) for power in powers], seeds)
            except Exception as problem:  # noqa: BLE001 - one failed team must not end a table
                found.put({"cell": place, "failed": f"{type(problem).__name__}: {problem}"[:300]})
                break
            line = {"cell": place, "powers": powers, **line, "machine": machine()}
            done |= {power: choosing_mean(line, k) for k, power in enumerate(powers)}
            found.put(line)


def machine() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def cells_of(spec: str) -> list[dict[str, Any]]:
    from teams import CLIP_NORMS, ROWS, TASKS, Cell

    model, steps, epsilons, rows, *more = spec.split("/")
    chosen = SETS[rows] if rows in SETS else tuple(rows.split("+_"))
    named = more[0].split(",") if more else list(TASKS)
    starts = more[1].split(",") if len(more) > 1 else [""]
    unknown = [row for row in chosen if row not in ROWS]
    if unknown:
        raise SystemExit(f"no row {unknown[0]!r}; sets are {', '.join(SETS)}")
    return [
        Cell(
            model,
            task,
            row,
            float(epsilon),
            int(steps),
            start=start,
            clip_norm="" if "clip_norm" in TASKS[task] else CLIP_NORMS.get(model, ""),
        ).place
        for epsilon, task, start, row in product(epsilons.split(","), named, starts, chosen)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="study-data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--of", action="append", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no team after so many")
    parser.add_argument("--tokens", action="append", default=[], help="[MODEL:]N, of a micro-batch")
    parser.add_argument(
        "--seeds", default=",".join(map(str, SEEDS)), help="of which 100 and more choose the rate"
    )
    parser.add_argument(
        "--first", default=",".join(map(str, FIRST)), help="powers of the root of two to begin with"
    )
    args = parser.parse_args()
    seeds = tuple(int(seed) for seed in args.seeds.split(","))
    first = [int(power) for power in args.first.split(",")]
    tokens = {"": 16384}
    for each in args.tokens:
        model, _, number = each.rpartition(":")
        tokens[model] = int(number)
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    wanted = [cell for spec in args.of for cell in cells_of(spec)]
    context = mp.get_context("spawn")
    cells, found = context.Queue(), context.Queue()
    for cell in wanted:
        cells.put(cell)
    began, ends = time.time(), time.time() + 60 * args.minutes
    workers = [
        context.Process(
            target=work, args=(cells, found, known, args.data, tokens, seeds, first, ends), daemon=True
        )
        for _ in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    with args.out.open("a", encoding="utf-8") as out:
        while any(worker.is_alive() for worker in workers) or not found.empty():
            try:
                line = found.get(timeout=0.5)
            except queue.Empty:
                continue
            if "failed" in line:
                print(line, flush=True)
                continue
            out.write(json.dumps(line) + "\n")
            out.flush()
            place = line["cell"]
            print(
                f"{time.time() - began:6.0f} s  {place['model']} {place['steps']} {place['task']} eps "
                f"{place['epsilon']:g} {place['row']}: {line['powers']} {line['seconds']}",
                flush=True,
            )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
