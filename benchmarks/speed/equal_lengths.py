"""Time and peak memory of a training step: privlora, plain peft, Opacus and the PRISM authors' code.

    python benchmarks/speed/equal_lengths.py --out benchmarks/results/speed.json [--prism-reference CHECKOUT]

All variants live in one process and take turns in random order, so whatever else the machine does meets all
of them. A ratio is the median over rounds of (variant / plain) within one round. With one thread the CPU seconds
of a step are free of waiting and of spinning threads: on a shared machine they are the robust number. Peak memory
is what the operating system says of a process that trains with one variant and does nothing else.
`speed_steps.py` says what each variant does.

The authors' code is not part of this repository: give your own checkout of osu-srml/PRISM-DP-LoRA.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from speed_steps import TARGETS, VARIANTS, Setting, Shape
from speed_timing import built, measure_memory, save, time_rounds

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

BASE = "plain"
LENGTH = 128


def setting_of(batch: int, reference: Path | None) -> Setting:
    return Setting(((LENGTH, LENGTH),) * batch, batch, Shape(positions=LENGTH), reference=reference)


def time_variants(names: list[str], batch: int, threads: int, reference: Path | None, seconds: float) -> Any:
    """Interleaved rounds until ``seconds`` are used up; wall and CPU seconds of every step."""
    torch.set_num_threads(threads)
    setting = setting_of(batch, reference)
    variants = built({name: (name, setting) for name in names})
    found = time_rounds(variants, lambda: range(batch), warm=range(batch), base=BASE, seconds=seconds)
    return {"batch": batch, "threads": threads, **found}


def markdown(result: dict[str, Any]) -> str:
    """The tables of benchmarks/results/speed.md."""
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
        "model": str(Shape()),
        "adapter": {"rank": Shape().rank, "target_modules": TARGETS},
        "sequence_length": LENGTH,
        "base": BASE,
        "memory": [],
        "timings": [],
    }
    reference = chosen.prism_reference
    for batch in sorted({batch for batch, _ in runs} if chosen.memory else set()):
        settings = {name: (name, setting_of(batch, reference)) for name in names}
        found = measure_memory(settings, [range(batch)] * 2, base=BASE)
        result["memory"].append({"batch": batch, "variants": found})
        save(result, started, chosen.out)
    for k, (batch, threads) in enumerate(runs):
        left = chosen.minutes * 60 - (time.perf_counter() - started)
        result["timings"].append(time_variants(names, batch, threads, reference, left / (len(runs) - k)))
        save(result, started, chosen.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
