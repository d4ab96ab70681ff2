"""Fast losses against dp_accounting's own, which take one number at a time."""

import functools
import itertools
import math

import numpy as np
import pytest
from accounting_cases import exact_epsilon, make_plan, poisson
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


SIGMAS, RATES = (0.3, 0.7, 2.0, 30.0), (1e-5, 1e-3, 0.01, 0.2, 0.9, 1.0)


def further(*cases):
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


def in_turn(*axes):
    """All cells; every two values of two axes meet in those that are not long, where the last axis is the shortest."""
    cells = list(itertools.product(*map(enumerate, axes)))
    return [
        pytest.param(
            *(v for _, v in cell), marks=pytest.mark.long if sum(i for i, _ in cell) % len(axes[-1]) else ()
        )
        for cell in cells
    ]


@pytest.mark.parametrize(("sigma", "q", "relation"), in_turn(SIGMAS, RATES, RELATIONS))
def test_one_step_loses_what_it_loses_by_dp_accounting(sigma, q, relation):
    ours, other = gaussian_pld(sigma, q, relation, GRID), theirs(sigma, q, relation)
    assert curve(ours) == pytest.approx(curve(other), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("most", "relation"), in_turn((12, 18, 60), RELATIONS))
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
    st.floats(-13.0, -0.5),  # of 1e-14 the tails that are cut off are a part
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
    step = gaussian_pld(sigma, q, RELATIONS[0], GRID)
    for one in (step._pmf_remove, step._pmf_add):
        dense = plain_pmf(one).self_compose(steps)
        composed, rounding = one.self_compose(steps), 1e-15 * steps / delta
        epsilon = composed.get_epsilon_for_delta(delta)
        assert epsilon == pytest.approx(dense.get_epsilon_for_delta(delta), rel=1e-8 + rounding, abs=1e-8)
        assert FastPmf.of(dense).get_epsilon_for_delta(delta) == pytest.approx(
            epsilon, rel=1e-8 + rounding, abs=1e-8
        )
        points = np.sort([0.0, 0.0123, epsilon, epsilon + 0.21])
        found = composed.get_delta_for_epsilon(points)
        assert found == pytest.approx(dense.get_delta_for_epsilon(points), rel=2e-6, abs=3e-15 * steps)


def plain_pmf(pmf):
    return reference.pld_pmf.DensePLDPmf(
        pmf._discretization, pmf._lower_loss, pmf._probs, pmf._infinity_mass, True
    )


SMALL_DELTAS = [  # sigma, q, steps, delta
    (1.0, 1e-3, 100, 1e-12),
    (1.0, 0.004, 2000, 1e-8),
    (1.0, 0.01, 100, 3e-14),
    (1.0, 1e-3, 100_000, 1e-9),
    (1.0, 1e-3, 100_000, 1e-11),
    (0.4, 1e-4, 3, 1e-9),
]
MORE_SMALL_DELTAS = [
    (1.0, 3e-3, 20_000, 1e-11),
    (1.0, 1e-4, 100_000, 1e-12),
    (1.0, 0.2, 300, 1e-13),
    (0.5, 1e-4, 20, 1e-9),
]
FURTHER_SMALL_DELTAS = further(
    (1.0, 1e-3, 100_000, 1e-10),
    (1.0, 2e-3, 50_000, 1e-11),
    (0.8, 1e-3, 100_000, 1e-10),
    (2.0, 5e-3, 100_000, 1e-10),
    (1.0, 1e-3, 1_000_000, 1e-10),
    (30.0, 0.5, 10_000, 1e-12),
)


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [
        *SMALL_DELTAS,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_SMALL_DELTAS),
        *FURTHER_SMALL_DELTAS,
    ],
)
def test_no_composition_is_stated_below_its_own_law(sigma, q, steps, delta):
    """Rounding in a plain transform is about 1e-16 a step beside 1: stated at delta 1e-11, epsilon was 0.03 too low."""
    step = gaussian_pld(sigma, q, RELATIONS[0], 1e-4 if steps >= 1000 else GRID)
    stated = step.self_compose(steps).get_epsilon_for_delta(delta)
    for counted, bound in ((0.0, stated * (1 + 1e-7)), (1e-15, math.inf)):
        pmfs = (step._pmf_remove, step._pmf_add)
        exact = max(exact_epsilon([(pmf, steps)], counted, delta, max(stated, 0.1)) for pmf in pmfs)
        assert exact <= bound
    assert stated <= exact * 1.001


