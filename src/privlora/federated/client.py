"""A client: one owner's records, ledger and answers, and what it agreed to and was asked in each federation. Its
records, losses, norms and counts never leave it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from privlora.accounting import Ledger, LedgerSummary, read_ledger
from privlora.config import FederationSettings, Settings
from privlora.config.one_place import MICRO_BATCH
from privlora.data.formats import Format
from privlora.disk import locked
from privlora.errors import ConfigError, PrivacyError, PrivloraError, RunError
from privlora.federated import plans
from privlora.federated.desk import Desk, has_begun, read_terms
from privlora.federated.limits import Limits
from privlora.federated.messages import (
    ASKED,
    REFUSED,
    SUM,
    TRAINING,
    Number,
    Reply,
    Request,
    refusal,
    refuse_unlisted,
)
from privlora.federated.rules import Asked, Tensors
from privlora.federated.rules.base import Sizes, groups_of
from privlora.federated.rules.checks import broadcast_shapes, refuse_foreign
from privlora.federated.secure.keys import Identity
from privlora.federated.secure.masks import agreed_digest, encode
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import Message
from privlora.federated.secure.wire import Turn as Which
from privlora.federated.workplace import (
    NotReadyError,
    Own,
    Records,
    Workplace,
    in_words,
    refuse_missing_model,
)
from privlora.mechanisms import ClippedUpdate, NoiseSource, Noising
from privlora.names import is_local
from privlora.precision import own_context
from privlora.training.files import temporary_files

if TYPE_CHECKING:
    from privlora.federated.local import Ended, Job
    from privlora.training.inputs import Data

_log = logging.getLogger(__name__)

_LONGEST = 64  # characters of a run's name, which is a folder's


@dataclass
class Client:
    """name: public. folder: its own, for all its federations. path: its records' files; records: the same in memory.
    format: of the files; by their endings, unless its owner says otherwise: a server may not say what is a record.

    model: where it has the base model, if not where the server's settings say; revision: of it, where it is on the hub.
    pins: the fingerprint of each client that secure sums may be over, where its owner has them from elsewhere than the
    server. limits: what its owner lets a server ask for. workplaces: of the process, by run; shared with its others.
    """

    name: str
    folder: Path
    path: str | list[str] | None = None
    records: Records | None = field(default=None, repr=False)
    format: Format = "auto"
    model: str | None = None
    revision: str | None = None
    pins: Mapping[str, str] | None = None
    limits: Limits = field(default_factory=Limits)
    workplaces: dict[str, Workplace] = field(default_factory=dict, repr=False)
    _sessions: dict[str, Session] = field(default_factory=dict, init=False, repr=False)

    @property
    def own(self) -> Own:
        return Own(self.name, self.path, self.records, self.format)

    def answer(self, request: Request) -> Reply:
        """The reply to one request. What cannot or must not be answered is refused in fixed words; the log says why."""
        return answer_all({self.name: self}, [request])[0]

    @property
    def identity(self) -> Identity:
        """Its keys for secure sums, made when they are first asked for. Other owners may pin their public fingerprint,
        ``identity.public(name).fingerprint``."""
        path = self.folder / "identity.key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            Identity.create().save(path)
        return Identity.load(path)

    def session(self, request: Request) -> Session:
        """Of the request's run. Raises PrivacyError for a run without a name."""
        run = request.values.get("run")
        if not (isinstance(run, str) and run.isascii() and run.isalnum() and len(run) <= _LONGEST):
            raise refusal("a request does not say of which run it is")
        if run not in self._sessions:
            self._sessions[run] = Session(self, run)
        return self._sessions[run]

    def other_ledgers(self, run: str) -> list[LedgerSummary]:
        """Of all runs of this client but one: its own, and those of what trusted servers stated, written where they
        are missing. Under the client's lock. Raises PrivacyError for a run of which neither can be had."""
        for path in sorted(self.folder.glob("*/")):
            if path.name != run:
                Desk(path).keep_stated()
        paths = sorted([*self.folder.glob("*/ledger.jsonl"), *self.folder.glob("*/stated.jsonl")])
        return [read_ledger(path) for path in paths if path.parent.name != run and has_begun(path)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For the time of one answer; what a killed process left half-written is removed.

        Raises RunError while another process answers for this client.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.folder / "lock"):
                for folder in (self.folder, *self.folder.glob("*/")):
                    for path in temporary_files(folder):
                        path.unlink()
                yield
        except BlockingIOError:
            what = f"another process answers for {str(self.folder)!r}, and two answers would both be charged"
            raise RunError(what, fix="let one process answer for one client") from None
        except OSError as error:
            what = f"cannot write {str(self.folder)!r}: {error.strerror}"
            raise RunError(what, fix="give the client a folder of its own") from None

    def refuse(self, request: Request, error: Exception) -> Reply:
        """Whatever the error is: one that ended a trusted server's run would show that this client was drawn."""
        _log.warning("%s refuses %r of round %s: %s", self.name, request.kind, request.round, _told(error))
        told = error.told if isinstance(error, NotReadyError) and request.kind == "join" else REFUSED
        return Reply(self.name, request.kind, request.round, refused=told)


