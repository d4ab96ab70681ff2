"""What rounds of votes cost, alone and before private training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from privlora.accounting import (
    Ledger,
    Plan,
    PoissonSampling,
    StepEvent,
    calibrate_noise_multiplier,
    compose_ledgers,
    epsilon,
    read_ledger,
)
from privlora.errors import PrivacyError
from privlora.synthesis import plans
from privlora.synthesis.plans import plan_votes, plan_votes_and_training

NAMED: dict[str, Any] = {"delta": 1e-5, "expected_batch_size": 400.0, "method": "aug-pe", "dataset": "notes"}


@pytest.mark.parametrize(("target", "sigma"), [(1.0, 11.797), (2.0, 6.305), (4.0, 3.419), (8.0, 1.898)])
def test_ten_rounds_of_everybody_need_the_published_noise(target: float, sigma: float) -> None:
    plan = plan_votes(10, target_epsilon=target, **NAMED)
    ((event, rounds),) = plan.phases
    assert (rounds, event.sampling, plan.clip_norm, plan.unit) == (10, PoissonSampling(1.0), 1.0, "record")
    assert event.noise_multiplier == pytest.approx(sigma, rel=0.005)
    assert epsilon(plan.phases, 1e-5) <= target
    weaker = StepEvent(event.sampling, event.noise_multiplier * 0.995)
    assert epsilon([(weaker, 10)], 1e-5) > target


def test_sampled_voters_need_less_noise() -> None:
    plan = plan_votes(10, target_epsilon=1.0, sampling=PoissonSampling(0.2), **NAMED)
    assert plan.phases[0][0].noise_multiplier == pytest.approx(2.8257, rel=0.005)


def test_a_user_is_a_unit_as_a_record_is() -> None:
    plan = plan_votes(3, target_epsilon=1.0, unit="user", records_per_user=4, **NAMED)
    assert (plan.unit, plan.records_per_user) == ("user", 4)


VOTES = StepEvent(PoissonSampling(1.0), 12.0)


def both(votes: StepEvent = VOTES, target: float = 3.0, sampling: float = 0.2) -> Plan:
    return plan_votes_and_training(
        votes,
        5,
        (PoissonSampling(sampling), 10),
        target_epsilon=target,
        clip_norm=0.1,
        **{**NAMED, "expected_batch_size": 80.0},
    )


def test_votes_and_training_are_phases_of_one_ledger(tmp_path: Path) -> None:
    plan = both()
    assert (plan.before_training, plan.steps) == (5, 15)
    assert 0.99 * 3.0 < epsilon(plan.phases, 1e-5) <= 3.0
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, plan) as ledger:
        for step in range(1, 16):
            if step == 6:
                with pytest.raises(PrivacyError, match="planned"):
                    ledger.charge(VOTES)
            assert ledger.charge(plan.event_of(step)) == step
        ledger.finish()
    assert read_ledger(path).epsilon() == epsilon(plan.phases, 1e-5)
    assert compose_ledgers([path]).epsilon <= 3.0


def test_training_has_what_the_votes_leave() -> None:
    alone = calibrate_noise_multiplier(PoissonSampling(0.2), 10, 3.0, 1e-5).noise_multiplier
    beside = both().phases[-1][0].noise_multiplier
    assert beside > alone
    with pytest.raises(PrivacyError, match="beside the steps"):
        both(StepEvent(PoissonSampling(1.0), 1.0), target=1.0)


def test_a_step_of_training_that_is_charged_as_a_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be one phase of the plan, and votes could go on where training should begin."""
    monkeypatch.setattr(plans, "calibrate_noise_multiplier", lambda *_, **__: SimpleNamespace(event=VOTES))
    with pytest.raises(PrivacyError, match="charged as a round"):
        both()
