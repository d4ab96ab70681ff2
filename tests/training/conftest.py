"""One model for the runs of all files, and one interrupted run, of which each test gets a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_cases import PUBLIC, STOPPED, Bench

from privlora.training.files import RunFolder


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="session")
def stopped(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after 8 of its 12 steps, evaluated after every second."""
    root = tmp_path_factory.mktemp("stopped") / "run"
    bench.stopped(root, STOPPED, run={"evaluate_every": 2}, evaluation=PUBLIC)
    return root


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(stopped, tmp_path / "run")))