def test_no_composition_of_unlike_steps_is_stated_below_its_own_law():
    kinds = [((1.0, 1e-3), 50_000), ((0.9, 2e-3), 10_000), ((4.0, 1.0), 1)]
    steps = [(gaussian_pld(*kind, RELATIONS[0], 1e-4), count) for kind, count in kinds]
    composed = functools.reduce(
        lambda a, b: a.compose(b), [step.self_compose(count) for step, count in steps]
    )
    for delta in (1e-6, 1e-11):
        stated = composed.get_epsilon_for_delta(delta)
        # Of all these steps the removal is the dearer one.
        exact = exact_epsilon([(step._pmf_remove, count) for step, count in steps], 0.0, delta, stated)
        assert exact * (1 - 1e-7) <= stated <= exact * 1.001


@pytest.mark.parametrize("steps", [2, 50])
def test_what_the_bounds_leave_out_counts_as_infinite(steps):
    one = gaussian_pld(1.0, 0.01, RELATIONS[0], GRID)._pmf_remove
    made = one.self_compose(steps, 1e-6)
    assert made._infinity_mass >= 1e-6 - math.expm1(steps * math.log1p(-one._infinity_mass)) - 1e-18
    assert made.get_delta_for_epsilon(1e3) >= 1e-6
    twice = made.compose(made, 1e-6)
    assert made.size < one.self_compose(steps, 0.0).size
    assert twice._infinity_mass >= 1e-6


def test_losses_whose_exponential_vanishes():
    dense = reference.pld_pmf.DensePLDPmf(1.0, 800, np.array([0.5, 0.5]), 0.0, True)
    for delta in (0.1, 0.6):
        assert FastPmf.of(dense).get_epsilon_for_delta(delta) == dense.get_epsilon_for_delta(delta)


@pytest.mark.parametrize("order", [2.0**-6, 0.5, 2.0, 16.0])
def test_whatever_losses_are_tilted_by_no_delta_is_stated_below_its_law(order):
    """What rounding can do is counted: with an order that is far from the best one, much; with a good one, nothing."""
    step = gaussian_pld(1.0, 0.01, RELATIONS[0], GRID)._pmf_remove
    composed = step.self_compose(1000)
    plain = plain_pmf(step).self_compose(1000)
    epsilons = np.array([0.5, 1.0, 2.0, 3.0])
    steps = np.array([composed._last - round(each / GRID) for each in epsilons])
    found, exact = composed._sums_at(order).deltas(steps), plain.get_delta_for_epsilon(epsilons)
    assert (found >= exact - 1e-13).all()
    if order == 2.0:
        assert found == pytest.approx(exact, rel=1e-4)
    assert composed._sums_at(order).doubt(1.0) > 1e-12 * composed._sums_at(order)._scale(steps[1]) > 0


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
    spent = [epsilon([(event, steps)], 1e-5, grid=GRID) for steps in range(1, 301)]
    assert spent == sorted(spent)
    assert len(transforms) <= 60  # of 300 steps, two directions and two grids


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


@pytest.fixture
def _fresh_steps():
    accountants._step_pld.cache_clear()
    yield
    accountants._step_pld.cache_clear()


def calibrated():
    return calibrate_noise_multiplier(poisson(0.01, 1.0).sampling, 100, 2.0, 1e-5, cache=False)


