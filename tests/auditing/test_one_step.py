"""The audit agrees with correct mechanisms of every kind and convicts broken ones."""

from __future__ import annotations

import pytest
import torch
from audit_cases import MUTATIONS, setting

from privlora.accounting.events import CyclicPoissonSampling, StepEvent
from privlora.errors import ConfigError
from privlora.lab.audits.one_step import audit_step, trials_for
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier
from privlora.mechanisms import CorrelatedNoise, band_coefficients
from privlora.methods import METHODS

SIGMA = 1.0
# A mechanism sees coordinates and a kind of clipping, never an optimizer: one method of each.
PRIVATE = list(
    {(row.space, row.clipping): name for name, row in reversed(METHODS.items()) if row.private}.values()
)


@pytest.mark.parametrize("name", PRIVATE)
def test_correct_step_is_within_its_claim_and_the_bound_is_tight(name: str) -> None:
    # M2 lets little of a canary through: as sharp an audit needs as much less noise.
    mechanism, others, canary = setting(name, 0.3 if name == "wishart-m2" else SIGMA, seed=7)
    result = audit_step(mechanism, mechanism.event, others, canary, trials=200)
    assert not result.violated
    assert result.statistic == "alignment"
    assert 0.15 * result.epsilon_claimed <= result.epsilon_lower <= result.epsilon_claimed


# The full table, for every method and many seeds, is benchmarks/auditing/mutations.py.
@pytest.mark.parametrize(("name", "mutation"), [("dp-adamw", each) for each in MUTATIONS])
def test_mutations_are_detected(name: str, mutation: str) -> None:
    assert MUTATIONS[mutation].caught(name, SIGMA, trials=150)


@pytest.mark.long
def test_a_module_that_escapes_spectral_clipping_is_detected() -> None:
    assert MUTATIONS["module not clipped"].caught("prism", SIGMA, trials=100)


@pytest.mark.parametrize(
    "mutation", ["noise/4", pytest.param("module not clipped", marks=pytest.mark.long), "fixed seed"]
)
def test_correct_steps_are_not_flagged(mutation: str) -> None:
    assert not MUTATIONS[mutation].caught("dp-adamw", SIGMA, trials=150, broken=False)


def test_noise_does_not_come_from_global_seeds() -> None:
    def first_release() -> torch.Tensor:
        torch.manual_seed(0)
        return setting("dp-adamw", SIGMA)[0].release().vector[0][0].flatten()

    assert float(torch.corrcoef(torch.stack([first_release(), first_release()]))[0, 1]) < 0.5


def test_more_trials_are_planned_for_smaller_epsilons_and_tighter_bounds() -> None:
    counts = [trials_for(gaussian_noise_multiplier(e, 1e-5), 1e-5) for e in (1.0, 3.0, 8.0)]
    assert counts == sorted(counts, reverse=True)
    assert 1000 < counts[2] < 2000
    assert 20_000 < counts[0] < 35_000
    assert trials_for(1.0, 1e-5, share=0.95) > 4 * trials_for(1.0, 1e-5, share=0.85)


@pytest.mark.long
def test_the_planned_number_of_trials_reaches_its_share() -> None:
    sigma = gaussian_noise_multiplier(8.0, 1e-5)
    mechanism, others, canary = setting("ffa", sigma, seed=7)
    result = audit_step(mechanism, mechanism.event, others, canary, trials=trials_for(sigma, 1e-5))
    assert 0.85 <= result.epsilon_lower / result.epsilon_claimed <= 1


def test_too_few_trials_are_refused() -> None:
    mechanism, others, canary = setting("dp-adamw", SIGMA)
    with pytest.raises(ConfigError, match="trials"):
        audit_step(mechanism, mechanism.event, others, canary, trials=10)


def test_a_clipping_norm_above_the_canary_is_refused() -> None:
    mechanism, others, canary = setting("dp-adamw", SIGMA)
    mechanism.clip_norm = 1e4
    with pytest.raises(ConfigError, match="too large"):
        audit_step(mechanism, mechanism.event, others, canary, trials=100)


@pytest.mark.parametrize("correlated", [True, False])
def test_one_step_by_itself_is_not_audited(correlated: bool) -> None:
    mechanism, others, canary = setting("ffa", 1.0)
    claimed = StepEvent(CyclicPoissonSampling(0.1, 3), 1.0)
    if correlated:
        noise = CorrelatedNoise(band_coefficients(3, 12), mechanism.coordinates)
        mechanism.noising.correlated, claimed = noise, mechanism.event
    with pytest.raises(ConfigError, match="several are priced together"):
        audit_step(mechanism, claimed, others, canary, trials=100)
