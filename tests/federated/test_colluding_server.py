"""A server that works with clients of a joint federation, played against the product's own clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collusion_cases import Collusion
from federated_cases import SIGMA, Federation, owners, settings_of

from privlora.config.federation import honest_left
from privlora.errors import ConfigError, PrivacyError
from privlora.federated.client import Client
from privlora.federated.limits import Limits
from privlora.federated.messages import REFUSED, SUM, Request
from privlora.federated.plans import client_plan, lattice_of, public_settings
from privlora.federated.secure.collector import Collector
from privlora.federated.secure.masks import agreed_digest
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import Message, Terms, Turn
from privlora.federated.words import InWords

NAMES = [f"owner-{k}" for k in range(4)]
LIMITS = Limits(max_epsilon=100.0, max_delta=1e-2, least_clients=3, needs_secure_sums=True, pins_model=False)


class Asked:
    """An honest client, as the server reaches it."""

    def __init__(self, client: Client, run: str) -> None:
        self.client, self.run = client, run

    def kept(self) -> Participant:
        secret = (self.client.folder / self.run / "sum.secret").read_bytes()
        return Participant.from_bytes(secret, self.client.identity)

    def ask(self, kind: str, values: Mapping[str, Any]) -> Message:
        told = {"run": self.run, "stage": "train", **values}
        reply = self.client.answer(Request(self.client.name, kind, 1, values=told))
        if reply.refused is not None:
            raise PrivacyError(reply.refused, fix="")
        return dict(reply.values)

    def mask(self, values: Message, tensors: Any) -> np.ndarray:
        told = {"run": self.run, "stage": "train", **values}
        reply = self.client.answer(Request(self.client.name, "train", 1, tensors=tensors, values=told))
        self._context, self._sharers = self.kept()._context, self.kept()._sharers
        return reply.tensors[SUM].numpy()

    def agree(self, values: Message) -> Message:
        return self.ask("agree", values)

    def unmask(self, values: Message) -> Message:
        return self.ask("unmask", values)


def server_of(folder: Path, count: int) -> tuple[Federation, Collusion]:
    """All have shared and masked; ``count`` clients work with the server."""
    chosen = settings_of("joint", NAMES, federation={"survivors": 3, "rounds": 1})
    made = Federation(folder, chosen, owners(4), limits=LIMITS)
    public = {name: client.identity.public(name) for name, client in made.clients.items()}
    for client in made.clients.values():
        client.pins = {name: one.fingerprint for name, one in public.items()}
    made.join()
    (entries,) = made.server.expected("train", 1)["sum"]
    lattice = lattice_of(chosen.federation, made.plan, {"sum": (entries,)})
    assert lattice is not None
    run = made.history.run
    collector = Collector(Terms(Turn(run, 1, "train"), 3, lattice.bits, tuple(public.values())))
    asked = {name: Asked(client, run) for name, client in made.clients.items()}
    keys, vectors = {}, {}
    for name, ask in collector.ask_shares().items():
        collector.take("share", name, asked[name].ask("share", ask))
        keys[name] = asked[name].kept()._key
    sent = made.server.tensors("train")
    agreed = agreed_digest(public_settings(made.settings).to_yaml(), sent)
    for name, ask in collector.ask_vectors(agreed, entries).items():
        vectors[name] = asked[name].mask(ask, sent)
    own = NAMES[4 - count :]
    return made, Collusion(
        {name: asked[name] for name in NAMES if name not in own},
        {name: asked[name].kept() for name in own},
        {name: client.identity for name, client in made.clients.items()},
        {name: keys[name] for name in own},
        {name: shown.key for name, shown in collector._shown.items()},
        vectors,
        3,
    )


def noise_in(made: Federation, opened: np.ndarray) -> float:
    """The standard deviation of what was opened, over the clipping norm; nearly all of it is noise."""
    lattice = lattice_of(made.settings.federation, made.plan, {"sum": opened.shape})
    assert lattice is not None
    assert made.plan is not None
    signed = opened.astype(np.int64) - (opened > 2 ** (lattice.bits - 1)) * 2**lattice.bits
    return float(np.std(signed) * lattice.width / made.plan.clip_norm)


def test_with_one_client_a_server_opens_no_single_answer(tmp_path: Path) -> None:
    made, server = server_of(tmp_path, 1)
    server.tell(NAMES[:2], [*NAMES[:2], NAMES[3]])
    with pytest.raises(PrivacyError):
        server.tell([NAMES[2]], NAMES)
    opened = server.opened(NAMES[:2])
    assert opened is not None
    assert all(server.opened([name]) is None for name in NAMES[:3])
    row, *_ = InWords(made.settings, made.plan).colluding
    assert row["clients"] == 1
    assert (
        noise_in(made, opened) > 0.9 * row["noise_multiplier"] == pytest.approx(0.9 * SIGMA * (2 / 3) ** 0.5)
    )


def test_with_two_it_does_and_that_is_stated(tmp_path: Path) -> None:
    """More than the threshold leaves out: the rest of the noise is one share."""
    made, server = server_of(tmp_path, 2)
    for name in NAMES[:2]:
        server.tell([name], [name, *NAMES[2:]])
    row = InWords(made.settings, made.plan).colluding[1]
    assert row["clients"] == 2
    for name in NAMES[:2]:
        opened = server.opened([name])
        assert opened is not None
        assert noise_in(made, opened) > 0.9 * row["noise_multiplier"]
    assert row["noise_multiplier"] == pytest.approx(SIGMA * (1 / 3) ** 0.5)


def test_clients_count_on_no_more_than_the_threshold_leaves_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the settings, each client's own participant refuses a threshold that is too small."""
    granted, begin = [], Participant.begin
    monkeypatch.setattr(
        Participant, "begin", lambda *a, **given: granted.append(given["colluding"]) or begin(*a, **given)
    )
    server_of(tmp_path, 1)
    assert granted == [1] * 4


