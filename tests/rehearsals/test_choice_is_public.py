"""``method.name: auto`` through a whole start: what reaches the choice is the same whatever the records are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer

import privlora.running
from privlora.api import fine_tune

PRIVACY = {
    "noise_multiplier": 1.5,
    "delta": 1e-3,
    "steps": 2,
    "expected_batch_size": 6,
    "public_dataset_size": 12,
}


class Chosen(Exception):
    """In the place of a choice: the run goes no further."""


def test_nothing_that_is_chosen_by_follows_from_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number, lengths and words: a private one among settings would be published with the choice."""
    file = tmp_path / "public.jsonl"
    file.write_text(
        "\n".join(json.dumps({"text": f"visitor {i} left."}) for i in range(48)), encoding="utf-8"
    )
    seen: list[tuple[Any, ...]] = []

    def choose(settings: Any, multiplier: float, model: Any, tokenizer: Any, *rest: Any) -> None:
        public = [each for each in rest if each is not None and not callable(each)]
        seen.append((settings.to_yaml(), multiplier, public))
        raise Chosen

    monkeypatch.setattr(privlora.running, "choose", choose)
    monkeypatch.setattr("privlora.rehearsals.trials.MORE_TEXTS", 32)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    for count, words in ((12, "came in with a cold."), (11, "left."), (13, "stayed.")):
        with pytest.raises(Chosen):
            fine_tune(
                model,
                [{"text": f"patient {i} {words}"} for i in range(count)],
                tokenizer=tokenizer,
                output=tmp_path / "run",
                data={"max_length": 40},
                privacy=PRIVACY,
                adapter={"r": 2, "target_modules": ["q_proj"]},
                method={"name": "auto"},
                synthesis={"file": str(file), "seeds": 8},
            )
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][2] == []
