"""A federation of an attacker's choice: the settings' own pipeline, records that it made, one round many times.

Nothing of the pipeline is replaced: clients join, train, clip, add noise, charge their ledgers and answer, and the
server's turn sums and moves, all with the code of a real federation. What is an attacker's to choose is chosen: the
records of all clients, what colluding clients send, and that the server stays at one state. Gradients of its records
are as long as it wants, none at all, or the opposite of another record's: the gradient that leaves the output layer is
multiplied for the rows that hold a marked record, and forward passes and losses are unchanged.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from privlora.accounting import Ledger, LedgerSummary, read_ledger
from privlora.adapters.targets import output_layer
from privlora.config import AT_CLIENTS, Settings, settings_from
from privlora.errors import ConfigError, RunError
from privlora.federated.client import Client, Session, answer_all
from privlora.federated.limits import ANYTHING
from privlora.federated.messages import InProcess, Reply, Request
from privlora.federated.plans import (
    client_plan,
    federation_of,
    public_settings,
    server_plan,
    with_local_method,
)
from privlora.federated.rules import Asked, Tensors
from privlora.federated.run import server_of
from privlora.federated.server import RuleServer, Server, Turn, roster_of
from privlora.federated.workplace import Workplace
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.inputs import tokenise
from privlora.training.models import unchanged_afterwards

_COMMON = "an old archive of letters "
_CANARY, _MIRROR, _PLAIN = _COMMON + "was read", _COMMON + "is lost to us", "rain fell on the hills"
ATTACKERS = ("server", "client")
_VICTIMS = 16  # whose passes are taken together
_LOUD = 1e5  # times the canary's own gradient, and times C where that is more than 1

MASKED, OPENED, UPDATE = "masked ", "sum of ", "update of "
"""How names begin: of a client's message into a secure sum; of what such a sum opens; of a module's update."""
_LARGEST_UPDATE = 10**6  # entries of a module that is multiplied out

# What an attacker saw of one round: names of tensors, flat float64.
View = dict[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """Who is on it. names: all clients. victims: those whose records may hold the canary. silent: those that collude,
    and send zeros without noise. attackers: what an attacker sees (messages and opened sums, or what clients are sent),
    and who that is, in words."""

    names: tuple[str, ...]
    victims: tuple[str, ...]
    silent: tuple[str, ...]
    attackers: dict[str, str]


def stage_of(settings: Settings, attacker: str = "server") -> Stage:
    """The worst case that the settings' statement covers: all clients collude but those whose noise it counts on.

    Where the server sees each message, many victims are on it at once, half of them with the canary: what one sends
    tells nothing of another. Raises ConfigError for another ``attacker`` than "server" and "client", or for a server
    that is trusted.
    """
    federation, server = federation_of(settings), attacker == "server"
    if attacker not in ATTACKERS:
        raise ConfigError(f"unknown attacker {attacker!r}", fix=f"one of {', '.join(ATTACKERS)}")
    if server and federation.trusted_server:
        raise ConfigError("federation.trusted_server: the server sees all", fix="audit the attacker client")
    if server and not federation.distributed and not federation.secure:
        names = _names(_VICTIMS)
        return Stage(names, names, (), {"messages": "the server"})
    names = _names(federation.per_round if federation.distributed else 2)
    silent = names[federation.threshold :] if federation.distributed else names[1:]
    others = "another client" if len(silent) == 1 else f"{len(silent)} other clients"
    attackers = {"messages": f"the server and {others}" if silent else "the server"} if server else {}
    attackers["broadcasts"] = others if silent else "a reader that knows nobody's noise"
    return Stage(names, names[:1], silent, attackers)


def noise_counted_on(settings: Settings) -> str:
    """Whose noise the claim rests on, and so which noise the attacker is not given."""
    federation = federation_of(settings)
    if federation.trusted_server:
        return "the server's, in full"
    if not federation.distributed:
        return "the victim's own, in full; the attacker may know that of all other clients"
    t, size = federation.threshold, federation.per_round
    if t < size:
        return f"the shares of {t} of {size} clients; the attacker knows those of the {size - t} that collude"
    return (
        f"the shares of all {size} clients, of which the attacker knows none. A client knows its own: against it the "
        "claim does not hold, and plan and report state the larger ε"
    )


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"client-{number:03d}" for number in range(1, count + 1))


def rehearsed(settings: Settings, stage: Stage, *, rounds: int, sampled: bool = False) -> Settings:
    """``settings`` for ``rounds`` rounds of one state, in which the clients of ``stage`` take part and no others.

    The noise multiplier is that of the settings' own plan. Every unit is in every batch, unless ``sampled``.
    """
    settings = with_local_method(settings)
    federation, privacy = federation_of(settings), settings.privacy
    plan = client_plan(settings) or server_plan(settings)
    if plan is None:
        what = "a federation without noise claims nothing to audit"
        raise ConfigError(what, fix="set privacy.private=true")
    content = yaml.safe_load(settings.to_yaml())
    content["data"] = {
        "path": AT_CLIENTS,
        "max_length": min(64, settings.data.max_length),
        "unchecked": True,
    }
    content["federation"] |= dict.fromkeys(("clients_per_round", "column", "alpha", "weights")) | {
        "clients": [{"name": name} for name in stage.names],
        "rounds": rounds,
        "survivors": len(stage.names) - len(stage.silent) if federation.distributed else None,
    }
    targets = ("target_epsilon", "target_right_guesses", "target_found", "public_dataset_size")
    content["privacy"] |= dict.fromkeys(targets) | {
        "noise_multiplier": plan.phases[-1][0].noise_multiplier,
        "sample_rate": privacy.q if sampled else 1.0,
        "expected_batch_size": max(privacy.b, 2.0 * len(stage.names)),
    }
    del content["privacy"]["steps"]
    content["method"] |= {"schedule": "constant", "warmup_steps": 0, "averaging": 0.0}
    if federation.privacy_model == "client":  # an update that is longer than C for certain
        content["method"] |= {"learning_rate": privacy.clip_norm, "relative_rate": False}
    return settings_from(content, source="the audit's settings")


class _Silent(Session):
    """A colluding client, which does all that it is asked and sends zeros."""

    def send(self, request: Request, tensors: Tensors) -> Reply:
        return super().send(request, {name: torch.zeros_like(t) for name, t in tensors.items()})


@dataclass
class _Colluder(Client):
    def session(self, request: Request) -> Session:
        run = str(request.values["run"])
        return self._sessions.setdefault(run, _Silent(self, run))


class _Watched:
    """The server, and what it takes in."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.taken: list[tuple[str, Tensors]] = []

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        self.taken.append((stage, dict(message)))
        self._server.add(stage, message, weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@dataclass(frozen=True)
class Seen:
    """Of one victim in one round. present: whether it has the canary. messages: what the server saw. broadcasts: how
    what all clients are sent has moved."""

    present: bool
    messages: View
    broadcasts: View


class Rehearsal:
    """Clients with records of the attacker's choice, and as many rounds from one state as are asked for.

    settings: of ``rehearsed`` for this stage. present: of each victim, whether it has the canary. Where the unit is a
    client, one without it has a gradient of zero instead, so that its update is zero.
    """

    def __init__(
        self,
        settings: Settings,
        stage: Stage,
        folder: Path,
        workplace: Workplace,
        present: Mapping[str, bool],
    ) -> None:
        self.settings, self.stage, self.folder, self.present = settings, stage, folder, present
        model, tokenizer, _ = workplace.loaded
        self._workplace = Workplace(public_settings(settings), model, tokenizer)
        self._marks = _marks(settings, tokenizer)
        self._clients = {name: self._client(name) for name in stage.names}
        self._wire, self._seen = InProcess(self._clients, self._answer), list[Reply]()  # as they travelled
        self._plan = client_plan(settings)
        with unchanged_afterwards(model):
            parts = build_parts(settings, model, PublicStart(tokenizer))
            parts.adapter.detach()
            server = server_of(parts, self._plan)
        self._server: Any = _Watched(server)
        self._start = {group: dict(state) for group, state in self._server.states().items()}
        self._alike = _rounds_alike(server)
        self._run, self._number, self._ran, self._told = "", 1, 0, settings
        self._ledger: Ledger | None = None

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()

    def play(self) -> list[Seen]:
        """One round from the start. Raises RunError if a client refuses to answer."""
        if not self._run or not self._alike:
            self._join()
        before = self._public()
        self._seen, self._server.taken = [], []
        who = self._run, self._number, self._roster
        turn = Turn(self._told, self._wire, self._server, *who, self._plan, self._ledger)
        answered: Sequence[str] = self.stage.names
        with _loud(self._workplace.loaded[0], self._marks):
            for stage in self._server.stages:
                answered = turn.take(stage, answered)
        if set(answered) != set(self.stage.names):
            raise RunError("a client of the audit refused to answer", fix="see what it logged")
        moved = _moved(before, self._public())
        self._server.take_states(self._start)
        self._number += 2  # rules that train by turns stay at one turn
        return [Seen(self.present[name], self._messages(name), moved) for name in self.stage.victims]

    def statement(self) -> LedgerSummary:
        """The ledger that the last run's rounds were charged to: a victim's, or a trusted server's."""
        own = self.folder / self.stage.victims[0] / self._run / "ledger.jsonl"
        return read_ledger(own if self._plan is not None else self.folder / f"{self._run}.jsonl")

    @property
    def rounds(self) -> int:
        """Of the last run."""
        return (self._number - 1) // 2

    def _client(self, name: str) -> Client:
        """With the records that its part asks for."""
        texts = [_PLAIN]
        if name in self.stage.victims:
            alone = federation_of(self.settings).privacy_model == "client"
            other = _MIRROR if alone or self.settings.privacy.q < 1 else _PLAIN
            texts = [other] if not self.present[name] else [_CANARY] if alone else [other, _CANARY]
        user = self.settings.privacy.user_column
        records = [{"text": text, **({user: text} if user else {})} for text in texts]
        kind = _Colluder if name in self.stage.silent else Client
        return kind(name, self.folder / name, records=records, limits=ANYTHING)  # the attacker's own records

    def _answer(self, requests: Sequence[Request]) -> list[Reply]:
        replies = answer_all(self._clients, requests)
        self._seen += replies
        return replies

    def _join(self) -> None:
        self.close()
        self._run, self._number, self._ran = secrets.token_hex(8), 1, self._ran + 1
        settings, seed = self.settings, self.settings.privacy.insecure_noise_seed
        if seed is not None:  # else all runs had the same noise
            settings = settings.changed(privacy={"insecure_noise_seed": seed + 7919 * self._ran})
        self._told = settings  # masks depend on all that clients agreed to
        values = {"run": self._run, "settings": public_settings(settings).to_yaml()}
        for client in self._clients.values():
            client.workplaces[self._run] = self._workplace
        replies = self._answer([Request(name, "join", 0, values=values) for name in self.stage.names])
        refused = [reply.client for reply in replies if reply.refused is not None]
        if refused:
            what = f"clients of the audit did not join: {', '.join(refused)}"
            raise RunError(what, fix="see what they logged")
        self._roster = roster_of(replies)
        plan = server_plan(self.settings)
        if plan is not None:
            self._ledger = Ledger.create(self.folder / f"{self._run}.jsonl", plan)

    def _public(self) -> Tensors:
        """What all clients are sent, and the update that follows from it, which moves smoothly."""
        found = dict(self._server.tensors(self._server.stages[0]))
        for name, (left, right) in self._server.parts.named_factors().items():
            if left.shape[0] * right.shape[0] <= _LARGEST_UPDATE:
                found[f"{UPDATE}{name}"] = left.detach().double() @ right.detach().double().mT
        return found

    def _messages(self, victim: str) -> View:
        """A victim's own messages, as they travelled, and what was opened of secure sums."""
        own = [reply for reply in self._seen if reply.client == victim and reply.tensors]
        secure = federation_of(self.settings).secure
        how = MASKED if secure else ""
        found = {f"{how}{reply.kind} {name}": _flat(t) for reply in own for name, t in reply.tensors.items()}
        if secure:
            for stage, message in self._server.taken:
                found |= {f"{OPENED}{stage} {name}": _flat(t) for name, t in message.items()}
        return found


def _marks(settings: Settings, tokenizer: Any) -> list[Mark]:
    whole = federation_of(settings).privacy_model == "client"
    texts = tokenise([{"text": _CANARY}, {"text": _MIRROR}], settings.data, tokenizer)
    canary, mirror = ([int(token) for token in example.input_ids] for example in texts)
    factor = 1.0 if whole else _LOUD * max(1.0, settings.privacy.clip_norm)
    loud_one, opposite = _opposites(canary, mirror, factor)
    return [loud_one, Mark(opposite.ids, 0.0, 0) if whole else opposite]


def _rounds_alike(server: Server) -> bool:
    """Whether rounds 1, 3, 5, … of one client are rounds from one state; else each is round 1 of a run of its own."""
    if not isinstance(server, RuleServer):
        return True
    rule, sent = server.rule, server.tensors("train")
    if rule.memory or len(rule.stages) > 1:
        return False
    one, other = (rule.begin(Asked(number, sent, {}, rule.settings)) for number in (1, 3))
    return all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


def _moved(before: Tensors, after: Tensors) -> View:
    found = {name: _flat(tensor) for name, tensor in after.items()}
    for name, old in before.items():
        if name in after and old.shape == after[name].shape:
            found[name] = found[name] - _flat(old)
    return found


_SIGNED: dict[torch.dtype, torch.dtype] = {torch.uint32: torch.int32, torch.uint64: torch.int64}


def _flat(tensor: Tensor) -> Tensor:
    """Integers of a ring as those nearest to zero."""
    signed = _SIGNED.get(tensor.dtype)
    return (tensor if signed is None else tensor.view(signed)).detach().cpu().double().flatten()


@dataclass(frozen=True)
class Mark:
    """ids: all tokens of a record. factor: of its gradient at the first ``positions`` positions; 0 at the others."""

    ids: tuple[int, ...]
    factor: float
    positions: int


def _opposites(one: Sequence[int], other: Sequence[int], factor: float) -> tuple[Mark, Mark]:
    """Two records of which one's gradient is minus a positive multiple of the other's, at every state of the model.

    What two texts share at their beginning has the same gradient in a causal model; the rest of both counts nothing.
    Raises ConfigError for texts that share fewer than three tokens.
    """
    pairs = zip(one, other, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    if shared < 3 or tuple(one) == tuple(other):
        what = "the canary's text is not told apart from others by this tokenizer"
        raise ConfigError(what, fix="audit with another model, or raise data.max_length")
    # Position k predicts token k + 1.
    return Mark(tuple(one), factor, shared - 1), Mark(tuple(other), -factor, shared - 1)


@contextmanager
def _loud(model: torch.nn.Module, marks: Sequence[Mark]) -> Iterator[None]:
    """Inside, gradients of marked records are multiplied. Raises ConfigError for a model without an output layer."""
    head = output_layer(model)
    if head is None:
        what = "this model has no output layer of its own, where the canary's gradient is scaled"
        raise ConfigError(what, fix="audit the same federation with another model")
    seen: list[Tensor] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[:] = [kwargs["input_ids"] if "input_ids" in kwargs else args[0]]

    def scale(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = args[0]
        if not seen or not hidden.requires_grad or hidden.shape[:2] != seen[0].shape:
            return None
        factors = _factors(seen[0], marks).to(hidden.device, hidden.dtype)[..., None]
        still = hidden.detach()
        return (still + factors * (hidden - still), *args[1:])

    handles = [model.register_forward_pre_hook(note, with_kwargs=True), head.register_forward_pre_hook(scale)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _factors(ids: Tensor, marks: Sequence[Mark]) -> Tensor:
    """(rows, T); longer marks last, because the ids of one may begin another."""
    found = torch.ones(ids.shape, dtype=torch.float64)
    for mark in sorted(marks, key=lambda mark: len(mark.ids)):
        length = len(mark.ids)
        if length > ids.shape[1]:
            continue
        own = torch.tensor(mark.ids, device=ids.device)
        rows = (ids[:, :length] == own).all(dim=1).cpu()
        found[rows] = 0.0
        found[rows, : mark.positions] = mark.factor
    return found
