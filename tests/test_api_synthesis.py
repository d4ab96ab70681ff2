"""privlora.synthesize: records in memory, loaded models, finished runs; what comes back and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

import privlora
from privlora.accounting import read_ledger
from privlora.errors import ConfigError, RunError
from privlora.training.observer import Observer

RECORDS = [{"note": f"patient {i} came in at {i % 7} with a cold."} for i in range(12)]
PRIVACY: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "delta": 1e-3,
    "steps": 2,
    "sample_rate": 1.0,
    "public_dataset_size": 12,
}
COLUMNS = {"text": "note", "max_length": 40}


class Notes:
    """A generator whose variations are new texts."""

    def random(self, count: int) -> list[str]:
        return [f"note {i}: a patient had a cough" for i in range(count)]

    def vary(self, texts: Sequence[str]) -> list[str]:
        self.asked = getattr(self, "asked", 0) + 1
        return [f"{text[:30]} and {self.asked}{i}" for i, text in enumerate(texts)]


def make(model: Any, output: Path, **options: Any) -> privlora.SynthesisResult:
    given: dict[str, Any] = {
        "privacy": PRIVACY,
        "data": COLUMNS,
        "adapter": {"r": 2},
        "synthesis": {"seeds": 3, "samples": 9},
        "generator": Notes(),
    }
    return privlora.synthesize(
        model, RECORDS, tokenizer=tiny_tokenizer(), output=output, **{**given, **options}
    )


def test_records_in_memory_become_texts(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    class Hears(Observer):
        def on_texts(self, done: int, total: int) -> None:
            told.append((done, total))

    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = make(model, tmp_path / "texts", observer=Hears())
    assert len(set(result.texts)) == 9
    assert all("a patient had a cough" in text for text in result.texts)
    assert told[-1] == (9, 9)
    assert result.folder == tmp_path / "texts"
    assert result.release == result.folder / "release"
    lines = (result.release / "synthetic.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"note": text} for text in result.texts]
    assert result.report["texts"]["count"] == 9
    ledger = read_ledger(result.release / "ledger.jsonl")
    assert (ledger.plan.method, ledger.charges) == ("aug-pe", result.steps)
    assert (result.epsilon, result.delta) == (ledger.epsilon(), 1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_finished_run_is_asked_at_no_cost(tmp_path: Path) -> None:
    model = tiny_model()
    trained = privlora.fine_tune(
        model,
        RECORDS,
        tokenizer=tiny_tokenizer(),
        privacy=PRIVACY,
        data=COLUMNS,
        adapter={"r": 2},
        output=tmp_path / "run",
    )
    asked = {"seeds": 3, "samples": 4, "max_new_tokens": 8, "random_prompt": "note"}
    result = privlora.synthesize(
        model,
        source=tmp_path / "run",
        synthesis=asked,
        tokenizer=tiny_tokenizer(),
        run={"seed": 3},
        output=tmp_path / "texts",
    )
    assert len(result.texts) == 4
    assert result.report["texts"]["column"] == "note"
    assert result.report["texts"]["of_a_finished_run"]
    assert (result.epsilon, result.steps) == (trained.epsilon, trained.steps)
    own, theirs = (read_ledger(place / "ledger.jsonl") for place in (result.release, trained.release))
    assert own.run_id == theirs.run_id
    with pytest.raises(ConfigError, match="privacy is given, and the run in source is trained already"):
        privlora.synthesize(model, source=tmp_path / "run", synthesis=asked, privacy=PRIVACY)
    # Nothing of an adapter is in a folder of texts, so it cannot be asked in its turn.
    with pytest.raises(RunError, match="no adapter that could be asked"):
        privlora.synthesize(
            model,
            source=tmp_path / "texts",
            synthesis=asked,
            tokenizer=tiny_tokenizer(),
            output=tmp_path / "more",
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "runs/a"}, "give records, or source, and not both"),
        ({"synthesis": None, "generator": None}, "nothing says who writes the texts"),
        ({"synthesis": "model"}, "synthesis is of type str"),
        ({"synthesis": {"seeds": 3, "file": "p.jsonl"}}, "generator is given, and synthesis names another"),
        ({"method": {"name": "prism"}}, "synthesis.callable asks another writer"),
        ({"privacy": None}, "privacy"),
    ],
)
def test_calls_that_cannot_be_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make(tiny_model(), tmp_path / "texts", **options)
    assert not (tmp_path / "texts").exists()


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run in"):
        privlora.synthesize(tiny_model(), source=tmp_path / "nowhere", synthesis={})
