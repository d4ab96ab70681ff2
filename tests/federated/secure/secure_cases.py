"""A federation in one process, whose steps a test can change on the way."""

from collections.abc import Callable, Collection

import numpy as np

from privlora.federated.secure.collector import Collector
from privlora.federated.secure.keys import Identity
from privlora.federated.secure.masks import ring_type
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import Message, Terms, Turn

TURN = Turn("run", 1, "train")
SENT = bytes(range(32))
LENGTH = 37


class Federation:
    """Clients c00, c01, … with their vectors; each step answers for the clients that are still there."""

    def __init__(
        self, clients, threshold=None, bits=32, length=LENGTH, turn=TURN, restart=False, whole=False
    ):
        self.names = [f"c{number:02d}" for number in range(clients)]
        self.identities = {name: Identity.create() for name in self.names}
        roster = tuple(self.identities[name].public(name) for name in self.names)
        self.terms = Terms(turn, threshold or clients // 2 + 1, bits, roster)
        self.length, self.restart, self.whole = length, restart, whole
        self.collector = Collector(self.terms, whole=whole)
        self.people: dict[str, Participant] = {}
        self.vectors = {name: self.draw(number) for number, name in enumerate(self.names)}
        self.masked: dict[str, np.ndarray] = {}
        self.requests: dict[str, Message] = {}

    def draw(self, seed):
        kind = ring_type(self.terms.bits)
        return np.random.default_rng(seed).integers(0, 2**self.terms.bits, self.length, dtype=kind)

    def expected(self, names):
        total = np.zeros(self.length, ring_type(self.terms.bits))
        for name in names:
            total += self.vectors[name]
        return total

    def person(self, name):
        """The client, in a new process if the federation restarts."""
        if self.restart:
            self.people[name] = Participant.from_bytes(self.people[name].to_bytes(), self.identities[name])
        return self.people[name]

    def share(self, without: Collection[str] = ()):
        self.requests = self.collector.ask_shares()
        for name, request in self.requests.items():
            if name not in without:
                self.collector.take("share", name, self.begin(name, request))

    def begin(self, name, request, **changes):
        earlier = self.names if self.whole else None
        settings = {"turn": self.terms.turn, "earlier": earlier} | changes
        self.people[name], reply = Participant.begin(self.identities[name], name, request, **settings)
        return reply

    def ask_vectors(self):
        self.requests = self.collector.ask_vectors(SENT, self.length)
        return self.requests

    def mask(
        self, without: Collection[str] = (), change: Callable[[str, Message], Message] = lambda _, sent: sent
    ):
        for name, request in self.ask_vectors().items():
            if name not in without:
                reply = self.answer_mask(name, change(name, request))
                self.collector.take("mask", name, reply)

    def answer_mask(self, name, request, sent=SENT):
        reply = self.person(name).mask(request, self.vectors[name].copy(), sent)
        self.masked[name] = reply["vector"].copy()
        return reply

    def agree(self, without: Collection[str] = ()):
        self.requests = self.collector.ask_agreement()
        for name, request in self.requests.items():
            if name not in without:
                self.collector.take("agree", name, self.person(name).agree(request))

    def unmask(self, without: Collection[str] = ()):
        self.requests = self.collector.ask_unmasking()
        for name, request in self.requests.items():
            if name not in without:
                self.collector.take("unmask", name, self.person(name).unmask(request))

    def run(self, *lost: Collection[str]):
        """The whole sum; lost: who drops out before each of the four answers."""
        gone: set[str] = set()
        for step, names in zip(
            (self.share, self.mask, self.agree, self.unmask), lost or [()] * 4, strict=True
        ):
            gone |= set(names)
            step(gone)
        return self.collector.total()
