"""Which answers a model gives after private training: the label of film reviews, at each row's default rate.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/fair/answers.py --data study-data --out benchmarks/results/answers.jsonl
    python benchmarks/fair/answers.py --out benchmarks/results/answers.jsonl --table

An answer is right where the model gives the review's own label the larger probability of the two. Two sizes: of the
fair table, and what auto makes of two passes over 20,000 records. A line of the file is a row with all of its seeds;
lines that are there are not run again. The last row is plain LoRA without privacy, as `privlora train` runs it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from teams import Cell, Table

from privlora.config.auto import run_sizes

MODEL, TASK, EPSILON, SEEDS = "reviews1M", "sst2", 3.0, (0, 1, 2)
ROWS = ("prism", "dp-sgd + free, relative rates", "dp-adamw + free")
SIZES = ((24, 64), run_sizes(20_000, 2))
PLAIN = {"steps": 600, "batch": 64, "rate": 0.003}


def plain(data: str) -> dict[str, Any]:
    """Without privacy; the released adapter on the same held-out records."""
    import tempfile

    from peft import PeftModel
    from study_data import TASKS
    from teams import likelier, other_labels

    from privlora import fine_tune
    from privlora.data.records import load_records
    from privlora.evaluation.next_token import record_losses
    from privlora.training.inputs import tokenise

    task = dict(TASKS[TASK])
    units = task.pop("units")
    task.pop("clip_norm"), task.pop("file")
    with tempfile.TemporaryDirectory() as scratch:
        result = fine_tune(
            f"{data}/models/{MODEL}",
            f"{data}/{TASK}-train.jsonl",
            data={"max_length": 48, "unchecked": True, **task},
            adapter={"r": 8, "lora_alpha": 16},
            privacy={
                "private": False,
                "steps": PLAIN["steps"],
                "expected_batch_size": PLAIN["batch"],
                "public_dataset_size": units,
                "delta": 1e-5,
            },
            method={"name": "adamw", "learning_rate": PLAIN["rate"]},
            output=f"{scratch}/run",
        )
        table = Table(data)
        settings = table.settings(Cell(MODEL, TASK, "prism", EPSILON, 24))
        held = table.load(settings, TASK)[1]
        other = tokenise(
            other_labels(list(load_records(f"{data}/{TASK}-heldout.jsonl"))), settings.data, table.tokenizer
        )
        assert table.model is not None
        model = PeftModel.from_pretrained(table.model, str(result.release))
        losses, of_other = (record_losses(model, of) for of in (held, other))
    right = likelier(held, losses, other, of_other)
    halves = [round(float(right[half::2].mean()), 5) for half in (0, 1)]
    cell = {"model": MODEL, "task": TASK, "row": "adamw, without privacy", **PLAIN}
    return {"cell": cell, "answered_choosing": [[halves[0]]], "answered_report": [[halves[1]]]}


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """As benchmarks/results/fair.md has it."""
    yield "| method | steps x batch | loss | right answers |"
    yield "|---|---|---|---|"
    for line in lines:
        cell = line["cell"]
        right = np.array([line["answered_choosing"][0], line["answered_report"][0]]).mean(0)
        loss = ""
        if "report" in line:
            loss = f"{np.array([line['choosing'][0], line['report'][0]]).mean():.3f}"
        spread = f" ± {right.std(ddof=1):.1%}" if len(right) > 1 else ""
        yield f"| {cell['row']} | {cell['steps']} x {cell['batch']} | {loss} | {right.mean():.1%}{spread} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="study-data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the table of what is there; run nothing")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.table:
        print("\n".join(table(lines)))
        return
    torch.set_num_threads(1)
    there = [line["cell"] for line in lines]
    of = Table(args.data)
    with args.out.open("a", encoding="utf-8") as out:
        for steps, batch in SIZES:
            for row in ROWS:
                cell = Cell(MODEL, TASK, row, EPSILON, steps, batch=round(batch))
                if cell.place in there:
                    continue
                line = {"cell": cell.place, **of.run(cell, [cell.default], SEEDS)}
                out.write(json.dumps(line) + "\n")
                out.flush()
                print(row, steps, line["answered_report"], line["seconds"], flush=True)
        if not any("privacy" in cell["row"] for cell in there):
            out.write(json.dumps(plain(args.data)) + "\n")


if __name__ == "__main__":
    main()
