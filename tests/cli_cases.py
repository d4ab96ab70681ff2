"""A tiny model on disk, records in every form, and calls of the real command line inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from promises import promise
from tiny_models import byte_tokenizer, tiny_llama

from privlora.cli import main
from privlora.training.progress import WRITING

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LOADING = "loading torch and transformers"
CHECKING = "checking every file of the release against its report and ledger"
PHASES = (
    LOADING,
    "looking at the model's files",
    "loading the model",
    "reading the records",
    "preparing the first step",
    "preparing the next step",
    "preparing the release",
    WRITING,
    CHECKING,
)
"""What commands say in pipes as it begins."""
TRAINING = (PHASES[0], PHASES[1], PHASES[3], PHASES[2], PHASES[4], WRITING)
"""Of these the ones of `privlora train`, in their order."""
EVALUATING = (LOADING, "reading the records", "loading the model")
"""Of these the ones of `privlora evaluate`, in their order."""
PRIVACY = promise(steps=3, batch=4, records=20, delta=1e-5, noise_multiplier=1)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")


def save_tiny_model(folder: Path, *, chat: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A random Llama of two layers (width 16) over bytes, in ``folder``."""
    tokenizer = byte_tokenizer(("<pad>", "</s>"), pad_token="<pad>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    tiny_llama(max_position_embeddings=128, **tokens).to(dtype).save_pretrained(folder)
    return folder


def record(number: int) -> dict[str, Any]:
    """One record with the columns of every form."""
    name, other = NAMES[number % len(NAMES)], f"case {number}"
    return {
        "text": f"{name} came in with {other}.",
        "question": f"Who had {other}?",
        "answer": f"{name}.",
        "messages": [
            {"role": "user", "content": f"Who had {other}?"},
            {"role": "assistant", "content": name},
        ],
        "patient": name,
    }


def task_record(number: int) -> dict[str, Any]:
    """One record with the columns of a task of GLUE and of a math task."""
    return {
        "sentence": f"{NAMES[number % len(NAMES)]} liked film {number}.",
        "label": number % 2,
        "instruction": f"What is {number} + 1?",
        "input": "",
        "output": f"The answer is {number + 1}.",
        "answer": str(number + 1),
    }


def write_records(
    path: Path, count: int = 40, *, first: int = 0, make: Callable[[int], dict[str, Any]] = record
) -> Path:
    """JSONL, or plain text for names that end in .txt."""
    rows = [make(first + i) for i in range(count)]
    lines = [row["text"] if path.suffix == ".txt" else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def run_settings(model: Path, folder: Path, /, **groups: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A run of three private steps on ``folder``/records.jsonl; ``groups`` are laid over it, None removes."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "device": "cpu"},
        "data": {"path": str(folder / "records.jsonl"), "max_length": 48},
        "adapter": {"r": 2},
        "privacy": promise(steps=3, batch=4, records=40, noise_multiplier=2.0),
        "run": {"output": str(folder / "run")},
    }
    for group, values in groups.items():
        merged = {**settings.get(group, {}), **values}
        settings[group] = {key: value for key, value in merged.items() if value is not None}
    return settings


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """What --json printed: one object and nothing else."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> Outcome:
    """The command line with these arguments."""
    capsys.readouterr()
    code = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


Call = Callable[..., Outcome]
"""The command line with these arguments, as the fixture ``call`` of tests/cli gives it."""


def phases(outcome: Outcome) -> list[str]:
    """Of the lines of stderr those that name a phase, in their order."""
    return [line for line in outcome.err.splitlines() if line in PHASES]


def after(outcome: Outcome, *begun: str) -> list[str]:
    """The lines of stderr after these phases, with which it begins; it names no other and none twice."""
    lines = outcome.err.splitlines()
    assert lines[: len(begun)] == phases(outcome) == list(begun), outcome.err
    return lines[len(begun) :]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file's content and every folder (None), by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refuses(
    call: Call, folder: Path, argv: list[object], *words: str, quiet: bool = True, said: Sequence[str] = ()
) -> Outcome:
    """The command refuses in one line that holds ``words``, or with a line for each fix; nothing changes in
    ``folder``.
    quiet: nothing else is printed but the phases ``said`` before; where none are, what a command says before slow
    imports.
    """
    before = tree(folder)
    outcome = call(*argv)
    check(outcome, *words)
    if quiet:
        slow = [phase for phase in phases(outcome) if phase in (LOADING, CHECKING)]
        _, *fixes = after(outcome, *(said or slow))
        assert len(fixes) != 1, outcome.err
        assert all(line.startswith("  - ") for line in fixes), outcome.err
    assert tree(folder) == before
    return outcome


def check(outcome: Outcome, *words: str) -> None:
    lines = outcome.err.splitlines()
    fixes = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    errors = [
        f"{line} {'; '.join(fixes)}" if line.endswith((" Fix:", " mistakes:")) else line
        for line in lines
        if line.startswith("error: ")
    ]
    assert outcome.code == 2, outcome
    assert len(errors) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    for word in words:
        assert word in errors[0], errors[0]
