"""How the benchmarks of speed measure: variants that take turns in one process, and memory of fresh processes."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed_steps import VARIANTS, Setting, Variant, build_model

MIN_ROUNDS = 3
# Imported once, before the processes that measure memory are forked.
_HEAVY = ["torch", "transformers.models.llama.modeling_llama", "peft", "opacus"]


def built(settings: Mapping[str, tuple[str, Setting]]) -> dict[str, Variant]:
    """label -> a variant of VARIANTS in its setting; all share one set of frozen weights, so of one shape."""
    weights = build_model(next(iter(settings.values()))[1]).state_dict()
    return {
        label: VARIANTS[name](replace(setting, weights=weights))
        for label, (name, setting) in settings.items()
    }


def time_rounds(
    variants: Mapping[str, Variant],
    draw: Callable[[], Sequence[int]],
    *,
    warm: Sequence[int],
    base: str,
    seconds: float,
    rounds: int = MIN_ROUNDS,
) -> dict[str, Any]:
    """Wall and CPU seconds of steps on the same batches, in rounds of random order, and ratios to ``base``.

    At least ``rounds`` rounds, and as many as ``seconds`` allow. The first step of each, on the records ``warm``, with
    allocations, caches and first moments, does not count.
    """
    names = list(variants)
    for variant in variants.values():
        variant.step(warm)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    end = time.perf_counter() + seconds
    while len(wall[base]) < rounds or time.perf_counter() < end:
        drawn = draw()
        for name in order.sample(names, len(names)):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            variants[name].step(drawn)
            wall[name].append(time.perf_counter() - wall_start)
            cpu[name].append(time.process_time() - cpu_start)
    return {
        "rounds": len(wall[base]),
        "variants": {
            name: {"wall": _summary(wall[name], wall[base]), "cpu": _summary(cpu[name], cpu[base])}
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


def measure_memory(
    settings: Mapping[str, tuple[str, Setting]], batches: Sequence[Sequence[int]], *, base: str
) -> dict[str, dict[str, float]]:
    """Of each variant, in a process that has imported everything and run nothing, MiB at its peak over ``batches``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    tasks = [(name, setting, batches) for name, setting in settings.values()]
    with context.Pool(1, maxtasksperchild=1) as pool:
        found = dict(zip(settings, pool.starmap(_memory, tasks, chunksize=1), strict=True))
    for row in found.values():
        row["peak_ratio"] = row["peak_mib"] / found[base]["peak_mib"]
        row["over_model_ratio"] = row["over_model_mib"] / found[base]["over_model_mib"]
    return {label: {k: round(v, 3) for k, v in row.items()} for label, row in found.items()}


def _memory(name: str, setting: Setting, batches: Sequence[Sequence[int]]) -> dict[str, float]:
    """MiB of the process with the bare model, with the variant, and at the peak of its steps."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    setting = replace(setting, weights=build_model(setting).state_dict())
    loaded = _resident()
    variant = VARIANTS[name](setting)
    made = _resident()
    for drawn in batches:
        variant.step(drawn)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"model_mib": loaded, "built_mib": made, "peak_mib": peak, "over_model_mib": peak - loaded}


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def save(result: dict[str, Any], started: float, out: Path | None) -> None:
    """After every part, so that a long run on a busy machine may be stopped."""
    result["minutes"] = round((time.perf_counter() - started) / 60, 1)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