@pytest.mark.parametrize("clients", range(3, 10))
def test_what_is_stated_is_the_noise_of_what_can_be_opened(clients: int) -> None:
    """For each threshold that settings take, and each number of clients that works with the server."""
    names = [f"owner-{k}" for k in range(clients)]
    least = 2 * clients // 3 + 1
    with pytest.raises(ConfigError, match=f"survivors: {least}, or more"):
        settings_of("joint", names, federation={"survivors": least - 1})
    for threshold in range(least, clients + 1):
        made = settings_of("joint", names, federation={"survivors": threshold})
        plan = client_plan(made)
        assert plan is not None
        rows = InWords(made, plan).colluding
        counts = [row["clients"] for row in rows]
        assert counts == sorted({1, 2, min(3, clients - 1), max(1, clients - threshold), clients - 1})
        for row in rows:
            left = honest_left(clients, threshold, row["clients"])
            assert row["noise_multiplier"] == pytest.approx(SIGMA * (left / threshold) ** 0.5, rel=1e-6)
        costs = [row["epsilon"] for row in rows]
        assert costs == sorted(costs)
        assert f"as long as c is below {2 * threshold - clients}" in InWords(made).what_the_server_sees()


def test_terms_of_a_smaller_threshold_are_joined_by_nobody(tmp_path: Path) -> None:
    chosen = settings_of("joint", NAMES[:3], federation={"rounds": 1})
    made = Federation(tmp_path, chosen, owners(3), limits=replace(LIMITS, least_clients=2)).join()
    (good, *_) = made.exchange.requests("join")
    terms = str(good.values["settings"]).replace("survivors: null", "survivors: 2")
    bad = replace(good, values={"run": "another", "settings": terms})
    assert made.clients["owner-0"].answer(bad).refused == REFUSED


def test_an_owner_says_over_how_many_a_sum_is_opened_at_least(tmp_path: Path) -> None:
    """``least_clients`` is not only of those who are asked."""
    chosen = settings_of("joint", NAMES, federation={"survivors": 3, "rounds": 1})
    made = Federation(tmp_path, chosen, owners(4), limits=LIMITS).join()
    (good, *_) = made.exchange.requests("join")
    client = made.clients["owner-0"]
    client.limits = replace(LIMITS, least_clients=4)
    another = replace(good, values={**good.values, "run": "another"})
    assert client.answer(another).refused == REFUSED
