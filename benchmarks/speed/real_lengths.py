"""Time and peak memory of a step on records of real lengths: privlora, plain peft, plain peft by length, Opacus.

    python benchmarks/speed/real_lengths.py --out benchmarks/results/real_lengths.json
    python benchmarks/speed/real_lengths.py --show benchmarks/results/real_lengths.json --figure FILE

Batches are drawn from record_lengths.json (record_lengths.py made it), and their tokens at random; each round has a
new one, the same for every step. Steps live in one process and take turns in random order. Ratios are medians within
rounds, of CPU time, to plain peft with each batch sorted by length. The peers' micro-batches are of 16 rows, padded to
the longest; privlora's are those that its defaults make. Padding is positions that went through the model over tokens.
Memory is the peak of a fresh process over its loaded model. --only takes cases, such as "SST-2 64 8k"; what is not
measured anew stays in the file. --smoke runs all cases on a tiny model and an eighth of each batch, measures memory for
the first of them alone, and writes no results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed_steps import Setting, Shape, Variant
from speed_timing import built, measure_memory, save, time_rounds

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

RESULTS = Path(__file__).parents[1] / "results"
ROWS = 16  # of a peer's micro-batch
MAX_TOKENS = 4096  # of privlora's, its default
WARM = 8  # records of the step that does not count
POOL = 2048  # records that batches are drawn from
BASE = "plain, by length"
# Label -> variant, and whether the batch is sorted first.
STEPS: dict[str, tuple[str, bool]] = {
    "plain": ("plain", False),
    BASE: ("plain", True),
    "Opacus": ("Opacus DP-AdamW, hooks", False),
    "dp-adamw": ("privlora dp-adamw", False),
    "prism": ("privlora prism", False),
}
SHAPES = {"8k": Shape(positions=512), "128k": Shape(layers=4, vocabulary=128_000, positions=512)}
TINY = Shape(layers=1, vocabulary=64, hidden=32, intermediate=48, heads=2, positions=512, rank=2)


@dataclass(frozen=True)
class Case:
    """Batches of one data set, or of texts of 128 tokens that are all labels (data: equal)."""

    data: str
    batch: int
    vocabulary: str
    threads: int = 1

    def __str__(self) -> str:
        threads = "" if self.data != "equal" else f" {self.threads}"
        return f"{self.data} {self.batch} {self.vocabulary}{threads}"

    def setting(self, lengths: dict[str, list[list[int]]], smoke: bool) -> Setting:
        shape = replace(TINY) if smoke else SHAPES[self.vocabulary]
        # Equal texts need no micro-batches for their lengths, and the peers take a whole batch of 8.
        rows = None if self.data == "equal" else ROWS
        return Setting(self._lengths(lengths, smoke), self.batch, shape, rows, max_tokens=MAX_TOKENS)

    def _lengths(self, lengths: dict[str, list[list[int]]], smoke: bool) -> tuple[tuple[int, int], ...]:
        if self.data == "equal":
            return ((128, 128),) * self.batch
        rows = lengths[self.data]
        weights = np.array([count for *_, count in rows], float)
        rng = np.random.default_rng(0)
        chosen = rng.choice(len(rows), self.batch if smoke else POOL, p=weights / weights.sum())
        return tuple((rows[i][0], rows[i][1]) for i in chosen)


CASES = [
    Case(data, batch, vocabulary)
    for vocabulary in SHAPES
    for data in ("SST-2", "GSM8K", "PubMed")
    for batch in (64, 256)
] + [Case("equal", batch, "8k", threads) for batch in (8, 32) for threads in (1, 2)]


def measure(case: Case, setting: Setting, *, seconds: float, rounds: int, memory: bool) -> dict[str, Any]:
    """One row of the results."""
    torch.set_num_threads(case.threads)
    settings = {label: (name, replace(setting, grouped=grouped)) for label, (name, grouped) in STEPS.items()}
    variants = built(settings)
    draws = np.random.default_rng(1)
    warm = range(min(WARM, case.batch))
    tokens = [sum(setting.lengths[record][0] for record in warm)]
    drawn = list[Sequence[int]]()
    padded = {label: _positions(variant) for label, variant in variants.items()}

    def draw() -> Sequence[int]:
        drawn.append(draws.choice(len(setting.lengths), case.batch, replace=False).tolist())
        tokens[0] += sum(setting.lengths[record][0] for record in drawn[-1])
        return drawn[-1]

    found = time_rounds(variants, draw, warm=warm, base=BASE, seconds=seconds, rounds=rounds)
    for label, row in found["variants"].items():
        row["padding"] = round(padded[label]() / tokens[0], 3)
    del variants
    if memory:
        peaks = measure_memory(settings, [warm, drawn[0]], base=BASE)
        for label, row in found["variants"].items():
            row["memory"] = peaks[label]
    return {
        "machine": describe_machine(),
        "model": str(setting.shape),
        "threads": case.threads,
        "tokens_a_record": round(tokens[0] / (case.batch * len(drawn) + len(warm)), 1),
        **found,
    }


def _positions(variant: Variant) -> Callable[[], int]:
    """How many positions have gone through a variant's model so far, with gradients."""
    count = [0]

    def seen(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else args[0]
        if torch.is_grad_enabled():  # not the one pass in which a step finds out what its model is like
            count[0] += ids.numel()

    variant.model.register_forward_pre_hook(seen, with_kwargs=True)
    return lambda: count[0]


def markdown(result: dict[str, Any]) -> str:
    """The table of benchmarks/results/performance.md."""
    lines = [
        f"| batch | step | CPU s | to {BASE} (quartiles) | padding | over the model, MiB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        for label, found in row["variants"].items():
            cpu, memory = found["cpu"], found.get("memory")
            low, high = cpu["ratio_quartiles"]
            cells = [
                row["case"],
                label,
                f"{cpu['median_s']:.2f}",
                f"**{cpu['ratio']:.2f}** ({low:.2f}-{high:.2f})",
            ]
            cells.append(f"{found['padding']:.2f}")
            cells += (
                ["", ""]
                if memory is None
                else [
                    f"{memory['over_model_mib']:.0f}",
                    f"{memory['over_model_ratio']:.2f}",
                ]
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_figure(result: dict[str, Any], path: Path) -> None:
    """Bars of CPU time and of memory relative to plain peft by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows, width = result["cases"], 0.8 / len(STEPS)
    figure, (times, memories) = plt.subplots(
        2, 1, figsize=(max(6.5, 1 + 0.8 * len(rows)), 5), sharex=True, layout="constrained"
    )
    for k, label in enumerate(STEPS):
        found = [row["variants"][label] for row in rows]
        places = np.arange(len(rows)) + (k - (len(STEPS) - 1) / 2) * width
        ratios = np.array([each["cpu"]["ratio"] for each in found])
        spread = np.array([each["cpu"]["ratio_quartiles"] for each in found]).T
        times.bar(places, ratios, width, label=label, yerr=np.abs(spread - ratios), error_kw={"lw": 0.8})
        peaks = [each.get("memory", {}).get("over_model_ratio", np.nan) for each in found]
        memories.bar(places, peaks, width)
    for axes, what in ((times, "CPU time of a step"), (memories, "peak memory over the model")):
        axes.axhline(1.0, color="black", lw=0.8)
        axes.set_ylabel(f"{what}\n({BASE} = 1)", fontsize=8)
    memories.set_xticks(range(len(rows)), [row["case"].replace(" ", "\n", 1) for row in rows], fontsize=8)
    figure.legend(fontsize=8, ncols=len(STEPS), loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="the results as JSON; cases that it holds are replaced or kept"
    )
    parser.add_argument("--lengths", type=Path, default=RESULTS / "record_lengths.json")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=list(map(str, CASES)))
    parser.add_argument("--minutes", type=float, default=0.0, help="of each case; --rounds are run at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--show", type=Path, metavar="JSON", help="measure nothing; print the table of this file"
    )
    parser.add_argument("--figure", type=Path, help="draw the picture here")
    parser.add_argument("--smoke", action="store_true", help="does everything run? A tiny model, one round")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    result: dict[str, Any] = {"base": BASE, "rows_of_peers": ROWS, "max_tokens": MAX_TOKENS, "cases": []}
    kept = chosen.show or chosen.out
    if kept is not None and kept.exists() and not chosen.smoke:
        result["cases"] = json.loads(kept.read_text(encoding="utf-8"))["cases"]
    lengths = json.loads(chosen.lengths.read_text(encoding="utf-8"))
    for case in [] if chosen.show else CASES:
        if chosen.only is not None and str(case) not in chosen.only:
            continue
        taken = replace(case, batch=case.batch // 8, threads=1) if chosen.smoke else case
        row = measure(
            taken,
            taken.setting(lengths, chosen.smoke),
            seconds=0.0 if chosen.smoke else 60 * chosen.minutes,
            rounds=1 if chosen.smoke else chosen.rounds,
            memory=chosen.memory and (not chosen.smoke or case is CASES[0]),
        )
        done = {each["case"]: each for each in result["cases"]} | {str(case): {"case": str(case), **row}}
        result["cases"] = [done[str(each)] for each in CASES if str(each) in done]
        save(result, started, None if chosen.smoke else chosen.out)
        print(f"{case}: {(time.perf_counter() - started) / 60:.1f} minutes", file=sys.stderr, flush=True)
    print(markdown(result))
    if chosen.figure is not None:
        draw_figure(result, chosen.figure)


if __name__ == "__main__":
    main()
