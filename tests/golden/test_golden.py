"""A part of the golden runs; all of them by `make golden`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from golden_cases import CASES, QUICK
from golden_runs import KEPT, differences, found, machine


def test_all_runs_are_kept() -> None:
    kept = json.loads(KEPT.read_text())["runs"]
    assert set(kept) == set(CASES)
    assert set(QUICK) <= set(CASES)
    assert not any("failed" in one for one in kept.values())


@pytest.mark.parametrize("name", QUICK)
def test_a_run_gives_what_it_gave(name: str, tmp_path: Path) -> None:
    if name.startswith("rule"):
        pytest.importorskip("flwr", reason="of the extra federated")
    kept = json.loads(KEPT.read_text())
    new = found(name, tmp_path / "run")
    here = machine() == kept["machine"]
    assert differences(kept["runs"][name], new, to_the_bit=False, numbers=here) == []


def test_what_differs_is_told() -> None:
    old = {
        "weights": "a",
        "ledgers": "b",
        "shapes": "c",
        "length": 2.0,
        "projections": [0.1, 0.2],
        "losses": [1.0],
    }
    assert differences(old, old, to_the_bit=True) == []
    assert differences(old, old | {"weights": "x"}, to_the_bit=True) == ["weights"]
    assert differences(old, old | {"weights": "x"}, to_the_bit=False) == []
    assert differences(old, old | {"projections": [0.1, 0.3]}, to_the_bit=False) == ["numbers"]
    assert differences(old, old | {"projections": [0.1, 0.3]}, to_the_bit=False, numbers=False) == []
    assert differences(old, old | {"ledgers": "x", "losses": [1.1]}, to_the_bit=False) == [
        "ledgers",
        "losses",
    ]
    assert differences(old, {"failed": "why", "losses": []}, to_the_bit=False) != []
