"""What SmolLM2-135M gives away of eight secrets among 2,000 notes: the story of `privlora demo`, a line a run.

    python benchmarks/real_models/canaries.py --models MODELS
    python benchmarks/real_models/canaries.py --show

Notes, secrets, sizes and rates are the demo's: eight patients have a secret code in eight notes each. A patient is the
unit of privacy. Exposure is in bits, by the rank of a secret among 255 others of its form; 1.4 is chance, 8 the most.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

RESULTS = Path(__file__).parents[1] / "results" / "canaries.jsonl"
MODEL = "smollm2-135m-instruct"
EPSILONS = (None, 3.0, 1.0, 8.0)  # None: without privacy


def run(epsilon: float | None, model: Path, scratch: Path) -> dict[str, Any]:
    from privlora import train_run
    from privlora.demo import make_canaries, private_records
    from privlora.demo import run as demo
    from privlora.training.files import RunFolder, read_lines

    story = demo.story_of(str(model))
    canaries = make_canaries(demo.CANARIES, seed=11)
    records = private_records(demo.RECORDS, seed=1) + [r for canary in canaries for r in canary.records()]
    settings = demo._settings(story, scratch / "run", private=epsilon is not None)
    if epsilon is not None:
        privacy = settings.privacy.model_copy(update={"target_epsilon": epsilon})
        settings = settings.model_copy(update={"privacy": privacy})
    began = time.perf_counter()
    result = train_run(settings, records=records, evaluation=private_records(demo.HELD_OUT, seed=2))
    seconds = round(time.perf_counter() - began)
    losses = [row["loss_per_example"] for row in read_lines(RunFolder(scratch / "run").evaluations)]
    before, after = (demo._leakage(story, adapter, canaries) for adapter in (None, result.release))
    return {
        "model": MODEL,
        "epsilon": epsilon,
        "untrained": round(losses[0], 4),
        "trained": round(losses[-1], 4),
        "recited": [before["extracted"], after["extracted"]],
        "exposure": [round(found["exposure"], 2) for found in (before, after)],
        "chance": round(after["exposure_chance"], 2),
        "seconds": seconds,
    }


def table(lines: list[dict[str, Any]]) -> str:
    rows = ["| model | ε | held-out loss | recited, of 8 | exposure, bits |", "|---" * 5 + "|"]
    for line in sorted(lines, key=lambda line: line["epsilon"] or 1e9):
        loss, recited, exposure = (
            f"{line['untrained']:.3f} to {line['trained']:.3f}",
            f"{line['recited'][0]} to {line['recited'][1]}",
            f"{line['exposure'][0]:.1f} to {line['exposure'][1]:.1f}",
        )
        rows.append(f"| {line['model']} | {line['epsilon'] or 'none'} | {loss} | {recited} | {exposure} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the table of what is there; run nothing")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.show:
        print(table(lines))
        return
    torch.set_num_threads(args.threads)
    for epsilon in EPSILONS:
        if any(line["epsilon"] == epsilon for line in lines):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            found = run(epsilon, (args.models / MODEL).resolve(), Path(scratch))
        lines.append({**found, "machine": describe_machine()})
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(lines[-1]) + "\n")
        print(table(lines[-1:]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
