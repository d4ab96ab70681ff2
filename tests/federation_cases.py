"""A federation of three on the tiny model, for tests of the command line and of Python's front door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_cases import run_settings, write_records

NAMES = ("north", "south", "west")


def write_clients(folder: Path, count: int = 16) -> list[dict[str, str]]:
    """Records of three clients in ``folder``, none twice; what federation.clients says of them. Skips the test where
    the extra federated is missing."""
    for package in ("cryptography", "flwr"):
        pytest.importorskip(package, reason="of the extra federated")
    return [
        {"name": name, "path": str(write_records(folder / f"{name}.jsonl", count, first=1000 * (at + 1)))}
        for at, name in enumerate(NAMES)
    ]


def federation_settings(model: Path, folder: Path, /, **groups: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Two rounds of two private local steps each; ``groups`` are laid over it, None removes."""
    federation = {"clients": 3, "rounds": 2, "rule": "tan", "local_steps": 2}
    privacy = {"steps": None, "expected_batch_size": 12}
    changed = {
        **groups,
        "federation": {**federation, **groups.get("federation", {})},
        "privacy": {**privacy, **groups.get("privacy", {})},
    }
    return run_settings(model, folder, **changed)
