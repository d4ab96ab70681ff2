"""What the demo prints at its end can be pasted and runs."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from privlora.demo import run
from privlora.training.files import RunFolder


def test_the_last_lines_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "read_ledger", lambda _: SimpleNamespace(charges=3))
    monkeypatch.setattr("peft.PeftModel.from_pretrained", lambda _, folder: Path(folder))
    console = Console(record=True, file=io.StringIO())
    run._tell_where(console, RunFolder(tmp_path), tmp_path / "secrets.jsonl")
    code = console.export_text().partition("Use it:\n")[2].partition("\n\nAttack it")[0]
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in code.splitlines()), names)
    assert names["model"] == tmp_path / "release"
    assert names["tokenizer"]("a note").input_ids
