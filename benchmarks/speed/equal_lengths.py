"""Time and peak memory of a training step: privlora, plain peft, Opacus and the PRISM authors' code.

    python benchmarks/speed.py --out benchmarks/results/speed.json [--prism-reference CHECKOUT]

All variants live in one process and take turns in random order, so whatever else the machine does meets all
of them. A ratio is the median over rounds of (variant / plain) within one round. With one thread the CPU seconds
of a step are free of waiting and of spinning threads: on a shared machine they are the robust number. Peak memory
is what the operating system says of a process that trains with one variant and does nothing else.
`speed_variants.py` says what each variant does.

The authors' code is not part of this repository: give your own checkout of osu-srml/PRISM-DP-LoRA.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from speed_variants import LENGTH, RANK, TARGETS, VARIANTS, Setting, build_model

BASE = "plain"
MIN_ROUNDS = 3
# Imported once, before the processes that measure memory are forked.
_HEAVY = ["torch", "transformers.models.llama.modeling_llama", "peft", "opacus"]


def time_variants(names: list[str], batch: int, threads: int, reference: Path | None, seconds: float) -> Any:
    """Interleaved rounds until ``seconds`` are used up; wall and CPU seconds of every step."""
    torch.set_num_threads(threads)
    weights = build_model(Setting(batch)).state_dict()
    variants = {name: VARIANTS[name](Setting(batch, weights, reference)) for name in names}
    for variant in variants.values():
        variant.step()  # allocations, caches and first moments
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(wall[BASE]) < MIN_ROUNDS:
        for name in order.sample(names, len(names)):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            variants[name].step()
            wall[name].append(time.perf_counter() - wall_start)
            cpu[name].append(time.process_time() - cpu_start)
    return {
        "batch": batch,
        "threads": threads,
        "rounds": len(wall[BASE]),
        "variants": {
            name: {"wall": _summary(wall[name], wall[BASE]), "cpu": _summary(cpu[name], cpu[BASE])}
            for name in names
        },
    }


def _summary(values: list[float], base: list[float]) -> dict[str, Any]:
    ratios = np.array(values) / np.array(base)
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    ratio_low, ratio, ratio_high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return {
        "median_s": round(float(median), 4),
        "quartiles_s": [round(float(low), 4), round(float(high), 4)],
        "min_s": round(min(values), 4),
        "ratio": round(float(ratio), 4),
        "ratio_quartiles": [round(float(ratio_low), 4), round(float(ratio_high), 4)],
    }


def measure_memory(name: str, batch: int, reference: Path | None) -> dict[str, float]:
    """MiB of the process with the bare model, with the variant, and at the peak of two steps."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    setting = Setting(batch, build_model(Setting(batch)).state_dict(), reference)
    loaded = _resident()
    variant = VARIANTS[name](setting)
    built = _resident()
    for _ in range(2):
        variant.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"model_mib": loaded, "built_mib": built, "peak_mib": peak, "over_model_mib": peak - loaded}


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure_all_memory(names: list[str], batch: int, reference: Path | None) -> dict[str, Any]:
    """`measure_memory` of every variant, each in a process that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    tasks = [(name, batch, reference) for name in names]
    with context.Pool(2, maxtasksperchild=1) as pool:
        found = dict(zip(names, pool.starmap(measure_memory, tasks, chunksize=1), strict=True))
    base = found[BASE]
    for row in found.values():
        row["peak_ratio"] = row["peak_mib"] / base["peak_mib"]
        row["over_model_ratio"] = row["over_model_mib"] / base["over_model_mib"]
    rounded = {name: {k: round(v, 3) for k, v in row.items()} for name, row in found.items()}
    return {"batch": batch, "variants": rounded}


def markdown(result: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    lines = []
    for timing in result["timings"]:
        lines += [
            f"\nBatch {timing['batch']}, {timing['threads']} thread(s), {timing['rounds']} rounds:\n",
            "| step | CPU s | CPU ratio (quartiles) | wall s | wall ratio (quartiles) |",
            "|---|---|---|---|---|",
        ]
        for name, row in timing["variants"].items():
            cells = [name]
            for clock in ("cpu", "wall"):
                found = row[clock]
                low, high = found["ratio_quartiles"]
                cells += [f"{found['median_s']:.2f}", f"**{found['ratio']:.2f}** ({low:.2f}-{high:.2f})"]
            lines.append("| " + " | ".join(cells) + " |")
    for memory in result["memory"]:
        lines += [
            f"\nBatch {memory['batch']}, peak memory of a fresh process:\n",
            "| step | peak MiB | ratio | over the loaded model, MiB | ratio |",
            "|---|---|---|---|---|",
        ]
        for name, row in memory["variants"].items():
            lines.append(
                f"| {name} | {row['peak_mib']:.0f} | **{row['peak_ratio']:.2f}** "
                f"| {row['over_model_mib']:.0f} | {row['over_model_ratio']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--prism-reference", type=Path, help="a checkout of the PRISM authors' repository")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["8x1", "8x2", "32x2"],
        metavar="BATCHxTHREADS",
        help="what to time (default: 8x1 8x2 32x2)",
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="in all; 3 rounds are run at least")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", nargs="+", metavar="VARIANT", choices=VARIANTS, help=f"beside {BASE!r}")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")

    names = [n for n in VARIANTS if chosen.only is None or n in {BASE, *chosen.only}]
    if chosen.prism_reference is None:
        skipped = [n for n in names if n.startswith("PRISM authors")]
        names = [n for n in names if n not in skipped]
        if skipped:
            print(f"SKIPPED for want of --prism-reference: {', '.join(skipped)}")
    started = time.perf_counter()
    runs = [(int(batch), int(threads)) for batch, threads in (run.split("x") for run in chosen.runs)]
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "model": "random Llama: hidden 512, 8 layers, 8 heads, intermediate 1376, vocabulary 8000, float32",
        "adapter": {"rank": RANK, "target_modules": TARGETS},
        "sequence_length": LENGTH,
        "base": BASE,
        "memory": [],
        "timings": [],
    }
    reference = chosen.prism_reference
    for batch in sorted({batch for batch, _ in runs} if chosen.memory else set()):
        result["memory"].append(measure_all_memory(names, batch, reference))
        _save(result, started, chosen.out)
    for k, (batch, threads) in enumerate(runs):
        left = chosen.minutes * 60 - (time.perf_counter() - started)
        result["timings"].append(time_variants(names, batch, threads, reference, left / (len(runs) - k)))
        _save(result, started, chosen.out)
    print(markdown(result))


def _save(result: dict[str, Any], started: float, out: Path | None) -> None:
    """After every part, so that a long run on a busy machine may be stopped."""
    result["minutes"] = round((time.perf_counter() - started) / 60, 1)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
