"""Plans of several phases: charged in order, resumed, read back and composed exactly."""

import json
from itertools import groupby
from time import process_time

import pytest
from accounting_cases import make_plan, poisson
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

import privlora.accounting.calibration as calibration
from privlora.accounting import (
    Ledger,
    PoissonSampling,
    StepEvent,
    TruncatedPoissonSampling,
    calibrate_noise_multiplier,
    compose_ledgers,
    epsilon,
    read_ledger,
)
from privlora.accounting.accountants import pld_epsilon, ranges, within
from privlora.accounting.ledger_format import Plan, digest, fingerprint
from privlora.errors import PrivacyError

HISTOGRAM, TRAINING = poisson(1.0, 5.0), poisson(0.1, 1.5)
PROJECTED = StepEvent(PoissonSampling(0.1), 0.9, ((8, 64),))
CAPPED = StepEvent(TruncatedPoissonSampling(0.1, 40, 200), 1.5)
POOL = (HISTOGRAM, TRAINING, PROJECTED, CAPPED)
TWO = ((HISTOGRAM, 1), (TRAINING, 4))


def run_length(events):
    return [(event, len(list(run))) for event, run in groupby(events)]


def charged(path, plan, steps):
    """A ledger with the first so many steps of the plan."""
    with Ledger.create(path, plan) as ledger:
        for step in range(1, steps + 1):
            assert ledger.charge(plan.event_of(step)) == step
    return path


# --- the plan ---


def test_a_plan_lists_its_steps():
    plan = make_plan(phases=(*TWO, (HISTOGRAM, 2)))
    assert plan.steps == 7
    assert [plan.event_of(step) for step in range(1, 8)] == [HISTOGRAM, *[TRAINING] * 4, *[HISTOGRAM] * 2]
    assert [plan.events(steps) for steps in (0, 1, 3)] == [
        [],
        [(HISTOGRAM, 1)],
        [(HISTOGRAM, 1), (TRAINING, 2)],
    ]
    assert plan.events(7) == plan.events(9) == list(plan.phases)
    for step in (0, 8):
        with pytest.raises(PrivacyError, match="not one of the plan's 7"):
            plan.event_of(step)


def test_equal_neighbours_are_one_phase():
    plan = make_plan(phases=((TRAINING, 1), (poisson(0.1, 1.5), 3), (HISTOGRAM, 1), (TRAINING, 2)))
    assert plan.phases == ((TRAINING, 4), (HISTOGRAM, 1), (TRAINING, 2))


def test_what_is_for_one_phase_says_so():
    assert make_plan(phases=((TRAINING, 3),)).event == TRAINING
    with pytest.raises(PrivacyError, match="2 phases, and this is for runs of one"):
        _ = make_plan(phases=TWO).event


@pytest.mark.parametrize(
    "phases",
    [
        (),
        (TRAINING, 3),
        ((TRAINING, 0),),
        ((TRAINING, True),),
        ((TRAINING, 2.0),),
        ((HISTOGRAM, 1), (TRAINING,)),
    ],
)
def test_unusable_phases_are_refused(phases):
    with pytest.raises(PrivacyError, match="phases"):
        make_plan(phases=phases)


@pytest.mark.parametrize("phases", [((HISTOGRAM, 1), (PROJECTED, 1)), ((PROJECTED, 1), (HISTOGRAM, 1))])
def test_every_phase_has_to_be_covered_by_the_adjacency(phases):
    with pytest.raises(PrivacyError, match="replace-one"):
        make_plan(phases=phases, adjacency="replace-one")


def test_a_plan_has_phases_of_an_event_and_steps():
    new = make_plan(phases=TWO).to_dict()
    flat = {name: value for name, value in new.items() if name != "phases"} | new["phases"][1]
    with pytest.raises(PrivacyError, match="plan has the fields"):
        Plan.from_dict(flat)
    for change in ([], [{"steps": 1}], [new["phases"][0] | {"free": 1}], [{"event": "x", "steps": 1}]):
        with pytest.raises((PrivacyError, AttributeError)):
            Plan.from_dict(new | {"phases": change})


# --- the ledger ---


