"""Reference numbers, and small builders that the accounting tests share."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from privlora.accounting import Plan, PoissonSampling, StepEvent

_TESTS = Path(__file__).resolve().parents[1]


def load_vectors() -> dict[str, Any]:
    return json.loads((_TESTS / "vectors" / "accounting.json").read_text())


def shared_vectors_file() -> Path:
    """The optional original of the numbers, outside the repository."""
    root = os.environ.get("PRIVLORA_ASSETS") or _TESTS.parents[1] / "shared"
    return Path(root) / "vectors" / "accounting.json"


def poisson(sample_rate: float, noise_multiplier: float) -> StepEvent:
    return StepEvent(PoissonSampling(sample_rate), noise_multiplier)


def make_plan(**changes: Any) -> Plan:
    """Of one phase, with event= and steps=, or of phases=."""
    one = ((changes.pop("event", poisson(0.01, 1.0)), changes.pop("steps", 5)),)
    settings: dict[str, Any] = {
        "phases": one,
        "delta": 1e-5,
        "target_epsilon": None,
        "adjacency": "add-or-remove-one",
        "unit": "record",
        "records_per_user": None,
        "clip_norm": 1.0,
        "expected_batch_size": 64.0,
        "method": "prism",
        "dataset": "letters",
    }
    return Plan(**(settings | changes))


def exact_epsilon(parts: Any, counted: float, delta: float, guess: float) -> float:
    """Of so many releases of each discretised loss: (loss, count). counted: mass that counts as infinite besides.

    Exact relative to delta, by another way than the package's: all probabilities of the exponentially tilted law, from
    one transform over 14 and more of its standard deviations, and a search among them. guess: about what is found.
    """
    grid = parts[0][0]._discretization

    def tilted(pmf: Any, order: float) -> tuple[Any, float, Any]:
        index = np.arange(len(pmf._probs)) + pmf._lower_loss
        log = np.log(np.maximum(pmf._probs, 1e-320)) + order * index * grid
        weights = np.exp(log - log.max())
        return weights / weights.sum(), float(log.max()) + math.log(weights.sum()), index

    def mean(order: float) -> float:
        each = [(tilted(pmf, order), count) for pmf, count in parts]
        return sum(count * float(weights @ index) for (weights, _, index), count in each)

    low, high = 0.0, 300.0
    for _ in range(20):
        order = (low + high) / 2
        low, high = (order, high) if mean(order) * grid < guess else (low, order)
    spread, log_mass, first = 0.0, 0.0, 0
    for pmf, count in parts:
        weights, log, index = tilted(pmf, order)
        spread += count * float((weights * (index - (weights * index).sum()) ** 2).sum())
        log_mass, first = log_mass + count * log, first + count * pmf._lower_loss
    half = int(14 * math.sqrt(spread)) + 2 * max(len(pmf._probs) for pmf, _ in parts)
    length = 1 << (2 * half + 1).bit_length()
    made: Any = 1.0
    for pmf, count in parts:
        transform = np.fft.rfft(tilted(pmf, order)[0], length)
        turned = count * np.angle(transform) % (2 * np.pi)
        made = made * np.exp(count * np.log(np.maximum(np.abs(transform), 1e-300)) + 1j * turned)
    at = np.arange(-half, half + 1) + round(mean(order))
    mass = np.maximum(np.fft.irfft(made, length)[(at - first) % length], 1e-320)
    loss = at * grid
    probs = np.exp(np.log(mass) + log_mass - order * loss)
    infinite = counted - math.expm1(sum(count * math.log1p(-pmf._infinity_mass) for pmf, count in parts))
    low, high = 0.0, float(loss[-1])
    for _ in range(60):
        middle = (low + high) / 2
        over = loss > middle
        value = infinite + float((probs[over] * -np.expm1(middle - loss[over])).sum())
        low, high = (middle, high) if value > delta else (low, middle)
    return high
