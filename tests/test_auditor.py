"""Whoever holds a release installs no torch: what packaging/verify declares is all that its commands import."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from promises import promise

from privlora.api import fine_tune

ROOT = Path(__file__).parent.parent
DECLARED = tomllib.loads((ROOT / "packaging/verify/pyproject.toml").read_text())["project"]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT_OUT = [
    line.split(">")[0].replace("-", "_")
    for line in set(WHOLE["dependencies"]) - set(DECLARED["dependencies"])
]
ALONE = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %s:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Without())
from privlora.cli import audit_main
sys.exit(audit_main())
"""


def alone(*words: object) -> subprocess.CompletedProcess[str]:
    """The second wheel's command, in a process that can import nothing of training."""
    command = [sys.executable, "-c", ALONE % LEFT_OUT, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import tiny_llama, tiny_tokenizer

    records = [{"text": f"note {i} of a cat"} for i in range(40)]
    privacy: dict[str, Any] = promise(steps=2, batch=8, records=40, noise_multiplier=1.0)
    given = {"tokenizer": tiny_tokenizer(), "output": tmp_path_factory.mktemp("auditor"), "privacy": privacy}
    return fine_tune(tiny_llama(), records, adapter={"r": 2}, **given).release


def test_a_release_is_verified(release: Path) -> None:
    done = alone("verify", release)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("verified; no annex was checked")
    report = release / "privacy_report.json"
    report.write_text(report.read_text().replace('"delta": 0.001', '"delta": 1e-09'))
    assert alone("verify", release).returncode == 1
    asked = alone("verify", release, "--base", "model")
    assert asked.returncode == 2
    assert "is compared by torch, which is not installed here" in asked.stderr


def test_noise_and_epsilon_are_computed() -> None:
    given = ("--sample-rate", 0.01, "--steps", 100, "--delta", 1e-5)
    assert alone("calibrate", *given, "--epsilon", 3).returncode == 0
    shown = alone("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("verify", "calibrate", "budget"))
    unknown = alone("train", "run.yaml")
    assert unknown.returncode == 2
    assert "there is no command 'train'" in unknown.stderr


def test_its_version_and_lower_bounds_are_privloras() -> None:
    assert set(DECLARED["dependencies"]) < set(WHOLE["dependencies"])
    assert {"torch", "transformers", "safetensors"} <= set(LEFT_OUT)
    assert DECLARED["requires-python"] == WHOLE["requires-python"]
