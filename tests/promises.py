"""How private a run of a test is."""

from __future__ import annotations

from typing import Any


def promise(
    *, steps: int, batch: float | None = None, records: int | None = None, delta: float = 1e-3, **more: Any
) -> dict[str, Any]:
    """The group privacy: in each step ``batch`` records in expectation, of ``records``. more: its other settings."""
    numbers = {"delta": delta, "steps": steps, "expected_batch_size": batch, "public_dataset_size": records}
    return {name: value for name, value in numbers.items() if value is not None} | more
