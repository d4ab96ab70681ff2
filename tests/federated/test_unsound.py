"""What cannot protect is refused, with the reason: by the server's settings, and by clients that get such terms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federated_cases import Federation, owners, settings_of

from privlora.errors import ConfigError, PrivacyError
from privlora.federated.client import Client
from privlora.federated.messages import REFUSED, Request
from privlora.federated.plans import timetable, with_local_method

NAMES = ["owner-0", "owner-1", "owner-2", "owner-3"]


def joint_of(folder: Path, **federation: Any) -> Federation:
    """A federation of the rule joint that can do without one of its four clients."""
    chosen = settings_of("joint", NAMES, federation={"survivors": 3, **federation})
    return Federation(folder, chosen, owners(4))


SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "several joint steps": ("joint", {"local_steps": 2}, "takes one step a round"),
    "shares of noise in the clear": ("joint", {"secure_aggregation": False}, "share of the noise"),
    "shares of clients' noise in the clear": (
        "tan",
        {"privacy_model": "client", "secure_aggregation": False},
        "share of the noise",
    ),
    "few survivors": ("joint", {"survivors": 2}, "above two thirds"),
    "more survivors than clients": ("joint", {"survivors": 5}, "and at most all"),
    "a sum over one client": ("joint", {"clients_per_round": 1}, "is its update"),
    "joint clients": ("joint", {"privacy_model": "client"}, "records, not clients"),
    "weighted clients": ("tan", {"privacy_model": "client", "weights": [1, 2, 3, 4]}, "no weights"),
    "a trusted server of records": ("tan", {"trusted_server": True}, "hidden by the client itself"),
    "a trusted server that sees sums": (
        "tan",
        {"privacy_model": "client", "trusted_server": True, "secure_aggregation": True},
        "updates that it sees",
    ),
}


@pytest.mark.parametrize("case", sorted(SETTINGS))
def test_settings_that_cannot_protect_are_refused(case: str) -> None:
    rule, federation, reason = SETTINGS[case]
    with pytest.raises(ConfigError, match=reason):
        settings_of(rule, NAMES, federation=federation)


@pytest.mark.parametrize("rule", ["fedask", "scaffold", "fedsa", "flora", "fedex", "flexlora"])
def test_rules_of_more_than_one_summed_message_hide_no_clients(rule: str) -> None:
    chosen = settings_of(rule, NAMES, federation={"privacy_model": "client"})
    with pytest.raises(ConfigError, match=r"cannot hide whole clients|cannot be summed"):
        with_local_method(chosen)


def test_noiseless_joint_needs_no_secure_sum_and_none_of_its_numbers() -> None:
    chosen = settings_of("joint", NAMES, privacy={"private": False}, federation={"survivors": 3})
    federation = with_local_method(chosen).federation
    assert federation is not None
    assert (federation.secure, federation.survivors) == (False, None)
    settings_of("joint", NAMES, privacy={"private": False}, federation={"secure_aggregation": False})


TERMS: dict[str, tuple[str, str, str]] = {
    "no secure sum": ("joint", "secure_aggregation: null", "secure_aggregation: false"),
    "two steps of a joint round": ("joint", "local_steps: 1", "local_steps: 2"),
    "few survivors": ("joint", "survivors: null", "survivors: 2"),
    "a rule that cannot hide clients": ("tan", "rule: tan", "rule: fedask"),
    "a method that does not go with the rule": ("tan", "name: prism", "name: ffa"),
}


@pytest.mark.parametrize("case", sorted(TERMS))
def test_clients_join_no_terms_that_cannot_protect(case: str, tmp_path: Path) -> None:
    """A server of another version, or of bad will, sends them."""
    rule, old, new = TERMS[case]
    federation = {"privacy_model": "client"} if rule == "tan" else {}
    made = Federation(tmp_path, settings_of(rule, NAMES, federation=federation), owners(4)).join()
    (good, *_) = made.exchange.requests("join")
    terms = str(good.values["settings"])
    assert old in terms
    bad = replace(good, values={"run": "another", "settings": terms.replace(old, new)})
    client = made.clients["owner-0"]
    assert client.answer(bad).refused == REFUSED
    assert client.answer(replace(good, values={**good.values, "run": "another"})).refused is None


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 4},
        {"names": "owner-0,owner-1,owner-2"},
        {"names": "owner-0,owner-1,owner-2,owner-9"},
        {"stage": "sketch"},
    ],
)
def test_a_client_shares_with_nobody_but_those_agreed_on(change: dict[str, Any], tmp_path: Path) -> None:
    made = joint_of(tmp_path)
    made.exchange.ask = lambda request: (
        replace(request, values={**request.values, **change})
        if (request.kind, request.client) == ("share", "owner-0")
        else request
    )
    made.run()
    own = [reply for reply in made.exchange.replies("share") if reply.client == "owner-0"]
    assert [reply.refused for reply in own] == [REFUSED, REFUSED]
    assert all("owner-0" not in one.answered for one in made.done())
    assert made.ledger_of("owner-0").charges == 0


def test_a_round_is_not_opened_twice_as_another_stage(tmp_path: Path) -> None:
    """After a sum of the round, "train" again, called a sketch, over its survivors with a lower threshold."""
    made = joint_of(tmp_path, rounds=1)
    leave = made.exchange.drop
    made.exchange.drop = lambda request: request.kind == "leave"
    made.run()
    made.exchange.drop = leave
    client, charged = made.clients["owner-0"], made.ledger_of("owner-0").charges
    (share,) = [r for r in made.exchange.requests("share") if r.client == "owner-0"]
    (train,) = [r for r in made.exchange.requests("train") if r.client == "owner-0"]
    for request in (share, train):
        again = replace(request, values={**request.values, "stage": "sketch"})
        assert client.answer(again).refused == REFUSED
    assert made.ledger_of("owner-0").charges == charged == 1


def test_a_client_shares_with_no_key_that_its_owner_did_not_pin(tmp_path: Path) -> None:
    made = joint_of(tmp_path, rounds=1)
    pins = {name: client.identity.public(name).fingerprint for name, client in made.clients.items()}
    made.clients["owner-0"].pins = pins
    made.clients["owner-1"].pins = {**pins, "owner-3": pins["owner-2"]}
    made.run()
    assert {reply.client for reply in made.exchange.replies("share") if reply.refused} == {"owner-1"}


@pytest.mark.parametrize("kind", ["train", "share"])
def test_a_client_is_in_its_own_rounds_alone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its budget would cover the round."""
    federation = {"rounds": 3, "clients_per_round": 3}
    chosen = settings_of("joint" if kind == "share" else "tan", NAMES, federation=federation)
    made = Federation(tmp_path, chosen, owners(4)).join()
    (left,) = set(NAMES) - set(next(iter(timetable(tuple(NAMES), 3, 3, chosen.run.seed))))
    asked = made.request(left)
    if kind == "share":
        made.exchange.drop = lambda request: request.kind != "join"
        made.rounds().serve()
        asked = replace(made.exchange.requests("share", 1)[0], client=left)
    assert made.clients[left].answer(asked).refused == REFUSED
    assert "round 1, in which others train" in caplog.text
    assert made.ledger_of(left).charges == 0