@settings(max_examples=30, deadline=None)
@given(
    phases=st.lists(st.tuples(st.sampled_from(POOL), st.integers(1, 4)), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_run_killed_anywhere_is_charged_as_planned(tmp_path_factory, phases, data):
    """Torn at a random byte of a random line, time and again, until all steps are charged."""
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    plan = make_plan(phases=tuple(phases))
    planned = [event for event, count in phases for _ in range(count)]
    assert plan.phases == tuple(run_length(planned))
    Ledger.create(path, plan).close()
    done = 0
    while done < len(planned):
        with Ledger.open(path) as ledger:
            assert ledger.plan == plan
            assert ledger.charges == done
            for _ in range(data.draw(st.integers(1, len(planned) - done))):
                for wrong in POOL:
                    if wrong != planned[done]:
                        before = path.read_bytes()
                        with pytest.raises(PrivacyError, match=f"charged in step {done + 1} is"):
                            ledger.charge(wrong)
                        assert path.read_bytes() == before
                assert ledger.charge(planned[done]) == done + 1
                done += 1
                assert ledger.events() == read_ledger(path).events() == run_length(planned[:done])
        if data.draw(st.booleans()):
            *_, last = path.read_bytes().splitlines(keepends=True)
            lost = data.draw(st.integers(1, len(last) - 1))
            path.write_bytes(path.read_bytes()[:-lost])
            done -= 1
            assert read_ledger(path).events() == run_length(planned[:done])
    with Ledger.open(path) as ledger:
        for event in POOL:
            with pytest.raises(PrivacyError, match="steps of the plan are charged"):
                ledger.charge(event)
        ledger.finish()
    assert read_ledger(path).events() == list(plan.phases)


def test_a_charge_names_the_event_of_its_step(tmp_path):
    path = charged(tmp_path / "ledger", make_plan(phases=TWO), 3)
    header, *charges = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["schema_version"] == 3
    assert header["plan"]["phases"] == [
        {"event": HISTOGRAM.to_dict(), "steps": 1},
        {"event": TRAINING.to_dict(), "steps": 4},
    ]
    assert [line["event"] for line in charges] == [fingerprint(e) for e in (HISTOGRAM, TRAINING, TRAINING)]


def rewritten(path, change):
    """The records changed, the chain of hashes whole: as a faulty program could write it."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(records)
    head, lines = None, []
    for record in records:
        lines.append(json.dumps({**record, "prev": head}, sort_keys=True).encode() + b"\n")
        head = digest(lines[-1])
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r[2].update(event=fingerprint(HISTOGRAM)), "line 3 .* plan's of step 2"),  # once too often
        (lambda r: r[1].update(event=fingerprint(TRAINING)), "line 2 .* plan's of step 1"),  # too early
        (lambda r: r[0]["plan"]["phases"].reverse(), "line 2 .* plan's of step 1"),
        (lambda r: r[0]["plan"]["phases"][1].update(steps=1), "line 4 .* after 2 of 2"),
        (lambda r: r[0].update(schema_version=2), "line 1 .* is not a plan of schema version 3"),
        (lambda r: r[0]["plan"].update(phases=[]), "line 1 .* phases"),
        (lambda r: r[0]["plan"]["phases"][0].update(event="none"), "line 1"),
    ],
)
def test_charges_that_do_not_follow_the_plan_are_refused(tmp_path, change, reason):
    path = charged(tmp_path / "ledger", make_plan(phases=TWO), 3)
    rewritten(path, lambda records: None)
    assert read_ledger(path).charges == 3
    rewritten(path, change)
    for function in (read_ledger, Ledger.open):
        with pytest.raises(PrivacyError, match=reason):
            function(path)


# --- the cost ---


def composed_by_dp_accounting(events, delta, grid=1e-4):
    """Of Poisson-sampled Gaussian events, by dp_accounting's own accountant and composition."""
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, grid)
    parts = [
        SelfComposedDpEvent(
            PoissonSampledDpEvent(event.sampling.sample_rate, GaussianDpEvent(event.noise_multiplier)), count
        )
        for event, count in events
    ]
    accountant.compose(ComposedDpEvent(parts))
    return accountant.get_epsilon(delta)


@settings(max_examples=6, deadline=None)
@given(
    phases=st.lists(
        st.tuples(
            st.builds(poisson, st.sampled_from([0.02, 0.1, 1.0]), st.floats(1.5, 4.0)), st.integers(1, 6)
        ),
        min_size=2,
        max_size=4,
    ),
    data=st.data(),
)
@pytest.mark.slow
def test_phases_compose_as_dp_accounting_composes_them(tmp_path_factory, phases, data):
    plan = make_plan(phases=tuple(phases))
    steps = data.draw(st.integers(1, plan.steps))
    path = charged(tmp_path_factory.mktemp("run") / "ledger", plan, steps)
    expected = composed_by_dp_accounting(plan.events(steps), plan.delta)
    assert read_ledger(path).epsilon() == pytest.approx(expected, rel=1e-4)


def test_every_phase_counts_at_its_own_price(tmp_path):
    """Neither as if all steps were the first phase's, nor without the last one, nor of the plan's end."""
    plan = make_plan(phases=(*TWO, (PROJECTED, 2), (HISTOGRAM, 1)))
    spent = [read_ledger(charged(tmp_path / str(n), plan, n)).epsilon() for n in (1, 5, 7, 8)]
    assert spent == [
        epsilon(events, plan.delta)
        for events in (
            [(HISTOGRAM, 1)],
            [(HISTOGRAM, 1), (TRAINING, 4)],
            [(HISTOGRAM, 1), (TRAINING, 4), (PROJECTED, 2)],
            [(HISTOGRAM, 2), (TRAINING, 4), (PROJECTED, 2)],
        )
    ]
    assert spent == sorted(set(spent))


# --- the budget ---


def test_runs_with_and_without_phases_compose(tmp_path):
    one = charged(tmp_path / "one", make_plan(event=TRAINING), 3)
    many = charged(tmp_path / "many", make_plan(phases=(*TWO, (HISTOGRAM, 1))), 6)
    statement = compose_ledgers([one, many])
    assert [run.events for run in statement.runs] == [((TRAINING, 3),), ((HISTOGRAM, 2), (TRAINING, 4))]
    assert [run.releases for run in statement.runs] == [3, 6]
    together = epsilon([(HISTOGRAM, 2), (TRAINING, 7)], 1e-5)
    assert statement.epsilon == pytest.approx(together, rel=1e-9)
    assert statement.runs[1].epsilon == epsilon([(HISTOGRAM, 2), (TRAINING, 4)], 1e-5)


def test_copies_that_went_on_apart_count_each_event_as_often_as_it_was_released(tmp_path):
    plan = make_plan(phases=((HISTOGRAM, 2), (TRAINING, 4)))
    path, copy = charged(tmp_path / "run", plan, 1), tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    for place, last in ((path, 2), (copy, 5)):
        with Ledger.open(place) as ledger:
            for step in range(2, last + 1):
                ledger.charge(plan.event_of(step))
    (run,) = compose_ledgers([path, copy]).runs
    assert run.events == ((HISTOGRAM, 3), (TRAINING, 3))
    assert run.releases == 6
    assert run.epsilon == epsilon([(HISTOGRAM, 3), (TRAINING, 3)], 1e-5)


# --- calibration beside releases that are fixed ---

FIXED = [(HISTOGRAM, 1), (poisson(0.2, 3.0), 2)]


def calibrated(sampling=TRAINING.sampling, steps=10, target=2.0, delta=1e-5, beside=FIXED, **options):
    return calibrate_noise_multiplier(
        sampling, steps, target, delta, beside=beside, cache=False, tolerance=1e-4, **options
    )


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"beside": [(PROJECTED, 1), (CAPPED, 1)]},
        {"beside": FIXED[:1], "adjacency": "replace-one", "target": 4.0},
    ],
)
@pytest.mark.slow
def test_noise_beside_other_releases_is_tight_and_never_above_the_target(question):
    found = calibrated(**question)
    beside, adjacency = question.get("beside", FIXED), found.adjacency
    spent = epsilon([*beside, (found.event, 10)], 1e-5, adjacency=adjacency)
    assert spent == found.epsilon <= found.target_epsilon
    less = StepEvent(found.sampling, found.noise_multiplier * (1 - 5e-4))
    assert epsilon([*beside, (less, 10)], 1e-5, adjacency=adjacency) > found.target_epsilon


