"""Rounds of several kinds: each samples, divides and charges as its phase says, and the plan covers all of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import crash_cases
import pytest
import yaml
from federated_cases import SIGMA, Federation, owners, settings_of

from privlora.accounting import Ledger, PoissonSampling, StepEvent, epsilon
from privlora.config import FederationSettings, Settings, settings_from
from privlora.data.sampling import PoissonSampler
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.federated.facts import keep_ledgers
from privlora.federated.history import History, RoundObserver
from privlora.federated.limits import ANYTHING
from privlora.federated.local import rates
from privlora.federated.messages import REFUSED, Request
from privlora.federated.plans import (
    charged_after,
    client_plan,
    client_settings,
    public_settings,
    reach,
    server_plan,
    span_of,
    timetable,
)
from privlora.mechanisms import GaussianMechanism, MeanMechanism, SumMechanism
from privlora.stacked import Team
from privlora.training.promise import ADJACENCY

NAMES = [f"owner-{k}" for k in range(3)]
TAN = [
    {"rounds": 2, "local_steps": 3},  # b = 6 of 12, as privacy says
    {"rounds": 3, "expected_batch_size": 9.0},
]
JOINT = [{"rounds": 2}, {"rounds": 3, "expected_batch_size": 9.0}]
PHASES = {"tan": TAN, "joint": JOINT}
# Releases of each phase.
STEPS = {"tan": (6, 3), "joint": (2, 3)}
TARGET = {"noise_multiplier": None, "target_epsilon": 3.0}


def phased(rule: str = "tan", phases: Any = None, **groups: Any) -> Settings:
    federation = {"phases": PHASES[rule] if phases is None else phases, **groups.pop("federation", {})}
    return settings_of(rule, NAMES, federation=federation, **groups)


def planned(settings: Settings) -> Any:
    plan = client_plan(settings)
    assert plan is not None
    return plan


def events(rule: str, sigma: float = SIGMA) -> list[tuple[StepEvent, int]]:
    return [
        (StepEvent(PoissonSampling(q), sigma), count)
        for q, count in zip((0.5, 0.75), STEPS[rule], strict=True)
    ]


# --- settings ---


PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-4}


def given(federation: Any, **privacy: Any) -> Settings:
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": "records.jsonl"},
            "privacy": {**PRIVACY, "expected_batch_size": 64, "public_dataset_size": 640, **privacy},
            "federation": {"clients": 4, "rule": "tan", **federation},
        }
    )


@pytest.mark.parametrize(
    ("federation", "place"),
    [
        ({"phases": TAN, "rounds": 5}, "phases"),
        ({"phases": TAN, "local_steps": 1}, "phases"),
        ({"phases": []}, "federation.phases"),
        ({"phases": [{"local_steps": 2}]}, "federation.phases[0].rounds"),
        ({"phases": [{"rounds": 0}]}, "federation.phases[0].rounds"),
        ({"phases": [{"rounds": 2}, {"rounds": 2, "steps": 2}]}, "federation.phases[1].steps"),
        (
            {"phases": [{"rounds": 2}, {"rounds": 2, "expected_batch_size": 641}]},
            "federation.phases[1].expected_batch_size",
        ),
        ({"phases": TAN, "rule": "joint"}, "one step a round"),
        ({"phases": TAN, "privacy_model": "client"}, "privacy_model=client"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(federation: Any, place: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(place)):
        given(federation)


@pytest.mark.parametrize("phases", [TAN, JOINT, [{"rounds": "2"}, {"rounds": 1.0}]])
def test_what_is_written_is_read_again(phases: Any) -> None:
    settings = given({"phases": phases})
    federation = settings.federation
    assert federation is not None
    assert federation.rounds == sum(int(phase["rounds"]) for phase in phases)
    text = settings.to_yaml()
    assert "phases:" in text
    again = settings_from(yaml.safe_load(text))
    assert again == settings
    assert again.to_yaml() == text
    told = public_settings(settings)
    assert told.federation is not None
    assert told.federation.phases == federation.phases


def test_a_round_knows_its_phase() -> None:
    settings = given(
        {"phases": [{"rounds": 2, "local_steps": 3}, {"rounds": 1}, {"rounds": 2, "local_steps": 4}]}
    )
    federation = settings.federation
    assert federation is not None
    numbers = range(1, federation.rounds + 1)
    assert [federation.place_of(number) for number in numbers] == [0, 0, 1, 2, 2]
    assert [federation.kind_of(number).local_steps for number in numbers] == [3, 3, 1, 4, 4]
    assert [federation.steps_before(number) for number in (*numbers, 6)] == [0, 3, 6, 7, 11, 15]
    assert federation.steps == settings.privacy.steps == 15
    assert federation.first_rounds == [1, 3, 4]


# --- plans ---


@pytest.mark.parametrize("private", [{}, {"target_epsilon": 4.0, "noise_multiplier": None}])
def test_one_phase_plans_what_rounds_and_local_steps_plan(private: Any) -> None:
    one = given({"rounds": 4, "local_steps": 3}, **private)
    plan, own = planned(one), {**private, "expected_batch_size": 32}
    whole = {"rounds": 4, "local_steps": 3}
    for other in (
        given({"phases": [whole]}, **private),
        given({"phases": [{**whole, "expected_batch_size": 64}]}, **own),
        given({"phases": [{**whole, "rounds": 1}, {**whole, "rounds": 3}]}, **private),
    ):
        assert planned(other).to_dict() == plan.to_dict()
    sigma = plan.event.noise_multiplier
    assert plan.phases == ((StepEvent(PoissonSampling(0.1), sigma), 12),)
    assert plan.expected_batch_size == 16.0


@pytest.mark.parametrize("rule", PHASES)
def test_one_noise_for_all_phases_meets_the_target(rule: str) -> None:
    plan = planned(phased(rule, privacy=TARGET))
    sigma = plan.phases[0][0].noise_multiplier
    assert list(plan.phases) == events(rule, sigma)
    spent = epsilon(plan.phases, plan.delta, adjacency=ADJACENCY)
    assert spent <= 3.0
    less = [(replace(event, noise_multiplier=sigma * (1 - 1e-4)), count) for event, count in plan.phases]
    assert epsilon(less, plan.delta, adjacency=ADJACENCY) > 3.0
    assert plan.expected_batch_size == 9.0 / (1 if rule == "joint" else len(NAMES))


@pytest.mark.parametrize("way", ["size", "rate and batch", "rate and size"])
def test_the_rate_is_the_batch_of_the_public_size(way: str) -> None:
    ways = {
        "size": {},
        "rate and batch": {"public_dataset_size": None, "sample_rate": 0.1},
        "rate and size": {"expected_batch_size": None, "sample_rate": 0.1},
    }
    settings = given({"phases": [{"rounds": 1}, {"rounds": 1, "expected_batch_size": 160}]}, **ways[way])
    rates_of = [event.sampling.sample_rate for event, _ in planned(settings).phases]
    assert rates_of == pytest.approx([0.1, 0.25], rel=1e-12)
    assert [client_settings(settings, number).privacy.b for number in (1, 2)] == pytest.approx([16, 40])


def test_whole_clients_are_charged_a_round_however_many_steps_it_has() -> None:
    phases = [{"rounds": 2, "local_steps": 3}, {"rounds": 1}]
    whole = {"federation": {"privacy_model": "client"}}
    assert planned(phased(phases=phases, **whole)).phases == ((StepEvent(PoissonSampling(1.0), SIGMA), 3),)
    trusted = {"federation": {"privacy_model": "client", "trusted_server": True}}
    own = server_plan(phased(phases=phases, **trusted))
    assert own is not None
    assert own.steps == 3


@pytest.mark.parametrize("per_round", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rounds", [(1, 1), (3, 2), (4, 7), (2, 3, 2)])
def test_no_client_is_in_more_rounds_of_a_phase_than_are_planned(
    per_round: int, rounds: tuple[int, ...]
) -> None:
    names = tuple(f"owner-{k}" for k in range(5))
    federation = FederationSettings(
        clients=5, clients_per_round=per_round, rule="tan", phases=[{"rounds": n} for n in rounds]
    )
    most = federation.steps_of_a_client
    for seed in range(20):
        told = timetable(names, per_round, sum(rounds), seed)
        for name in names:
            counts = [0] * len(rounds)
            for number, chosen in enumerate(told, start=1):
                counts[federation.place_of(number)] += name in chosen
            assert all(count <= limit for count, limit in zip(counts, most, strict=True))
    if per_round == 5:
        assert tuple(most) == rounds


def test_learning_rates_go_on_from_phase_to_phase() -> None:
    method = {"name": "prism", "schedule": "linear", "learning_rate": 1.0, "warmup_steps": 0}
    phases = [{"rounds": 1, "local_steps": 3}, {"rounds": 2}, {"rounds": 1, "local_steps": 4}]
    settings = phased(phases=phases, method=method)
    found = [
        rates(settings, number)(step)
        for number, steps in ((1, 3), (2, 1), (3, 1), (4, 4))
        for step in range(1, steps + 1)
    ]
    flat = settings_of("tan", NAMES, method=method, federation={"rounds": 1, "local_steps": 9})
    assert found == [rates(flat, 1)(step) for step in range(1, 10)]


# --- where a round's releases stand in a ledger ---


def test_releases_of_missed_rounds_are_charged_before_the_next_phase(tmp_path: Path) -> None:
    settings = phased()
    federation, privacy = settings.federation, settings.privacy
    assert federation is not None
    with Ledger.create(tmp_path / "ledger.jsonl", planned(settings)) as ledger:
        reach(ledger, federation, privacy, 2)
        assert ledger.charges == 0
        for _ in range(3):
            ledger.charge(ledger.plan.event_of(ledger.charges + 1))
        reach(ledger, federation, privacy, 4)
        assert ledger.charges == 6
        assert charged_after(federation, privacy, [2, 4]) == 7
        for _ in range(2):
            ledger.charge(ledger.plan.event_of(ledger.charges + 1))
        reach(ledger, federation, privacy, 5)
        assert ledger.charges == 8


def test_a_round_takes_nothing_from_the_next_phase(tmp_path: Path) -> None:
    """Of the first phase two of six releases are left: a third step would be charged as one of the second."""
    settings = phased()
    assert settings.federation is not None
    with Ledger.create(tmp_path / "ledger.jsonl", planned(settings)) as ledger:
        for _ in range(4):
            ledger.charge(ledger.plan.event_of(ledger.charges + 1))
        with pytest.raises(PrivacyError, match="2 releases left, and a round takes 3"):
            reach(ledger, settings.federation, settings.privacy, 2)
        assert ledger.charges == 4


def test_neighbouring_phases_of_one_batch_size_share_their_releases() -> None:
    settings = phased(phases=[{"rounds": 2, "local_steps": 3}, {"rounds": 1, "local_steps": 2}, *JOINT[1:]])
    assert settings.federation is not None
    spans = [span_of(settings.federation, settings.privacy, number) for number in (1, 3, 4)]
    assert spans == [range(8), range(8), range(8, 11)]
    assert planned(settings).steps == 11


# --- runs ---


class Seen:
    """What samplers drew with, by round, and what sums were divided by."""

    def __init__(self, patch: pytest.MonkeyPatch, made: Federation) -> None:
        self.rates: dict[int, set[float]] = {}
        self.divisors: dict[int, set[float]] = {}
        self.steps: dict[int, set[int]] = {}
        draw, take = PoissonSampler.draw, Team.take

        def number() -> int:
            return made.history.begun

        def drawn(sampler: PoissonSampler) -> Any:
            self.rates.setdefault(number(), set()).add(sampler.sampling.sample_rate)
            return draw(sampler)

        def taken(team: Team, count: int, *others: Any) -> None:
            self.steps.setdefault(number(), set()).add(count)
            take(team, count, *others)

        def noted(init: Any) -> Any:
            def begun(mechanism: Any, *args: Any, **options: Any) -> None:
                init(mechanism, *args, **options)
                self.divisors.setdefault(number(), set()).add(mechanism.expected_batch_size)

            return begun

        patch.setattr(PoissonSampler, "draw", drawn)
        patch.setattr(Team, "take", taken)
        for mechanism in (GaussianMechanism, MeanMechanism):
            patch.setattr(mechanism, "__init__", noted(mechanism.__init__))


@pytest.mark.parametrize("rule", PHASES)
def test_each_round_samples_divides_and_charges_as_its_phase_says(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Federation(tmp_path, phased(rule), owners(3))
    seen = Seen(monkeypatch, made)
    deviations: list[float] = []
    release = SumMechanism.release

    def released(self: SumMechanism, *args: Any, **options: Any) -> Any:
        found = release(self, *args, **options)
        deviations.append(found.noise_std)
        return found

    monkeypatch.setattr(SumMechanism, "release", released)
    made.run()
    assert seen.rates == {1: {0.5}, 2: {0.5}, 3: {0.75}, 4: {0.75}, 5: {0.75}}
    for name in NAMES:
        ledger = made.ledger_of(name)
        assert ledger.events() == events(rule)
        assert ledger.charges == ledger.plan.steps
    if rule == "joint":
        assert seen.divisors == {1: {6.0}, 2: {6.0}, 3: {9.0}, 4: {9.0}, 5: {9.0}}
        assert deviations == pytest.approx([SIGMA / 6] * 2 + [SIGMA / 9] * 3, rel=0.01)
    else:
        assert seen.divisors == {1: {2.0}, 2: {2.0}, 3: {3.0}, 4: {3.0}, 5: {3.0}}
        assert seen.steps == {1: {3}, 2: {3}, 3: {1}, 4: {1}, 5: {1}}


@pytest.mark.parametrize(
    ("groups", "charged"),
    [
        ({"privacy": {"private": False}}, None),
        ({"federation": {"secure_aggregation": True}}, 9),
        ({"federation": {"privacy_model": "client"}}, 5),
        ({"federation": {"privacy_model": "client", "trusted_server": True}}, None),
    ],
)
def test_steps_follow_the_phases_in_every_privacy_model(
    groups: dict[str, dict[str, Any]], charged: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "privacy_model" in groups.get("federation", {})
    phases = [{key: n for key, n in phase.items() if key != "expected_batch_size"} for phase in TAN]
    made = Federation(tmp_path, phased(phases=phases if whole else TAN, **groups), owners(3))
    seen = Seen(monkeypatch, made)
    made.run()
    assert all(one.void is None for one in made.done() if one.asked)
    for number, steps in seen.steps.items():
        assert steps == {3 if number <= 2 else 1}
    if charged is None:
        assert not list(tmp_path.glob("owner-*/*/ledger.jsonl"))
    else:
        assert {made.ledger_of(name).charges for name in NAMES} == {charged}
    if not whole:
        assert seen.rates == {1: {0.5}, 2: {0.5}, 3: {0.75}, 4: {0.75}, 5: {0.75}}
        assert seen.divisors == {1: {2.0}, 2: {2.0}, 3: {3.0}, 4: {3.0}, 5: {3.0}}


def ledgers_of(made: Federation) -> dict[str, str]:
    own = made.clients.items()
    return {name: (each.folder / made.history.run / "ledger.jsonl").read_text() for name, each in own}


def test_a_client_that_missed_a_round_is_in_the_next_phase(tmp_path: Path) -> None:
    made = Federation(tmp_path, phased(), owners(3))
    lost = ("owner-0", "train", 2)
    made.exchange.drop = lambda request: (request.client, request.kind, request.round) == lost
    made.run()
    assert [len(one.answered) for one in made.done()] == [3, 2, 3, 3, 3]
    ledger = made.ledger_of("owner-0")
    assert ledger.events() == events("tan")
    texts = ledgers_of(made)
    assert made.plan is not None
    keep = (made.folder, made.settings, made.history, made.plan)
    assert set(keep_ledgers(*keep, texts)) == set(NAMES)
    # Without its ledger, the others' cover what it can have released in the last phase.
    assert set(keep_ledgers(*keep, {**texts, "owner-0": ""})) == set(NAMES[1:])


def test_a_ledger_without_a_phase_that_was_answered_is_left_out(tmp_path: Path) -> None:
    """It has as many charges as rounds that the client answered, but they stand in the earlier phase."""
    names = [*NAMES, "owner-3"]
    clients = [{"name": name} for name in names]
    made = Federation(tmp_path, phased("joint", federation={"clients": clients, "survivors": 3}), owners(4))
    made.exchange.drop = lambda request: request.client == "owner-0" and request.round in (1, 2)
    made.run()
    texts = ledgers_of(made)
    assert made.plan is not None
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join(texts["owner-0"].split("\n")[:4]) + "\n")  # the plan, and three charges
    with Ledger.open(path) as cut:
        cut.finish()
    given = {**texts, "owner-0": path.read_text()}
    found = keep_ledgers(made.folder, made.settings, made.history, made.plan, given)
    assert set(found) == set(names[1:])


def test_a_server_cannot_go_by_another_timetable(tmp_path: Path) -> None:
    """It asks for the last phase first, then for the phase that it left out: what was agreed on is charged."""
    made = Federation(tmp_path, phased(), owners(3)).join()
    client = made.clients["owner-0"]
    assert client.answer(made.request("owner-0", number=3)).refused is None
    assert made.ledger_of("owner-0").events() == [events("tan")[0], (events("tan")[1][0], 1)]
    assert client.answer(made.request("owner-0", number=2)).refused == REFUSED
    assert client.answer(made.request("owner-0", number=6)).refused == REFUSED
    longer = made.request("owner-0", number=4)
    values = {**longer.values, "local_steps": 5}
    told = Request(longer.client, longer.kind, longer.round, longer.tensors, values)
    assert client.answer(told).refused == REFUSED
    assert made.ledger_of("owner-0").charges == 7


def test_an_owner_accepts_or_refuses_the_plan_as_a_whole(tmp_path: Path) -> None:
    plan = planned(phased())
    whole = epsilon(plan.phases, plan.delta, adjacency=ADJACENCY)
    parts = [epsilon([phase], plan.delta, adjacency=ADJACENCY) for phase in plan.phases]
    assert max(parts) < 0.9 * whole
    Federation(tmp_path / "more", phased(), owners(3), limits=replace(ANYTHING, max_epsilon=whole)).join()
    less = Federation(
        tmp_path / "less", phased(), owners(3), limits=replace(ANYTHING, max_epsilon=0.9 * whole)
    )
    with pytest.raises(RunError, match="did not join"):
        less.join()


# --- from beginning to end ---


class StopAfter(RoundObserver):
    """Ends the server's process, as it seems, after a round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_round(self, done: Any, rounds: int) -> None:
        if done.step == self.number:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize(("rule", "stop"), [("tan", 1), ("joint", 2), ("tan", 3)])
