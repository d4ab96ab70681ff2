"""What plan, console, report and card say of a federation: the larger epsilon, drowned updates, units, silence."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from fact_cases import NAMES, facts_of, rounds_with, settings_for
from federated_cases import owners, settings_of
from rich.console import Console
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import epsilon
from privlora.config import Settings
from privlora.federated.history import Round, RoundObserver
from privlora.federated.plans import client_plan, federation_of, server_plan, update_noise
from privlora.federated.progress import RoundProgress
from privlora.federated.run import federate
from privlora.federated.words import InWords
from privlora.reporting.tables import federation_table
from privlora.rounding import rounded_up

NOISE = {"noise_multiplier": 1.0}
SHARED: list[dict[str, Any]] = [{"rule": "joint"}, {"rule": "fedavg", "privacy_model": "client"}]
WHOLE: list[dict[str, Any]] = [{"rule": "tan"}, {**SHARED[1], "trusted_server": True}]


@pytest.mark.parametrize("group", SHARED)
def test_the_epsilon_against_a_client_stands_beside_the_other_and_is_the_reports(
    group: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings_for(NOISE, **group)
    plan = client_plan(settings)
    assert plan is not None
    stated = epsilon(plan.phases, plan.delta, adjacency=plan.adjacency)
    words = InWords(settings, plan)
    rows = words.colluding
    report = facts_of(settings, tmp_path, (3, 3, 3, 3), rounds_with(4, 4, 4))[0]["colluding"]
    assert [row["epsilon"] for row in rows] == pytest.approx([row["epsilon"] for row in report], rel=1e-6)
    assert rows[0]["epsilon"] > 1.1 * stated
    for said in (words.what_it_costs(), words.in_a_line()):
        for each in (stated, rows[0]["epsilon"], rows[1]["epsilon"]):
            assert f"{rounded_up(each)} against " in said


def _clients(count: int, **group: Any) -> tuple[Settings, Any]:
    settings = settings_for(NOISE, clients=count, rule="fedavg", privacy_model="client", **group)
    return settings, client_plan(settings) or server_plan(settings)


@pytest.mark.parametrize("trusted", [False, True])
def test_noise_that_drowns_updates_is_warned_of_with_the_clients_that_it_takes(trusted: bool) -> None:
    """sigma sqrt(d) / K: 1 * 50 / 4, so 50 clients are enough and 49 are not."""
    settings, plan = _clients(4, trusted_server=trusted)
    noise = update_noise(federation_of(settings), plan, 2500)
    assert noise == {"to_clip_norm": 12.5, "clients_needed": 50}
    (said,) = InWords(settings, client_plan(settings), server_plan(settings)).warnings(2500)
    assert "12.5 clip_norms" in said
    assert "about 50 clients in a round" in said
    for count, drowned in ((49, True), (51, False)):
        more, plan = _clients(count, trusted_server=trusted)
        assert bool(InWords(more, client_plan(more), server_plan(more)).warnings(2500)) == drowned


def test_shares_for_drop_outs_count_and_records_are_not_warned_of() -> None:
    settings, plan = _clients(4, survivors=3)
    noise = update_noise(federation_of(settings), plan, 2700)
    assert noise is not None
    assert noise["to_clip_norm"] == pytest.approx(60 / 4)
    for group in ({"rule": "joint"}, {"rule": "tan"}):
        own = settings_for(NOISE, **group)
        assert InWords(own, client_plan(own)).warnings(10**8) == []


def test_sketches_that_lose_a_part_are_warned_of() -> None:
    """With noise they lose nothing."""
    lossy = settings_for(clients=3, rule="fedask")
    wanted = 2 * lossy.adapter.r
    (said,) = InWords(lossy).warnings(None)
    assert f"oversampling={wanted}" in said
    assert InWords(settings_for(clients=3, rule="fedask", oversampling=wanted)).warnings(None) == []
    own = settings_for(NOISE, clients=3, rule="fedask")
    assert InWords(own, client_plan(own)).warnings(None) == []


def test_an_adapter_without_the_clients_part_is_warned_of() -> None:
    settings = settings_for(NOISE, clients=3, rule="fedsa")
    (said,) = InWords(settings, client_plan(settings)).warnings(None)
    assert "RUN/private" in said


@pytest.mark.parametrize("unit", ["record", "user"])
def test_what_is_hidden_is_the_settings_unit(unit: str, tmp_path: Path) -> None:
    user = {"unit": "user", "user_column": "patient", "max_records_per_user": 1} if unit == "user" else {}
    settings = settings_for({**NOISE, **user}, rule="joint")
    facts, _, ledger = facts_of(settings, tmp_path, (3, 3, 3, 3), rounds_with(4, 4, 4))
    assert ledger is not None
    rows = dict(federation_table({"federation": facts, "statement": {"unit": ledger.plan.unit}}))
    assert rows["Hidden"] == f"one {unit} of any client"


def test_no_line_of_a_log_has_seconds_or_follows_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a round takes tells how large batches are, and whom a server drew in secret."""
    shown, now = Console(file=io.StringIO(), record=True, width=200), iter(range(0, 10**6, 1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    with RoundProgress(shown, private=True) as observer:
        for number in range(1, 41):
            for answered in (0, 1):
                observer.on_phase(f"round {number}/40: clients train", answered, 4)
                observer.on_local_step(1, 3)
            observer.on_round(Round(number, NAMES, NAMES, 10, 10), 40)
    first, *rounds = shown.export_text().splitlines()
    assert first == "round 1/40: clients train"
    assert rounds == [f"round {n}/40  4/4 clients  10 B down  10 B up" for n in (1, *range(4, 41, 4))]


class _Hearing(RoundObserver):
    """What an observer is told of rounds."""

    def __init__(self) -> None:
        self.phases = list[tuple[str, int | None, int | None]]()
        self.steps = list[tuple[int, int]]()

    def on_phase(self, what: str, answered: int | None, asked: int | None) -> None:
        self.phases.append((what, answered, asked))

    def on_local_step(self, done: int, steps: int) -> None:
        self.steps.append((done, steps))


def _heard(folder: Path, rule: str, **group: Any) -> _Hearing:
    given, heard, run = owners(3), _Hearing(), {"output": str(folder / "run")}
    settings = settings_of(rule, list(given), federation={"rounds": 1, **group}, run=run)
    federate(settings, model=tiny_model(), tokenizer=tiny_tokenizer(), records=given, observer=heard)
    return heard


def test_of_a_secret_draw_nothing_is_heard_that_follows_from_it(tmp_path: Path) -> None:
    heard = _heard(tmp_path, rule="fedavg", privacy_model="client", trusted_server=True)  # which draws all
    assert heard.steps == []
    assert heard.phases[2:] == [("round 1/1: clients train", None, None)]


def test_an_observer_hears_what_goes_on_in_a_round(tmp_path: Path) -> None:
    heard = _heard(tmp_path, rule="tan", local_steps=2)
    assert heard.steps == [(1, 2), (2, 2)]
    assert heard.phases == [
        ("loading the model, and reading the clients' records", None, None),
        ("asking 3 clients to join", None, None),
        *(("round 1/1: clients train", answered, 3) for answered in range(4)),
    ]