@pytest.mark.slow
def test_noise_beside_other_releases_by_dp_accountings_own_composition():
    found = calibrated()
    alone = calibrate_noise_multiplier(TRAINING.sampling, 10, 2.0, 1e-5, tolerance=1e-4, cache=False)
    assert found.noise_multiplier > 1.01 * alone.noise_multiplier
    events = [*FIXED, (found.event, 10)]
    assert composed_by_dp_accounting(events, 1e-5) == pytest.approx(2.0, rel=5e-4)
    assert found.to_dict()["beside"] == [{"event": e.to_dict(), "steps": n} for e, n in FIXED]
    assert found.describe().startswith("1 step of Gaussian mechanism, sigma=5")


def test_the_same_event_beside_is_not_lost():
    """Of ten steps nine are fixed, at the noise of ten: rounded to two digits, the last one needs just that noise."""

    def rounded(steps, beside):
        return calibrate_noise_multiplier(
            PoissonSampling(1.0), steps, 3.0, 1e-5, beside=beside, tolerance=0.1, cache=False
        )

    ten = rounded(10, ())
    last = rounded(1, [(ten.event, 9)])
    assert last.event == ten.event
    assert last.epsilon == ten.epsilon == epsilon([(ten.event, 10)], 1e-5) <= 3.0


