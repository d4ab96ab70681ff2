"""What a card says of rounds that records scored, and of the model that they tuned."""

from __future__ import annotations

from typing import Any

from tiny_models import tiny_model, tiny_tokenizer

from privlora.config import settings_from
from privlora.reporting.facts import _public_texts
from privlora.reporting.wording import _public_texts as rows_of
from privlora.training.assembly import PublicStart, build_parts


def rows(method: str, **synthesis: Any) -> dict[str, str]:
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 2}
    settings = settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": "(in memory)", "text": "text"},
            "adapter": {"r": 2},
            "privacy": {**privacy, "expected_batch_size": 30, "public_dataset_size": 30},
            "method": {"name": method},
            "synthesis": synthesis,
        }
    )
    parts = build_parts(settings, tiny_model(), PublicStart(tiny_tokenizer()))
    parts.adapter.detach()
    return dict(rows_of(_public_texts(parts)["public_texts"]))


def test_scores_and_preferences_are_told(monkeypatch: Any) -> None:
    monkeypatch.setattr("privlora.training.texts.preferences.find_spec", lambda name: object())
    found = rows("popri", answers=10, requests=7, dpo_learning_rate=0.25)
    assert "10 texts of the model for each of 7 requests" in found["Preference scores"]
    assert "over rank 5: beta 0.01, learning rate 0.25, epochs 1" in found["Preference scores"]
    assert "Votes" not in found
    assert "chosen anew" not in found["Public texts"]
    assert found["Then"].startswith("4 × ordinary training")
    assert "Then" not in rows("popri", epochs=0)


def test_counts_are_told() -> None:
    found = rows("aug-pe", nearest=3, lookahead=2)
    assert "for the 3 nearest" in found["Votes"]
    assert "100 texts are kept by rank" in found["Votes"]
    assert "where 2 variations of it are" in found["Votes"]
    assert "chosen anew after every round" in found["Public texts"]