def _told(error: Exception) -> str:
    """For this client's log. What is no error of privlora may quote a record: it is told by its kind, and by the lines
    of code that led to it."""
    if isinstance(error, PrivloraError):
        return str(error)
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in extract_tb(error.__traceback__)]
    return f"{in_words(error)} at {' > '.join(lines)}"


@own_context()
def answer_all(clients: Mapping[str, Client], requests: Sequence[Request]) -> list[Reply]:
    """The replies of clients in one process; those that train do so side by side."""
    replies: list[Reply] = []
    works: list[Work] = []
    with ExitStack() as held:
        for request in requests:
            client = clients[request.client]
            try:
                session = client.session(request)
                held.enter_context(client.locked())
                if request.kind == "train":
                    works.append(session.begin(request, held))
                else:
                    replies.append(session.answer(request))
            except Exception as error:  # noqa: BLE001 - see Client.refuse
                replies.append(client.refuse(request, error))
        for alike in _alike(works):
            replies += _train(clients, alike)
    return replies


def _alike(works: Sequence[Work]) -> list[list[Work]]:
    """Works of one run and round with the same terms that were sent the same; those of a server that treats clients
    alike are one list."""
    found: list[list[Work]] = []
    for work in works:
        alike = next((others for others in found if work.is_like(others[0])), [])
        alike.append(work)
        if len(alike) == 1:
            found.append(alike)
    return found


def _train(clients: Mapping[str, Client], works: Sequence[Work]) -> list[Reply]:
    # Here, because a process that answers one other message would take longer to import them than to answer.
    from privlora.federated.local import train_locally

    replies = []
    try:
        ended = train_locally([work.job for work in works], works[0].session.workplace)
    except Exception as error:  # noqa: BLE001 - see Client.refuse
        return [clients[work.request.client].refuse(work.request, error) for work in works]
    for work, end in zip(works, ended, strict=True):
        try:
            replies.append(work.reply(end))
        except Exception as error:  # noqa: BLE001 - see Client.refuse
            replies.append(clients[work.request.client].refuse(work.request, error))
    return replies


