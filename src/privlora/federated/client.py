"""A client: one owner's records, ledger and answers. Its records, losses, norms and counts never leave it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from privlora.accounting import LedgerSummary, read_ledger
from privlora.data.formats import Format
from privlora.disk import lock
from privlora.errors import PrivloraError, RunError
from privlora.federated.desk import Desk, has_begun
from privlora.federated.limits import Limits
from privlora.federated.messages import REFUSED, Reply, Request
from privlora.federated.readiness import NotReadyError, in_words
from privlora.federated.secure import Identity
from privlora.federated.session import Session, Work
from privlora.federated.workplace import Workplace
from privlora.precision import own_context
from privlora.training.files import temporary_files

_log = logging.getLogger(__name__)

_LONGEST = 64  # characters of a run's name, which is a folder's


@dataclass
class Client:
    """name: public. folder: its own, for all its federations. path: its records' files; records: the same in memory.
    format: of the files; by their endings, unless its owner says otherwise: a server may not say what is a record.

    model: where it has the base model, if not where the server's settings say; revision: of it, where it is on the hub.
    pins: the fingerprint of each client
    that secure sums may be over, where its owner has them from elsewhere than the server. limits: what its owner lets a
    server ask for. workplaces: of the process, by run; shared with the other clients of it.
    """

    name: str
    folder: Path
    path: str | list[str] | None = None
    records: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    format: Format = "auto"
    model: str | None = None
    revision: str | None = None
    pins: Mapping[str, str] | None = None
    limits: Limits = field(default_factory=Limits)
    workplaces: dict[str, Workplace] = field(default_factory=dict, repr=False)
    _sessions: dict[str, Session] = field(default_factory=dict, init=False, repr=False)

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
        """Of the request's run. Raises RunError for a run without a name."""
        run = request.values.get("run")
        if not (isinstance(run, str) and run.isascii() and run.isalnum() and len(run) <= _LONGEST):
            raise RunError("a request does not say of which run it is", fix="look at the server")
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
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise RunError(
                f"cannot write {str(self.folder)!r}: {error.strerror}",
                fix="give the client a folder of its own",
            ) from None
        try:
            lock(descriptor)
            for folder in (self.folder, *self.folder.glob("*/")):
                for path in temporary_files(folder):
                    path.unlink()
            yield
        except BlockingIOError:
            raise RunError(
                f"another process answers for {str(self.folder)!r}",
                why="two answers to one question would both be charged",
                fix="let one process answer for one client",
            ) from None
        finally:
            os.close(descriptor)

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
                    works.append(session.begin(request))
                    held.callback(works[-1].close)
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
        for others in found:
            if work.session.settings == others[0].session.settings and _same(work.request, others[0].request):
                others.append(work)
                break
        else:
            found.append([work])
    return found


def _same(one: Request, other: Request) -> bool:
    return (
        (one.round, one.values["run"]) == (other.round, other.values["run"])
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    )


def _train(clients: Mapping[str, Client], works: Sequence[Work]) -> list[Reply]:
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
    except Exception as error:  # noqa: BLE001 - see Client.refuse
        return [clients[work.request.client].refuse(work.request, error) for work in works]
    for work, end in zip(works, ended, strict=True):
        try:
            replies.append(work.reply(end))
        except Exception as error:  # noqa: BLE001 - see Client.refuse
            replies.append(clients[work.request.client].refuse(work.request, error))
    return replies
