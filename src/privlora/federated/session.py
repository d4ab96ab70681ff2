"""A client in one federation: what it agreed to, what it was asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import yaml
from torch import Tensor

from privlora.accounting import Ledger, Plan, read_ledger
from privlora.config import FederationSettings, Settings, settings_from
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.federated.desk import Desk
from privlora.federated.limits import one_at_a_time
from privlora.federated.messages import Reply, Request
from privlora.federated.payload import SUM, clipped_share, fixed_share
from privlora.federated.plans import (
    charges_a_round,
    client_plan,
    client_settings,
    federation_of,
    rule_of,
    rule_settings,
    weight_of,
)
from privlora.federated.rules import Tensors
from privlora.federated.secure import Message, Participant, Phase, digest_of
from privlora.federated.secure import Turn as Which
from privlora.federated.secure.wire import REQUESTS
from privlora.federated.workplace import Workplace
from privlora.mechanisms import NoiseSource
from privlora.training.inputs import Data, load_data

if TYPE_CHECKING:
    from privlora.federated.client import Client
    from privlora.federated.local import Ended, Job


class Session:
    """One client in one run. Everything that must survive a message lies at its desk."""

    def __init__(self, client: Client, run: str) -> None:
        self.client, self.run = client, run
        self.desk = Desk(client.folder / run)

    @cached_property
    def settings(self) -> Settings:
        """What this client agreed to, with its own place of the model. Raises RunError before it has joined."""
        settings = self.desk.settings
        if self.client.model is None:
            return settings
        return settings.model_copy(
            update={"model": settings.model.model_copy(update={"name": self.client.model})}
        )

    @property
    def federation(self) -> FederationSettings:
        return federation_of(self.settings)

    @property
    def workplace(self) -> Workplace:
        if self.run not in self.client.workplaces:
            self.client.workplaces[self.run] = Workplace(self.settings)
        return self.client.workplaces[self.run]

    @cached_property
    def data(self) -> Data:
        """This client's records, as the run reads them. How many they are is not held against public numbers, which are
        of all clients."""
        model, tokenizer, settings = self.workplace.loaded
        own = {"path": self.client.path or "", "evaluation": None, "unchecked": True, "limit": None}
        nowhere = {"init": None, "public_text": None, "public_text_limit": None}
        mine = client_settings(settings).model_copy(
            update={
                "data": settings.data.model_copy(update=own),
                "adapter": settings.adapter.model_copy(update=nowhere),
            }
        )
        return load_data(mine, tokenizer, self.client.records, model=model)

    # --- messages ---

    def answer(self, request: Request) -> Reply:
        """To all messages but "train", which clients of a process answer together."""
        handlers = {
            "join": self._join,
            "share": self._share,
            "sketch": self._sketch,
            "agree": self._unveil,
            "unmask": self._unveil,
            "leave": self._leave,
        }
        if request.kind not in handlers:
            raise RunError("a request of an unknown kind", fix="use one version of privlora everywhere")
        return handlers[request.kind](request)

    def begin(self, request: Request) -> Work:
        """What "train" asks for; noted before anything is done, so that it is done once."""
        settings = self.settings
        self.desk.begin(request)
        ledger = Ledger.open(self.desk.ledger) if self.desk.ledger.exists() else None
        try:
            if ledger is not None and ledger.remaining < charges_a_round(self.federation):
                raise PrivacyError(
                    f"the budget has {ledger.remaining} releases left, and a round takes "
                    f"{charges_a_round(self.federation)}",
                    why="more releases than planned would exceed the stated epsilon",
                    fix="end the federation; the next one can plan more rounds",
                )
            beginning = None
            if not self.federation.joint:
                beginning = rule_of(self.federation).begin(
                    request.round, request.tensors, self.desk.kept("memory"), rule_settings(settings)
                )
            seed = settings.privacy.insecure_noise_seed
            if seed is not None:
                seed = (seed * 1009 + self.federation.names.index(self.client.name)) * 10007 + request.round
            from privlora.federated.local import Job  # for training alone, since it takes long to import

            job = Job(self.client.name, self.data, request.round, request.tensors, beginning, ledger, seed)
        except BaseException:
            if ledger is not None:
                ledger.close()
            raise
        return Work(self, request, job)

    def send(self, request: Request, tensors: Tensors) -> Reply:
        """An answer as it is; masked, where sums are secure."""
        values: dict[str, int | float | str | bytes] = {}
        if self.federation.secure:
            participant = self._participant()
            vector = tensors[SUM].numpy()
            masked = participant.mask(_asked(request, "mask"), vector, digest_of(request.tensors))
            self._keep(participant)
            tensors = {SUM: torch.from_numpy(np.asarray(masked["vector"]))}
            values["context"] = bytes(masked["context"])  # type: ignore[arg-type]
        return Reply(self.client.name, request.kind, request.round, tensors=tensors, values=values)

    def by_rule(self, request: Request, end: Mapping[str, Tensor], travelled: float) -> Tensors:
        """The rule's answer; what it keeps for later is at the desk before anything leaves."""
        answer, kept = rule_of(self.federation).answer(
            request.kind,
            request.round,
            request.tensors,
            end,
            self.desk.kept("memory"),
            rule_settings(self.settings),
            travelled=travelled,
        )
        self.desk.keep("memory", kept)
        return answer

    def _join(self, request: Request) -> Reply:
        try:
            content = yaml.safe_load(str(request.values["settings"]))
        except (KeyError, yaml.YAMLError):
            raise RunError("the server's settings are not readable", fix="look at the server") from None
        if not isinstance(content, dict):
            raise RunError("the server's settings are not readable", fix="look at the server")
        settings = settings_from(content, source="the server's settings")
        federation = federation_of(settings)
        if self.client.name not in federation.names:
            raise ConfigError(
                f"client {self.client.name} is not of this federation", fix="rename it, or leave"
            )
        plan = client_plan(settings)
        with one_at_a_time(self.client.folder):
            if self.client.limits is not None and not self.desk.joined:
                self.client.limits.admit(plan, self._earlier())
            self.desk.open(settings, plan)
        values: dict[str, int | float | str | bytes] = {}
        if federation.secure:
            public = self.client.identity.public(self.client.name)
            values = {"signing": public.signing, "agreement": public.agreement}
        return Reply(self.client.name, "join", request.round, values=values)

    def _earlier(self) -> list[Plan]:
        """What this client has agreed to in other runs."""
        ledgers = self.client.folder.glob("*/ledger.jsonl")
        return [
            read_ledger(path).plan
            for path in sorted(ledgers)
            if path != self.desk.ledger and b"\n" in path.read_bytes()
        ]

    def _sketch(self, request: Request) -> Reply:
        """A later stage: algebra on what training left."""
        self.settings  # noqa: B018 - refuses those that have not joined
        self.desk.begin(request)
        return self.send(request, self.packed(self.by_rule(request, {}, 0.0)))

    def packed(self, answer: Tensors) -> Tensors:
        """Releases, as they are or as integers of a secure sum."""
        if not self.federation.secure:
            return answer
        vector = fixed_share(answer, self.settings, weight_of(self.settings, self.client.name))
        return {SUM: torch.from_numpy(vector)}

    def _leave(self, request: Request) -> Reply:
        return Reply(self.client.name, "leave", request.round, values={"ledger": self.desk.statement()})

    # --- secure sums ---

    def _share(self, request: Request) -> Reply:
        federation = self.federation
        asked = _asked(request, "share")
        stage = str(asked.get("stage"))
        size = len(str(asked.get("names")).split(","))
        if (asked.get("threshold"), size) != (
            federation.threshold,
            federation.per_round,
        ) and stage == "train":
            raise PrivacyError(
                "a secure sum over another number of clients, or with another threshold, than agreed",
                why="each client's share of the noise is made for these numbers",
                fix="look at the server",
            )
        self.desk.begin(request)
        earlier = self.desk.survivors(request.round) if stage != "train" else None
        participant, reply = Participant.begin(
            self.client.identity,
            self.client.name,
            asked,
            turn=Which(self.run, request.round, stage),
            answered=(),  # the desk has refused whatever came before
            pins=self.client.pins,
            earlier=earlier,
        )
        self._keep(participant)
        return Reply(self.client.name, "share", request.round, values=_plain(reply))

    def _unveil(self, request: Request) -> Reply:
        self.desk.begin(request)
        participant = self._participant()
        agrees = request.kind == "agree"
        reply = (
            participant.agree(_asked(request, "agree"))
            if agrees
            else participant.unmask(_asked(request, "unmask"))
        )
        if agrees:
            self.desk.keep_survivors(request.round, participant.survivors)
        self._keep(participant)
        return Reply(self.client.name, request.kind, request.round, values=_plain(reply))

    def _participant(self) -> Participant:
        kept = self.desk.secret("sum")
        if kept is None:
            raise PrivacyError(
                "asked for a secure sum that was not begun",
                why="without masks the server would see this client's part",
                fix="look at the server",
            )
        return Participant.from_bytes(kept, self.client.identity)

    def _keep(self, participant: Participant) -> None:
        self.desk.keep_secret("sum", b"" if participant.over else participant.to_bytes())