@pytest.mark.parametrize("beside", [[(poisson(1.0, 2.0), 1)], [(poisson(0.5, 0.0), 1)]])
def test_what_costs_more_than_the_target_leaves_nothing(beside):
    with pytest.raises(PrivacyError, match="beside the steps costs") as caught:
        calibrated(beside=beside, target=1.0)
    assert caught.value.fix


def test_what_costs_all_but_nothing_of_the_target_is_an_error_with_advice():
    spent = epsilon([(HISTOGRAM, 1)], 1e-5)
    with pytest.raises(PrivacyError, match=r"out of reach|noise_multiplier found"):
        calibrated(beside=[(HISTOGRAM, 1)], target=spent * (1 + 1e-9))


def test_a_kept_answer_is_for_the_same_releases_beside_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVLORA_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(calibration, "_solve", lambda *question: asked.append(question) or (2.0, 1.0))
    for beside in ((), FIXED, FIXED, FIXED[:1], [(HISTOGRAM, 2), FIXED[1]]):
        calibrate_noise_multiplier(TRAINING.sampling, 10, 2.0, 1e-5, beside=beside)
    assert len(asked) == 4


@pytest.mark.slow
def test_what_can_be_read_once_counts_twice_where_it_is_needed_twice() -> None:
    other = (StepEvent(PoissonSampling(1.0), 2.0), 1)
    listed, read_once = (
        calibrate_noise_multiplier(PoissonSampling(0.1), 20, 3.0, 1e-5, beside=beside, cache=False)
        for beside in ([other], iter([other]))
    )
    assert read_once.noise_multiplier == listed.noise_multiplier
    projected = StepEvent(PoissonSampling(0.1), 1.0, ((2, 8),))
    with pytest.raises(PrivacyError):
        epsilon(iter([(projected, 1)]), 1e-5, adjacency="replace-one")


# --- one noise for phases of several sampling rates ---

KINDS = [(PoissonSampling(0.1), 12), (PoissonSampling(0.4), 2)]
OF_KINDS = {"delta": 1e-5, "target_epsilon": 2.0}


def several(kinds=KINDS, **options):
    (first, steps), *others = kinds
    return calibrate_noise_multiplier(
        first, steps, others=others, **{**OF_KINDS, "cache": False, "tolerance": 1e-4, **options}
    )


@pytest.mark.parametrize(
    "options", [{}, {"adjacency": "replace-one", "target_epsilon": 4.0}, {"beside": FIXED[:1]}]
)
def test_one_noise_for_several_rates_is_tight_and_never_above_the_target(options):
    found = several(**options)
    sigma, beside = found.noise_multiplier, options.get("beside", [])
    events = [(StepEvent(sampling, sigma), count) for sampling, count in KINDS]
    assert list(found.events) == [*beside, *events]
    spent = epsilon([*beside, *events], 1e-5, adjacency=found.adjacency)
    assert spent == found.epsilon <= found.target_epsilon
    less = [(StepEvent(sampling, sigma * (1 - 5e-4)), count) for sampling, count in KINDS]
    assert epsilon([*beside, *less], 1e-5, adjacency=found.adjacency) > found.target_epsilon


def test_one_noise_for_several_rates_by_dp_accountings_own_composition():
    found = several()
    assert composed_by_dp_accounting(list(found.events), 1e-5) == pytest.approx(2.0, rel=5e-4)
    assert [phase["steps"] for phase in found.to_dict()["others"]] == [2]
    assert "q=0.1" in found.describe()
    assert "q=0.4" in found.describe()


