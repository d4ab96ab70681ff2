"""Time and peak memory of a step on models that people use: privlora, plain peft, plain peft by length, Opacus.

    python benchmarks/speed/real_models.py --models MODELS --assets ASSETS --out benchmarks/results/speed_models.json
    python benchmarks/speed/real_models.py --show benchmarks/results/speed_models.json

MODELS and ASSETS are those of real_models/grid.py. Records have the lengths that the model's own tokenizer gives to
the data, with rank 8 on all linear layers, in bfloat16. Everything else is as in real_lengths.py: steps live in one
process and take turns in random order on equal batches, and ratios are medians within rounds, of CPU time, to plain
peft with each batch sorted by length. The peers' micro-batches are of 16 rows; privlora's are its default's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_lengths import BASE, ROWS, markdown, measure
from speed_steps import Setting, Shape
from speed_timing import save

from privlora.config.one_place import MICRO_BATCH

sys.path.append(str(Path(__file__).parents[1] / "real_models"))
from grid import GEMMA, SMOLLM, TASKS, read

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_TOKENS = MICRO_BATCH  # of privlora
POOL = 1024  # records that batches are drawn from


@dataclass(frozen=True)
class Case:
    """Batches of one task of grid.py."""

    model: str
    data: str
    batch: int
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.model} {self.data} {self.batch} x {self.threads}"

    def setting(self, models: Path, assets: Path) -> Setting:
        from transformers import AutoTokenizer

        from privlora.config import DataSettings
        from privlora.training.inputs import tokenise

        task, folder = TASKS[self.data], models / self.model
        examples = tokenise(
            read(assets, task, "train", POOL),
            DataSettings(path="records", **task.columns),
            AutoTokenizer.from_pretrained(folder),
        )
        lengths = tuple(
            (len(record.input_ids), count)
            for record, count in zip(examples, examples.label_counts, strict=True)
            if count
        )
        shape = Shape(rank=8, targets=LINEAR, dtype="bfloat16", folder=str(folder))
        return Setting(lengths, self.batch, shape, ROWS, max_tokens=MAX_TOKENS)


CASES = [
    Case(model, data, batch, threads)
    for model, threads in ((SMOLLM, 1), (SMOLLM, 2), (GEMMA, 1))
    for data, batch in (("pubmed", 32), ("sst2", 64), ("e2e", 64), ("math", 32))
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument(
        "--out", type=Path, help="the results as JSON; cases that it holds are kept or replaced"
    )
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=list(map(str, CASES)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--show", type=Path, metavar="JSON", help="measure nothing; print the table of this file"
    )
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    kept = chosen.show or chosen.out
    result: dict[str, Any] = {"base": BASE, "rows_of_peers": ROWS, "max_tokens": MAX_TOKENS, "cases": []}
    if kept is not None and kept.exists():
        result["cases"] = json.loads(kept.read_text(encoding="utf-8"))["cases"]
    for case in [] if chosen.show else CASES:
        if chosen.only is not None and str(case) not in chosen.only:
            continue
        row = measure(
            case, case.setting(chosen.models, chosen.assets), seconds=0.0, rounds=chosen.rounds, memory=True
        )
        done = {each["case"]: each for each in result["cases"]} | {str(case): {"case": str(case), **row}}
        result["cases"] = [done[str(each)] for each in CASES if str(each) in done]
        save(result, started, chosen.out)
        print(f"{case}: {(time.perf_counter() - started) / 60:.1f} minutes", file=sys.stderr, flush=True)
    print(markdown(result))


if __name__ == "__main__":
    main()
