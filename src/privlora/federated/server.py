"""The server of a federation: what moves there (the update of a rule, or of joint the state of a run), and its rounds:
ask, take in what comes, move, save.

The same lines drive clients of this process, of Flower's simulation and of other machines: only the Exchange differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from privlora.accounting import Ledger, Plan
from privlora.config import FederationSettings, Settings
from privlora.coordinates.base import name_factors
from privlora.data.examples import Examples
from privlora.data.sampling import PoissonSampler
from privlora.errors import PrivacyError, RunError
from privlora.evaluation import evaluate_next_token
from privlora.federated import plans
from privlora.federated.history import ASIDE, STOPPED, History, Round, RoundObserver, set_aside, why_void
from privlora.federated.local import rates
from privlora.federated.messages import (
    REFUSED,
    SUM,
    Exchange,
    Number,
    Phase,
    Reply,
    Request,
    refuse_unlisted,
    size,
)
from privlora.federated.rules import Pairs, Rule, Tensors
from privlora.federated.rules.checks import LARGEST_NORM, refuse_unfit
from privlora.federated.secure.collector import Collector
from privlora.federated.secure.keys import PublicIdentity
from privlora.federated.secure.masks import FIXED_BITS, agreed_digest, decode
from privlora.federated.secure.wire import Message, Terms
from privlora.federated.secure.wire import Turn as Which
from privlora.geometry.fixed_rank import Point, Product, point_from_factors
from privlora.mechanisms import ClippedUpdate, Layout, NoiseSource, Noising, SumMechanism
from privlora.optimizers import IterateAverage
from privlora.pages.numbers import finite
from privlora.training.assembly import Parts
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint
from privlora.training.files import RunFolder, append_line, read_lines
from privlora.training.loop import Interrupted
from privlora.training.state import States
from privlora.training.stopping import stop_on_signal

_log = logging.getLogger(__name__)


_AFTER_ROUND: Final = (
    "stopping after this round, and saving. A second Ctrl-C or SIGTERM stops at once: the round is then void, and what "
    "it charged stays charged"
)

_SHOWN = 10  # rounds that a line names

SECRET: Final = (
    f"whom the server drew, and who answered, is its secret, which epsilon counts on: private/{ASIDE} says what "
    "rounds lacked"
)
"""What a trusted server's log says at the end, whatever came of it."""

NOTHING_LACKED: Final = "in every round at least half of those drawn answered, and everybody in some"


_DONE: Final[Mapping[str, str]] = {
    "train": "clients train",
    "sketch": "clients answer once more",
    "share": "clients exchange keys for the secure sum",
    "agree": "clients agree on who is in the secure sum",
    "unmask": "the secure sum is opened",
}
"""What goes on in a round, by kinds of messages."""


@dataclass(kw_only=True)
class _RuleParts(Parts):
    """Parts whose update is the rule's, in the place of the coordinates that clients train in.

    scale: of the rule's factors. rule_average: of the updates after each round, where method.averaging is on.
    """

    rule: Rule
    scale: float
    rule_average: IterateAverage | None = None

    def update(self) -> Pairs:
        """What is exported: one (A (L, m, k), B (L, n, k)) a group; the update is A B^T."""
        if self.rule_average is not None:
            return self.rule_average.factors()
        pairs = self.rule.factors()
        if not pairs[0][0].shape[-1]:  # nothing was stacked yet
            pairs = [(a.new_zeros(*a.shape[:2], 1), b.new_zeros(*b.shape[:2], 1)) for a, b in pairs]
        return [(self.scale * a, b) for a, b in pairs]

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self.adapter.relative_to_w0(name_factors(self.adapter, self.update()))

    def as_points(self) -> list[Point]:
        """As an average asks coordinates."""
        pairs = self.rule.factors()
        return [
            point_from_factors(self.scale * a, b, torch.Generator(a.device).manual_seed(0)) for a, b in pairs
        ]

    def as_products(self) -> list[Product]:
        return [(self.scale * a, a.new_ones(a.shape[0], a.shape[-1]), b) for a, b in self.rule.factors()]

    def install_result(self) -> None:
        for group, (a, b) in zip(self.adapter.groups, self.update(), strict=True):
            self.adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)