def test_the_noise_lies_between_that_of_each_rate_alone_and_does_not_depend_on_the_order():
    steps = sum(count for _, count in KINDS)
    low, high = (several([(sampling, steps)]).noise_multiplier for sampling, _ in KINDS)
    found = several()
    assert low < found.noise_multiplier < high
    assert several(KINDS[::-1]).noise_multiplier == pytest.approx(found.noise_multiplier, rel=2e-4)


def test_phases_of_one_rate_are_one_phase(tmp_path, monkeypatch):
    """The same question, answer and place in the cache, however it is cut."""
    monkeypatch.setenv("PRIVLORA_CACHE", str(tmp_path))
    sampling = PoissonSampling(0.2)
    whole = calibrate_noise_multiplier(sampling, 10, 1.0, 1e-5)
    (kept,) = (tmp_path / "calibration").iterdir()
    assert "others" not in json.loads(kept.read_text())["request"]
    cut = calibrate_noise_multiplier(sampling, 3, 1.0, 1e-5, others=iter([(sampling, 6), (sampling, 1)]))
    assert cut == whole
    assert "others" not in whole.to_dict()
    assert list((tmp_path / "calibration").iterdir()) == [kept]


def test_a_kept_answer_is_for_the_same_rates_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVLORA_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(calibration, "_solve", lambda *question: asked.append(question) or (2.0, 1.0))
    for others in ((), KINDS[1:], KINDS[1:], [(PoissonSampling(0.4), 3)], [(PoissonSampling(0.5), 2)]):
        calibrate_noise_multiplier(PoissonSampling(0.1), 12, 2.0, 1e-5, others=others)
    assert len(asked) == 4


@pytest.mark.parametrize("other", [(PoissonSampling(0.4), 0), (PoissonSampling(0.0), 2)])
def test_a_phase_that_releases_nothing_is_refused(other):
    with pytest.raises(PrivacyError):
        several([KINDS[0], other])


def test_nothing_is_priced_after_the_time_for_it():
    """Whoever verifies, or joins, computes what others wrote."""
    with within(600.0):
        assert epsilon([(poisson(0.05, 0.9), 7)], 1e-5) > 0
    with within(-1.0), pytest.raises(PrivacyError, match="more epsilons are asked for"):
        epsilon([(poisson(0.05, 0.91), 7)], 1e-5)
    assert epsilon([(poisson(0.05, 0.91), 7)], 1e-5) > 0


def test_many_kinds_are_not_computed_on_the_fine_grid(monkeypatch):
    """Tiny rates of little noise: the cost of five times as many points would be gigabytes."""
    events = [(poisson(0.01, 2.0), 5), (poisson(0.011, 2.0), 3)]
    coarse, fine = (pld_epsilon(dict(events), 1e-5, "add-or-remove-one", grid) for grid in (1e-4, 2e-5))
    assert fine < coarse < 0.1
    assert epsilon(events, 1e-5) == fine
    monkeypatch.setattr(
        "privlora.accounting.accountants._MOST_FINE", ranges(event for event, _ in events) / 2
    )
    assert epsilon(events, 1e-5) == coarse


def test_many_phases_of_little_noise_are_refused_at_once():
    """Anybody writes a ledger, and the losses of each would take a gigabyte."""
    events = [(poisson(0.001, 0.07 + i * 1e-5), 1) for i in range(32)]
    began = process_time()
    with pytest.raises(PrivacyError, match="would take gigabytes"):
        epsilon(events, 1e-5)
    with pytest.raises(PrivacyError, match="of 200 different releases would take gigabytes"):
        epsilon([(poisson(0.1 + i * 1e-5, 0.6), 10) for i in range(200)], 1e-5)
    for kinds in (
        tuple((poisson(0.001, 0.1612 + i * 1e-5), 1) for i in range(32)),
        tuple(
            (StepEvent(PoissonSampling(0.1), 1.0, tuple((1, 64 * i + k) for k in range(2, 12))), 1)
            for i in range(4)
        ),
        tuple((StepEvent(TruncatedPoissonSampling(0.1, 1000, 12), 0.5 + i / 1000), 1) for i in range(8)),
    ):
        with pytest.raises(PrivacyError, match="minutes and gigabytes"):
            make_plan(phases=kinds)
    assert process_time() - began < 5
    assert make_plan(phases=tuple((poisson(0.05, 0.8 + i / 100), 10) for i in range(32)))
    assert epsilon([(poisson(0.01, 1 + i / 100), 10) for i in range(3)], 1e-5) < 5
