"""A client: one owner's records, ledger and answers. Its records, losses, norms and counts never leave it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from privlora.errors import PrivloraError, RunError
from privlora.federated.limits import Limits
from privlora.federated.messages import Reply, Request
from privlora.federated.secure import Identity
from privlora.federated.session import Session, Work
from privlora.federated.workplace import Workplace

_log = logging.getLogger(__name__)


@dataclass
class Client:
    """name: public. folder: its own, for all its federations. path: its records' files; records: the same in memory.

    model: where it has the base model, if not where the server's settings say. pins: the fingerprint of each client
    that secure sums may be over, where its owner has them from elsewhere than the server. limits: of what all
    federations of ``folder`` may release together; None: whatever a server's settings say. workplaces: of the process,
    by run; shared with the other clients of it.
    """

    name: str
    folder: Path
    path: str | list[str] | None = None
    records: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    model: str | None = None
    pins: Mapping[str, str] | None = None
    limits: Limits | None = None
    workplaces: dict[str, Workplace] = field(default_factory=dict, repr=False)
    _sessions: dict[str, Session] = field(default_factory=dict, init=False, repr=False)

    def answer(self, request: Request) -> Reply:
        """The reply to one request. What cannot or must not be answered is refused without a reason, and told here."""
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
        """Of the request's run. Raises RunError for a run without a name."""
        run = str(request.values.get("run", ""))
        if not (run.isalnum() and len(run) <= 64):
            raise RunError("a request does not say of which run it is", fix="look at the server")
        if run not in self._sessions:
            self._sessions[run] = Session(self, run)
        return self._sessions[run]

    def refuse(self, request: Request, error: PrivloraError) -> Reply:
        _log.warning("%s refuses %r of round %d: %s", self.name, request.kind, request.round, error)
        return Reply(self.name, request.kind, request.round, refused="refused")


def answer_all(clients: Mapping[str, Client], requests: Sequence[Request]) -> list[Reply]:
    """The replies of clients in one process; those that train do so side by side."""
    replies: list[Reply] = []
    works: list[Work] = []
    try:
        for request in requests:
            client = clients[request.client]
            try:
                session = client.session(request)
                if request.kind == "train":
                    works.append(session.begin(request))
                else:
                    replies.append(session.answer(request))
            except PrivloraError as error:
                replies.append(client.refuse(request, error))
        if works:
            replies += _train(clients, works)
    finally:
        for work in works:
            work.close()
    return replies


def _train(clients: Mapping[str, Client], works: Sequence[Work]) -> list[Reply]:
    """All works are of one run and one round."""
    # Here, because a process that answers one other message would take longer to import them than to answer.
    from privlora.federated.joint import vectors
    from privlora.federated.local import train_locally

    jobs, workplace = [work.job for work in works], works[0].session.workplace
    replies = []
    try:
        if works[0].session.federation.joint:
            ended: list[Any] = list(vectors(jobs, workplace))
        else:
            ended = list(train_locally(jobs, workplace))
    except PrivloraError as error:
        return [clients[work.request.client].refuse(work.request, error) for work in works]
    for work, end in zip(works, ended, strict=True):
        try:
            replies.append(work.reply(end))
        except PrivloraError as error:
            replies.append(clients[work.request.client].refuse(work.request, error))
    return replies