class RuleServer:
    """The update of an aggregation rule. parts: what is exported and reported. stages: the messages of a round."""

    def __init__(self, parts: Parts, rule: Rule, scale: float) -> None:
        given = {name: value for name, value in vars(parts).items() if name != "average"}
        self.rule, self.stages, self.parts = rule, rule.stages, _RuleParts(**given, rule=rule, scale=scale)
        self._groups = [(len(g.sites), g.m, g.n) for g in parts.adapter.groups]
        if parts.hyper.averaging and rule.fixed_rank:
            iterate: Any = self.parts
            self.parts.rule_average = IterateAverage(iterate, parts.hyper.averaging)

    def tensors(self, stage: str) -> Tensors:
        """What every client is sent."""
        return self.rule.broadcast(stage)

    def expected(self, stage: str, number: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of an answer's tensors; of each client the same."""
        return self.rule.shapes(stage, number, self._groups, self.rule.settings)[1]

    def message_sizes(self, number: int, present: int) -> tuple[float, float]:
        """Numbers that a client is sent, and that it answers, in all stages of a round with so many clients."""
        return self.rule.message_sizes(self._groups, self.rule.settings, number, present)

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        """Take in an answer, on arrival, or a sum of several, of which ``weight`` is the sum of weights."""
        self.rule.add(stage, message, weight)

    def close(self, stage: str, number: int, present: int) -> None:
        """All answers of ``present`` clients are in; after the last stage the state moves."""
        self.rule.close(stage)
        if stage == self.stages[-1] and self.parts.rule_average is not None:
            self.parts.rule_average.update()

    def states(self) -> States:
        """Everything that the next round depends on."""
        states = {"rule": self.rule.state_dict()}
        if self.parts.rule_average is not None:
            states["average"] = self.parts.rule_average.state_dict()
        return states

    def take_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Inverse of ``states``; whatever came in of an unfinished round is forgotten."""
        for stage in self.stages:  # takes what came in; where that moves the state is undone
            self.rule.close(stage)
        self.rule.load_state_dict(states["rule"])
        if self.parts.rule_average is not None:
            self.parts.rule_average.load_state_dict(states["average"])


class JointServer:
    """A central run's state, which moves along secure sums as a central run would; as `RuleServer`."""

    stages = ("train",)

    def __init__(self, parts: Parts, plan: Plan | None) -> None:
        """plan: of each client's ledger; None in the non-private mode."""
        self.parts, settings = parts, parts.settings
        self._layout = Layout.of(parts.coordinates)
        self._mechanism = SumMechanism(
            parts.coordinates,
            lattice=plans.lattice_of(plans.federation_of(settings), plan, self.expected("train", 1)),
            expected_batch_size=settings.privacy.b,
            clip_norm=settings.privacy.clip_norm,
        )
        self._total: np.ndarray | None = None

    def tensors(self, stage: str) -> Tensors:
        return {name: t.detach().cpu().clone() for name, t in self.parts.coordinates.state_dict().items()}

    def expected(self, stage: str, number: int) -> dict[str, tuple[int, ...]]:
        return {SUM: (self._layout.entries,)}

    def message_sizes(self, number: int, present: int) -> tuple[float, float]:
        return float(sum(t.numel() for t in self.tensors("train").values())), float(self._layout.entries)

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        vector = message[SUM].numpy()
        self._total = vector.copy() if self._total is None else self._total + vector

    def close(self, stage: str, number: int, present: int) -> None:
        assert self._total is not None
        total, self._total = self._total, None
        release = self._mechanism.release(total, number, shares=present)
        # Schedules run over all rounds, and a client is not in each of them.
        self.parts.move(release, rates(self.parts.settings, number)(1))

    def states(self) -> States:
        return self.parts.states()

    def take_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._total = None
        self.parts.take_states(states)


Server = RuleServer | JointServer


@dataclass
class Turn:
    """One round. run: its name. roster: public keys of all clients, where sums are secure. plan: of each client's
    ledger. ledger: a trusted server's own. down, up: bytes so far. sent: how many clients were sent tensors, in the
    largest stage. missing: of the clients that were asked last, why those do not count that do not."""

    settings: Settings
    exchange: Exchange
    server: Server
    run: str
    number: int = 0
    roster: Mapping[str, PublicIdentity] = field(default_factory=dict)
    plan: Plan | None = None
    ledger: Ledger | None = None
    down: int = field(default=0, init=False)
    up: int = field(default=0, init=False)
    sent: int = field(default=0, init=False)
    missing: dict[str, str] = field(default_factory=dict, init=False)

    @property
    def federation(self) -> FederationSettings:
        return plans.federation_of(self.settings)

    def aside(self, text: str) -> None:
        """Takes what the log may not say, where a trusted server draws in secret."""

    def tell(self, what: str, answered: int | None, asked: int | None) -> None:
        """Is shown what goes on (`RoundObserver.on_phase`)."""

    def take(self, stage: str, asked: Sequence[str]) -> list[str]:
        """Ask, take in, close; gives who answered. Raises RunError where nothing may come of the round."""
        if self.federation.secure:
            answered = self._secure(stage, asked)
        elif self.ledger is not None:
            answered = self._trusted(stage, asked)
        else:
            answered = self._plain(stage, asked)
        self.server.close(stage, self.number, len(answered))
        return answered

    def _plain(self, stage: str, asked: Sequence[str]) -> list[str]:
        answered = []
        for reply in self._fitting(stage, asked, self.server.expected(stage, self.number)):
            self.server.add(stage, dict(reply.tensors), plans.weight_of(self.settings, reply.client))
            answered.append(reply.client)
        if not answered:
            raise RunError("no client answered", fix="see what they logged")
        return answered

    def _trusted(self, stage: str, asked: Sequence[str]) -> list[str]:
        """Clipped updates of whole clients, to which the server itself adds noise."""
        assert self.ledger is not None
        expected = self.server.expected(stage, self.number)
        updates = ClippedUpdate(_like(expected), self.settings.privacy.clip_norm)
        total, answered = torch.zeros(updates.entries, dtype=torch.float64), []
        for reply in self._fitting(stage, asked, expected):
            # Clipped here as well: the bound may not rest on what a client says.
            total += updates.clipped(reply.tensors)
            answered.append(reply.client)
        event = self.ledger.plan.event_of(self.ledger.charges + 1)
        divisor = float(self.federation.per_round)
        mean = updates.release(total, Noising(self.ledger, NoiseSource()), event, divisor)
        self.server.add(stage, mean, 1.0)
        return answered

    def _secure(self, stage: str, asked: Sequence[str]) -> list[str]:
        """A sum of which no part is seen."""
        federation = self.federation
        expected = self.server.expected(stage, self.number)
        lattice = plans.lattice_of(federation, self.plan, expected)
        roster = tuple(self.roster[name] for name in sorted(asked))
        bits = FIXED_BITS if lattice is None else lattice.bits
        terms = Terms(Which(self.run, self.number, stage), federation.threshold, bits, roster)
        collector = Collector(terms, whole=stage != self.server.stages[0])
        sent = self.server.tensors(stage)
        agreed = agreed_digest(plans.public_settings(self.settings).to_yaml(), sent)
        length = sum(prod(shape) for shape in expected.values())
        asks: dict[Phase, Callable[[], Mapping[str, Message]]] = {
            "share": collector.ask_shares,
            "mask": lambda: collector.ask_vectors(agreed, length),
            "agree": collector.ask_agreement,
            "unmask": collector.ask_unmasking,
        }
        for phase, ask in asks.items():
            kind, tensors = (stage, sent) if phase == "mask" else (phase, {})
            for reply in self._send(kind, ask(), tensors, stage=stage):
                message: Message = dict(reply.values)
                if phase == "mask":
                    message["vector"] = _vector(reply.tensors)
                try:
                    collector.take(phase, reply.client, message)
                except RunError as wrong:
                    self._drop(reply, wrong)
        total, answered = collector.total(), list(collector.survivors)
        if federation.joint and lattice is not None:
            self.server.add(stage, {SUM: torch.from_numpy(total)}, 1.0)
        elif lattice is not None:
            updates = ClippedUpdate(_like(expected), self.settings.privacy.clip_norm)
            self.server.add(stage, updates.opened(total, lattice, float(federation.per_round)), 1.0)
        else:
            weight = sum(plans.weight_of(self.settings, name) for name in answered)
            found = decode(total, expected, federation.per_round)
            divisor = 1.0 if federation.joint else weight
            self.server.add(stage, {name: t / divisor for name, t in found.items()}, weight)
        return answered

    def _fitting(
        self, stage: str, asked: Sequence[str], expected: Mapping[str, tuple[int, ...]]
    ) -> Iterator[Reply]:
        """The answers whose tensors are what a stage takes."""
        for reply in self._send(stage, {name: {} for name in asked}, self.server.tensors(stage)):
            try:
                refuse_unfit(reply.tensors, expected, LARGEST_NORM)
            except RunError as unfit:
                self._drop(reply, unfit)
            else:
                yield reply

    def _send(
        self, kind: str, asks: Mapping[str, Message], sent: Mapping[str, Tensor], **values: Number
    ) -> Iterator[Reply]:
        """The answers to what was asked, as they come, at most one of each client."""
        values = {"run": self.run, **values}
        requests = [Request(name, kind, self.number, sent, {**values, **own}) for name, own in asks.items()]
        self.down += sum(size(request) for request in requests)
        self.sent = max(self.sent, sum(bool(request.tensors) for request in requests))
        seen: set[str] = set()
        silent, self.missing = set(asks), dict.fromkeys(asks, "no answer")
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
        secret = self.federation.trusted_server
        if kind in _DONE and not (secret and answered):
            what = f"round {self.number}/{self.federation.rounds}: {_DONE[kind]}"
            self.tell(what, *((None, None) if secret else (answered, asked)))

    def _listed(self, reply: Reply) -> bool:
        """Whether it is an answer, and one that holds what is listed."""
        names = plans.tensors_of(self.settings, reply.kind, self.number)[1]
        try:
            refuse_unlisted(reply, self.federation.secure, names)
        except RunError as unlisted:
            self._drop(reply, unlisted)
            self.missing[reply.client] = "its answer is not listed"
            return False
        if reply.refused is not None:
            self.missing[reply.client] = reply.refused
            why = "its own log says why" if reply.refused == REFUSED else reply.refused
            self._say(logging.INFO, f"{reply.client} refuses {reply.kind}: {why}")
        return reply.refused is None

    def _drop(self, reply: Reply, because: RunError) -> None:
        self._say(logging.WARNING, f"the answer of {reply.client} is dropped: {because}")

    def _say(self, level: int, what: str) -> None:
        """To the log, which others may see; aside, where who answers when is a trusted server's secret: even a line
        that names nobody would tell that a client which fails was drawn."""
        line = f"round {self.number}: {what}"
        if self.federation.trusted_server:
            self.aside(line)
        else:
            _log.log(level, "%s", line)


@dataclass(kw_only=True)
class Rounds(Turn):
    """A federation's server at work, turn by turn.

    server: what moves. evaluation: PUBLIC records, for the held-out loss.
    """

    folder: RunFolder
    history: History
    evaluation: Examples | None = None
    observer: RoundObserver = field(default_factory=RoundObserver)

    def serve(self) -> dict[str, str]:
        """All rounds that are left; gives the ledgers that clients gave, as text, empty where there is none.

        A round that was begun and not ended, because this process died, stays void: its clients may have been charged
        for it, and are not asked twice. Raises Interrupted, after saving, on a signal; RunError if a client
        does not join.
        """
        federation = self.federation
        every = self.settings.run.evaluation_interval(federation.rounds)
        self._join()
        self.take_up()
        begun = self.history.begun
        if begun == 0:
            self._evaluate(0)
        with stop_on_signal(_AFTER_ROUND) as stop:
            for number, asked in enumerate(self._participants(), start=1):
                if number <= begun:
                    continue
                done = self._round(number, asked)
                last = number == federation.rounds
                if last or (every and number % every == 0):
                    self._evaluate(number)  # first: a round is shown with its own loss
                self._show(done)
                if stop.is_set() and not last:
                    raise Interrupted(number)
        self._evaluate(federation.rounds)
        given = self._leave()
        missed = _shortfall(self.history.rounds())
        if federation.trusted_server:
            _log.info("%s", SECRET)
            self.aside(missed or NOTHING_LACKED)
        elif missed is not None:
            _log.warning("ATTENTION: %s", missed)
        return given

    def aside(self, text: str) -> None:
        set_aside(self.folder.private, text)

    def tell(self, what: str, answered: int | None, asked: int | None) -> None:
        self.observer.on_phase(what, answered, asked)

    def take_up(self) -> None:
        """Go back to the last round that was saved; nobody is asked anything."""
        saved = 0
        if self.folder.checkpoint.exists():
            saved, states = load_checkpoint(self.folder.checkpoint, run_id=self.history.run)
            self.server.take_states(states)
        self.history.void_after(saved)

    def _participants(self) -> Iterable[list[str]]:
        """Of rounds 1, 2, …; a secret where a trusted server's ledger counts on it."""
        federation = self.federation
        if self.ledger is None:
            names, public = tuple(federation.names), self.settings.run.seed
            return plans.timetable(names, federation.per_round, federation.rounds, public)
        rate, seed = federation.per_round / federation.size, self.settings.privacy.insecure_noise_seed
        sampler = PoissonSampler(federation.size, rate, insecure_seed=seed)
        if sampler.sampling != self.ledger.plan.event.sampling:
            what = "clients are drawn in another way than the ledger's plan says, and its epsilon counts on"
            raise PrivacyError(what, fix="resume with the settings of the first run")
        return plans.secret_participants(federation.names, sampler, federation.rounds)

    def _round(self, number: int, asked: list[str]) -> Round:
        """One round: its stages, then what is saved of it."""
        self.history.begin(number, asked)
        self.number, self.down, self.up, self.sent = number, 0, 0, 0
        before = self.server.states()
        void, answered = None, asked
        try:
            for stage in self.server.stages:
                answered = self.take(stage, answered)
        except RunError as reason:
            self.server.take_states(before)
            void, answered = reason.what, []
        done = Round(number, tuple(asked), tuple(answered), self.down, self.up, void, self.sent)
        self.history.end(done)  # first: a checkpoint of a round that did not end could not be told from it
        if void is None:
            mark = Mark(number, self.history.run, None)
            save_checkpoint(self.folder.checkpoint, self.server.states(), mark)
        return done

    def _show(self, done: Round) -> None:
        shown = done if self.ledger is None else done.untold()
        self.observer.on_round(shown, self.federation.rounds)

    def _join(self) -> None:
        """Every client agrees to the public settings, or the federation does not begin."""
        self.tell(f"asking {self.federation.size} clients to join", None, None)
        names = self.federation.names
        away = set(names) - set(self.exchange.names())
        if away:
            shown = ", ".join(sorted(away))
            raise RunError(f"clients that cannot be reached: {shown}", fix="start them, then go on")
        terms = plans.public_settings(self.settings).to_yaml()
        replies = list(self._send("join", {name: {} for name in names}, {}, settings=terms))
        joined = {reply.client for reply in replies}
        if self.federation.secure:
            self.roster = roster_of(replies)
            self.missing |= dict.fromkeys(joined - set(self.roster), "its key is no key")
            joined &= set(self.roster)
        if joined != set(names):
            shown = ", ".join(f"{name} ({self.missing[name]})" for name in sorted(set(names) - joined))
            fix = "mend what each of them said: above, or where a client on another machine logs"
            raise RunError(f"clients that did not join: {shown}", fix=fix)
        _log.info("all %d clients joined", len(names))

    def _leave(self) -> dict[str, str]:
        """Each client's ledger, as the client gave it; without those that gave none."""
        self.exchange.names()  # waits for those that are away, as long as for an answer
        self.number = self.federation.rounds + 1
        shares = plans.tensors_of(self.settings, "leave", self.number)[0]
        sent = self.server.tensors("train") if shares else {}
        replies = self._send("leave", {name: {} for name in self.federation.names}, sent)
        return {reply.client: str(reply.values["ledger"]) for reply in replies}

    def _evaluate(self, step: int) -> None:
        """Held-out loss of what would be exported now, on public records."""
        rows = read_lines(self.folder.evaluations)
        if not self.evaluation or any(row["step"] == step for row in rows):
            return
        self.tell("measuring the held-out loss", None, None)
        with self.server.parts.exported() as model, self.server.parts.adapter:
            result = evaluate_next_token(model, self.evaluation)
        append_line(self.folder.evaluations, {"step": step, **finite(result.to_dict())})
        self.observer.on_evaluation(step, result.loss_per_example)


def _shortfall(rounds: Sequence[Round]) -> str | None:
    """What rounds lacked that the report says too, for the log's last line: None where at least half of those asked
    answered in every round, and everybody in some."""
    done = [one for one in rounds if one.void is None]
    reasons = {str(one.void) for one in rounds if one.void is not None}
    found: list[str] = []
    if reasons:
        void = f"{len(rounds) - len(done)} of {len(rounds)} rounds are void ({why_void(rounds)})"
        found.append(f"{void}, nothing moved in them")
    asked = {name for one in done for name in one.asked}
    absent = sorted(asked - {name for one in done for name in one.answered})
    few = [one.step for one in done if 2 * len(one.answered) < len(one.asked)]
    if absent:
        found.append(f"never an answer from {', '.join(absent)}: nothing was learnt from their records")
    if few:
        which = str(len(few)) if len(few) > _SHOWN else ", ".join(map(str, few))
        found.append(f"fewer than half of those asked answered in rounds: {which} (of {len(rounds)})")
    look = ". See what these clients logged" if absent or few or reasons - {STOPPED} else ""
    return f"{'; '.join(found)}{look}" if found else None


def roster_of(replies: Iterable[Reply]) -> dict[str, PublicIdentity]:
    """The public keys that clients joined with; without those whose keys are no keys."""
    found = {}
    for reply in replies:
        signing, agreement = reply.values.get("signing"), reply.values.get("agreement")
        if isinstance(signing, bytes) and isinstance(agreement, bytes):
            with suppress(RunError):
                found[reply.client] = PublicIdentity(reply.client, signing, agreement)
    return found


def _vector(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """A masked vector; an empty one, which fits no sum, for what is none."""
    vector = tensors.get(SUM)
    if set(tensors) != {SUM} or vector is None or vector.dtype not in (torch.uint32, torch.uint64):
        return np.zeros(0, np.uint32)
    return np.asarray(vector.numpy())


def _like(expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors of these names and shapes, with no values of their own."""
    return {name: torch.empty(shape, device="meta") for name, shape in expected.items()}
