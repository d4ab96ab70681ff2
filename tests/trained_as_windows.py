"""A script for as_windows.py: all modules, ledgers, locks, and a run that is stopped and resumed."""

import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path

import pytest
import yaml
from accounting_cases import make_plan

import privlora
from privlora.accounting import Ledger, read_ledger
from privlora.api import train_run
from privlora.cli import main
from privlora.config import load_settings
from privlora.demo import model_path, private_records
from privlora.disk import lock
from privlora.errors import RunError
from privlora.training.loop import Interrupted


def import_all() -> None:
    """Rooms of extras that are not installed say so, and are no matter of the system."""
    for module in pkgutil.walk_packages(privlora.__path__, "privlora."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except RunError as error:
                if "pip install" not in str(error):
                    raise
            except ModuleNotFoundError as error:
                if error.name != "flwr":
                    raise


def ledgers(folder: Path) -> None:
    plan = make_plan()
    event = plan.event
    path = folder / "ledger.jsonl"
    synced, os.fsync = os.fsync, _full
    with pytest.raises(RunError, match="No space left"):
        Ledger.create(path, plan)
    os.fsync = synced
    assert path.read_bytes() == b"", "nothing was released, and no open file can go"
    with Ledger.create(path, plan) as ledger:
        ledger.charge(event)
        assert read_ledger(path).charges == 1, "who only reads meets no lock"
        with pytest.raises(RunError, match="the ledger cannot be locked: Resource temporarily unavailable"):
            Ledger.open(path)
    with Ledger.open(path) as ledger:
        ledger.charge(event)
        ledger.finish()
    assert b"\r" not in path.read_bytes()
    assert read_ledger(path).closed


def _full(_: object) -> None:
    raise OSError(28, "No space left on device")


def run_of_commands(folder: Path) -> None:
    (folder / "notes.jsonl").write_text(
        "\n".join(map(json.dumps, private_records(64, seed=1))), encoding="utf-8"
    )
    settings = {
        "model": {"name": str(model_path())},
        "adapter": {"r": 4},
        "data": {"path": str(folder / "notes.jsonl"), "text": "text", "max_length": 128},
        "privacy": {
            "noise_multiplier": 1.0,
            "delta": 1e-4,
            "steps": 3,
            "expected_batch_size": 8,
            "public_dataset_size": 64,
        },
        "run": {"output": str(folder / "run"), "checkpoint_every": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert main(["plan", str(folder / "run.yaml")]) == 0
    with pytest.raises(Interrupted):
        train_run(
            load_settings(folder / "run.yaml"), callbacks=[lambda event: event.step == 1 and event.stop()]
        )
    assert read_ledger(folder / "run/release/ledger.jsonl").charges == 1
    assert main(["resume", str(folder / "run")]) == 0
    assert read_ledger(folder / "run/release/ledger.jsonl").charges == 3
    assert main(["report", str(folder / "run")]) == 0
    assert main(["evaluate", str(folder / "run"), "--data", str(folder / "notes.jsonl")]) == 0


def two_processes(folder: Path) -> None:
    with open(folder / "turn.lock", "wb") as one, open(folder / "turn.lock", "wb") as other:
        lock(one.fileno(), wait=True)
        with pytest.raises(BlockingIOError):
            lock(other.fileno())
    with open(folder / "turn.lock", "wb") as again:
        lock(again.fileno())


if __name__ == "__main__":
    import_all()
    (place := Path(sys.argv[1])).mkdir()
    ledgers(place)
    two_processes(place)
    for quick in (["--version"], ["--help"], ["methods"]):
        assert main(quick) == 0
    run_of_commands(place)
