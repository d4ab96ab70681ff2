"""What a promise means: against the closed forms of the Gaussian mechanism, and that bounds are bounds."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from scipy.optimize import brentq

from privlora.accounting import PoissonSampling, StepEvent
from privlora.accounting.meaning import Meaning, in_words, meaning, noise_for
from privlora.errors import PrivacyError

NORMAL = NormalDist()


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 9])
def test_one_gaussian_release_after_the_other(sigma: float, steps: int) -> None:
    """mu = sqrt(steps) / sigma: guesses are right in Phi(mu / 2) of all cases, and Phi(Phi^-1(a) + mu) are found."""
    mu = steps**0.5 / sigma
    found = meaning([(StepEvent(PoissonSampling(1.0), sigma), steps)])
    told = (found.right_guesses, found.found_at_1_percent, found.found_at_1_permille)
    true = (NORMAL.cdf(mu / 2), *(NORMAL.cdf(NORMAL.inv_cdf(a) + mu) for a in (0.01, 0.001)))
    for bound, value in zip(told, true, strict=True):
        assert value - 1e-9 <= bound <= 1.03 * value + 1e-3


def test_replacing_a_record_tells_twice_as_much() -> None:
    """Of one that is replaced, both contribute: mu = 2 sqrt(steps) / sigma."""
    mu = 2 * 4**0.5 / 3
    found = meaning([(StepEvent(PoissonSampling(1.0), 3.0), 4)], "replace-one")
    assert found.right_guesses == pytest.approx(NORMAL.cdf(mu / 2), abs=1e-3)
    true = NORMAL.cdf(NORMAL.inv_cdf(0.01) + mu)
    assert true - 1e-9 <= found.found_at_1_percent <= 1.03 * true + 1e-3


def test_more_steps_tell_more_and_none_tell_nothing() -> None:
    few, many = (meaning([(StepEvent(PoissonSampling(0.01), 1.0), steps)]) for steps in (10, 1000))
    assert few.right_guesses < many.right_guesses < 1
    assert few.found_at_1_percent < many.found_at_1_percent
    assert meaning([]) == Meaning(0.5, 0.01, 0.001)


def test_in_words() -> None:
    guesses, found, worst = in_words(Meaning(0.61203, 0.0412, 0.00512), "user", 3.0)
    assert guesses.startswith("Average: an attacker asks about users")
    assert "at most 61.3 % of guesses" in guesses
    assert "finds at most 4.2 % of the users that took part" in found
    assert worst.endswith("becomes at most 95.3 % sure.")
    assert len(in_words(Meaning(0.61203, 0.0412, 0.00512), "user", None)) == 2


def test_delta_is_not_how_often_the_worst_case_is_passed() -> None:
    """Of a Gaussian with (3, 1e-4), whose losses are normal: 5.6 times as often. So no page may say that it is."""

    def delta(mu: float, epsilon: float = 3.0) -> float:
        return float(
            NORMAL.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * NORMAL.cdf(-mu / 2 - epsilon / mu)
        )

    mu = brentq(lambda mu: delta(mu) - 1e-4, 0.1, 3)
    assert NORMAL.cdf(mu / 2 - 3 / mu) / delta(mu) == pytest.approx(5.6, abs=0.1)


@pytest.mark.parametrize("wanted", [{"right_guesses": 0.6}, {"found_at_1_percent": 0.05}])
def test_noise_for_a_share_is_the_least(wanted: dict[str, float]) -> None:
    sampling, steps = PoissonSampling(0.05), 40
    sigma = noise_for(((sampling, steps),), **wanted)
    (name, share), *_ = wanted.items()
    found = [getattr(meaning([(StepEvent(sampling, s), steps)]), name) for s in (sigma, 0.999 * sigma)]
    assert found[0] <= share < found[1]


def test_noise_for_one_release_is_the_gaussians() -> None:
    sigma = noise_for(((PoissonSampling(1.0), 4),), right_guesses=0.6)
    assert sigma == pytest.approx(1 / NORMAL.inv_cdf(0.6), rel=0.01)  # Phi(mu / 2) with mu = 2 / sigma


def test_noise_for_a_share_is_of_all_phases_together() -> None:
    phases = ((PoissonSampling(0.05), 40), (PoissonSampling(0.5), 4))
    sigma = noise_for(phases, right_guesses=0.6)
    found = meaning([(StepEvent(sampling, sigma), steps) for sampling, steps in phases])
    assert 0.599 < found.right_guesses <= 0.6
    assert sigma > 1.05 * noise_for(phases[:1], right_guesses=0.6)


def test_a_share_of_a_coin_is_refused() -> None:
    with pytest.raises(PrivacyError, match="between that of a coin and 1"):
        noise_for(((PoissonSampling(0.1), 4),), right_guesses=0.5)
