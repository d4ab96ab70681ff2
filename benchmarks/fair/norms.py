"""How long gradients of records are at the start, and those of texts that the model writes: the median of each.

    python benchmarks/fair/norms.py --data study-data --out benchmarks/results/norms.jsonl
    python benchmarks/fair/norms.py --out benchmarks/results/norms.jsonl --table

In the coordinates of the row, at rank 8, before anything is clipped; 128 records of each task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

MODELS = ("stories260K", "babyllama105", "reviews1M")
ROWS = ("prism", "dp-sgd + free + start")
PLACES = ("math-questions", "pubmed", "biorxiv", "math-solutions", "sst2")
OWN = "its own texts"
_RECORDS = 128


def measured(data: str) -> Iterator[dict[str, Any]]:
    from teams import Cell, Table

    from privlora.rehearsals.noise_alone import own_texts
    from privlora.rehearsals.settling import median_norm
    from privlora.rehearsals.trials import Bench

    table = Table(data)
    for model in MODELS:
        for row in ROWS:
            for place in (*PLACES, OWN):
                settings = table.settings(Cell(model, PLACES[0] if place == OWN else place, row, 3.0, 24))
                train, _ = table.load(settings, PLACES[0] if place == OWN else place)
                if place == OWN:
                    texts = own_texts(Bench(table.model, table.tokenizer), settings.run.seed)
                else:
                    order = np.random.default_rng(0).permutation(len(train))[:_RECORDS].tolist()
                    texts = train.like([train[i] for i in order])
                norm = median_norm(settings, texts, table.model, table.tokenizer)
                yield {"model": model, "row": row, "of": place, "median_norm": float(f"{norm:.3g}")}


def table_of(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Of prism."""
    yield "| model | " + " | ".join((*PLACES, OWN)) + " |"
    yield "|---" * (2 + len(PLACES)) + "|"
    for model in MODELS:
        norms = {
            one["of"]: one["median_norm"] for one in lines if (one["model"], one["row"]) == (model, ROWS[0])
        }
        yield f"| {model} | " + " | ".join(f"{norms[place]:g}" for place in (*PLACES, OWN)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="study-data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what is there; measure nothing")
    args = parser.parse_args()
    if not args.table:
        lines = [json.dumps(line) for line in measured(args.data)]
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(table_of([json.loads(line) for line in args.out.read_text("utf-8").splitlines()])))


if __name__ == "__main__":
    main()
