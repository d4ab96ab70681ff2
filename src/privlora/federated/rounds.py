"""The rounds of a federation, as its server sees them: ask, take in what comes, move, save.

The same lines drive clients of this process, of Flower's simulation and of other machines: only the Exchange differs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from privlora.config import AT_CLIENTS, ClientSettings, RunSettings, Settings
from privlora.data.examples import Examples
from privlora.errors import RunError
from privlora.evaluation import evaluate_next_token
from privlora.federated.history import History, Round
from privlora.federated.messages import Exchange, Number, Reply, Request, size
from privlora.federated.plans import federation_of
from privlora.federated.schedule import participants
from privlora.federated.server import Server
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint
from privlora.training.files import RunFolder, append_line, read_lines
from privlora.training.loop import Interrupted, stop_on_signal

_log = logging.getLogger(__name__)


class RoundObserver(Protocol):
    """Whoever wants to see a federation go on."""

    def on_round(self, done: Round, rounds: int) -> None: ...

    def on_evaluation(self, step: int, loss: float) -> None: ...


@dataclass
class Rounds:
    """A federation's server at work. server: what moves. evaluation: PUBLIC records, for the held-out loss."""

    settings: Settings
    exchange: Exchange
    server: Server
    folder: RunFolder
    history: History
    evaluation: Examples | None = None
    observer: RoundObserver | None = None

    def serve(self) -> dict[str, str]:
        """All rounds that are left; gives each client's ledger as text, empty where it has none.

        A round that was begun and not ended, because this process died, stays void: its clients may have been charged
        for it, and are not asked twice. Raises Interrupted, after saving, on SIGINT or SIGTERM; RunError if a client
        does not join.
        """
        federation, run = federation_of(self.settings), self.settings.run
        self._join()
        if self.folder.checkpoint.exists():
            self.server.take_states(load_checkpoint(self.folder.checkpoint, run_id=self.history.run)[1])
        begun = self.history.begun
        if begun == 0:
            self._evaluate(0)
        chosen = participants(federation.names, federation.per_round, federation.rounds, run.seed)
        with stop_on_signal() as stop:
            for number, asked in enumerate(chosen, start=1):
                if number <= begun:
                    continue
                self._take(number, asked)
                last = number == federation.rounds
                if run.evaluate_every and number % run.evaluate_every == 0 and not last:
                    self._evaluate(number)
                if stop.is_set() and not last:
                    raise Interrupted(number)
        self._evaluate(federation.rounds)
        return self._leave(federation.rounds)

    def _take(self, number: int, asked: list[str]) -> None:
        """One round: its stages, then what is saved and shown of it."""
        self.history.begin(number, asked)
        turn = Turn(self.settings, self.exchange, self.server, self.history.run, number)
        before = self.server.states()
        void, answered = None, asked
        try:
            for stage in self.server.stages:
                answered = turn.stage(stage, answered)
        except RunError as reason:
            self.server.take_states(before)
            void, answered = reason.what, []
        else:
            save_checkpoint(self.folder.checkpoint, self.server.states(), Mark(number, self.history.run, None))
        done = Round(number, tuple(asked), tuple(answered), turn.down, turn.up, void)
        self.history.end(done)
        if self.observer is not None:
            self.observer.on_round(done, federation_of(self.settings).rounds)

    def _join(self) -> None:
        """Every client agrees to the public settings, or the federation does not begin."""
        terms = public_settings(self.settings).to_yaml()
        values = {"run": self.history.run, "settings": terms}
        names = federation_of(self.settings).names
        missing = set(names) - set(self.exchange.names())
        if missing:
            raise RunError(
                f"clients that cannot be reached: {', '.join(sorted(missing))}", fix="start them, then go on"
            )
        replies = self.exchange.send([Request(name, "join", 0, values=values) for name in names])
        joined = {reply.client for reply in replies if reply.refused is None}
        if joined != set(names):
            raise RunError(
                f"clients that did not join: {', '.join(sorted(set(names) - joined))}",
                why="a client joins terms that it can keep with its records and its budget",
                fix="see what these clients logged",
            )

    def _leave(self, number: int) -> dict[str, str]:
        """Each client's ledger."""
        names = federation_of(self.settings).names
        values = {"run": self.history.run}
        replies = self.exchange.send([Request(name, "leave", number + 1, values=values) for name in names])
        ledgers = {reply.client: str(reply.values.get("ledger", "")) for reply in replies if reply.refused is None}
        missing = sorted(set(names) - set(ledgers))
        if missing:
            raise RunError(
                f"clients that did not give their ledgers: {', '.join(missing)}",
                why="without them the report cannot say what was released",
                fix="start them, then `privlora resume`",
            )
        return ledgers

    def _evaluate(self, step: int) -> None:
        """Held-out loss of what would be exported now, on public records."""
        rows = read_lines(self.folder.evaluations)
        if not self.evaluation or any(row["step"] == step for row in rows):
            return
        with self.server.exported() as model:
            result = evaluate_next_token(model, self.evaluation)
        append_line(self.folder.evaluations, {"step": step, **result.to_dict()})
        if self.observer is not None:
            self.observer.on_evaluation(step, result.loss_per_example)