def test_an_interrupted_run_goes_on_in_the_right_phase(rule: str, stop: int, tmp_path: Path) -> None:
    phases = [{**phase, "rounds": 2} for phase in PHASES[rule]]
    settings = crash_cases.settings_of(tmp_path / "run", rule, phases=phases)
    with pytest.raises(KeyboardInterrupt):
        crash_cases.run(settings, observer=StopAfter(stop))
    result = crash_cases.run(settings, fresh=False)
    crash_cases.check_ended(tmp_path / "run", settings, result)
    plan = planned(settings)
    assert [one.void for one in History(tmp_path / "run/private/rounds.jsonl").rounds()] == [None] * 4
    for path in crash_cases.ledgers(tmp_path / "run").values():
        ledger = crash_cases.read_ledger(path)
        assert ledger.events() == list(plan.phases)
        assert [event.sampling.sample_rate for event, _ in ledger.events()] == [6 / 18, 9 / 18]
    assert result.epsilon == epsilon(plan.phases, plan.delta, adjacency=ADJACENCY)


@pytest.mark.parametrize(("rule", "steps", "clients"), [("tan", 3, 3), ("joint", 1, 1)])
def test_the_report_states_both_phases(rule: str, steps: int, clients: int, tmp_path: Path) -> None:
    phases = [{**phase, "rounds": 2} for phase in PHASES[rule]]
    result = crash_cases.run(crash_cases.settings_of(tmp_path / "run", rule, phases=phases))
    report = json.loads((tmp_path / "run/release/privacy_report.json").read_text())
    stated = report["statement"]
    charged = [(each["sampling"]["sample_rate"], each["steps_charged"]) for each in stated["phases"]]
    assert charged == [(6 / 18, 2 * steps), (9 / 18, 2)]
    assert (stated["epsilon"], stated["expected_batch_size"]) == (result.epsilon, 9 / clients)
    assert report["federation"]["phases"] == [
        {"rounds": 2, "local_steps": steps, "expected_batch_size": 6.0},
        {"rounds": 2, "local_steps": 1, "expected_batch_size": 9.0},
    ]
    for page in ("README.md", "report.html"):
        assert "Rounds of phase 2" in (tmp_path / "run/release" / page).read_text()


def test_audits_ask_for_one_kind() -> None:
    from privlora.auditing.rehearsal import rehearsed, stage_of

    settings = phased("joint")
    with pytest.raises(ConfigError, match="one phase at a time"):
        rehearsed(settings, stage_of(settings, "server"), rounds=2)