def test_a_client_masks_for_the_sum_that_it_began(tmp_path: Path) -> None:
    """Its keys of one sum are of no use in another one, also where nothing else would refuse it."""
    made = joint_of(tmp_path, rounds=2)
    made.exchange.drop = lambda request: (
        request.kind != "join" and (request.kind, request.round) != ("share", 1)
    )
    made.rounds().serve()
    client = made.clients["owner-0"]
    (share,) = [r for r in made.exchange.requests("share", 1) if r.client == "owner-0"]
    session, train = client.session(share), replace(share, kind="train")
    assert session._participant(train).terms.turn == (made.history.run, 1, "train")
    for other in (replace(train, round=2), replace(train, values={**train.values, "stage": "sketch"})):
        with pytest.raises(PrivacyError, match="was not begun"):
            session._participant(other)


@pytest.mark.parametrize(
    ("rule", "group"),
    [("joint", {}), ("tan", {"secure_aggregation": True}), ("tan", {"privacy_model": "client", "rounds": 1})],
)
def test_nobody_is_charged_for_a_sum_that_never_began(
    rule: str, group: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing could leave without masks, so a client does not train for it either."""
    made = Federation(tmp_path, settings_of(rule, NAMES, federation=group), owners(4)).join()
    tensors = made.server.tensors("train")
    mask = {"run": made.history.run, "stage": "train", "length": 1, "names": ",".join(NAMES)}
    keys = {"keys": b"", "seals": b"", "signatures": b"", "letters": b""}
    asked = Request("owner-0", "train", 1, tensors, {**mask, **keys})
    assert made.clients["owner-0"].answer(asked).refused == REFUSED
    assert "a secure sum that was not begun" in caplog.text
    assert made.ledger_of("owner-0").charges == 0


class Sketched:
    """FedASK without secure sums, a round of which is over and nobody has left."""

    def __init__(self, folder: Path) -> None:
        chosen = settings_of("fedask", NAMES, federation={"rounds": 1})
        self.made = Federation(folder, chosen, owners(4))
        self.asked: list[Request] = []
        self.made.exchange.drop = self._kept

    def _kept(self, request: Request) -> bool:
        """owner-0's second stage stays here."""
        mine = (request.kind, request.client) == ("sketch", "owner-0")
        self.asked += [request] if mine else []
        return mine or request.kind == "leave"

    def last(self) -> tuple[Client, Request]:
        self.made.run()
        (asked,) = self.asked
        return self.made.clients["owner-0"], asked


def test_a_second_stage_is_answered_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the note of what was answered, not only because what it needs is gone by then."""
    client, asked = Sketched(tmp_path).last()
    assert client.answer(asked).refused is None
    assert client.answer(asked).refused == REFUSED
    assert "asked again for sketch of round 1" in caplog.text


def test_a_second_stage_is_of_the_shapes_that_were_agreed_on(tmp_path: Path) -> None:
    client, asked = Sketched(tmp_path).last()
    narrow = {name: tensor[..., :1] for name, tensor in asked.tensors.items()}
    assert client.answer(replace(asked, tensors=narrow)).refused == REFUSED


def test_a_server_asks_for_no_second_sum_without_a_client_of_the_first(tmp_path: Path) -> None:
    """It stops by itself, before clients have to refuse: nobody is asked to sign a shorter list."""
    federation = {"rounds": 1, "secure_aggregation": True, "survivors": 3}
    made = Federation(tmp_path, settings_of("fedask", NAMES, federation=federation), owners(4))
    made.exchange.drop = lambda request: (request.kind, request.client) == ("sketch", "owner-0")
    made.run()
    (one,) = made.done()
    assert "'sketch' in round 1 is void" in str(one.void)
    assert {request.values["stage"] for request in made.exchange.requests("agree")} == {"train"}
