"""The benchmark of many records and many steps runs from end to end, on few of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import privlora

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


def call(*given: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--smoke", *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.long
def test_every_part(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    out.write_text(json.dumps({"before": {"ledger": {}}, "now": {"ledger": {}}}))
    done = call("--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["now"] == json.loads(done.stdout)
    assert set(found["now"]) == {
        *("machine", "rounds", "tokenising", "loading", "ledger", "epsilon_after_each_step", "calibrate")
    }
    assert found["before"] == {"ledger": {}}
    loading = found["now"]["loading"]
    assert loading["records"] == 4000
    assert loading["bytes_of_ids_per_record"] > 100


@pytest.mark.long
def test_one_part_leaves_the_others(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    out.write_text(json.dumps({"now": {"loading": {"s": 1}, "rounds": 2}}))
    done = call("--out", out, "--only", "ledger")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["now"]
    assert found["ledger"]["steps"] == 2000
    assert found["loading"] == {"s": 1}
    assert "tokenising" not in found
    done = call("--only", "legder")
    assert done.returncode == 2
    assert "unknown legder; give some of tokenising, loading" in done.stderr
