"""What a whole step launches, reads back and decomposes, by phase: privlora, plain peft and Opacus.

    python benchmarks/speed/launches.py --out benchmarks/results/launches.json

Counted by operations.py on a narrow Llama of 40 and of 224 adapted modules: the numbers depend on no machine, and on no
size but those of the table. One micro-batch a step or four, the second step of each. AdamW is that of GPUs, which
updates all parameters in a few kernels.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from operations import KERNEL, KINDS, LINEAR_ALGEBRA, READ_BACK, Operations
from speed_steps import VARIANTS, Opacus, Plain, Privlora, Setting, Shape, Variant

from privlora.training.footprint import row_tokens

BASE = "plain peft"
STEPS: dict[str, Callable[[Setting], Variant]] = {
    BASE: lambda s: Plain(s, foreach=True),
    "Opacus DP-AdamW, hooks": Opacus,
    "privlora dp-adamw": VARIANTS["privlora dp-adamw"],
    "privlora prism": VARIANTS["privlora prism"],
}
PHASES = ("gradients", "accumulate", "release", "optimizer", "averaging")
NARROW = Shape(vocabulary=64, hidden=32, intermediate=48, heads=2, positions=32, rank=4)
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Modules -> a shape that has so many.
SHAPES = {40: replace(NARROW, layers=8), 224: replace(NARROW, layers=32, targets=ALL_LINEAR)}
UNITS = 8
PARTS = (1, 4)
LONGEST = 12


def count(name: str, shape: Shape, units: int = UNITS, parts: int = 1) -> Operations:
    """The operations of one step on ``units`` records of two lengths, in so many equal micro-batches."""
    rows = units // parts
    setting = Setting(
        tuple((LONGEST - unit % 2, 6) for unit in range(units)), units, shape, rows, grouped=True
    )
    variant = STEPS[name](setting)
    if isinstance(variant, Privlora):
        variant.private_step.max_tokens = rows * max(LONGEST, row_tokens(variant.adapter))
    variant.step(range(units))
    found = Operations(PHASES[0])
    if isinstance(variant, Privlora):
        found.follow(variant.mechanism, "accumulate", "accumulate")
        found.follow(variant.mechanism, "release", "release")
        if variant.average is not None:
            found.follow(variant.average, "update", "averaging")
    found.follow(variant.optimizer, "step", "optimizer")
    with found:
        variant.step(range(units))
    return found


def measured(name: str, modules: int, parts: int) -> dict[str, Any]:
    """The table's rows of one step: all, by phase, and by what is decomposed and read back."""
    found = count(name, SHAPES[modules], parts=parts)
    return {
        "total": {kind: found.total(kind) for kind in KINDS},
        "phases": {phase: dict(found.counts[phase]) for phase in PHASES if phase in found.counts},
        "names": {kind: dict(found.total_names(kind)) for kind in (READ_BACK, LINEAR_ALGEBRA)},
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of benchmarks/results/performance.md."""
    lines = [
        f"| modules | micro-batches | step | kernels | to {BASE} | "
        + " | ".join(PHASES)
        + " | read-backs | linear algebra |",
        "|---" * (7 + len(PHASES)) + "|",
    ]
    for case in result["cases"]:
        base = case["steps"][BASE]["total"][KERNEL]
        for name, row in case["steps"].items():
            total = row["total"]
            cells = [str(case["modules"]), str(case["micro_batches"]), name]
            cells += [f"{total[KERNEL]:,}", f"**{total[KERNEL] / base:.2f}**"]
            cells += [f"{row['phases'].get(phase, {}).get(KERNEL, 0):,}" for phase in PHASES]
            lines.append(
                "| " + " | ".join([*cells, str(total[READ_BACK]), str(total[LINEAR_ALGEBRA])]) + " |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--modules", nargs="+", type=int, choices=SHAPES, default=list(SHAPES))
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    result = {
        "torch": torch.__version__,
        "units": UNITS,
        "cases": [
            {"modules": n, "micro_batches": k, "steps": {name: measured(name, n, k) for name in STEPS}}
            for n in chosen.modules
            for k in PARTS
        ],
    }
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()
