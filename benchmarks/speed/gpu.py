"""A whole private step on a GPU beside peft's plain one and Opacus', on random Llamas of published shapes in bfloat16.

    python benchmarks/speed/gpu.py --out benchmarks/results/gpu.json

Variants share the frozen weights and take turns in random order; a ratio is the median over rounds of (variant / plain)
within one round. Memory is the most that torch had allocated in a variant's steps, the model's own weights counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speed_steps import VARIANTS, Setting, Shape, Variant, build_model
from speed_timing import time_rounds

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COMMON: dict[str, Any] = {"positions": 512, "rank": 16, "targets": ALL_LINEAR, "dtype": "bfloat16"}
SHAPES = {
    "0.5B (shape of Qwen2.5)": Shape(24, 151936, 896, 4864, 14, 2, tied=True, **COMMON),
    "8B (shape of Llama 3.1)": Shape(32, 128256, 4096, 14336, 32, 8, **COMMON),
    "small": Shape(2, 512, 64, 128, 4, 2, **COMMON),  # for tests
}
PLAIN = "plain peft"
NAMES = {
    PLAIN: "plain",
    "privlora prism": "privlora prism",
    "privlora dp-adamw": "privlora dp-adamw",
    "Opacus DP-AdamW": "Opacus DP-AdamW, hooks",
}


class Waiting:
    """A step that is over when the device is done; keeps its most memory."""

    def __init__(self, variant: Variant, device: str) -> None:
        self.model, self._variant, self._cuda = variant.model, variant, device == "cuda"
        self.peak = 0

    def step(self, drawn: Sequence[int]) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._variant.step(drawn)
        if self._cuda:
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())


def measured(
    shape: Shape,
    names: Sequence[str],
    *,
    device: str,
    records: int,
    tokens: int,
    rows: int,
    checkpointing: bool,
    seconds: float,
) -> dict[str, Any]:
    """Steps of so many records of so many tokens each, in micro-batches of ``rows``."""
    setting = Setting(
        ((tokens, tokens),) * records,
        records,
        shape,
        rows=rows,
        max_tokens=rows * tokens,
        device=device,
        checkpointing=checkpointing,
    )
    setting = replace(setting, weights=build_model(replace(setting, checkpointing=False)).state_dict())
    made: dict[str, Waiting] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            made[name] = Waiting(VARIANTS[NAMES[name]](setting), device)
            made[name].step(range(rows))
            made[name].peak = 0
        except torch.OutOfMemoryError:
            made.pop(name, None)
            failed[name] = "out of memory"
            torch.cuda.empty_cache()
    found = time_rounds(made, lambda: range(records), warm=range(records), base=PLAIN, seconds=seconds)
    for name, row in found["variants"].items():
        row["peak_gib"] = round(made[name].peak / 2**30, 2)
        row["tokens_per_s"] = round(records * tokens / row["wall"]["median_s"])
    return {
        "model": str(shape),
        "parameters": sum(t.numel() for t in (setting.weights or {}).values()),
        "records": records,
        "tokens": tokens,
        "rows": rows,
        "checkpointing": checkpointing,
        "failed": failed,
        **found,
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables of docs/performance.md."""
    lines = []
    for name, case in result["cases"].items():
        lines += [
            f"\n{name}, {case['records']} records of {case['tokens']} tokens a step, {case['rows']} at a time, "
            f"{result['device']}, {case['rounds']} rounds:\n",
            "| step | s | to plain peft | tokens a second | most memory, GiB |",
            "|---|---|---|---|---|",
        ]
        for label, row in case["variants"].items():
            wall = row["wall"]
            cells = [label, f"{wall['median_s']:.2f}", f"**{wall['ratio']:.2f}**"]
            cells += [f"{row['tokens_per_s']:,}", f"{row['peak_gib']:.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines += [f"| {label} | {why} | | | |" for label, why in case["failed"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES][:2])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=None)
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result: dict[str, Any] = {"machine": describe_machine(), "device": device, "cases": {}}
    for name in args.shapes:
        began = time.perf_counter()
        checkpointing = name.startswith("8B") if args.checkpointing is None else args.checkpointing
        # Of Opacus' hooks only where no block is computed twice: its activations would be those of both times.
        names = [each for each in args.names if not (checkpointing and each.startswith("Opacus"))]
        result["cases"][name] = measured(
            SHAPES[name],
            names,
            device=args.device,
            records=args.records,
            tokens=args.tokens,
            rows=args.rows,
            checkpointing=checkpointing,
            seconds=args.seconds,
        )
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()
