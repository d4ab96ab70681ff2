"""What torchrun starts: one run of several processes, with one voice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import run_settings, write_config

import privlora
from privlora.accounting import read_ledger
from privlora.cli import main

SEVERAL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def torchrun(*words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    return subprocess.run(
        [*command, "-m", "privlora", *words], capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.mark.long
def test_torchrun_trains_one_run(model: Path, folder: Path) -> None:
    config = write_config(folder, run_settings(model, folder))
    ended = torchrun("train", str(config))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("promise:") == 1
    assert ended.stderr.count("step 3/3") == 1
    summary = read_ledger(folder / "run/release/ledger.jsonl")
    assert (summary.charges, summary.closed) == (3, True)

    again = torchrun("train", str(config))
    assert again.returncode != 0
    assert again.stderr.count("error: ") == 1
    assert "holds a run already" in again.stderr


@pytest.mark.parametrize("command", ["plan", "audit", "lab", "synthesize", "evaluate"])
def test_other_commands_run_in_one_process(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SEVERAL.items():
        monkeypatch.setenv(name, value)
    assert main([command, "nothing.yaml"]) == 2
    assert f"`privlora {command}` runs in one" in capsys.readouterr().err


def test_help_is_there_in_any_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SEVERAL.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    assert "Usage" in capsys.readouterr().out
