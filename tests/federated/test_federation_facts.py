"""What a federation's report says: numbers against ledgers and history, words against the privacy model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fact_cases import NAMES, ROUNDS, facts_of, rounds_with, settings_for

from privlora.accounting import epsilon
from privlora.federated.history import Round
from privlora.federated.plans import client_plan
from privlora.federated.words import InWords
from privlora.reporting import parties

NOISE = {"noise_multiplier": 1.0}
MODELS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "joint": (NOISE, {"rule": "joint"}),
    "local": (NOISE, {"rule": "tan", "local_steps": 2}),
    "local, summed": (NOISE, {"rule": "tan", "secure_aggregation": True}),
    "whole clients": (NOISE, {"rule": "fedavg", "privacy_model": "client"}),
    "trusted": (NOISE, {"rule": "fedavg", "privacy_model": "client", "trusted_server": True}),
    "open": (None, {"rule": "fedavg"}),
}


def facts_for(name: str, folder: Path, *answered: int) -> dict[str, Any]:
    privacy, federation = MODELS[name]
    settings = settings_for(privacy, **federation)
    steps = federation.get("local_steps", 1)
    charges = tuple(steps * sum(i < count for count in answered) for i in range(len(NAMES)))
    return facts_of(settings, folder, charges, rounds_with(*answered))[0]


@pytest.mark.parametrize("name", MODELS)
def test_facts_are_json_without_a_clock_or_a_count_of_records(name: str, tmp_path: Path) -> None:
    facts = facts_for(name, tmp_path, 4, 4, 3)
    text = json.dumps(facts, allow_nan=False)
    assert json.loads(text) == facts
    for word in ('records"', "seconds", "time", "created", "secret-records", "path"):
        assert word not in text.replace("at that time", "")


@pytest.mark.parametrize(
    ("name", "noise_by", "secure", "against"),
    [
        ("joint", "shares", True, "no more than sums"),
        ("local", "client", False, "everybody but the client itself"),
        ("local, summed", "client", True, "everybody but the client itself"),
        ("whole clients", "shares", True, "no more than sums"),
        ("trusted", "server", False, "not against the server"),
        ("open", None, False, "nobody"),
    ],
)
def test_each_privacy_model_has_its_words(
    name: str, noise_by: str | None, secure: bool, against: str, tmp_path: Path
) -> None:
    facts = facts_for(name, tmp_path, 4, 4, 4)
    assert (facts["noise_by"], facts["secure_sums"]) == (noise_by, secure)
    assert against in parties.against(facts)
    assert (facts["lattice"] is None) == (noise_by != "shares")


def test_every_client_has_its_ledgers_budget(tmp_path: Path) -> None:
    facts = facts_for("local", tmp_path, 3, 3, 2)
    plan = client_plan(settings_for(NOISE, rule="tan", local_steps=2))
    assert plan is not None
    planned = epsilon(plan.events(6), plan.delta, adjacency=plan.adjacency)
    assert [c["steps_charged"] for c in facts["clients"]] == [6, 6, 4, 0]
    for client in facts["clients"]:
        assert (client["steps_planned"], client["delta"]) == (2 * ROUNDS, 1e-3)
        assert client["epsilon_planned"] == planned
        spent = plan.events(client["steps_charged"])
        assert client["epsilon"] == epsilon(spent, plan.delta, adjacency=plan.adjacency)
    assert facts["clients"][3]["epsilon"] == 0
    assert [c["rounds_answered"] for c in facts["clients"]] == [3, 3, 2, 0]
    assert facts["statement_of"] == "client-1"


@pytest.mark.parametrize("most", range(len(NAMES)))
def test_the_statement_is_of_the_client_that_released_most(most: int, tmp_path: Path) -> None:
    """Whichever it is: another's would state too small an epsilon for it."""
    settings = settings_for(NOISE, rule="tan", local_steps=2)
    charges = tuple(6 if i == most else 2 for i in range(len(NAMES)))
    facts, _, ledger = facts_of(settings, tmp_path, charges, rounds_with(4, 4, 4))
    assert facts["statement_of"] == NAMES[most]
    assert ledger is not None
    assert ledger.charges == 6


def test_rounds_are_the_historys(tmp_path: Path) -> None:
    facts = facts_for("joint", tmp_path, 4, 0, 3)
    rounds = facts["rounds"]
    assert (rounds["planned"], rounds["done"], rounds["void"]) == (3, 2, 1)
    assert [one["void"] for one in rounds["log"]] == [False, True, False]
    assert [one["dropped"] for one in rounds["log"]] == [[], [], ["client-4"]]
    assert [one["bytes_up"] for one in rounds["log"]] == [4000, 0, 3000]
    # A void round says nothing of what a round takes.
    assert (facts["bytes"]["down"], facts["bytes"]["up"]) == (1000, 1000)


def test_what_colluding_clients_leave_is_the_other_clients_noise(tmp_path: Path) -> None:
    """Taking c of t shares off leaves sigma sqrt((t - c) / t), but for the little that rounding takes."""
    rows = facts_for("joint", tmp_path, 4, 4, 4)["colluding"]
    assert [row["clients"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["noise_multiplier"] == pytest.approx(((4 - row["clients"]) / 4) ** 0.5, rel=1e-3)
    plan = client_plan(settings_for(NOISE, rule="joint"))
    assert plan is not None
    stated = epsilon(plan.events(3), plan.delta, adjacency=plan.adjacency)
    costs = [stated, *(row["epsilon"] for row in rows)]
    assert costs == sorted(set(costs))


@pytest.mark.parametrize("name", ["local", "trusted", "open"])
def test_where_noise_is_whole_nobody_can_take_a_share_off(name: str, tmp_path: Path) -> None:
    assert facts_for(name, tmp_path, 4)["colluding"] == []


def test_repeatable_noise_has_no_epsilon_anywhere(tmp_path: Path) -> None:
    settings = settings_for({**NOISE, "insecure_noise_seed": 3}, rule="joint")
    facts = facts_of(settings, tmp_path, (3, 3, 3, 3), rounds_with(4, 4, 4))[0]
    assert facts["colluding"] == []
    assert {client["epsilon"] for client in facts["clients"]} == {None}


@pytest.mark.parametrize("group", [{"rule": "joint"}, {"rule": "fedavg", "privacy_model": "client"}])
def test_shared_noise_is_not_said_to_hide_from_a_client_that_knows_its_own(group: dict[str, Any]) -> None:
    """Of t shares a curious client takes its own off; the line before a run may not promise more than the report."""
    said = InWords(settings_for(NOISE, **group)).who_is_protected()
    assert "the other clients" not in said
    assert "count without it" in said


@pytest.mark.parametrize("name", ["trusted", "local"])
def test_nothing_says_whom_a_trusted_server_drew(name: str, tmp_path: Path) -> None:
    """Nor how many: facts are the same whoever was drawn. Where clients come by a public timetable, they are not."""
    privacy, federation = MODELS[name]
    settings, found = settings_for(privacy, **federation), []
    for k, drawn in enumerate(((NAMES[:2], NAMES[1:]), (NAMES[2:], NAMES[:1]))):
        rounds = [
            Round(number, names, names, 1000 * len(names), 1000 * len(names))
            for number, names in enumerate(drawn, start=1)
        ]
        (tmp_path / str(k)).mkdir()
        found.append(facts_of(settings, tmp_path / str(k), (2, 2, 2, 2), rounds)[0])
    assert (found[0] == found[1]) == (name == "trusted")
