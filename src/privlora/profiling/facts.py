"""What a profile comes to: the facts of its page, as plain numbers. PRIVATE, all of it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from privlora.config import Settings
from privlora.profiling.trace import PER_BATCH, Traced
from privlora.profiling.watch import ASIDE, REST, StepTimes, Watch, median
from privlora.stages import (
    ACCUMULATE,
    AVERAGING,
    BACKWARD,
    CAPTURE,
    CHARGE,
    COLLATE,
    DRAW,
    FORWARD,
    INSTALL,
    LOSS,
    NOISE,
    OPTIMIZER,
    PREPARE,
    PROCESSES,
)
from privlora.training.peak import Peak

Facts = dict[str, Any]
STAGES: Final = {
    DRAW: "draw the batch",
    PREPARE: "public texts and projections",
    COLLATE: "cut and pad micro-batches",
    FORWARD: "forward",
    LOSS: "loss, with the output layer",
    BACKWARD: "backward, which captures",
    CAPTURE: "gather gradients of each unit",
    ACCUMULATE: "clip and sum",
    PROCESSES: "other processes: sent, awaited",
    CHARGE: "charge the ledger",
    NOISE: "noise",
    OPTIMIZER: "optimizer",
    AVERAGING: "averaging",
    INSTALL: "move and install",
    REST: "everything else",
}
"""In the order of a step."""
_STEPS_KEPT: Final = 1000  # in the JSON and the figures
_FITTED, _CORRELATED = 8, 0.7  # steps, and how well they lie on a line, below which none is laid through them


@dataclass(frozen=True)
class Around:
    """Of the run, what its steps do not tell.

    told: what a step takes at most as `privlora plan` tells it; why_not: or why it does not. alone: each unit goes
    through the model by itself. checkpointing: activations are recomputed. processes: that train together.
    """

    settings: Settings
    told: Peak | None
    why_not: str | None
    alone: bool
    checkpointing: bool
    processes: int
    dtype: str


def gather(watch: Watch, around: Around) -> Facts:
    """The facts of a run of at least one step."""
    measured = watch.measured()
    settings = around.settings
    seconds = [each.seconds for each in measured]
    low, high = _quartiles(seconds)
    tokens = sum(each.tokens for each in measured)
    on_gpu = watch.device.type == "cuda"
    return {
        "model": settings.model.name,
        "method": settings.method.name,
        "device": _device_name(watch.device),
        "on_gpu": on_gpu,
        "dtype": around.dtype,
        "threads": torch.get_num_threads(),
        "cores": _cores(),
        "processes": around.processes,
        "steps": len(watch.steps),
        "planned_steps": settings.privacy.steps,
        "measured": len(measured),
        "first_seconds": watch.steps[0].seconds if len(watch.steps) > 1 else None,
        "seconds": {"median": median(seconds), "low": low, "high": high},
        "host_seconds": median([each.host_seconds for each in measured]),
        "cpu_seconds": median([_cpu(each) for each in measured]),
        "tokens_per_second": tokens / max(sum(seconds), 1e-12),
        "stages": _stages(measured, alone=around.processes == 1),
        "aside": _aside(watch.steps),
        "fit": fit(measured),
        "micro_batches": _micro_batches(watch, measured, around),
        "operators": None if watch.trace.found is None else _operators(watch.trace.found, measured),
        "memory": _memory(watch, around),
        "checkpointing": around.checkpointing,
        "every_step": [
            {
                "step": each.step,
                "seconds": each.seconds,
                "positions": each.positions,
                "tokens": each.tokens,
                "profiler": each.disturbed,
            }
            for each in watch.steps[:: -(-len(watch.steps) // _STEPS_KEPT)]
        ],
    }


def fit(steps: Sequence[StepTimes]) -> dict[str, float] | None:
    """Seconds of a step as fixed + per_position x positions; None of few steps, or of batches that are all alike."""
    x = np.array([each.positions for each in steps], dtype=float)
    if len(x) < _FITTED or x.std() < 0.03 * max(x.mean(), 1.0):
        return None
    y = np.array([each.seconds for each in steps])
    slope, fixed = np.polyfit(x, y, 1)
    if slope <= 0 or fixed < 0 or np.corrcoef(x, y)[0, 1] < _CORRELATED:
        return None
    return {"fixed": float(fixed), "per_position": float(slope)}


def _stages(measured: Sequence[StepTimes], *, alone: bool) -> list[Facts]:
    """Means over steps, scaled to the median step so that shares add up to 1. alone: there are no other processes."""
    whole = median([each.seconds for each in measured])
    tokens = max(1.0, median([float(each.tokens) for each in measured]))
    shown = [name for name in STAGES if not (alone and name == PROCESSES)]
    found = [name for name in shown if any(name in each.wall for each in measured)]
    middle = {name: statistics.fmean(each.wall[name] for each in measured) for name in found}
    scale = whole / max(sum(middle.values()), 1e-12)
    lines = []
    for name in found:
        low, high = _quartiles([each.wall[name] for each in measured])
        wall = scale * middle[name]
        lines.append(
            {
                "stage": name,
                "words": STAGES[name],
                "wall": wall,
                "low": low,
                "high": high,
                "share": wall / max(whole, 1e-12),
                "host": median([each.host[name] for each in measured]),
                "cpu": median([each.cpu[name] for each in measured]),
                "per_token": wall / tokens,
                "per_micro_batch": name in PER_BATCH,
            }
        )
    return lines


def _aside(steps: Sequence[StepTimes]) -> list[Facts]:
    """What comes once in a while: how often, how long each time, and spread over the steps."""
    lines = []
    for name in ASIDE:
        times = sum(each.occurred[name] for each in steps)
        if times:
            total = sum(each.wall[name] for each in steps)
            lines.append(
                {"stage": name, "times": times, "each": total / times, "of_a_step": total / len(steps)}
            )
    return lines


def _micro_batches(watch: Watch, measured: Sequence[StepTimes], around: Around) -> Facts:
    positions = sum(each.positions for each in measured)
    tokens = sum(each.tokens for each in measured)
    shapes = watch.shapes
    return {
        "of_a_step": median([float(each.batches) for each in measured]),
        "tokens_of_a_step": median([float(each.tokens) for each in measured]),
        "positions_of_a_step": median([float(each.positions) for each in measured]),
        "padding": 1 - tokens / positions if positions else 0.0,
        "rows": _three([rows for rows, _, _ in shapes]),
        "width": _three([width for _, width, _ in shapes]),
        "positions": _three([rows * width for rows, width, _ in shapes]),
        "allowed": around.settings.run.max_tokens,
        "alone": around.alone,
        "shapes": [list(shape) for shape in shapes[:: -(-len(shapes) // _STEPS_KEPT) or 1]],
    }


def _operators(traced: Traced, measured: Sequence[StepTimes]) -> Facts:
    """Of the window, and what it comes to in a step: what comes with micro-batches grows with positions."""
    positions = median([float(each.positions) for each in measured])
    grows = positions / traced.positions if traced.positions else 1.0
    rows = [
        asdict(each) | {"of_a_step": each.seconds * (grows if each.stage in PER_BATCH else 1.0)}
        for each in traced.operators
    ]
    return asdict(traced) | {"operators": sorted(rows, key=lambda row: -row["of_a_step"])}


def _memory(watch: Watch, around: Around) -> Facts:
    before, most = watch.memory.before, watch.memory.most
    return {
        "before": before,
        "most": most,
        "of_steps": None if before is None or most is None else most - before,
        "told": None if around.told is None else around.told.to_dict(),
        "why_not": around.why_not,
        "free": torch.cuda.mem_get_info(watch.device)[0] if watch.device.type == "cuda" else None,
    }


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.25, 0.75]) if values else (0.0, 0.0)
    return float(low), float(high)


def _three(values: Sequence[int]) -> list[float]:
    """Smallest, median, largest."""
    return [float(min(values)), float(statistics.median(values)), float(max(values))] if values else []


def _cpu(step: StepTimes) -> float:
    return sum(seconds for stage, seconds in step.cpu.items() if stage not in ASIDE)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
