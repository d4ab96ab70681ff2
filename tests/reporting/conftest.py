from __future__ import annotations

import json
from typing import Any

import pytest
from reporting_cases import Run, make_run


@pytest.fixture(scope="session")
def private_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A private run with PRISM. Tests must not change its folder."""
    return make_run(tmp_path_factory.mktemp("private") / "run", privacy={"noise_multiplier": 1.0})


@pytest.fixture(scope="session")
def public_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in the non-private mode."""
    return make_run(tmp_path_factory.mktemp("public") / "run", "adamw")


@pytest.fixture(scope="session")
def insecure_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A private run whose noise can be repeated."""
    privacy = {"noise_multiplier": 1.0, "insecure_noise_seed": 5}
    return make_run(tmp_path_factory.mktemp("insecure") / "run", "dp-adamw", privacy=privacy)


@pytest.fixture
def report(private_run: Run) -> dict[str, Any]:
    """The private run's report; tests may change it."""
    loaded = json.loads((private_run.folder.release / "privacy_report.json").read_text())
    assert isinstance(loaded, dict)
    return loaded
