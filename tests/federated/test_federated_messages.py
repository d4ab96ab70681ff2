"""Every byte that travels is listed, by kind, on both sides; and none of it follows from private numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from federated_cases import Federation, owners, records, settings_of

from privlora.errors import RunError
from privlora.federated.messages import (
    KINDS,
    REFUSED,
    REPLIES,
    REQUESTS,
    SUM,
    Reply,
    Request,
    refuse_unlisted,
)
from privlora.federated.rules import RULES

NAMES = ["owner-0", "owner-1", "owner-2"]
RECORD = [
    *((rule, {"secure_aggregation": False}) for rule in sorted(RULES)),
    *((rule, {"secure_aggregation": True}) for rule in ("tan", "fedask", "scaffold")),
    ("joint", {}),
]
CLIENT = [
    ("tan", {"privacy_model": "client"}),
    ("fedavg", {"privacy_model": "client", "trusted_server": True, "clients_per_round": 3}),
]
NOISELESS = [("tan", {"private": False}), ("joint", {"private": False, "secure_aggregation": False})]


def run(folder: Path, rule: str, federation: dict[str, Any], own: dict[str, Any] | None = None) -> Federation:
    federation = dict(federation)
    private = federation.pop("private", True)
    chosen = settings_of(rule, NAMES, federation=federation, privacy={} if private else {"private": False})
    return Federation(folder, chosen, own or owners(3)).run()


@pytest.mark.parametrize(("rule", "federation"), [*RECORD, *CLIENT, *NOISELESS])
def test_messages_hold_what_is_listed_and_no_private_number(
    rule: str, federation: dict[str, Any], tmp_path: Path
) -> None:
    """Owners with other records, of other number and lengths: all but noised numbers and keys is the same."""
    other = {name: records(20 + k, range(3, 6 + 7 * k)) for k, name in enumerate(NAMES)}
    made = [run(tmp_path / "a", rule, federation), run(tmp_path / "b", rule, federation, other)]
    for one in made:
        assert one.exchange.messages
        for message in one.exchange.messages:
            _check_listed(one, message)
    said = [[_shown(one, message) for message in one.exchange.messages] for one in made]
    assert said[0] == said[1]


def _check_listed(made: Federation, message: Request | Reply) -> None:
    secure = made.settings.federation.secure  # type: ignore[union-attr]
    table = REQUESTS if isinstance(message, Request) else REPLIES
    assert {name: type(value) for name, value in message.values.items()} == dict(table[secure][message.kind])
    if message.kind not in ("train", "sketch"):
        brings = isinstance(message, Request) and (message.kind, made.settings.federation.rule) == (
            "leave",
            "fedsa",
        )  # type: ignore[union-attr]
        assert message.tensors.keys() == (made.server.tensors("train").keys() if brings else set())
    elif isinstance(message, Reply):
        expected = made.server.expected(message.kind, message.round)
        if secure:
            entries = sum(torch.Size(shape).numel() for shape in expected.values())
            expected = {SUM: (entries,)}
        assert {name: tuple(t.shape) for name, t in message.tensors.items()} == expected
    if message.kind == "leave" and isinstance(message, Reply):
        _check_ledger(str(message.values["ledger"]))


def _check_ledger(text: str) -> None:
    """Its lines are the plan and one charge a release; the only clock is the day it was begun on."""
    if not text:
        return
    first, *charges, last = map(json.loads, text.splitlines())
    assert set(last) == {"type", "prev"}
    day = datetime.now(UTC).date().toordinal()
    assert abs(datetime.fromisoformat(first["created"]).date().toordinal() - day) <= 1
    assert all(set(line) == {"type", "step", "event", "salt", "prev"} for line in charges)


_RANDOM = {"signing", "agreement", "key", "keys", "seal", "seals"}
_RANDOM |= {"signature", "signatures", "letters", "context"}


def _shown(made: Federation, message: Request | Reply) -> Any:
    """A message without what is random: numbers of tensors, keys, the run's name, a ledger's own name and salts."""
    values: dict[str, Any] = dict(message.values)
    for name, value in values.items():
        if name in {*_RANDOM, "seeds", "run", "ledger"}:
            values[name] = len(value)
        elif name == "settings":
            values[name] = yaml.safe_load(value)
    if "threshold" in values:
        values.pop("signing"), values.pop("agreement")
    tensors = {name: (tuple(t.shape), t.dtype) for name, t in message.tensors.items()}
    refused = getattr(message, "refused", None)
    return type(message).__name__, message.client, message.kind, message.round, values, tensors, refused


def test_terms_hold_nothing_of_records_and_machines(tmp_path: Path) -> None:
    """Settings as clients get them, of a server that knows paths."""
    chosen = settings_of("tan", NAMES)
    own = [{"name": name, "path": f"/secret/{name}.jsonl"} for name in NAMES]
    filled = settings_of(
        "tan", NAMES, federation={"clients": own}, run={"output": "/secret/output", "label": "trial"}
    )
    filled = filled.model_copy(
        update={"data": filled.data.model_copy(update={"evaluation": "/secret/held-out.jsonl"})}
    )
    made = [Federation(tmp_path / str(k), each, owners(3)).join() for k, each in enumerate((chosen, filled))]
    terms = [yaml.safe_load(str(one.exchange.requests("join")[0].values["settings"])) for one in made]
    assert "secret" not in str(terms[1])
    assert terms[1]["run"].pop("label") == "trial"
    terms[0]["run"].pop("label", None)
    assert terms[0] == terms[1]


CHANGES: dict[str, Callable[[Reply], Reply]] = {
    "another value": lambda r: replace(r, values={**r.values, "loss": 1.5}),
    "another tensor": lambda r: replace(r, tensors={**r.tensors, "0.norms": torch.ones(2)}),
    "a value of another type": lambda r: replace(r, values={**r.values, "context": "text"}),
    "words beside a refusal": lambda r: replace(r, refused="record 17 is too long"),
}


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_server_drops_answers_with_more_than_is_listed(change: str, secure: bool, tmp_path: Path) -> None:
    federation = {"rounds": 1, "secure_aggregation": secure, **({"survivors": 3} if secure else {})}
    names = [*NAMES, "owner-3"]
    made = Federation(tmp_path, settings_of("tan", names, federation=federation), owners(4))
    made.exchange.change = lambda reply: (
        CHANGES[change](reply) if (reply.client, reply.kind) == ("owner-1", "train") else reply
    )
    made.run()
    (only,) = made.done()
    assert only.answered == ("owner-0", "owner-2", "owner-3")


def test_a_server_takes_no_joining_with_more_than_is_listed(tmp_path: Path) -> None:
    made = Federation(tmp_path, settings_of("tan", NAMES), owners(3))
    made.exchange.change = lambda reply: replace(reply, values={"records": 6})
    with pytest.raises(RunError, match=r"did not join: owner-0 .*, owner-1 .*, owner-2"):
        made.run()


ASKED: dict[str, Callable[[Request], Request]] = {
    "another value": lambda r: replace(r, values={**r.values, "log_losses": 1}),
    "another tensor": lambda r: replace(r, tensors={**r.tensors, "0.W": torch.ones(2)}),
    "a tensor less": lambda r: replace(r, tensors=dict(list(r.tensors.items())[1:])),
    "a value less": lambda r: replace(r, values={}),
    "another kind": lambda r: replace(r, kind="evaluate"),
    "a stage that the rule has not": lambda r: replace(r, kind="sketch", tensors={}),
    "a round after the last": lambda r: replace(r, round=3),
    "a round that is a text": lambda r: replace(r, round="1"),
    "a round that is a truth": lambda r: replace(r, round=True),
}


@pytest.mark.parametrize("change", sorted(ASKED))
def test_a_client_refuses_requests_with_more_or_less_than_is_listed(change: str, tmp_path: Path) -> None:
    made = Federation(tmp_path, settings_of("tan", NAMES), owners(3)).join()
    request = made.request("owner-0")
    reply = made.clients["owner-0"].answer(ASKED[change](request))
    assert (reply.refused, reply.tensors, reply.values) == (REFUSED, {}, {})
    assert made.ledger_of("owner-0").charges == 0
    assert made.clients["owner-0"].answer(request).refused is None


def test_a_client_sends_nothing_that_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Federation(tmp_path, settings_of("tan", NAMES), owners(3)).join()
    answer = RULES["tan"].answer

    def more(*args: Any, **options: Any) -> Any:
        message, kept = answer(*args, **options)
        return {**message, "0.count": torch.ones(1)}, kept

    monkeypatch.setattr(RULES["tan"], "answer", more)
    assert made.clients["owner-0"].answer(made.request("owner-0")).refused == REFUSED


def test_a_refusal_holds_nothing() -> None:
    for wrong in (
        Reply("a", "train", 1, refused="because"),
        Reply("a", "train", 1, values={"loss": 1.0}, refused=REFUSED),
        Reply("a", "train", 1, tensors={"0.M": torch.ones(1)}, refused=REFUSED),
    ):
        with pytest.raises(RunError, match="more than a refusal"):
            refuse_unlisted(wrong, secure=False, tensors=["0.M"])
    refuse_unlisted(Reply("a", "train", 1, refused=REFUSED), secure=False, tensors=["0.M"])


def test_every_kind_is_listed() -> None:
    for table in (REQUESTS, REPLIES):
        assert set(table[True]) == set(KINDS)
        assert set(table[False]) == set(KINDS) - {"share", "agree", "unmask"}
