"""A run whose model breaks: its rates were too large, and what it publishes is still what others can read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_cases import Bench, Warned

from privlora.reporting import rewrite_report
from privlora.reporting.verifying import verify
from privlora.training.files import RunFolder, read_lines
from privlora.training.loop import _worse_than_guessing


def test_a_held_out_loss_that_is_not_finite_is_told_once_and_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In JSON that every reader knows, on the screen and in the report; and the release is verified as it is."""
    monkeypatch.setattr("privlora.methods._HOPELESS", 1e99)
    bench, observer = Bench(), Warned()
    folder = RunFolder(tmp_path / "run")
    public = [{"text": f"on day {i} the weather was fine."} for i in range(5)]
    options: dict[str, Any] = {"method": {"name": "dp-sgd", "learning_rate": 1e30}, "evaluation": public}
    bench.start(folder.root, observer=observer, run={"evaluate_every": 2}, **options)
    _, told = (what for what in observer.warnings if "public prompts" not in what)
    assert "held-out loss after step 2 is not a finite number" in told
    text = folder.evaluations.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, *others = read_lines(folder.evaluations)
    assert isinstance(first["loss_per_example"], float)
    assert len(others) > 1
    assert all(row["loss_per_example"] is None for row in others)
    for page in ("README.md", "report.html"):
        assert "not a finite number after step 2" in (folder.release / page).read_text()
    assert verify(folder.release).passed
    bench.resume(folder.root, public)
    assert folder.evaluations.read_text() == text
    rewrite_report(folder)
    assert verify(folder.release).passed


@pytest.mark.parametrize(
    ("loss", "data", "told"),
    [(7.0, {}, True), (6.7, {}, False), (7.0, {"label": "y"}, False), (7.0, {"chosen": "a"}, False)],
)
def test_a_base_model_that_is_worse_than_guessing_is_told(
    loss: float, data: dict[str, Any], told: bool
) -> None:
    """As with a tokenizer of another model, before any step is charged."""
    parts = SimpleNamespace(
        settings=SimpleNamespace(data=SimpleNamespace(**{"label": None, "chosen": None, **data})),
        adapter=SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=512))),
    )
    words = _worse_than_guessing(parts, loss)  # type: ignore[arg-type]
    assert (words is not None) == told
    assert words is None or "7.00 nats a token; one of 512 tokens at random has 6.24" in words
