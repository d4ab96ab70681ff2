"""Fast losses against dp_accounting's own, which take one number at a time."""

import math

import numpy as np
import pytest
from accounting_cases import make_plan, poisson
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as reference
from hypothesis import given, settings
from hypothesis import strategies as st

import privlora.accounting.ledger as ledger_module
import privlora.accounting.ledger_format as ledger_format
from privlora.accounting import (
    Ledger,
    StepEvent,
    TruncatedPoissonSampling,
    accountants,
    calibrate_noise_multiplier,
    epsilon,
    read_ledger,
)
from privlora.accounting.loss_distributions import FastPmf, gaussian_pld, truncated_pld, with_fast_pmfs
from privlora.errors import PrivacyError

GRID = 1e-3
RELATIONS = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
    NeighboringRelation.REPLACE_ONE,
)


def theirs(sigma, q, relation, grid=GRID):
    return reference.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=grid, neighboring_relation=relation
    )


def curve(pld, epsilons=(0.0, 0.001, 0.1, 0.5, 1.0, 3.0)):
    return np.array([pld.get_delta_for_epsilon(value) for value in epsilons])


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("q", [1e-5, 1e-3, 0.01, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("sigma", [0.3, 0.7, 2.0, 30.0])
def test_one_step_loses_what_it_loses_by_dp_accounting(sigma, q, relation):
    ours, other = gaussian_pld(sigma, q, relation, GRID), theirs(sigma, q, relation)
    assert curve(ours) == pytest.approx(curve(other), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("most", [12, 18, 60])
def test_truncated_steps_lose_what_they_lose_by_dp_accounting(most, relation):
    sampling = TruncatedPoissonSampling(0.1, most, 100)
    other = reference.from_truncated_subsampled_gaussian_mechanism(
        100, 0.1, most, 0.9, value_discretization_interval=GRID, neighboring_relation=relation
    )
    ours = truncated_pld(0.9, sampling, relation, GRID)
    assert curve(ours) == pytest.approx(curve(other), rel=1e-9, abs=1e-13)
    for steps in (1, 40):
        ours_composed, composed = ours.self_compose(steps), other.self_compose(steps)
        assert ours_composed.get_epsilon_for_delta(1e-5) == pytest.approx(
            composed.get_epsilon_for_delta(1e-5), rel=1e-8
        )


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.4, 20.0),
    st.floats(1e-4, 1.0),
    st.integers(1, 3000),
    st.floats(-14.0, -0.5),
    st.sampled_from(RELATIONS),
)
def test_compositions_cost_what_they_cost_by_dp_accounting(sigma, q, steps, log_delta, relation):
    """Also at large deltas, where epsilon is 0, and at deltas too small for sums over frequencies."""
    steps = max(1, min(steps, int(20 * (sigma / q) ** 2)))
    delta = 10.0**log_delta
    ours = gaussian_pld(sigma, q, relation, GRID).self_compose(steps)
    other = theirs(sigma, q, relation).self_compose(steps)
    found, expected = (pld.get_epsilon_for_delta(delta) for pld in (ours, other))
    # dp_accounting's own rounding is about 1e-16 a step, beside delta.
    assert found == pytest.approx(expected, rel=1e-7 + 1e-12 / delta, abs=1e-8)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.0, 0.01, 1), (1.0, 0.01, 1000), (0.6, 1e-3, 20_000)])
def test_sums_over_frequencies_equal_sums_over_losses(sigma, q, steps, delta):
    composed = gaussian_pld(sigma, q, RELATIONS[0], GRID).self_compose(steps)
    for one in (composed._pmf_remove, composed._pmf_add):
        plain = reference.pld_pmf.DensePLDPmf(
            GRID, one._lower_loss, one._probs, one._infinity_mass, True
        ).get_epsilon_for_delta(delta)
        assert one.get_epsilon_for_delta(delta) == pytest.approx(plain, rel=1e-9 + 1e-15 / delta, abs=1e-9)
        assert FastPmf.of(one).get_epsilon_for_delta(delta) == pytest.approx(plain, rel=1e-12, abs=1e-12)


def test_a_loss_without_an_end_has_no_epsilon():
    pld = gaussian_pld(1.0, 0.1, RELATIONS[0], GRID)
    infinite = FastPmf(GRID, 0, np.array([0.5, 0.4]), 0.1, True)
    assert (
        infinite.get_epsilon_for_delta(0.05)
        == infinite.self_compose(3).get_epsilon_for_delta(0.05)
        == math.inf
    )
    assert pld.self_compose(5).get_epsilon_for_delta(0.999) == 0.0