class Session:
    """One client in one run. Everything that must survive a message lies at its desk."""

    def __init__(self, client: Client, run: str) -> None:
        self.client, self.run = client, run
        self.desk = Desk(client.folder / run)

    @cached_property
    def settings(self) -> Settings:
        """What this client agreed to, with its own place of the model, and micro-batches of no more than is usual: what
        memory takes is not the server's to choose. Raises RunError before it has joined."""
        client = self.client
        tokens = min(self.desk.settings.run.max_tokens, MICRO_BATCH)
        settings = self.desk.settings.changed(run={"tokens_per_micro_batch": tokens})
        if client.model is None:
            return settings
        # A revision of the server's would be a model of its choice: whoever may open a pull request on the hub has one.
        return settings.changed(model={"name": client.model, "revision": client.revision})

    @property
    def federation(self) -> FederationSettings:
        return plans.federation_of(self.settings)

    @property
    def workplace(self) -> Workplace:
        if self.run not in self.client.workplaces:
            self.client.workplaces[self.run] = Workplace(self.settings)
        return self.client.workplaces[self.run]

    @cached_property
    def data(self) -> Data:
        """This client's records, as the run reads them."""
        model, tokenizer, settings = self.workplace.loaded
        return self.client.own.data(settings, model, tokenizer)

    # --- messages ---

    def answer(self, request: Request) -> Reply:
        """To all messages but "train", which clients of a process answer together."""
        self._refuse_unlisted(request)
        reply: Reply = getattr(self, f"_{request.kind}")(request)  # of a kind that is listed
        refuse_unlisted(reply, self.federation.secure, reply.tensors)
        return reply

    def begin(self, request: Request, held: ExitStack) -> Work:
        """What "train" asks for; noted before anything is done, so that it is done once. held: until it has ended."""
        settings = self.settings
        self._refuse_unlisted(request)
        self.desk.begin(request)
        self._refuse_broadcast(request)
        if self.federation.secure:
            self._participant(request)  # without masks nothing could leave, so nothing is charged
        ledger, beginning = None, None
        self.desk.opened(self.private)
        if self.private:
            ledger = held.enter_context(Ledger.open(self.desk.ledger))
            plans.refuse_spent(ledger, plans.charges_a_round(self.federation))
        if not self.federation.joint:
            beginning = plans.rule_of(self.federation).begin(self._asked_by_rule(request))
        seed = settings.privacy.insecure_noise_seed
        if seed is not None:
            seed = (seed * 1009 + self.federation.names.index(self.client.name)) * 10007 + request.round
        from privlora.federated.local import Job  # for training alone, since it takes long to import

        job = Job(self.client.name, self.data, request.round, request.tensors, beginning, ledger, seed)
        return Work(self, request, job)

    def send(self, request: Request, tensors: Tensors) -> Reply:
        """An answer as it is; masked, where sums are secure."""
        values: dict[str, Number] = {}
        if self.federation.secure:
            agreed = agreed_digest(self.desk.settings.to_yaml(), request.tensors)
            masked = self._in_sum(request, "mask", tensors[SUM].numpy(), agreed)
            tensors, values = {SUM: torch.from_numpy(masked["vector"])}, {"context": masked["context"]}
        reply = Reply(self.client.name, request.kind, request.round, tensors=tensors, values=values)
        listed = plans.tensors_of(self.settings, request.kind, request.round)[1]
        refuse_unlisted(reply, self.federation.secure, listed)
        return reply

    def _refuse_unlisted(self, request: Request) -> None:
        """Raises RunError for a request that is not listed; PrivacyError for one of a round or stage that this
        federation has not, or of a round in which, by the public timetable, this client does not train."""
        if request.kind == "join":
            refuse_unlisted(request, secure=False)
            return
        federation, kind = self.federation, request.kind
        refuse_unlisted(request, federation.secure, plans.tensors_of(self.settings, kind, request.round)[0])
        if kind == "leave":
            return
        stage = request.values.get("stage", kind)
        if stage not in plans.stages_of(federation) or (kind in TRAINING and stage != kind):
            what = f"a request of a stage that rule={federation.rule} does not have, in round {request.round}"
            raise refusal(what, "nothing was agreed on for a second answer of a round")
        if not 1 <= request.round <= federation.rounds:
            raise refusal(f"a request of round {request.round}, of {federation.rounds}")
        if self.client.name not in self._asked(request.round):
            what = f"asked for round {request.round}, in which others train"
            raise refusal(what, "the agreed terms say who trains when, and the budget is made for it")

    @property
    def private(self) -> bool:
        """Whether what this client sends is charged to its own ledger."""
        return self.settings.privacy.private and not self.federation.trusted_server

    def by_rule(self, request: Request, end: Tensors, travelled: float) -> Tensors:
        """The rule's answer; what it keeps for later is at the desk before anything leaves."""
        rule, asked = plans.rule_of(self.federation), self._asked_by_rule(request)
        answer, kept = rule.answer(request.kind, asked, end, travelled)
        self.desk.keep("memory", kept)
        return answer

    def _asked_by_rule(self, request: Request) -> Asked:
        kept, chosen = self.desk.kept("memory"), plans.rule_settings(self.settings)
        return Asked(request.round, request.tensors, kept, chosen)

    def no_update(self, request: Request) -> Tensors:
        """An answer of zeros, whatever the rule would make of a client that has not moved."""
        rule, dtype = plans.rule_of(self.federation), next(iter(request.tensors.values())).dtype
        groups, chosen = self.workplace.groups, plans.rule_settings(self.settings)
        shapes = rule.shapes(request.kind, request.round, groups, chosen)[1]
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}

    def _join(self, request: Request) -> Reply:
        settings = read_terms(str(request.values.get("settings", "")))
        federation = plans.federation_of(settings)
        if plans.with_local_method(settings) != settings:
            raise refusal("the server's settings leave open how clients train")
        if self.client.name not in federation.names:
            raise ConfigError(f"{self.client.name} is not of this federation", fix="rename it, or leave")
        self._refuse_model(settings.model.name)
        plan = plans.client_plan(settings)
        self.client.limits.refuse_terms(settings, plan, self.client.other_ledgers(self.run))
        # After the limits: terms beyond them learn nothing about this machine.
        self.client.own.refuse_missing()
        self.client.own.warn_of_unreadable(settings)
        if self.run not in self.client.workplaces:  # what clients of one process share is loaded
            refuse_missing_model(self.client.model or settings.model.name)
        self.desk.open(settings, plan, stated=plans.server_plan(settings))
        values: dict[str, Number] = {}
        if federation.secure:
            public = self.client.identity.public(self.client.name)
            values = {"signing": public.signing, "agreement": public.agreement}
        return Reply(self.client.name, "join", request.round, values=values)

    def _sketch(self, request: Request) -> Reply:
        """A later stage: algebra on what training left."""
        self.desk.begin(request)
        self._refuse_broadcast(request)
        return self.send(request, self.packed(self.by_rule(request, {}, 0.0)))

    def packed(self, answer: Tensors) -> Tensors:
        """Releases, as they are or as integers of a secure sum. Raises RunError for entries beyond the public limit."""
        if not self.federation.secure:
            return answer
        weight = plans.weight_of(self.settings, self.client.name)
        weighted = {name: tensor.double() * weight for name, tensor in answer.items()}
        return {SUM: torch.from_numpy(encode(weighted, self.federation.per_round))}

    def _leave(self, request: Request) -> Reply:
        ledger = self.desk.leave(self.private)
        if request.tensors:
            self._keep_own_model(request)
        return Reply(self.client.name, "leave", request.round, values={"ledger": ledger})

    def _keep_own_model(self, request: Request) -> None:
        """Of a rule without a common adapter: what all share and what this client kept, as peft stores adapters."""
        from privlora.federated.local import write_beginning

        try:
            self._refuse_broadcast(request)
            beginning = plans.rule_of(self.federation).begin(self._asked_by_rule(request))
            write_beginning(self.desk.own_adapter(), beginning, self.workplace, self.settings.model.name)
        except Exception as error:  # noqa: BLE001 - the ledger is given whatever comes of it
            _log.error("%s: its own adapter is not written: %s", self.client.name, _told(error))

    # --- what a server may not ask ---

    def _refuse_model(self, name: str) -> None:
        """Raise PrivacyError where the server would choose which folder of this machine, or what program, is loaded."""
        if self.client.model is not None or self.run in self.client.workplaces:
            return
        if self.client.limits.pins_model or is_local(name):
            what = "the server names the base model, and the owner of this client has not said where it lies"
            why = "a server could name a folder of this machine, or a model of its own making"
            fix = "give the client its model, or set limits.pins_model to false for a model of the hub"
            raise PrivacyError(what, why=why, fix=fix)

    def _asked(self, number: int) -> Sequence[str]:
        """Whom the terms let the server ask in a round."""
        federation = self.federation
        names, count = tuple(federation.names), federation.per_round
        if federation.trusted_server or count == len(names):
            return names
        return plans.timetable(names, count, federation.rounds, self.settings.run.seed)[number - 1]

    def _refuse_broadcast(self, request: Request) -> None:
        """Raise PrivacyError for tensors that do not follow from the terms. Those of joint meet its coordinates."""
        if self.federation.joint:
            return
        rule, groups = plans.rule_of(self.federation), self._groups(request.kind)
        expected = broadcast_shapes(rule, request.kind, groups, self._asked_by_rule(request))
        refuse_foreign(request.tensors, expected)

    def _groups(self, stage: str) -> list[Sizes]:
        """Of the adapter. A later stage needs no model: the factors that training kept have the same sizes."""
        if stage != "sketch":
            return self.workplace.groups
        kept = self.desk.kept("memory")
        pairs = [(kept[f"{g}.left"].shape, kept[f"{g}.right"].shape) for g in groups_of(kept)]
        return [(left[0], left[1], right[1]) for left, right in pairs]

    # --- secure sums ---

    def _share(self, request: Request) -> Reply:
        federation = self.federation
        asked = _asked(request, "share")
        stage, names = str(asked["stage"]), str(asked["names"]).split(",")
        # In a later stage the roster is whom the first one was over, which the participant sees to.
        others = stage == "train" and names != sorted(self._asked(request.round))
        if others or asked["threshold"] != federation.threshold:
            what = "a secure sum over other clients, or with another threshold, than agreed"
            raise refusal(what, "each client's share of the noise is made for these numbers")
        self.desk.begin(request)
        earlier = self.desk.survivors(request.round) if stage != "train" else None
        turn, client = Which(self.run, request.round, stage), self.client
        known: dict[str, Any] = {"pins": client.pins, "colluding": federation.colluding, "earlier": earlier}
        participant, reply = Participant.begin(client.identity, client.name, asked, turn=turn, **known)
        self.desk.keep_secret(participant.to_bytes())
        return Reply(self.client.name, "share", request.round, values=reply)

    def _agree(self, request: Request) -> Reply:
        reply = self._unmask(request)
        self.desk.keep_survivors(request.round, str(request.values["names"]).split(","))
        return reply

    def _unmask(self, request: Request) -> Reply:
        self.desk.begin(request)
        answer = self._in_sum(request, request.kind)
        return Reply(self.client.name, request.kind, request.round, values=answer)

    def _in_sum(self, request: Request, phase: str, *own: Any) -> Message:
        """What the participant answers in a phase; what it has to remember is kept, whatever comes of it."""
        participant = self._participant(request)
        try:
            answer: Message = getattr(participant, phase)(_asked(request, phase), *own)
        finally:  # one that refused has forgotten its secrets
            self.desk.keep_secret(None if participant.over else participant.to_bytes())
        return answer

    def _participant(self, request: Request) -> Participant:
        """In the sum of the request's own round and stage. Raises PrivacyError if there is none."""
        kept = self.desk.secret()
        found = None if kept is None else Participant.from_bytes(kept, self.client.identity)
        turn = Which(self.run, request.round, str(request.values.get("stage", request.kind)))
        if found is None or found.terms.turn != turn:
            why = "without masks of this round and stage the server would see this client's part"
            raise refusal("asked for a secure sum that was not begun", why)
        return found


