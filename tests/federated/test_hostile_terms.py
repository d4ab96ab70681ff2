"""Terms with which a server could switch protection off, or ask about records without paying for the answer."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
import yaml
from federated_cases import Federation, Records, drawing, owners, records, settings_of, without_noise

from privlora.accounting import Ledger, Plan, PoissonSampling, StepEvent, accountants, epsilon, read_ledger
from privlora.config import Settings, settings_from
from privlora.config.one_place import MICRO_BATCH
from privlora.data.rendering import portions
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.federated.client import Client
from privlora.federated.desk import Desk, read_terms
from privlora.federated.limits import ANYTHING, Limits
from privlora.federated.messages import REFUSED, Reply, Request
from privlora.federated.plans import client_plan, public_settings, server_plan, with_local_method
from privlora.federated.workplace import Workplace
from privlora.mechanisms import ClippedUpdate

NAMES = ["owner-0", "owner-1", "owner-2"]
CLIENT_LEVEL = {"privacy_model": "client", "trusted_server": True}


def changed(settings: Settings, **groups: Any) -> Settings:
    raw = settings.model_dump(mode="json", exclude_unset=True)
    for group, values in groups.items():
        raw[group] = {name: v for name, v in {**raw[group], **values}.items() if v is not None}
    return settings_from(raw, source="test")


@pytest.mark.parametrize(
    "value",
    [
        {"clip_norm": 5e-324},
        {"clip_norm": 1e-26},
        {"clip_norm": 1e300},
        {"expected_batch_size": 1e-300},
        {"expected_batch_size": 1e300},
        {"noise_multiplier": 1e-300},
    ],
)
def test_sizes_at_which_noise_underflows_are_refused(value: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(value))):
        settings_of("tan", NAMES, privacy=value)


def test_a_pattern_of_a_servers_never_runs_on_a_clients_machine() -> None:
    """`(.*)*(.*)*!` against one name of a layer takes longer than anybody waits."""
    for pattern in ("(.*)*(.*)*(.*)*!", "q_proj"):
        with pytest.raises(ConfigError, match="regular expression"):
            settings_of("tan", NAMES, adapter={"target_modules": pattern})
    for word in ("all-linear", ["q_proj"]):
        settings_of("tan", NAMES, adapter={"target_modules": word})


def test_a_column_is_not_repeated_thousands_of_times() -> None:
    """Records are tokenised whole before they are cut."""
    settings_of("tan", NAMES, data={"text": "{text} {text}"})
    for times in (5, 7000):
        with pytest.raises(ConfigError, match="one column more than 4 times"):
            settings_of("tan", NAMES, data={"text": "{text}" * times})


def test_records_are_tokenised_a_portion_at_a_time() -> None:
    """A server's format may add 50,000 characters to each, and memory must not tell how many records there are."""
    sizes = [3, 2**20, 5] + [1] * 1500
    found = [list(part) for part in portions(sizes, lambda size: size)]
    assert [each for part in found for each in part] == sizes
    assert [len(part) for part in found] == [2, 1000, 501]


def test_a_timetable_is_of_a_size_that_a_client_works_out() -> None:
    federation = {"rounds": 900_000, "local_steps": 1, "clients_per_round": 2}
    with pytest.raises(ConfigError, match="rounds times clients"):
        settings_of("tan", NAMES, federation=federation)
    del federation["clients_per_round"]  # where all train there is nothing to work out
    settings_of("tan", NAMES, federation=federation)


@pytest.mark.parametrize(("clip_norm", "batch"), [(5e-324, 1.0), (1.0, 1e-300), (float("nan"), 1.0)])
def test_no_plan_has_them(clip_norm: float, batch: float) -> None:
    with pytest.raises(PrivacyError, match="is not usable"):
        Plan(
            phases=((StepEvent(PoissonSampling(0.1), 1.0), 1),),
            delta=1e-5,
            target_epsilon=None,
            adjacency="add-or-remove-one",
            unit="record",
            records_per_user=None,
            clip_norm=clip_norm,
            expected_batch_size=batch,
            method="tan",
            dataset="d",
        )


