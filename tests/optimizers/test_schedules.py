"""Learning rates are functions of public step numbers."""

from __future__ import annotations

import pytest

from privlora.errors import ConfigError
from privlora.schedules import SCHEDULES, learning_rate_at


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_rates_are_positive_rise_to_the_peak_and_never_exceed_it(schedule: str, warmup: int) -> None:
    rates = [learning_rate_at(step, 20, 0.3, schedule, warmup) for step in range(1, 21)]
    assert all(0 < rate <= 0.3 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)
    if after:
        assert after[0] == pytest.approx(0.3)


def test_shapes() -> None:
    assert learning_rate_at(11, 20, 1.0, "linear") == pytest.approx(0.5)
    assert learning_rate_at(11, 20, 1.0, "cosine") == pytest.approx(0.5)
    assert learning_rate_at(20, 20, 1.0, "linear") == pytest.approx(0.05)
    assert learning_rate_at(1, 20, 1.0, "constant", warmup_steps=3) == pytest.approx(0.25)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="constant, linear, cosine"):
        learning_rate_at(1, 2, 0.1, "cosin")
