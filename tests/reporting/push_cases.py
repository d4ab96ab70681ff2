"""A hub that keeps what it is given, and a release that is made to look as if a run had written it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from privlora.errors import PrivacyError
from privlora.reporting.pushing import push
from privlora.reporting.seals import text_of, with_files
from privlora.training.files import RunFolder

FILES = (
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "evaluations.jsonl",
    "ledger.jsonl",
    "metrics.jsonl",
    "privacy_report.json",
    "report.html",
)
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-4, "steps": 3, "expected_batch_size": 4}
PRIVACY["public_dataset_size"] = 40
BASE = "someone/the-base"


class Hub:
    """Keeps what is uploaded, by name."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}

    def create_repo(self, repo: str, **options: Any) -> None:
        self.made = {"repo": repo, **options}

    def upload_folder(self, *, folder_path: str, allow_patterns: list[str], **options: Any) -> Any:
        found = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        assert sorted(found) == sorted(allow_patterns)
        self.files = found
        return SimpleNamespace(commit_url=f"https://hub.test/{options['repo_id']}")


def sealed_again(run: RunFolder, **changed: Any) -> None:
    """As if a run had written what lies there, and ``changed`` keys into its report. Its pages stay."""
    report = with_files({**json.loads(run.report.read_text()), **changed}, run.release)
    run.report.write_text(text_of(report))
    if run.private.exists():
        run.seal.write_text(json.loads(run.report.read_text())["sha256"])


def refused(run: RunFolder, file: str = "privacy_report.json") -> None:
    """No push, because of that file."""
    with pytest.raises(PrivacyError, match=rf"{file} in .* is not as the run wrote it"):
        push(run, "me/notes", base_model=BASE, dry_run=True)


def appended(name: str, text: str = " ") -> Callable[[Path], None]:
    """Adds ``text`` to a file of a release."""

    def write(release: Path) -> None:
        with open(release / name, "a", encoding="utf-8") as file:
            file.write(text)

    return write
