"""How private a run of a test is."""

from __future__ import annotations

from typing import Any


def promise(*, steps: int, batch: float, records: int, delta: float = 1e-3, **more: Any) -> dict[str, Any]:
    """The group privacy: in each step ``batch`` records in expectation, of ``records``. more: its other settings."""
    return {
        "delta": delta,
        "steps": steps,
        "expected_batch_size": batch,
        "public_dataset_size": records,
        **more,
    }