@pytest.mark.usefixtures("_fresh_steps")
@pytest.mark.parametrize(
    ("off", "slow"),
    [
        (1.0005, False),
        (1.0005, True),
        (0.9995, False),
        *further((0.9995, True), (1.01, False), (1.01, True)),
    ],
)
def test_a_calibration_is_confirmed_by_dp_accounting(off, slow, monkeypatch):
    """Whatever goes wrong in our own sums, no noise is chosen by them alone, in whichever way it was found."""
    import privlora.accounting.calibration as calibration
    import privlora.accounting.loss_distributions as module

    real, find, calls = module.gaussian_pld, calibration.find_noise, []
    monkeypatch.setattr(module, "gaussian_pld", lambda sigma, *others: real(off * sigma, *others))
    if slow:  # no slope on the coarse grid, so the root is sought on the fine one
        monkeypatch.setattr(calibration, "_COARSE_TOLERANCE", 1e-30)

    def counted(*arguments, rtol, **options):
        calls.append(1)
        return find(*arguments, rtol=max(rtol, 1e-7), **options)

    monkeypatch.setattr(calibration, "find_noise", counted)
    with pytest.raises(PrivacyError, match="two ways of computing epsilon disagree"):
        calibrated()
    assert len(calls) == 1 + slow


def test_what_is_no_number_confirms_nothing(monkeypatch):
    import privlora.accounting.calibration as calibration

    real = calibration.pld_epsilon
    monkeypatch.setattr(calibration, "pld_epsilon", lambda *a, theirs=False: math.nan if theirs else real(*a))
    with pytest.raises(PrivacyError, match="disagree"):
        calibrated()


SMALL_DELTA = (poisson(0.003, 1.0).sampling, 20_000, 4.0, 1e-11)


@pytest.mark.parametrize(
    ("q", "steps", "target", "delta"),
    [
        (0.003, 20_000, 4.0, 1e-11),
        (0.01, 10_000, 3.6, 1e-11),
        (0.01, 2000, 2.0, 1e-12),
        *further((1e-3, 100_000, 2.6, 1e-10), (1e-3, 20_000, 1.0, 1e-9)),
    ],
)
def test_noise_is_found_at_deltas_where_dp_accounting_rounds(q, steps, target, delta):
    found = calibrate_noise_multiplier(poisson(q, 1.0).sampling, steps, target, delta, cache=False)
    assert target * (1 - 1e-5) < found.epsilon <= target


@pytest.mark.usefixtures("_fresh_steps")
@pytest.mark.parametrize("where", ["here", "where it is exact"])
def test_at_small_deltas_calibrations_are_confirmed_as_well(where, monkeypatch):
    """Both where dp_accounting is exact, and, in the unsafe direction, at the delta itself."""
    import privlora.accounting.calibration as calibration

    real = calibration.pld_epsilon

    def too_low(events, delta, adjacency, grid, theirs=False):
        off = 0.9 if not theirs and (delta < 1e-9) == (where == "here") else 1.0
        return off * real(events, delta, adjacency, grid, theirs=theirs)

    monkeypatch.setattr(calibration, "pld_epsilon", too_low)
    with pytest.raises(PrivacyError, match="two ways of computing epsilon disagree"):
        calibrate_noise_multiplier(*SMALL_DELTA, cache=False)


def test_a_delta_that_needs_no_noise_is_refused():
    """It took minutes, and gave an epsilon of 0."""
    for q, steps, delta in ((0.5, 1, 0.5), (0.01, 10, 0.1)):
        with pytest.raises(PrivacyError, match="the probability that a unit is drawn at all"):
            calibrate_noise_multiplier(poisson(q, 1.0).sampling, steps, 0.001, delta, cache=False)
    assert calibrate_noise_multiplier(poisson(0.01, 1.0).sampling, 10, 0.5, 0.01, cache=False).epsilon <= 0.5


def test_losses_over_too_wide_a_range_are_refused_before_they_are_transformed(monkeypatch):
    """Of one kind, too: anybody writes a ledger, and a rare draw of little noise would take 9 GB."""
    events = [(poisson(0.01, 1.0), 10_000)]
    monkeypatch.setattr("privlora.accounting.loss_distributions._MOST_POINTS", 10_000)
    with pytest.raises(PrivacyError, match="would take gigabytes"):
        epsilon(events, 1e-5)
    monkeypatch.undo()
    assert epsilon(events, 1e-5) < 10
