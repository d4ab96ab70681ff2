"""A client and clients of a process that are no federation at all, but use everything that carries one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from privlora.federated.flower.records import NAME, message_type, packed, read_request
from privlora.federated.messages import Reply, Request


class StubClient:
    """Keeps a running sum on disk: what it answers depends on every request that it has had."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder, self.source = folder, source

    def answer(self, request: Request) -> Reply:
        if request.values.get("fail") == request.client:
            raise ValueError("a record about Alice")
        state = self.folder / "sum.json"
        total = json.loads(state.read_text()) if state.exists() else len(self.source)
        total += int(request.tensors["x"].sum())
        self.folder.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(total))
        tensors = {"y": request.tensors["x"] * total, "key": torch.tensor([total], dtype=torch.uint32)}
        return Reply(request.client, request.kind, request.round, tensors, {"name": request.client.encode()})


class EmbeddedGrid(Grid):
    """Flower's grid in one process: clients are names, and their answers come from one call for all of them.

    Args:
        clients: their names; node k + 1 is the k-th.
        answer_all: from requests, all that were sent together, to the replies of those that did not drop out.
    """

    def __init__(
        self, clients: Sequence[str], answer_all: Callable[[list[Request]], Iterable[Reply]]
    ) -> None:
        self._clients = dict(enumerate(clients, start=1))
        self._answer_all = answer_all
        self._pushed: dict[str, Message] = {}
        self._run = Run.create_empty(run_id=1)
        _identify(self._run)

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """A copy, as Flower's own grids give."""
        return Run(**vars(self._run))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """What Flower's constructor of messages makes."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """1 to the number of clients."""
        return list(self._clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep messages until they are pulled; their ids, in order."""
        pushed = {str(uuid4()): message for message in messages}
        for number, message in pushed.items():
            message.metadata.__dict__["_message_id"] = number  # as Flower's own grids set it
        self._pushed.update(pushed)
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to messages, which are answered together, here and now. A message is answered once."""
        wanted = [self._pushed.pop(number) for number in set(message_ids) & set(self._pushed)]
        wanted.sort(key=lambda message: message.metadata.dst_node_id)
        answers, asked = [], {}
        for message in wanted:
            name = self._clients[message.metadata.dst_node_id]
            if message.metadata.message_type == message_type(NAME):
                answers.append(Message(packed(Reply(name, NAME, 0)), reply_to=message))
            else:
                asked[name] = message
        replies = self._answer_all([read_request(message) for message in asked.values()]) if asked else []
        for reply in replies:
            answers.append(Message(packed(reply), reply_to=asked[reply.client]))
        return answers

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, then pull; ``timeout`` is without effect: nothing is waited for."""
        return self.pull_messages(self.push_messages(messages))


def _identify(run: Run) -> None:
    """Flower's messages carry who sends them; in a process that Flower did not start, nobody has said so yet."""
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run.run_id, 1, 1
