from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from push_cases import PRIVACY
from reporting_cases import Run, make_run

from privlora.api import fine_tune
from privlora.demo import model_path, private_records
from privlora.reporting import verifying
from privlora.reporting.filing import file_annex
from privlora.result import Result
from privlora.training.files import RunFolder

Plotted = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def private_run(tmp_path_factory: pytest.TempPathFactory, with_plots: Plotted) -> Run:
    """A private run with PRISM. Tests must not change its folder."""
    with with_plots():
        return make_run(tmp_path_factory.mktemp("private") / "run", privacy={"noise_multiplier": 1.0})


@pytest.fixture(scope="session")
def public_run(tmp_path_factory: pytest.TempPathFactory, with_plots: Plotted) -> Run:
    """A run in the non-private mode."""
    with with_plots():
        return make_run(tmp_path_factory.mktemp("public") / "run", "adamw")


@pytest.fixture(scope="session")
def insecure_run(tmp_path_factory: pytest.TempPathFactory, with_plots: Plotted) -> Run:
    """A private run whose noise can be repeated."""
    privacy = {"noise_multiplier": 1.0, "insecure_noise_seed": 5}
    with with_plots():
        return make_run(tmp_path_factory.mktemp("insecure") / "run", "dp-adamw", privacy=privacy)


@pytest.fixture
def report(private_run: Run) -> dict[str, Any]:
    """The private run's report; tests may change it."""
    loaded = json.loads((private_run.folder.release / "privacy_report.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, with_plots: Plotted) -> Result:
    """A run of the embedded model that can be pushed. Tests must not change its folder."""
    root = tmp_path_factory.mktemp("push")
    with with_plots():
        return fine_tune(
            str(model_path()),
            private_records(40, seed=1),
            evaluation=private_records(4, seed=2),
            privacy=PRIVACY,
            data={"max_length": 48},
            adapter={"r": 2},
            run={"report_to": "jsonl", "log_every": 2},
            output=root / "run",
        )


@pytest.fixture
def run(finished: Result, tmp_path: Path) -> RunFolder:
    """A copy of it."""
    shutil.copytree(finished.release.parent, tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.fixture(scope="session")
def filed(finished: Result, tmp_path_factory: pytest.TempPathFactory, with_plots: Plotted) -> RunFolder:
    """That run with an annex. Tests must not change its folder."""
    folder = RunFolder(tmp_path_factory.mktemp("filed") / "run")
    shutil.copytree(finished.release.parent, folder.root)
    with with_plots():
        file_annex(folder)
    return folder


@pytest.fixture
def release(filed: RunFolder, tmp_path: Path) -> Path:
    """A copy of its release, without the rest of the run."""
    return Path(shutil.copytree(filed.release, tmp_path / "handed-over"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Card and page, which take most of a check's time, are what they are."""
    monkeypatch.setattr(verifying, "pages_of", lambda report: {})
