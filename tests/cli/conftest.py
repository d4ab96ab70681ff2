"""One tiny model and one finished run for all tests of the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import cli_cases
import pytest
from cli_cases import Call, run_settings, save_tiny_model, write_config, write_records

from privlora.cli import main


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a finished run with public evaluation records, beside run.yaml, records and held_out."""
    folder = tmp_path_factory.mktemp("finished")
    write_records(folder / "records.jsonl")
    held_out = write_records(folder / "held_out.jsonl", 8, first=100)
    settings = run_settings(model, folder, data={"evaluation": str(held_out)}, run={"label": "cases"})
    assert main(["train", str(write_config(folder, settings))]) == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with good records."""
    write_records(tmp_path / "records.jsonl")
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return partial(cli_cases.call, capsys)
