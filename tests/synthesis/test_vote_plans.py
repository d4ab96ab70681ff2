"""What rounds of votes cost."""

from __future__ import annotations

import pytest

from privlora.accounting import PoissonSampling, StepEvent, calibrate_noise_multiplier, epsilon


@pytest.mark.parametrize(
    ("rate", "target", "sigma"),
    [(1.0, 1.0, 11.797), (1.0, 4.0, 3.419), (1.0, 8.0, 1.898), (0.2, 1.0, 2.8257), (0.1, 1.0, 1.7406)],
)
def test_ten_rounds_need_the_published_noise(rate: float, target: float, sigma: float) -> None:
    """Of everybody, and of few who are drawn: by dp-accounting on a grid of 1e-4."""
    event = calibrate_noise_multiplier(PoissonSampling(rate), 10, target, 1e-5).event
    assert event.noise_multiplier == pytest.approx(sigma, rel=0.005)
    assert epsilon([(event, 10)], 1e-5) <= target
    assert epsilon([(StepEvent(event.sampling, event.noise_multiplier * 0.995), 10)], 1e-5) > target


def test_training_has_what_the_votes_leave() -> None:
    votes, sampling = StepEvent(PoissonSampling(1.0), 12.0), PoissonSampling(0.2)
    alone = calibrate_noise_multiplier(sampling, 10, 3.0, 1e-5)
    beside = calibrate_noise_multiplier(sampling, 10, 3.0, 1e-5, beside=((votes, 5),))
    assert beside.noise_multiplier > alone.noise_multiplier
    assert 0.99 * 3.0 < epsilon([(votes, 5), (beside.event, 10)], 1e-5) <= 3.0