@pytest.mark.parametrize("probs", [[1.0], [0.25, 0.75], [0.1, 0.0, 0.9]])
@pytest.mark.parametrize("first", [-40, -1, 0, 7])
@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("delta", [1e-12, 1e-4, 0.3])
def test_losses_of_a_few_values(probs, first, steps, delta):
    """Also all losses above zero, all below, and one alone."""
    dense = reference.pld_pmf.DensePLDPmf(0.05, first, np.array(probs), 1e-7, True)
    found = FastPmf.of(dense).self_compose(steps).get_epsilon_for_delta(delta)
    assert found == pytest.approx(dense.self_compose(steps).get_epsilon_for_delta(delta), rel=1e-9, abs=1e-9)


def test_unlike_steps_compose_as_by_dp_accounting():
    first, second = ((0.9, 0.01, 100), (1.5, 0.2, 7))
    ours, other = (
        build(*first[:2], RELATIONS[0], GRID)
        .self_compose(first[2])
        .compose(build(*second[:2], RELATIONS[0], GRID).self_compose(second[2]))
        for build in (gaussian_pld, theirs)
    )
    assert ours.get_epsilon_for_delta(1e-6) == pytest.approx(other.get_epsilon_for_delta(1e-6), rel=1e-8)
    again = with_fast_pmfs(other)
    assert again.get_epsilon_for_delta(1e-6) == pytest.approx(other.get_epsilon_for_delta(1e-6), rel=1e-12)


def test_another_number_of_steps_transforms_nothing_anew(monkeypatch):
    """What makes epsilon after every step of a run cheap: transforms grow with the logarithm of the steps."""
    import privlora.accounting.loss_distributions as module

    transforms = []
    real = module.fft.rfft
    monkeypatch.setattr(module.fft, "rfft", lambda *a: transforms.append(1) or real(*a))
    event = StepEvent(poisson(0.0123, 1.0).sampling, 1.234)
    spent = [epsilon([(event, steps)], 1e-5, grid=GRID) for steps in range(1, 1001)]
    assert spent == sorted(spent)
    assert len(transforms) <= 60  # of 1000 steps, two directions and two grids
    assert "_probs" not in vars(gaussian_pld(1.0, 0.1, RELATIONS[0], GRID).self_compose(3)._pmf_remove)


def test_long_ledgers_hash_each_line_once(tmp_path, monkeypatch):
    """A fingerprint a phase, a hash a line, and no sum over all phases or lines at each of them."""
    path, steps = tmp_path / "ledger.jsonl", 10_000
    monkeypatch.setattr(ledger_module.os, "fsync", lambda file: None)
    first, second = poisson(0.01, 1.0), poisson(0.02, 2.0)
    plan = make_plan(phases=((first, steps - 100), (second, 100)))
    counts = {"fingerprint": 0, "digest": 0}
    for module in (ledger_module, ledger_format):
        for name in counts:

            def counted(*arguments, real=getattr(module, name), name=name):
                counts[name] += 1
                return real(*arguments)

            monkeypatch.setattr(module, name, counted)
    with Ledger.create(path, plan) as ledger:
        for step in range(steps):
            ledger.charge(plan.event_of(step + 1))
        ledger.finish()
    # A fingerprint is a digest, too.
    assert counts == {"fingerprint": 2, "digest": steps + 2 + 2}
    counts.update(fingerprint=0, digest=0)
    summary = read_ledger(path)
    assert counts == {"fingerprint": 2, "digest": steps + 2 + 2}
    assert (summary.charges, summary.closed) == (steps, True)
    assert summary.charge_hashes == ledger.summary.charge_hashes
    assert ledger.charge_hash(steps) == summary.charge_hashes[-1]


def test_a_calibration_is_confirmed_by_dp_accounting(monkeypatch):
    """Whatever goes wrong in our own sums, no noise is chosen by them alone."""
    import privlora.accounting.loss_distributions as module

    real = module.gaussian_pld
    monkeypatch.setattr(module, "gaussian_pld", lambda sigma, *others: real(1.01 * sigma, *others))
    accountants._step_pld.cache_clear()
    with pytest.raises(PrivacyError, match="two ways of computing epsilon disagree"):
        calibrate_noise_multiplier(poisson(0.01, 1.0).sampling, 100, 2.0, 1e-5, cache=False)
    accountants._step_pld.cache_clear()