def test_no_update_is_clipped_to_them() -> None:
    with pytest.raises(PrivacyError, match="underflow"):
        ClippedUpdate({"t": torch.zeros(2)}, 1e-26)


@pytest.mark.parametrize("other", [{"expected_batch_size": 1e5}, {"clip_norm": 3.0}, {"delta": 1e-4}])
def test_clients_with_other_terms_do_not_cancel_masks(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim's own terms are honest. The others' noise, on a coarser lattice, would be nothing beside its sum."""
    drawing(monkeypatch, lambda n: [])
    federation = Federation(tmp_path, settings_of("joint", NAMES), owners(3))
    lying = public_settings(changed(federation.settings, privacy=other))
    send = federation.exchange.send

    def two_faced(requests: list[Request]) -> list[Reply]:
        told = [
            replace(r, values={**r.values, "settings": lying.to_yaml()})
            if r.kind == "join" and r.client != NAMES[0]
            else r
            for r in requests
        ]
        return [reply for request in told for reply in send([request])]

    federation.exchange.send = two_faced  # type: ignore[method-assign, assignment]
    for name in NAMES[1:]:
        federation.clients[name].workplaces = {
            federation.history.run: Workplace(lying, federation.model, federation.workplace.tokenizer)
        }
    federation.run()
    assert [one.void is None for one in federation.done()] == [False, False]
    assert not any(one.answered for one in federation.done())


def lone(folder: Path, settings: Settings, own: Records) -> Reply:
    """What a client with these records answers in its first round, without noise."""
    federation = Federation(folder, settings, {**owners(3), NAMES[0]: own})
    federation.join()
    return federation.exchange.send([federation.request(NAMES[0])])[0]


def test_no_answer_depends_on_how_many_records_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 / delta is not compared with a client's number of records."""
    for count in (1, 4, 6):
        settings = settings_of("fedavg", NAMES, privacy={"delta": 0.2})
        reply = lone(tmp_path / str(count), settings, records(1)[:count])
        assert reply.refused is None


@pytest.mark.parametrize("user", [0, 77])
def test_one_record_whose_user_is_a_number_spoils_no_other(
    user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a user of its own, or of one whose other records have the same number as a string."""
    without_noise(monkeypatch)
    drawing(monkeypatch, lambda n: list(range(n)))
    users = {"unit": "user", "user_column": "who", "max_records_per_user": 2}
    settings = settings_of("fedavg", NAMES, privacy=users)
    named: Any = [{**record, "who": str(number)} for number, record in enumerate(records(1))]
    found = []
    for who in (user, str(user)):
        own = [*named, {**records(2)[0], "who": who}]
        found.append(lone(tmp_path / type(who).__name__, settings, own))
    assert [reply.refused for reply in found] == [None, None]
    for name, tensor in found[0].tensors.items():
        torch.testing.assert_close(tensor, found[1].tensors[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", ["tan", "joint"])
def test_a_client_without_records_answers(rule: str, tmp_path: Path) -> None:
    settings = settings_of(rule, NAMES)
    federation = Federation(tmp_path, settings, {**owners(3), NAMES[0]: [], NAMES[1]: [{"other": "x"}]}).run()
    assert [set(one.answered) for one in federation.done()] == [set(NAMES)] * 2
    assert federation.ledger_of(NAMES[0]).charges == (2 if rule == "joint" else 4)


def test_the_server_does_not_say_what_a_user_is() -> None:
    users = {"unit": "user", "user_column": "note", "max_records_per_user": 2}
    settings = settings_of("tan", NAMES, privacy=users)
    plan = client_plan(settings)
    for limits in (
        Limits(max_epsilon=1e3, max_delta=0.1),
        Limits(max_epsilon=1e3, max_delta=0.1, user_column="patient"),
    ):
        with pytest.raises(PrivacyError, match=r"limits\.user_column"):
            limits.refuse_terms(settings, plan)
    Limits(max_epsilon=1e3, max_delta=0.1, user_column="note").refuse_terms(settings, plan)
    ANYTHING.refuse_terms(settings, plan)


@pytest.mark.parametrize(
    ("limit", "named"),
    [({"max_epsilon": 1.0}, "max_epsilon"), ({"max_delta": 1e-6}, "max_delta"), ({"unit": "record"}, "unit")],
)
def test_limits_hold_for_what_a_trusted_server_says(limit: dict[str, Any], named: str) -> None:
    settings = settings_of("tan", NAMES, federation={**CLIENT_LEVEL, "clients_per_round": 2})
    own: dict[str, Any] = {"max_epsilon": 1e3, "max_delta": 0.1, "trusts_server": True, **limit}
    with pytest.raises(PrivacyError, match=rf"limits\.{named}"):
        Limits(**own).refuse_terms(settings, None)


def test_a_limit_on_delta_is_exact() -> None:
    settings = settings_of("tan", NAMES)
    plan = client_plan(settings)
    assert plan is not None
    Limits(max_epsilon=1e3, max_delta=plan.delta).refuse_terms(settings, plan)
    with pytest.raises(PrivacyError, match=r"limits\.max_delta"):
        Limits(max_epsilon=1e3, max_delta=plan.delta * 0.999).refuse_terms(settings, plan)


def test_an_update_for_a_trusted_server_is_clipped_before_it_leaves(tmp_path: Path) -> None:
    settings = settings_of("tan", NAMES, privacy={"clip_norm": 1e-3}, federation=CLIENT_LEVEL)
    federation = Federation(tmp_path, settings, owners(3)).run()
    for reply in federation.exchange.replies("train"):
        norm = sum(float(t.double().square().sum()) for t in reply.tensors.values()) ** 0.5
        assert 0 < norm <= 1e-3 * (1 + 1e-6)


def test_weights_of_a_secure_sum_are_alike() -> None:
    with pytest.raises(ConfigError, match="factor of 100"):
        settings_of("fedavg", NAMES, federation={"secure_aggregation": True, "weights": [1.0, 1e-15, 1e-15]})
    settings_of("fedavg", NAMES, federation={"secure_aggregation": True, "weights": [1.0, 0.5, 0.1]})


def test_a_sum_that_was_refused_leaves_no_secret(tmp_path: Path) -> None:
    federation = Federation(tmp_path, settings_of("joint", NAMES), owners(3))
    send = federation.exchange.send

    kept: dict[str, int] = {}

    def cut(requests: list[Request]) -> list[Reply]:
        asked = [replace(r, values={**r.values, "length": 3}) if r.kind == "train" else r for r in requests]
        replies = send(asked)
        found = [path for path in tmp_path.glob("owner-*/*/sum.secret") if path.stat().st_size]
        kept.setdefault(requests[0].kind, len(found))
        return replies

    federation.exchange.send = cut  # type: ignore[method-assign, assignment]
    federation.run()
    assert (kept["share"], kept["train"]) == (3, 0)


SPENDS: dict[str, Any] = {"noise_multiplier": None, "target_epsilon": 7.9, "delta": 1e-4}
ALLOWED = Limits(max_epsilon=1e6, max_delta=0.1)
TRUSTING = Limits(trusts_server=True, max_epsilon=8.0)


def owner(folder: Path, limits: Limits = ALLOWED, **given: Any) -> Client:
    return Client(NAMES[0], folder, records=records(0), limits=limits, **given)  # type: ignore[arg-type]


def joining(name: str, settings: Settings | None = None, /, **groups: dict[str, Any]) -> Request:
    """To join on these terms, which by default are honest; in ``groups`` a server says something else."""
    told = public_settings(with_local_method(settings or settings_of("tan", NAMES)))
    lies = {group: getattr(told, group).model_copy(update=values) for group, values in groups.items()}
    terms = told.model_copy(update=lies).to_yaml()
    return Request(NAMES[0], "join", 0, values={"run": name, "settings": terms})


def joins(client: Client, settings: Settings, run: str) -> bool:
    """Whether the client joins a run on these terms."""
    client.workplaces[run] = Workplace(public_settings(with_local_method(settings)))
    return client.answer(joining(run, settings)).refused is None


def test_runs_of_trusted_servers_count_for_an_owners_limit(tmp_path: Path) -> None:
    """Six of epsilon 7.9 were joined under a limit of 8; also by a client that left them, or whose process is new."""
    trusted = settings_of("tan", NAMES, federation=CLIENT_LEVEL, privacy=SPENDS)
    own = settings_of("tan", NAMES, privacy=SPENDS)

    def client() -> Client:
        return owner(tmp_path / "a", TRUSTING)

    first = client()
    assert joins(first, trusted, "r1")
    assert (tmp_path / "a/r1/stated.jsonl").exists()
    assert joins(first, trusted, "r1")  # again, after its server stopped
    assert not joins(first, trusted, "r2")
    assert first.answer(Request(NAMES[0], "leave", 3, values={"run": "r1"})).refused is None
    assert not joins(client(), trusted, "r3")
    assert not joins(client(), own, "r4")  # of another unit, which does not add up
    with pytest.raises(PrivacyError, match="another unit than an earlier run"):
        TRUSTING.refuse_terms(own, plan_of(own), client().other_ledgers("r4"))
    assert [each.plan.unit for each in client().other_ledgers("r4")] == ["client"]
    (tmp_path / "a/r1/stated.jsonl").unlink()
    assert joins(client(), trusted, "r1")  # it is written where it is missing
    assert not joins(client(), trusted, "r5")


@pytest.mark.parametrize("left", [None, b'{"torn'])
def test_a_run_that_was_joined_before_what_is_stated_was_kept(left: bytes | None, tmp_path: Path) -> None:
    """It counts in full, though its server never comes back; where its terms are lost, no other run is joined."""
    trusted = settings_of("tan", NAMES, federation=CLIENT_LEVEL, privacy=SPENDS)
    client = owner(tmp_path, TRUSTING)
    assert joins(client, trusted, "r1")
    stated, content = tmp_path / "r1/stated.jsonl", (tmp_path / "r1/stated.jsonl").read_bytes()
    stated.unlink() if left is None else stated.write_bytes(left)
    assert not joins(client, trusted, "r2")
    assert len(stated.read_bytes().splitlines()) == len(content.splitlines())
    assert [each.plan for each in client.other_ledgers("r2")] == [server_plan(with_local_method(trusted))]
    stated.unlink()
    (tmp_path / "r1/settings.yaml").write_text("model: [")
    assert not joins(client, trusted, "r3")
    with pytest.raises(PrivacyError, match=r"r1/settings.yaml' does not say what the run released"):
        client.other_ledgers("r3")


def test_runs_without_noise_and_with_a_ledger_of_their_own_state_nothing(tmp_path: Path) -> None:
    client = owner(tmp_path, ANYTHING)
    assert joins(client, settings_of("tan", NAMES), "r1")
    assert joins(client, settings_of("tan", NAMES, privacy={"private": False}), "r2")
    (tmp_path / "r1/settings.yaml").write_text("model: [")  # its ledger says what was released
    assert len(client.other_ledgers("r3")) == 1
    assert not list(tmp_path.glob("*/stated.jsonl"))


def test_runs_of_a_small_epsilon_add_up(tmp_path: Path) -> None:
    spends = {**SPENDS, "target_epsilon": 3.0}
    trusted = settings_of("tan", NAMES, federation=CLIENT_LEVEL, privacy=spends)
    client = owner(tmp_path, replace(TRUSTING, max_epsilon=6.0))
    assert [joins(client, trusted, f"r{number}") for number in range(5)] == [True, True, True, False, False]


def plan_of(settings: Settings) -> Plan:
    plan = client_plan(with_local_method(settings))
    assert plan is not None
    return plan


def test_terms_that_take_minutes_to_price_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountants, "process_time", itertools.count(0, 1000).__next__)
    settings = settings_of("tan", NAMES, privacy={"noise_multiplier": 3.2123})
    with pytest.raises(PrivacyError, match="more epsilons are asked for"):
        Limits(max_epsilon=1e3, max_delta=0.1).refuse_terms(settings, plan_of(settings))


def test_units_do_not_add_up(tmp_path: Path) -> None:
    own, hidden = settings_of("tan", NAMES), settings_of("tan", NAMES, federation={"privacy_model": "client"})
    Ledger.create(tmp_path / "ledger.jsonl", plan_of(hidden)).close()
    other = read_ledger(tmp_path / "ledger.jsonl")
    ALLOWED.refuse_terms(own, plan_of(own))
    ALLOWED.refuse_terms(hidden, plan_of(hidden), [other])
    with pytest.raises(PrivacyError, match="another unit than an earlier run's"):
        ALLOWED.refuse_terms(own, plan_of(own), [other])


def test_a_limit_is_exact() -> None:
    """To a thousandth, which a noise multiplier that was calibrated to it may miss."""
    settings = settings_of("tan", NAMES)
    plan = plan_of(settings)
    spent = epsilon(plan.phases, plan.delta, adjacency=plan.adjacency)
    Limits(max_epsilon=spent, max_delta=0.1).refuse_terms(settings, plan)
    with pytest.raises(PrivacyError, match=r"limits\.max_epsilon"):
        Limits(max_epsilon=spent / 1.002, max_delta=0.1).refuse_terms(settings, plan)


def test_no_server_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    """Where its owner lets it name a model of the hub."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    for run, name, joined in (("r0", "org/base", True), ("r1", str(tmp_path / "model"), False)):
        client = owner(tmp_path / "a", replace(ALLOWED, pins_model=False))
        assert (client.answer(joining(run, model={"name": name})).refused is None) == joined


def test_who_leaves_forgets_its_secrets(tmp_path: Path) -> None:
    federation = Federation(tmp_path, settings_of("joint", NAMES), owners(3)).join()
    client = federation.clients[NAMES[0]]
    folder = client.folder / federation.history.run
    Desk(folder).keep_secret(b"of a sum that was never finished")
    assert list(folder.glob("*.secret"))
    assert client.answer(federation.request(NAMES[0], "leave", 1)).refused is None
    assert not list(folder.glob("*.secret"))


@pytest.mark.parametrize("own", [None, "v2"])
def test_who_names_the_model_names_its_revision(own: str | None, tmp_path: Path) -> None:
    """A server's revision is another model of that name, such as anybody's pull request."""
    client = owner(tmp_path, model="org/base", revision=own)
    request = joining("r1", model={"revision": "refs/pr/7"})
    assert client.answer(request).refused is None
    loaded = client.session(request).workplace.settings.model
    assert (loaded.name, loaded.revision) == ("org/base", own)


def test_a_server_does_not_choose_how_much_memory_a_client_takes(tmp_path: Path) -> None:
    """Else whether a client is killed would tell how many records it has, and how long they are."""
    client = owner(tmp_path, model="org/base")
    for asked, taken in ((10**12, MICRO_BATCH), (64, 64)):
        request = joining(f"r{asked}", run={"tokens_per_micro_batch": asked})
        assert client.answer(request).refused is None
        assert client.session(request).settings.run.max_tokens == taken


def naming(first: str, second: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Terms that name files, by what is said of them."""
    clients = {"clients": [{"name": NAMES[0], "path": first}, *({"name": name} for name in NAMES[1:])]}
    gradient = {"init": "public-gradient", "public_text": second}
    return {
        "federation.clients": {"federation": clients, "data": {"evaluation": None}},
        "data.evaluation, federation.clients": {"federation": clients, "data": {"evaluation": second}},
        "data.path, data.evaluation, federation.clients": {
            "federation": {"clients": 3},
            "data": {"path": first, "evaluation": [second]},
        },
        "data.evaluation, adapter.init, adapter.public_text": {
            "data": {"evaluation": first},
            "adapter": gradient,
        },
        "adapter.init": {"adapter": {"init": first}},
        "data.evaluation, synthesis.file": {
            "data": {"evaluation": first},
            "synthesis": {"file": second},
        },
    }


@pytest.mark.parametrize("named", naming("", ""))
def test_terms_ask_nothing_about_files_of_this_machine(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are refused where two names are of one file: a server that named them learnt whether it is there."""
    looked: list[str] = []
    for name in ("stat", "lstat"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, *a, real=real, **k: looked.append(str(path)) or real(path, *a, **k)
        )
    place = tmp_path / "patients"
    place.mkdir()
    (place / "there").write_text("{}\n")
    (place / "alias").symlink_to(place / "there")
    looked.clear()
    told = public_settings(with_local_method(settings_of("tan", NAMES))).to_yaml()
    client = owner(tmp_path / "a")
    client.workplaces = {run: Workplace(read_terms(told)) for run in ("r0", "r1", "r2")}

    def joined(run: str, text: str) -> bool:
        request = Request(NAMES[0], "join", 0, values={"run": run, "settings": text})
        return client.answer(request).refused is None

    assert joined("r0", told)
    for run, second in (("r1", "alias"), ("r2", "nowhere")):
        raw = yaml.safe_load(told)
        for group, values in naming(str(place / "there"), str(place / second))[named].items():
            raw[group] = {**raw.get(group, {}), **values}
        with pytest.raises(PrivacyError, match=f"the server's settings name files: {named}. "):
            read_terms(yaml.safe_dump(raw))
        assert not joined(run, yaml.safe_dump(raw))
    assert not [path for path in looked if path.startswith(str(place))]


# --- how long it takes to read them ---

BILLIONS = "x0: &x0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"x{n}: &x{n} [{','.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
TEDIOUS = {
    "aliases": BILLIONS + "federation: {clients: [{name: a}, {name: b}], rounds: 2, weights: *x8}\n",
    "an alias of what holds it": "federation: &x {clients: [*x], rounds: 2}\n",
    "lists in lists": "federation: " + "[" * 50_000,
    "many values": "federation: {weights: [" + "1," * 100_000 + "]}",
    "many names": "run: {" + ",".join(f"lable{n}: 1" for n in range(20_000)) + "}",
    "many clients": "federation: {clients: [" + ",".join("{name: '?'}" for _ in range(15_000)) + "]}",
    "a number with base 60": "run: {seed: 1" + ":59" * 300_000 + "}",
    "a long text": "a: '" + " " * 2_000_000 + "'",
}


@pytest.mark.parametrize("case", TEDIOUS)
def test_terms_are_read_in_seconds_whatever_they_hold(case: str, tmp_path: Path) -> None:
    """A client reads them under its lock. Processor time, since others may be at work here."""
    client = Client("a", tmp_path / "a", records=records(0), limits=ANYTHING)
    values = {"run": "run", "settings": TEDIOUS[case]}
    began = process_time()
    assert client.answer(Request("a", "join", 0, values=values)).refused == REFUSED
    assert process_time() - began < 30


def test_terms_that_are_refused_name_the_line() -> None:
    with pytest.raises(RunError, match=r"settings, line 2, hold an alias\. Fix: let the server write out"):
        read_terms("model: {name: &name x}\nrun: {label: *name}\n")