@dataclass
class Work:
    """A client's training under way."""

    session: Session
    request: Request
    job: Job

    def reply(self, ended: Ended | np.ndarray) -> Reply:
        """ended: where training ended, by the rule; a vector for joint."""
        session = self.session
        if isinstance(ended, np.ndarray):
            vector = {SUM: torch.from_numpy(ended)}
            return session.send(self.request, session.packed(vector) if ended.dtype.kind == "f" else vector)
        answer = session.by_rule(self.request, ended.state, ended.travelled)
        settings = session.settings
        if session.federation.privacy_model == "record" or not settings.privacy.private:
            return session.send(self.request, session.packed(answer))
        if self.job.ledger is None:  # a trusted server clips and adds the noise
            return session.send(self.request, answer)
        seed = self.job.seed
        share = clipped_share(
            answer, settings, self.job.ledger, NoiseSource(None if seed is None else seed + 1)
        )
        return session.send(self.request, {SUM: torch.from_numpy(share)})

    def close(self) -> None:
        if self.job.ledger is not None:
            self.job.ledger.close()


def _asked(request: Request, phase: Phase) -> Message:
    """The fields of a phase of a secure sum among the request's values."""
    values = request.values
    return {n: v for n in REQUESTS[phase] if n in values and not isinstance(v := values[n], float)}


def _plain(reply: Message) -> dict[str, int | float | str | bytes]:
    return {name: value for name, value in reply.items() if not isinstance(value, np.ndarray)}
