"""What clients' ledgers show over rounds and federations, and that no more is released than was planned."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated_cases import Federation, owners, settings_of

from privlora.accounting import Ledger, compose_ledgers, epsilon, read_ledger
from privlora.data.sampling import PoissonSampler
from privlora.errors import RunError
from privlora.federated.client import Client
from privlora.federated.limits import ANYTHING
from privlora.federated.messages import REFUSED
from privlora.federated.plans import charges_a_round

NAMES = [f"owner-{k}" for k in range(3)]


def made(
    folder: Path, rule: str = "tan", privacy: dict[str, Any] | None = None, **options: Any
) -> Federation:
    federation = options.pop("federation", {})
    chosen = settings_of(rule, NAMES, federation=federation, privacy=privacy or {})
    return Federation(folder, chosen, owners(3), **options)


@pytest.mark.parametrize("rule", ["tan", "joint", "fedask"])
def test_clients_that_take_turns_are_charged_for_their_own_rounds(rule: str, tmp_path: Path) -> None:
    one = made(tmp_path, rule, federation={"rounds": 4, "clients_per_round": 2}).run()
    took = Counter(name for done in one.done() for name in done.answered)
    steps = one.settings.federation.local_steps  # type: ignore[union-attr]
    for name in NAMES:
        ledger = one.ledger_of(name)
        assert ledger.charges == took[name] * steps <= ledger.plan.steps
    assert max(took.values()) * steps == one.plan.steps  # type: ignore[union-attr]


def test_a_round_that_the_budget_does_not_cover_is_not_begun(tmp_path: Path) -> None:
    """A process died in the midst of a round of two steps: one charge is left, which is of no use for another one."""
    one = made(tmp_path).join()
    client, path = one.clients["owner-0"], tmp_path / "owner-0" / one.history.run / "ledger.jsonl"
    assert client.answer(one.request("owner-0", number=1)).refused is None
    with Ledger.open(path) as ledger:
        ledger.charge(ledger.plan.event_of(3))
    assert client.answer(one.request("owner-0", number=2)).refused == REFUSED
    assert read_ledger(path).charges == 3


@pytest.mark.parametrize(
    ("rule", "federation"), [("tan", {}), ("joint", {}), ("tan", {"privacy_model": "client"})]
)
def test_the_charges_of_a_round_are_as_many_as_is_said(
    rule: str, federation: dict[str, Any], tmp_path: Path
) -> None:
    """What a server holds ledgers against, and a client what is left of its budget."""
    one = made(tmp_path, rule, federation={"rounds": 1, **federation}).run()
    terms, charges = one.settings.federation, one.ledger_of("owner-0").charges
    assert terms is not None
    assert charges == charges_a_round(terms)


@pytest.mark.parametrize("rule", ["joint", "tan"])
def test_batches_are_drawn_anew_at_the_rate_that_is_charged(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each client and step, and again where all that is public is the same, the name of the run as well."""
    units, rate, draws = 200, 0.1, []
    draw = PoissonSampler.draw

    def noted(self: PoissonSampler) -> np.ndarray:
        found = draw(self)
        draws.append(frozenset(found.tolist()))
        return found[:0]  # nobody has to be trained on

    monkeypatch.setattr(PoissonSampler, "draw", noted)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "ab" * size)
    rounds = {"joint": 4, "tan": 2}[rule]
    chosen = settings_of(rule, NAMES, federation={"rounds": rounds}, privacy={"sample_rate": rate})
    for name in ("first", "again"):
        one = Federation(tmp_path / name, chosen, owners(3, [4] * units)).run()
        assert {done.void for done in one.done()} == {None}
        for event, _ in one.ledger_of("owner-0").events():
            assert event.sampling.sample_rate == rate
    assert len(draws) == 2 * 3 * 4
    n = len(draws) * units
    # Six standard deviations: a wrong alarm in 5e8.
    assert abs(sum(map(len, draws)) - rate * n) < 6 * (rate * (1 - rate) * n) ** 0.5
    # Two batches are the same with probability 0.82^200 = 6e-18.
    assert len(set(draws)) == len(draws)


def test_a_question_is_answered_once(tmp_path: Path) -> None:
    one = made(tmp_path).join()
    client = one.clients["owner-0"]
    assert client.answer(one.request("owner-0", number=2)).refused is None
    for number in (2, 1):
        assert client.answer(one.request("owner-0", number=number)).refused == REFUSED
    assert one.ledger_of("owner-0").charges == 2


def test_a_client_of_two_federations_has_two_ledgers_that_add_up(tmp_path: Path) -> None:
    runs = [made(tmp_path).run()]
    (tmp_path / "server").rename(tmp_path / "first")
    runs.append(made(tmp_path, "joint").run())
    folder = tmp_path / "owner-0"
    paths = sorted(folder.glob("*/ledger.jsonl"))
    assert {path.parent.name for path in paths} == {one.history.run for one in runs}
    total = compose_ledgers(paths)
    events = [pair for one in runs for pair in one.ledger_of("owner-0").events()]
    assert [count for _, count in events] == [4, 2]
    assert total.epsilon == pytest.approx(epsilon(events, 1e-3, adjacency="add-or-remove-one"))
    assert total.epsilon > max(run.epsilon for run in total.runs)


def planned(one: Federation, times: int = 1) -> float:
    assert one.plan is not None
    return epsilon(list(one.plan.phases) * times, one.plan.delta, adjacency=one.plan.adjacency)


def test_a_cap_holds_over_all_federations_of_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was joined and not left counts as planned; what was left, as charged."""
    first = made(tmp_path)
    one, two = planned(first), planned(first, 2)
    assert one < two
    for client in first.clients.values():
        client.limits = replace(ANYTHING, max_epsilon=(one + two) / 2)
    first.join()
    (tmp_path / "server").rename(tmp_path / "first")
    second = made(tmp_path, limits=replace(ANYTHING, max_epsilon=(one + two) / 2))
    with caplog.at_level(logging.WARNING), pytest.raises(RunError, match="did not join"):
        second.join()
    assert "with 1 other runs" in caplog.text
    assert not (tmp_path / "owner-0" / second.history.run).exists()
    for name, client in first.clients.items():  # nothing was released there, and nothing will be
        assert client.answer(first.request(name, "leave", 3)).refused is None
        assert client.answer(first.request(name, "train", 1)).refused == REFUSED
        assert first.ledger_of(name).charges == 0
    second.join()
    second.rounds()._join()  # joining again on the same terms changes nothing


def test_what_was_released_counts_after_leaving(tmp_path: Path) -> None:
    first = made(tmp_path).run()
    (tmp_path / "server").rename(tmp_path / "first")
    cap = (planned(first) + planned(first, 2)) / 2
    with pytest.raises(RunError, match="did not join"):
        made(tmp_path, limits=replace(ANYTHING, max_epsilon=cap)).join()


def test_all_other_ledgers_count(tmp_path: Path) -> None:
    client = Client("owner-0", tmp_path)
    plan = made(tmp_path / "x").plan
    assert plan is not None
    for name in "abcde":
        (tmp_path / name).mkdir()
        Ledger.create(tmp_path / name / "ledger.jsonl", plan).close()
    assert len(client.other_ledgers("e")) == 4
    assert len(client.other_ledgers("f")) == 5
