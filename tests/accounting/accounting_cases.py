"""Reference numbers, and small builders that the accounting tests share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from privlora.accounting import Plan, PoissonSampling, StepEvent

_TESTS = Path(__file__).resolve().parents[1]


def load_ledger(schema: int) -> str:
    """As an older version wrote it: three charges; that of schema 1 was resumed after two."""
    return (_TESTS / "vectors" / f"ledger-schema-{schema}.jsonl").read_text()


OLD_LEDGER = load_ledger(1)


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
