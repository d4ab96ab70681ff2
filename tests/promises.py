"""How private a run of a test is, and the settings of a small one."""

from __future__ import annotations

from typing import Any

from privlora.config import Settings, settings_from


def promise(
    *, steps: int, batch: float | None = None, records: int | None = None, delta: float = 1e-3, **more: Any
) -> dict[str, Any]:
    """The group privacy: in each step ``batch`` records in expectation, of ``records``. more: its other settings."""
    numbers = {"delta": delta, "steps": steps, "expected_batch_size": batch, "public_dataset_size": records}
    return {name: value for name, value in numbers.items() if value is not None} | more


def small_settings(**groups: Any) -> Settings:
    """Of a run that nobody starts; ``groups`` take the place of its own."""
    own = {
        "model": {"name": "tiny"},
        "data": {"path": "x.jsonl"},
        "privacy": promise(steps=2, batch=4, records=40, noise_multiplier=1.0),
    }
    return settings_from({**own, **groups}, source="test")
