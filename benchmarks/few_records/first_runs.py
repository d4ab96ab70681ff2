"""Sizes and clipping of a first run on few records: what `privlora init` writes, and what it might.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/few_records/first_runs.py --data study-data --out benchmarks/results/few_records/first_runs.jsonl
    python benchmarks/few_records/first_runs.py --out benchmarks/results/few_records/first_runs.jsonl --table

PRISM at rank 8 on a Llama of 260,000 parameters from its pretrained weights, learning rate by noise alone, three draws
of batches and noise. Ten steps of a fifth of the records are two passes; `auto` makes five. A line of the file is one
setting; lines that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from sizes import Runs, head, line

from privlora.config.auto import run_sizes

DRAWS = 3
CLIPPINGS = ("automatic", "spectral")
KEYS = ("task", "units", "epsilon", "steps", "batch", "clipping")


class Clipped(Runs):
    def settings(self, row: dict[str, Any]) -> Any:
        found = super().settings(row)
        return found.model_copy(
            update={"method": found.method.model_copy(update={"clipping": row["clipping"]})}
        )


def grid() -> Iterator[dict[str, Any]]:
    for task, units, epsilon in product(("pubmed", "math"), (100, 300, 1000), (1, 3)):
        for steps, batch in ((10, units / 5), run_sizes(units)):
            for clipping in CLIPPINGS:
                place = {"model": "stories260K", "task": task, "units": units, "epsilon": epsilon}
                yield {**place, "steps": steps, "batch": batch, "relative": True, "clipping": clipping}
    for task, units, epsilon in product(("pubmed", "math"), (100, 300), (1, 3)):
        steps, batch = run_sizes(units)
        place = {"model": "stories260K", "task": task, "units": units, "epsilon": epsilon}
        for layers in ("all-linear", "feed-forward"):
            own = {} if layers == "all-linear" else {"layers": layers}
            yield {
                **place,
                "steps": steps,
                "batch": batch,
                "relative": True,
                "clipping": "automatic",
                **own,
            }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from head(
        "task",
        "N",
        "epsilon",
        *(f"{size}, {each}" for size in ("10 steps", "auto") for each in CLIPPINGS),
        "auto, automatic, feed-forward",
    )
    means = {json.dumps({k: row[k] for k in (*KEYS, "layers") if k in row}): row["losses"] for row in rows}
    for task, units, epsilon in product(("pubmed", "math"), (100, 300, 1000), (1, 3)):
        cells = []
        for steps, batch in ((10, units / 5), run_sizes(units)):
            for clipping in CLIPPINGS:
                place = {"task": task, "units": units, "epsilon": epsilon, "steps": steps, "batch": batch}
                losses = means.get(json.dumps({**place, "clipping": clipping}))
                cells.append("" if losses is None else f"{sum(losses) / len(losses):.3f}")
        losses = means.get(json.dumps({**place, "clipping": "automatic", "layers": "feed-forward"}))
        cells.append("" if losses is None else f"{sum(losses) / len(losses):.3f}")
        if any(cells):
            yield line(task, f"{units:,}", epsilon, *cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("study-data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the table of what is there; run nothing")
    args = parser.parse_args()
    rows = [json.loads(each) for each in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.table:
        print("\n".join(table(rows)))
        return
    runs = Clipped(args.data)
    for place in grid():
        if any(place.items() <= row.items() and row.get("layers") == place.get("layers") for row in rows):
            continue
        rate = runs.settle(place)["rate"]
        found = [runs.run({**place, "rate": rate, "draw": draw}) for draw in range(DRAWS)]
        row = {**place, "rate": rate, "losses": [one["loss"] for one in found], "before": found[0]["before"]}
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
