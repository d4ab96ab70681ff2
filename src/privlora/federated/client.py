"""A client: one owner's records, ledger and answers. Its records, losses, norms and counts never leave it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from privlora.accounting import Ledger
from privlora.config import Settings, settings_from
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.federated.desk import Desk
from privlora.federated.local import Job, train
from privlora.federated.messages import Reply, Request
from privlora.federated.plans import client_plan, client_settings, federation_of, rule_of, rule_settings
from privlora.federated.workplace import Workplace
from privlora.training.inputs import Data, load_data

_log = logging.getLogger(__name__)


@dataclass
class Client:
    """name: public. folder: its own, for all federations. records: in memory, or None for ``path``.

    workplaces: of the process, by run; shared with other clients of it.
    """

    name: str
    folder: Path
    path: str | list[str] | None = None
    records: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    workplaces: dict[str, Workplace] = field(default_factory=dict, repr=False)

    def answer(self, request: Request) -> Reply:
        """The reply to one request; one that cannot or must not be answered is refused, in words that say nothing
        private. What happened is logged here."""
        return answer_all({self.name: self}, [request])[0]

    def refuse(self, request: Request, error: PrivloraError) -> Reply:
        _log.warning("%s refuses %s of round %d: %s", self.name, request.kind, request.round, error)
        return Reply(self.name, request.kind, request.round, refused="refused")

    def at(self, run: str) -> Turn:
        """This client in one federation. Raises RunError for a name that is none."""
        if not (run.isalnum() and len(run) <= 64):
            raise RunError("a run's name is not of letters and digits", fix="look at the server")
        return Turn(self, Desk(self.folder / run), run)


@dataclass
class Turn:
    """A client in one federation."""

    client: Client
    desk: Desk
    run: str

    def join(self, request: Request) -> Reply:
        """Agree to the settings of a run. Raises ConfigError or PrivacyError for settings that cannot be agreed to."""
        settings = settings_from(_values(str(request.values["settings"])), source="the server's settings")
        federation_of(settings)
        plan = client_plan(settings)
        self.desk.open(settings, plan)
        return Reply(self.client.name, "join", 0)

    @cached_property
    def settings(self) -> Settings:
        return self.desk.settings

    @property
    def workplace(self) -> Workplace:
        return self.client.workplaces.setdefault(self.run, Workplace(self.settings))

    @cached_property
    def data(self) -> Data:
        """This client's records, as the run reads them."""
        model, tokenizer, settings = self.workplace.loaded
        own = settings.data.model_copy(
            update={"path": self.client.path or "", "evaluation": None, "unchecked": True, "limit": None}
        )
        lora = settings.adapter.model_copy(update={"init": None, "public_text": None, "public_text_limit": None})
        mine = client_settings(settings).model_copy(update={"data": own, "adapter": lora})
        return load_data(mine, tokenizer, self.client.records, model=model)

    def job(self, request: Request) -> Job:
        """What training ``request`` asks for; noted first, so that it is asked for once."""
        settings = self.settings
        self.desk.begin(request)
        ledger = None
        if client_plan_exists(settings):
            ledger = Ledger.open(self.desk.ledger)
            steps = federation_of(settings).local_steps
            if ledger.remaining < steps:
                ledger.close()
                raise PrivacyError(
                    f"{self.client.name}: its budget has {ledger.remaining} steps left, and a round takes {steps}",
                    why="more releases than planned would exceed the stated epsilon",
                    fix="end the federation, or plan more rounds from the start",
                )
        begin = None
        if not federation_of(settings).joint:
            begin = rule_of(federation_of(settings)).begin(
                request.round, request.tensors, self.desk.kept("memory"), rule_settings(settings)
            )
        return Job(self.client.name, self.data, request.round, request.tensors, begin, ledger)

    def sketch(self, request: Request) -> Reply:
        """A later stage: algebra on what training left."""
        self.desk.begin(request)
        return self.reply(request, {}, 0.0)

    def reply(self, request: Request, end: Mapping[str, Tensor], travelled: float) -> Reply:
        """By the rule, from where training ended."""
        settings = self.settings
        answer, kept = rule_of(federation_of(settings)).answer(
            request.kind,
            request.round,
            request.tensors,
            end,
            self.desk.kept("memory"),
            rule_settings(settings),
            travelled=travelled,
        )
        self.desk.keep("memory", kept)
        return Reply(self.client.name, request.kind, request.round, tensors=answer)

    def leave(self, request: Request) -> Reply:
        """The last message: gives the ledger, which is public, closed if all is charged."""
        return Reply(
            self.client.name, "leave", request.round, values={"ledger": self.desk.statement()}
        )


def answer_all(clients: Mapping[str, Client], requests: Sequence[Request]) -> list[Reply]:
    """The replies of clients in one process; those that train do so side by side."""
    replies: list[Reply] = []
    training: list[tuple[Request, Turn, Job]] = []
    for request in requests:
        client = clients[request.client]
        try:
            turn = client.at(str(request.values["run"]))
            if request.kind == "train":
                training.append((request, turn, turn.job(request)))
            elif request.kind in ("join", "sketch", "leave"):
                replies.append(getattr(turn, request.kind)(request))
            else:
                raise RunError(f"unknown message {request.kind!r}", fix="look at the server")
        except PrivloraError as error:
            replies.append(client.refuse(request, error))
    try:
        for (request, turn, job), (end, travelled) in zip(
            training, train([job for _, _, job in training], training[0][1].workplace), strict=True
        ) if training else ():
            replies.append(turn.reply(request, end, travelled))
    except PrivloraError as error:
        done = {reply.client for reply in replies}
        replies += [turn.client.refuse(r, error) for r, turn, _ in training if r.client not in done]
    finally:
        for _, _, job in training:
            if job.ledger is not None:
                job.ledger.close()
    return replies
