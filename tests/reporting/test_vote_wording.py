"""What a card says of public texts: of spans, of rounds that records scored, and of the model that they tuned."""

from __future__ import annotations

from typing import Any

import pytest
from promises import promise, small_settings
from tiny_models import tiny_model, tiny_tokenizer

from privlora.reporting.facts import _public_texts
from privlora.reporting.tables import method_table
from privlora.training.assembly import PublicStart, build_parts


def facts(method: str, **synthesis: Any) -> dict[str, Any]:
    settings = small_settings(
        data={"path": "(in memory)", "text": "text"},
        adapter={"r": 2},
        privacy=promise(steps=2, batch=30, records=30, noise_multiplier=1.0),
        method={"name": method},
        synthesis=synthesis,
    )
    parts = build_parts(settings, tiny_model(), PublicStart(tiny_tokenizer()))
    parts.adapter.detach()
    return _public_texts(parts)


def rows(report: dict[str, Any], method: str, **synthesis: Any) -> dict[str, str]:
    return dict(method_table({**report, "method": {**report["method"], **facts(method, **synthesis)}}))


def test_scores_and_preferences_are_told(report: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("privlora.training.texts.preferences.find_spec", lambda name: object())
    found = rows(report, "popri", answers=10, requests=7, dpo_learning_rate=0.25)
    assert "10 texts of the model for each of 7 requests" in found["Preference scores"]
    assert "over the middle one, at learning rate 0.25" in found["Preference scores"]
    assert "Votes" not in found
    assert "chosen anew" not in found["Public texts"]
    assert found["Then"].startswith("4 × ordinary training")
    assert "Then" not in rows(report, "popri", epochs=0)


@pytest.mark.parametrize(
    ("directions", "texts", "said"),
    [
        ((3.0, 5.0), (40.0, 40.0), "ridge 1, 3 to 5 of 40 directions; expected"),
        ((40.0, 40.0), (40.0, 40.0), "ridge 1, all 40 directions; expected"),
        ((39.0, 40.0), (39.0, 40.0), "39 to 40 directions of texts whose number varied, 39 to 40; expected"),
    ],
)
def test_how_many_directions_steps_took_is_said_plainly(
    directions: Any, texts: Any, said: str, report: dict[str, Any]
) -> None:
    same = dict.fromkeys(("alpha", "ridge", "cosine", "kappa"), (1.0, 1.0))
    span = {**same, "directions": directions, "texts": texts}
    found = dict(method_table({**report, "method": {**report["method"], "span": span}}))["Span"]
    assert said in found
    assert "κ 1 (about so many times the cosine" in found


def test_a_row_that_uses_no_public_texts_is_said_to_have_none() -> None:
    assert facts("prism", publish=True) == {}
    warm = facts("prism", publish=True, warm_start_epochs=1)
    assert warm["public_texts"]["warm_start_epochs"] == 1


def test_counts_are_told(report: dict[str, Any]) -> None:
    found = rows(report, "aug-pe")
    assert "for the nearest text" in found["Votes"]
    assert "the 100 texts with most votes are kept" in found["Votes"]
    assert "chosen anew after every round" in found["Public texts"]
