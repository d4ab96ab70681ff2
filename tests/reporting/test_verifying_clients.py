"""A federation's statement is that of the client that released most, and its ledger is that client's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privlora.accounting import Ledger, Plan, PoissonSampling, epsilon
from privlora.accounting.events import StepEvent
from privlora.errors import PrivacyError
from privlora.reporting.annex import Book, read_book
from privlora.reporting.verifying_clients import _of_a_client, check_clients, check_colluding

EVENT = StepEvent(PoissonSampling(0.1), 1.0)
PLAN = Plan(
    phases=((EVENT, 3),),
    delta=1e-5,
    target_epsilon=None,
    adjacency="add-or-remove-one",
    unit="record",
    records_per_user=None,
    clip_norm=1.0,
    expected_batch_size=4.0,
    method="prism",
    dataset="notes",
)


def _book(path: Path, charges: int, plan: Plan = PLAN) -> Book:
    with Ledger.create(path, plan) as ledger:
        for _ in range(charges):
            ledger.charge(plan.event)
        ledger.finish()
    return read_book(path, path.read_bytes())


def _report(books: Mapping[str, Book | None], of: str) -> dict[str, Any]:
    rows = [{"name": name, **_of_a_client(book)} for name, book in books.items()]
    return {"federation": {"clients": rows, "statement_of": of}}


@pytest.fixture
def books(tmp_path: Path) -> dict[str, Book]:
    charges = {"north": 3, "south": 3, "west": 1}
    return {name: _book(tmp_path / f"{name}.jsonl", count) for name, count in charges.items()}


def test_the_statement_is_that_of_who_released_most(books: dict[str, Book]) -> None:
    check_clients(_report(books, "north"), books, books["north"])
    check_clients(_report(books, "south"), books, books["south"])
    check_clients(_report({**books, "east": None}, "south"), books, books["south"])  # it gave no ledger
    with pytest.raises(PrivacyError, match="another client's releases cost more"):
        check_clients(_report(books, "west"), books, books["west"])


def test_less_noise_costs_more_at_as_many_releases(books: dict[str, Book], tmp_path: Path) -> None:
    less = replace(PLAN, phases=((replace(EVENT, noise_multiplier=0.9), 3),))
    books["east"] = _book(tmp_path / "east.jsonl", 3, less)
    check_clients(_report(books, "east"), books, books["east"])
    with pytest.raises(PrivacyError, match="another client's releases cost more"):
        check_clients(_report(books, "north"), books, books["north"])


def test_the_statements_ledger_is_its_clients(books: dict[str, Book], tmp_path: Path) -> None:
    nobodys = _book(tmp_path / "ledger.jsonl", 3)
    for stated in (nobodys, books["south"]):
        with pytest.raises(PrivacyError, match=r"ledger.jsonl is not that of 'north'"):
            check_clients(_report(books, "north"), books, stated)
    with pytest.raises(PrivacyError, match=r"ledger.jsonl is not that of 'nobody'"):
        check_clients(_report(books, "nobody"), books, nobodys)


def test_what_clients_together_learn_is_said_whole(books: dict[str, Book]) -> None:
    """The rows follow from n and t, and those from the clients that are named."""
    report = _report(books, "north")
    facts = report["federation"] | {
        "noise_by": "shares",
        "clients_per_round": 3,
        "threshold": 3,
        "rule": {"name": "joint"},
    }
    rows = [
        {"clients": count, "noise_multiplier": (1 - count / 3) ** 0.5, "epsilon": found}
        for count, found in ((1, _epsilon(2)), (2, _epsilon(1)))
    ]
    check_colluding({"federation": facts | {"colluding": rows}}, books["north"].summary)
    alone = facts | {"noise_by": "client", "rule": {"name": "fedavg"}}
    check_colluding({"federation": alone | {"colluding": []}}, books["north"].summary)
    for other in (alone | {"colluding": rows}, alone | {"colluding": [], "rule": {"name": "joint"}}):
        with pytest.raises(PrivacyError, match="what clients together may learn"):
            check_colluding({"federation": other}, books["north"].summary)
    with pytest.raises(PrivacyError, match=r"epsilon = 0\.5 against 2 clients"):
        check_colluding(
            {"federation": facts | {"colluding": [rows[0], {**rows[1], "epsilon": 0.5}]}},
            books["north"].summary,
        )
    for missing in ([], rows[:1], rows[1:]):
        with pytest.raises(PrivacyError, match="what clients together may learn"):
            check_colluding({"federation": facts | {"colluding": missing}}, books["north"].summary)
    for size, threshold in ((100, 100), (3, 2), (2, 3)):
        wrong = facts | {"colluding": rows, "clients_per_round": size, "threshold": threshold}
        with pytest.raises(PrivacyError, match="do not follow from its clients"):
            check_colluding({"federation": wrong}, books["north"].summary)


def test_a_ledger_of_whole_clients_says_who_adds_the_noise(tmp_path: Path) -> None:
    whole = _book(tmp_path / "whole.jsonl", 3, replace(PLAN, unit="client"))
    facts = {
        "noise_by": "shares",
        "clients_per_round": 3,
        "threshold": 3,
        "rule": {"name": "tan"},
        "clients": [{}] * 3,
        "statement_of": "north",
        "colluding": [
            {"clients": count, "noise_multiplier": (1 - count / 3) ** 0.5, "epsilon": _epsilon(3 - count)}
            for count in (1, 2)
        ],
    }
    check_colluding({"federation": facts}, whole.summary)
    for forged in (
        {"noise_by": "client"},
        {"noise_by": "server"},
        {"noise_by": "client", "rule": {"name": "fedavg"}},
        {"statement_of": None},
    ):
        with pytest.raises(PrivacyError, match="whole clients"):
            check_colluding({"federation": facts | forged | {"colluding": []}}, whole.summary)
    for few in ({}, {"clients_per_round": 1, "threshold": 1}):
        with pytest.raises(PrivacyError, match=r"what clients together may learn|do not follow"):
            check_colluding({"federation": facts | few | {"colluding": []}}, whole.summary)
    with pytest.raises(PrivacyError, match="names none"):
        check_colluding({}, whole.summary)
    trusted = facts | {"noise_by": "server", "statement_of": None, "colluding": []}
    check_colluding({"federation": trusted}, whole.summary)


def _epsilon(honest: int) -> float:
    """Of what is left of three shares."""
    weaker = replace(EVENT, noise_multiplier=(honest / 3) ** 0.5)
    return epsilon([(weaker, 3)], PLAN.delta, adjacency=PLAN.adjacency)


def test_single_answers_have_one_share(tmp_path: Path) -> None:
    """Of n = 7 and t = 5, three clients and the server open single answers; and the phase with least noise counts."""
    phases = ((EVENT, 3), (replace(EVENT, noise_multiplier=2.0), 3))
    plan = replace(PLAN, phases=phases)
    with Ledger.create(tmp_path / "a.jsonl", plan) as ledger:
        for event, count in phases:
            for _ in range(count):
                ledger.charge(event)
        ledger.finish()
    summary = read_book(tmp_path / "a.jsonl", (tmp_path / "a.jsonl").read_bytes()).summary
    rows = []
    for count, honest in ((1, 4), (2, 3), (3, 1), (6, 1)):
        left = (honest / 5) ** 0.5
        found = epsilon([(replace(EVENT, noise_multiplier=left), 6)], PLAN.delta, adjacency=PLAN.adjacency)
        rows.append({"clients": count, "noise_multiplier": left, "epsilon": found})
    facts = {
        "noise_by": "shares",
        "clients_per_round": 7,
        "rule": {"name": "joint"},
        "threshold": 5,
        "clients": [{}] * 7,
        "colluding": rows,
    }
    check_colluding({"federation": facts}, summary)
    more = [{**row, "noise_multiplier": 2 * row["noise_multiplier"]} for row in rows]
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        check_colluding({"federation": facts | {"colluding": more}}, summary)


def test_a_ledger_of_many_phases_is_refused(tmp_path: Path) -> None:
    phases = tuple((replace(EVENT, noise_multiplier=1.0 + number / 10), 1) for number in range(33))
    path = tmp_path / "a.jsonl"
    Ledger.create(path, replace(PLAN, phases=phases)).close()
    with pytest.raises(PrivacyError, match="more than 32 phases"):
        read_book(path, path.read_bytes())
    few = tmp_path / "b.jsonl"
    Ledger.create(few, replace(PLAN, phases=phases[:32])).close()
    assert len(read_book(few, few.read_bytes()).summary.plan.phases) == 32