@dataclass
class Work:
    """A client's training under way."""

    session: Session
    request: Request
    job: Job

    def is_like(self, other: Work) -> bool:
        one, two = self.request, other.request
        return (
            (one.round, self.session.settings) == (two.round, other.session.settings)
            and (self.session.run, one.tensors.keys()) == (other.session.run, two.tensors.keys())
            and all(torch.equal(tensor, two.tensors[name]) for name, tensor in one.tensors.items())
        )

    def reply(self, ended: Ended | np.ndarray | None) -> Reply:
        """ended: where training ended, by the rule; a vector for joint; None for an update of zero."""
        reply = self._reply(ended)
        if self.job.ledger is not None:  # noted before the answer leaves
            self.session.desk.charged(self.job.ledger.summary)
        return reply

    def _reply(self, ended: Ended | np.ndarray | None) -> Reply:
        session = self.session
        if isinstance(ended, np.ndarray):
            vector = {SUM: torch.from_numpy(ended)}
            return session.send(self.request, session.packed(vector) if ended.dtype.kind == "f" else vector)
        if ended is None:
            answer = session.no_update(self.request)
        else:
            answer = session.by_rule(self.request, ended.state, ended.travelled)
        privacy = session.settings.privacy
        if session.federation.privacy_model == "record" or not privacy.private:
            return session.send(self.request, session.packed(answer))
        update = ClippedUpdate(answer, privacy.clip_norm)
        if self.job.ledger is None:  # a trusted server clips it again, and adds the noise
            return session.send(self.request, update.tensors(update.clipped(answer)))
        return session.send(self.request, {SUM: self._share(update, answer, self.job.ledger)})

    def _share(self, update: ClippedUpdate, answer: Tensors, ledger: Ledger) -> torch.Tensor:
        """A whole client's part of a secure sum: clipped, rounded, with its share of the noise; charged before."""
        shapes = {name: tuple(tensor.shape) for name, tensor in answer.items()}
        lattice, seed = plans.lattice_of(self.session.federation, ledger.plan, shapes), self.job.seed
        assert lattice is not None
        noising = Noising(ledger, NoiseSource(None if seed is None else seed + 1))
        return torch.from_numpy(update.share(answer, noising, ledger.plan.phases[-1][0], lattice))


def _asked(request: Request, phase: str) -> Message:
    """The fields of a phase of a secure sum among the request's values."""
    values = request.values
    return {name: values[name] for name in ASKED[phase] if name in values}
