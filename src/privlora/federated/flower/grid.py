"""Messages between the server and clients over any of Flower's grids."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from privlora.errors import RunError, named, nearest
from privlora.federated.flower.logs import aside_of_flower
from privlora.federated.flower.records import NAME, Arrays, message_type, packed, read_reply
from privlora.federated.messages import ABOUT_ITS_PLACE, BAD_CONFIG, NAME_PATTERN, TRAINING, Reply, Request

_log = logging.getLogger(__name__)

CLOCKS: Final = 300.0
"""Seconds by which two machines' clocks may differ; Flower compares them when a message expires."""

PATIENCE: Final = 60.0
"""Seconds that a node whose config is wrong is waited for: its owner has to start it anew, which makes it another."""

_PAUSE: Final = 1.0


class GridExchange:
    """Carries messages over a grid of Flower: the core's ``Exchange``.

    A client is found by its public name: that under which its SuperNode was registered, or else the one that it gives
    when it is asked. A client answers to its own name only. Names that two nodes have are used by neither.

    Args:
        grid: any of Flower's.
        timeout: seconds that replies may take, and that ``names`` waits for clients.
        invited: names of the clients that take part, others are left out; None: whoever is online.
        aside: takes what is to be said of an answer to training, where whom it is asked of is the server's secret;
            None: the log may say it.
        pause: waits some seconds (a test need not).
        clock: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        grid: Grid,
        timeout: float,
        invited: Iterable[str] | None = None,
        *,
        aside: Callable[[str], None] | None = None,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grid, self.timeout = grid, timeout
        self.invited = None if invited is None else frozenset(invited)
        self._aside, self._pause, self._clock = aside, pause, clock
        self._names: dict[int, str] = {}
        self._asked: set[int] = set()
        self._told: set[str] = set()
        self._wrong: dict[int, float] = {}  # nodes without a name because of their config, and since when

    def names(self) -> list[str]:
        """Of the clients that can be reached, sorted.

        Waits until all who are invited answer (or anybody, if nobody is named), but at most ``timeout`` seconds; and
        `PATIENCE` where each of the absent can be a node that is online and set up wrongly. A node that only claims
        so ends a federation before it begins, as any client may that does not join.
        """
        end = self._clock() + self.timeout
        while True:
            online = self._online()
            self._ask(online, [node for node in online if node not in self._names], end - self._clock())
            found = self._nodes(online)
            complete = found and set(found) >= (self.invited or frozenset())
            if complete or self._clock() >= end:
                return sorted(found)
            missing = sorted((self.invited or frozenset()) - set(found))
            absent = ", ".join(missing) or "any client"
            if missing and len(missing) <= self._stuck(online):
                why = "nodes that may be theirs are online, and their node configs are wrong"
                self._once(logging.ERROR, f"{absent}: not waited for any longer, since {why}")
                return sorted(found)
            self._once(logging.INFO, f"waiting for {absent}, {self.timeout:g} s at most")
            self._pause(_PAUSE)

    def _stuck(self, online: Iterable[int]) -> int:
        """How many nodes that are online have been set up wrongly for `PATIENCE`."""
        now = self._clock()
        return sum(now - self._wrong[node] >= PATIENCE for node in online if node in self._wrong)

    def send(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """The answers that came within ``timeout``, one at most of each client, read one by one.

        An error in place of a reply, a reply that cannot be read, one of another client, kind or round, and a second
        one of the same client are dropped.

        Raises:
            RunError: two requests for one client.
        """
        if len({request.client for request in requests}) < len(requests):
            raise RunError("two requests for one client at once", fix="send them one after the other")
        online = self._online()
        self._ask(online, [node for node in online if node not in self._asked], self.timeout)
        nodes = self._nodes(online)
        sent = {nodes[request.client]: request for request in requests if request.client in nodes}
        return self._answers(sent)

    def _answers(self, sent: dict[int, Request]) -> Iterator[Reply]:
        answered: set[int] = set()
        for node, reply in self._carry(sent, self.timeout):
            asked = sent[node]
            if reply.refused in ABOUT_ITS_PLACE:  # whoever was set up wrongly may not know its own name
                self._tell(logging.ERROR, node, asked, f"refuses {asked.kind}: {_why(reply)}")
                reply = Reply(asked.client, asked.kind, asked.round, refused=reply.refused)
            if (reply.client, reply.kind, reply.round) != (asked.client, asked.kind, asked.round):
                self._tell(logging.WARNING, node, asked, "answered something else; it is dropped")
            elif node not in answered:
                answered.add(node)
                yield reply

    def _online(self) -> dict[int, NodeInfo]:
        return {node.node_id: node for node in self.grid.get_nodes()}

    def _ask(self, online: dict[int, NodeInfo], nodes: Sequence[int], timeout: float) -> None:
        """Learn the names of ``nodes``. ``online``: what Flower knows of each."""
        self._asked.update(nodes)
        registered = {node: online[node].name for node in nodes if online[node].HasField("name")}
        self._names.update({node: name for node, name in registered.items() if _is_public(node, name)})
        question = Request(client="", kind=NAME, round=0)
        asked = [node for node in nodes if node not in registered]
        for node, reply in self._carry(dict.fromkeys(asked, question), max(timeout, _PAUSE)):
            named = (reply.kind, reply.round, reply.refused) == (NAME, 0, None)
            if named and _is_public(node, reply.client):
                self._names[node] = reply.client
            elif not named:
                self._once(logging.ERROR, f"{self._who(node)} does not give its name: {_why(reply)}")
                if reply.refused == BAD_CONFIG:
                    self._wrong.setdefault(node, self._clock())

    def _nodes(self, online: Iterable[int]) -> dict[str, int]:
        """The node of each client that can be reached and takes part."""
        named = {node: self._names[node] for node in online if node in self._names}
        count = Counter(named.values())
        for name in (name for name, times in count.items() if times > 1):
            self._once(logging.WARNING, f"{count[name]} nodes call themselves {name!r}; none of them is used")
        for node, name in named.items():
            if self.invited is not None and name not in self.invited:
                who = f"{self._who(node)} is no client of this federation"
                self._once(logging.WARNING, f"{who}, and is not asked; {nearest(name, sorted(self.invited))}")
        invited = set(count) if self.invited is None else self.invited
        return {name: node for node, name in named.items() if count[name] == 1 and name in invited}

    def _tell(self, level: int, node: int, asked: Request | None, what: str) -> None:
        """Log what is wrong with an answer, or say it aside. asked: what it is to."""
        line = f"{self._who(node)} {what}"
        if self._aside is not None and (asked is None or asked.kind in TRAINING):
            self._aside(line if asked is None else f"round {asked.round}: {line}")
        else:
            _log.log(level, "%s", line)

    def _who(self, node: int) -> str:
        """A node by its client's name, if that is known, and Flower's number."""
        return f"{self._names[node]} (node {node})" if node in self._names else f"node {node}"

    def _once(self, level: int, text: str) -> None:
        """Log what would be said again with every message."""
        if text not in self._told:
            self._told.add(text)
            _log.log(level, "%s", text)

    def _carry(self, sent: dict[int, Request], timeout: float) -> Iterable[tuple[int, Reply]]:
        """Requests by node, and what can be read of the answers. What an error says stays unread: it may be private."""
        if not sent:
            return
        arrays: Arrays = {}  # what all are sent is written once, however many they are
        ttl = timeout + CLOCKS  # else a client that was away would work for a round that is over
        messages = [
            Message(packed(one, arrays), node, message_type(one.kind), ttl=ttl, group_id=str(one.round))
            for node, one in sent.items()
        ]
        secret = any(request.kind in TRAINING for request in sent.values())
        with aside_of_flower(self._aside if secret else None):
            answers = self.grid.send_and_receive(messages, timeout=timeout)
        for message in answers:
            node = message.metadata.src_node_id
            if node not in sent or message.has_error():
                asked = sent.get(node)
                self._tell(logging.WARNING, node, asked, f"answered with an error{_kind_of_error(message)}")
                continue
            try:
                yield node, read_reply(message)
            except RunError as problem:
                self._tell(logging.WARNING, node, sent[node], f"gave an answer that is dropped: {problem}")


def _why(reply: Reply) -> str:
    """A refusal in words of this module alone: what a client wrote may be anything."""
    if reply.refused not in ABOUT_ITS_PLACE:
        return "its own log says why"
    return f"{reply.refused}; its own log says what to mend"


def _kind_of_error(message: Message) -> str:
    """Flower's number of an error and its name. The text beside them stays unread: it may quote a record."""
    if not message.has_error():
        return ""
    code = message.error.code
    found = [name for name, value in vars(ErrorCode).items() if name.isupper() and value == code]
    return f" ({', '.join([f'Flower’s {code}', *found])})"


def _is_public(node: int, name: str) -> bool:
    """Whether a client may be called so."""
    fits = re.fullmatch(NAME_PATTERN, name) is not None
    if not fits:
        _log.warning("node %d: %s is no name of up to 64 letters, digits, ., - and _", node, named(name))
    return fits
