"""One round's messages, as the server sees them: who is asked, whose answers count, and what their sum is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from privlora.accounting import Ledger, Plan
from privlora.config import Settings
from privlora.errors import RunError
from privlora.federated.messages import REFUSED, SUM, Exchange, Number, Reply, Request, refuse_unlisted, size
from privlora.federated.payload import FIXED_BITS, agreed_digest, fixed_point, lattice_of, like_of
from privlora.federated.plans import federation_of, plan_in, public_settings, tensors_of, weight_of
from privlora.federated.rules.checks import LARGEST_NORM, refuse_unfit
from privlora.federated.secure import Collector, Message, Phase, PublicIdentity, Terms, decode
from privlora.federated.secure import Layout as Names
from privlora.federated.secure import Turn as Which
from privlora.federated.server import Server
from privlora.mechanisms import ClippedUpdate, NoiseSource, Noising

_log = logging.getLogger(__name__)

_DONE: Final[Mapping[str, str]] = {
    "share": "clients exchange keys for the secure sum",
    "agree": "clients agree on who is in the secure sum",
    "unmask": "the secure sum is opened",
}
"""Kinds of messages, other than those that clients train for, in words."""


@dataclass
class Turn:
    """One round. roster: public keys of all clients, where sums are secure. plan: of each client's ledger. ledger: a
    trusted server's own. aside: takes what the log may not say, where a trusted server draws in secret. tell: is shown
    what goes on (`RoundObserver.on_phase`). down, up: bytes so far. sent: how many clients were sent
    tensors, in the largest stage."""

    settings: Settings
    exchange: Exchange
    server: Server
    run: str
    number: int
    roster: Mapping[str, PublicIdentity] = field(default_factory=dict)
    plan: Plan | None = None
    ledger: Ledger | None = None
    aside: Callable[[str], None] = field(default=lambda text: None)
    tell: Callable[[str, int | None, int | None], None] = field(default=lambda *_: None)
    down: int = 0
    up: int = 0
    sent: int = 0

    def take(self, stage: str, asked: Sequence[str]) -> list[str]:
        """Ask, take in, close; gives who answered. Raises RunError where nothing may come of the round."""
        federation = federation_of(self.settings)
        if federation.secure:
            answered = self._secure(stage, asked)
        elif self.ledger is not None:
            answered = self._trusted(stage, asked)
        else:
            answered = self._plain(stage, asked)
        self.server.close(stage, self.number, len(answered))
        return answered

    def _plain(self, stage: str, asked: Sequence[str]) -> list[str]:
        answered = []
        for reply in self._send(stage, self._same(stage, asked)):
            if self._fits(reply, self.server.expected(stage, self.number)):
                self.server.add(stage, dict(reply.tensors), weight_of(self.settings, reply.client))
                answered.append(reply.client)
        if not answered:
            raise RunError("no client answered", fix="see what they logged")
        return answered

    def _trusted(self, stage: str, asked: Sequence[str]) -> list[str]:
        """Clipped updates of whole clients, to which the server itself adds noise."""
        assert self.ledger is not None
        expected = self.server.expected(stage, self.number)
        updates = ClippedUpdate(like_of(expected), self.settings.privacy.clip_norm)
        total, answered = torch.zeros(updates.entries, dtype=torch.float64), []
        for reply in self._send(stage, self._same(stage, asked)):
            if self._fits(reply, expected):
                # Clipped here as well: the bound may not rest on what a client says.
                total += updates.clipped(reply.tensors)
                answered.append(reply.client)
        event = self.ledger.plan.event_of(self.ledger.charges + 1)
        divisor = float(federation_of(self.settings).per_round)
        mean = updates.release(total, Noising(self.ledger, NoiseSource()), event, divisor)
        self.server.add(stage, mean, 1.0)
        return answered

    def _secure(self, stage: str, asked: Sequence[str]) -> list[str]:
        """A sum of which no part is seen."""
        federation = federation_of(self.settings)
        expected = self.server.expected(stage, self.number)
        plan = None if self.plan is None else plan_in(self.settings, self.plan, self.number)
        lattice = lattice_of(federation, plan, expected)
        names = tuple(sorted(asked))
        terms = Terms(
            Which(self.run, self.number, stage),
            federation.threshold,
            FIXED_BITS if lattice is None else lattice.bits,
            tuple(self.roster[name] for name in names),
        )
        collector = Collector(terms, whole=stage != self.server.stages[0])
        self._phase("share", stage, collector, collector.ask_shares())
        sent = self.server.tensors(stage)
        agreed = agreed_digest(public_settings(self.settings).to_yaml(), sent)
        length = int(np.sum([np.prod(shape) for shape in expected.values()]))
        self._phase("mask", stage, collector, collector.ask_vectors(agreed, length), sent)
        self._phase("agree", stage, collector, collector.ask_agreement())
        self._phase("unmask", stage, collector, collector.ask_unmasking())
        total, answered = collector.total(), list(collector.survivors)
        if federation.joint and lattice is not None:
            self.server.add(stage, {SUM: torch.from_numpy(total)}, 1.0)
        elif lattice is not None:
            updates = ClippedUpdate(like_of(expected), self.settings.privacy.clip_norm)
            self.server.add(stage, updates.opened(total, lattice, float(federation.per_round)), 1.0)
        else:
            weight = sum(weight_of(self.settings, name) for name in answered)
            found = decode(total, Names.of(like_of(expected)), fixed_point(federation))
            divisor = 1.0 if federation.joint else weight
            self.server.add(stage, {name: t / divisor for name, t in found.items()}, weight)
        return answered

    def _phase(
        self,
        phase: Phase,
        stage: str,
        collector: Collector,
        asks: Mapping[str, Message],
        sent: Mapping[str, Tensor] | None = None,
    ) -> None:
        kind = stage if phase == "mask" else phase
        requests = {name: (dict(sent or {}), _values(ask)) for name, ask in asks.items()}
        for reply in self._send(kind, requests, stage=stage):
            message: Message = {n: v for n, v in reply.values.items() if not isinstance(v, float)}
            if phase == "mask":
                message["vector"] = _vector(reply.tensors)
            try:
                collector.take(phase, reply.client, message)
            except RunError as wrong:
                self._drop(reply, wrong)

    def _same(
        self, stage: str, asked: Sequence[str]
    ) -> dict[str, tuple[dict[str, Tensor], dict[str, Number]]]:
        sent = self.server.tensors(stage)
        return {name: (sent, {}) for name in asked}

    def _send(
        self,
        kind: str,
        asks: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Number]]],
        **values: Number,
    ) -> Iterator[Reply]:
        """The answers to what was asked, as they come, at most one of each client."""
        requests = [
            Request(name, kind, self.number, tensors=tensors, values={"run": self.run, **values, **own})
            for name, (tensors, own) in asks.items()
        ]
        self.down += sum(size(request) for request in requests)
        self.sent = max(self.sent, sum(bool(request.tensors) for request in requests))
        seen: set[str] = set()
        silent = set(asks)
        self._tell(kind, 0, len(asks))
        for reply in self.exchange.send(requests):
            silent.discard(reply.client)
            fits = (reply.kind, reply.round) == (kind, self.number) and reply.client in asks
            if fits and reply.client not in seen and self._listed(reply):
                seen.add(reply.client)
                self.up += size(reply)
                self._tell(kind, len(seen), len(asks))
                yield reply
        if silent:
            self._say(logging.INFO, f"no answer to {kind} from {', '.join(sorted(silent))}")

    def _tell(self, kind: str, answered: int, asked: int) -> None:
        """What is done now; how many are asked is a trusted server's secret."""
        what = f"round {self.number}/{federation_of(self.settings).rounds}: {self._in_words(kind)}"
        secret = federation_of(self.settings).trusted_server
        if not secret:
            self.tell(what, answered, asked)
        elif answered == 0:
            self.tell(what, None, None)

    def _in_words(self, kind: str) -> str:
        if kind in self.server.stages:
            return "clients train" if kind == self.server.stages[0] else "clients answer once more"
        return _DONE.get(kind, "clients answer")

    def _listed(self, reply: Reply) -> bool:
        """Whether it is an answer, and one that holds what is listed."""
        trains = reply.kind in self.server.stages
        names = tensors_of(self.settings, reply.kind, self.number)[1] if trains else ()
        try:
            refuse_unlisted(reply, federation_of(self.settings).secure, names)
        except RunError as unlisted:
            self._drop(reply, unlisted)
            return False
        if reply.refused is not None:
            why = "its own log says why" if reply.refused == REFUSED else reply.refused
            self._say(logging.INFO, f"{reply.client} refuses {reply.kind}: {why}")
        return reply.refused is None

    def _fits(self, reply: Reply, expected: Mapping[str, tuple[int, ...]]) -> bool:
        try:
            refuse_unfit(reply.tensors, expected, LARGEST_NORM)
        except RunError as unfit:
            self._drop(reply, unfit)
            return False
        return True

    def _drop(self, reply: Reply, because: RunError) -> None:
        self._say(logging.WARNING, f"the answer of {reply.client} is dropped: {because}")

    def _say(self, level: int, what: str) -> None:
        """To the log, which others may see; aside, where who answers when is a trusted server's secret: even a line
        that names nobody would tell that a client which fails was drawn."""
        line = f"round {self.number}: {what}"
        if federation_of(self.settings).trusted_server:
            self.aside(line)
        else:
            _log.log(level, "%s", line)


def roster_of(replies: Iterable[Reply]) -> dict[str, PublicIdentity]:
    """The public keys that clients joined with; without those whose keys are no keys."""
    found = {}
    for reply in replies:
        try:
            signing, agreement = reply.values["signing"], reply.values["agreement"]
            if isinstance(signing, bytes) and isinstance(agreement, bytes):
                found[reply.client] = PublicIdentity(reply.client, signing, agreement)
        except (KeyError, RunError):
            continue
    return found


def _vector(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """A masked vector; an empty one, which fits no sum, for what is none."""
    vector = tensors.get(SUM)
    if set(tensors) != {SUM} or vector is None or vector.dtype not in (torch.uint32, torch.uint64):
        return np.zeros(0, np.uint32)
    return np.asarray(vector.numpy())


def _values(message: Message) -> dict[str, Number]:
    return {name: value for name, value in message.items() if not isinstance(value, np.ndarray)}
