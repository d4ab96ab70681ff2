"""Learning rates over the steps of a run; without torch, since whoever verifies a release computes them again."""

from __future__ import annotations

import math
from collections.abc import Callable

from privlora.errors import ConfigError

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),
}


def learning_rate_at(step: int, steps: int, peak: float, schedule: str, warmup_steps: int = 0) -> float:
    """Learning rate of step 1 <= step <= steps: linear warm-up to ``peak``, then the schedule; never zero."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule {schedule!r}", fix=f"one of {', '.join(SCHEDULES)}")
    if step <= warmup_steps:
        return peak * step / (warmup_steps + 1)
    return peak * SCHEDULES[schedule]((step - warmup_steps - 1) / max(1, steps - warmup_steps))
