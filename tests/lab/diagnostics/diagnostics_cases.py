"""A workbench on a tiny model, and a study small enough for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tiny_models import tiny_model, tiny_tokenizer

from privlora.config import Settings, settings_from
from privlora.lab.diagnostics.bench import Workbench, open_workbench

RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(40)]


def tiny_settings(**groups: dict[str, Any]) -> Settings:
    """Four planned steps on RECORDS; ``groups`` are laid over it."""
    content: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny"},
        "data": {"path": "(in memory)", "max_length": 40},
        "adapter": {"r": 2, "lora_alpha": 3},
        "privacy": {
            "noise_multiplier": 1.5,
            "delta": 1e-3,
            "steps": 4,
            "expected_batch_size": 8,
            "public_dataset_size": 40,
        },
    }
    for group, values in groups.items():
        content[group] = {k: v for k, v in {**content.get(group, {}), **values}.items() if v is not None}
    return settings_from(content)


@contextmanager
def tiny_bench(*, seed: int = 0, model: Any = None, **groups: dict[str, Any]) -> Iterator[Workbench]:
    with open_workbench(
        tiny_settings(**groups),
        model=model if model is not None else tiny_model(),
        tokenizer=tiny_tokenizer(),
        records=RECORDS,
        seed=seed,
    ) as bench:
        yield bench