@dataclass
class Turn:
    """One round's messages. down, up: bytes so far."""

    settings: Settings
    exchange: Exchange
    server: Server
    run: str
    number: int
    down: int = 0
    up: int = 0

    def stage(self, stage: str, asked: Sequence[str]) -> list[str]:
        """Ask, take in, close; gives who answered. Raises RunError where nothing may come of the round."""
        tensors = self.server.tensors(stage)
        answered = []
        for reply in self.send(stage, {name: tensors for name in asked}):
            try:
                self.server.refuse(stage, reply.tensors)
            except RunError as unfit:
                _log.warning("round %d: the answer of %s is dropped: %s", self.number, reply.client, unfit)
                continue
            self.server.add(stage, dict(reply.tensors), weight_of(self.settings, reply.client))
            answered.append(reply.client)
        if not answered:
            raise RunError("no client answered", fix="see what they logged")
        self.server.close(stage, self.number, len(answered))
        return answered

    def send(self, kind: str, tensors: Mapping[str, Mapping[str, Tensor]], **values: Number) -> list[Reply]:
        """The fit answers of the clients that are asked, at most one of each."""
        requests = [
            Request(name, kind, self.number, tensors=sent, values={"run": self.run, **values})
            for name, sent in tensors.items()
        ]
        self.down += sum(size(request) for request in requests)
        replies: dict[str, Reply] = {}
        for reply in self.exchange.send(requests):
            fits = (reply.kind, reply.round) == (kind, self.number) and reply.client in tensors
            if fits and reply.refused is None and reply.client not in replies:
                replies[reply.client] = reply
                self.up += size(reply)
        return list(replies.values())


def weight_of(settings: Settings, client: str) -> float:
    """Public."""
    federation = federation_of(settings)
    return 1.0 if federation.weights is None else federation.weights[federation.names.index(client)]


def public_settings(settings: Settings) -> Settings:
    """What clients are told: without places on the server's machine, and without what is the server's alone."""
    federation = federation_of(settings)
    told = federation.model_copy(update={"clients": [ClientSettings(name=name) for name in federation.names],
        "split": "iid", "column": None, "alpha": None})
    data = settings.data.model_copy(update={"path": AT_CLIENTS, "evaluation": None})
    lora = settings.adapter.model_copy(update={"init": None, "public_text": None, "public_text_limit": None})
    run = RunSettings(seed=settings.run.seed, label=settings.run.label,
                      tokens_per_micro_batch=settings.run.tokens_per_micro_batch)
    return settings.model_copy(update={"federation": told, "data": data, "adapter": lora, "run": run})
