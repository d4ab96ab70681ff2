"""Whole runs played many times, and methods that lean on public texts: bounds near the claim, broken ones convicted."""

from __future__ import annotations

import pytest
import torch
from audit_cases import MUTATIONS, SPAN_MUTATIONS, opposite, playing, quarter_noise, realised_divisor, setting

from privlora.auditing.gradient_canaries import draw_canaries
from privlora.errors import ConfigError
from privlora.lab.audits.many_runs import audit_runs
from privlora.lab.audits.one_step import audit_step, trials_for
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier

RATE, STEPS, SIGMA = 0.5, 2, 0.5  # epsilon 13 at delta 1e-5: few runs show much of it


SPANS = pytest.mark.parametrize("name", [pytest.param("pe-sgd", marks=pytest.mark.long), "gep"])


@pytest.mark.long
@SPANS  # all rows: benchmarks/auditing/few_records.py
def test_one_step_on_public_texts_comes_near_its_claim(name: str) -> None:
    sigma = gaussian_noise_multiplier(8.0, 1e-5)
    mechanism, others, canary = setting(name, sigma, seed=7, others=1, targets=["q_proj"])
    found = audit_step(mechanism, mechanism.event, others, canary, trials=trials_for(sigma, 1e-5))
    assert 0.85 <= found.epsilon_lower / found.epsilon_claimed <= 1


@SPANS
def test_whole_runs_come_near_their_claim_and_leave_the_state_as_it_was(name: str) -> None:
    state, mechanism, canary = playing(name, SIGMA, rate=RATE, seed=7)
    before = state.states()
    claimed = [(mechanism.event, STEPS)]
    # Such a bound is above the claim as often as its confidence allows.
    found = audit_runs(
        *(state, mechanism, claimed, canary), steps=STEPS, learning_rate=0.05, trials=300, confidence=0.999
    )
    assert 0.3 * found.epsilon_claimed <= found.epsilon_lower <= found.epsilon_claimed
    after = state.states()
    assert all(torch.equal(t, after[part][key]) for part, own in before.items() for key, t in own.items())


def test_runs_with_a_quarter_of_the_noise_are_convicted() -> None:
    state, mechanism, canary = playing("pe-sgd", 2.0, rate=RATE, seed=7)
    quarter_noise(mechanism)
    claimed = [(mechanism.event, STEPS)]
    assert audit_runs(state, mechanism, claimed, canary, steps=STEPS, learning_rate=0.05, trials=100).violated


@pytest.mark.parametrize("trials", [99, 100])
def test_too_few_trials_and_many_canaries_are_refused(trials: int) -> None:
    state, mechanism, _ = playing("pe-sgd", 1.0, rate=RATE)
    canaries = draw_canaries(state.adapter, 1 + trials % 99, torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="canaries give no bound"):
        audit_runs(
            state, mechanism, [(mechanism.event, 2)], canaries, steps=2, learning_rate=0.5, trials=trials
        )


@pytest.mark.parametrize("mutation", ["noise/4", "tensor without noise"])
def test_broken_steps_are_convicted(mutation: str) -> None:
    assert MUTATIONS[mutation].caught("pe-sgd", 1.0, trials=150)


@pytest.mark.parametrize("broken", [False, True])
def test_division_by_the_drawn_is_convicted_where_all_others_point_the_other_way(broken: bool) -> None:
    """Sampling one more unit then moves the mean by up to two columns; a public divisor lets it move by one."""
    mechanism, _, canary = setting("pe-sgd", 1.0, seed=7, targets=["q_proj"])
    if broken:
        realised_divisor(mechanism)
    found = audit_step(mechanism, mechanism.event, opposite(canary, 3), canary, trials=400, confidence=0.99)
    assert found.violated == broken


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("pe-sgd", "column not normalised"),
        ("span-prism", "column not normalised"),
        ("gep", "residual not noised"),
        ("gep", "parts charged apart"),
    ],
)
def test_what_only_a_method_with_public_texts_can_get_wrong_is_convicted(name: str, mutation: str) -> None:
    # The root of two is little: fewer trials, or more noise, would not show it.
    assert SPAN_MUTATIONS[mutation].caught(name, 0.6, trials=400)
