"""How long steps take: by a clock that the test owns, and from nothing but public numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from privlora.config import Settings, settings_from
from privlora.config.auto import run_sizes
from privlora.errors import ConfigError
from privlora.rehearsals import pace
from privlora.rehearsals.pace import Pace, measure_pace, most_passes


def _settings(**groups: Any) -> Settings:
    privacy = {
        "target_epsilon": 3,
        "delta": 1e-5,
        "steps": 20,
        "expected_batch_size": 8,
        "public_dataset_size": 400,
    }
    data = {"path": "none.jsonl", "text": "text", "max_length": 12}
    adapter = {"r": 2, "target_modules": ["q_proj"]}
    whole = {"model": {"name": "none"}, "data": data, "adapter": adapter, "privacy": privacy}
    return settings_from({**whole, **{k: {**whole.get(k, {}), **v} for k, v in groups.items()}})


class _Clock:
    """A second a step and a tenth a record of it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_what_it_takes_beside_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lengths = _Clock(), []
    settings, model = _settings(), tiny_model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    steps = pace.trial_step

    def with_clock(parts: Any, records: Any, noise: Any, draw: int) -> Any:
        step = steps(parts, records, noise, draw)
        take = step.take

        def taking(drawn: Any) -> Any:
            clock.now += 1 + 0.1 * len(drawn)
            lengths.extend(len(records[i].input_ids) for i in drawn)
            return take(drawn)

        step.take = taking
        return step

    monkeypatch.setattr(pace, "trial_step", with_clock)
    found = measure_pace(settings, model, tiny_tokenizer(), tokens=7, clock=clock)
    assert found.record == pytest.approx(0.1)
    assert found.step == pytest.approx(1.0)
    assert set(lengths) == {7}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(("minutes", "units"), [(1.0, 500), (30.0, 10_000), (600.0, 1_000_000)])
def test_the_most_passes_are_those_that_just_fit(minutes: float, units: int) -> None:
    timed = Pace(128, 0.3, 0.004)
    passes = most_passes(timed, units, minutes)
    assert passes is not None
    assert timed.minutes(*run_sizes(units, passes)) <= minutes
    more = 1.15 * passes
    assert passes == 100 or timed.minutes(*run_sizes(units, more)) > minutes


def test_a_budget_may_have_room_for_nothing() -> None:
    assert most_passes(Pace(128, 60.0, 1.0), 1000, 1.0) is None


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ({"privacy": {"unit": "user", "user_column": "user"}}, "unit=user"),
        ({"data": {"chunk": True}}, "data.chunk"),
        ({"data": {"label": "label", "labels": 2}}, "data.label"),
    ],
)
def test_units_of_unknown_length_are_not_timed(groups: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        measure_pace(_settings(**groups), tiny_model(), tiny_tokenizer(), tokens=7)
