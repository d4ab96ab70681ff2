"""Messages over grids: who is found, what is dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

pytest.importorskip("flwr")
from flower_stubs import EmbeddedGrid
from flwr.app import Error, Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from privlora.errors import RunError
from privlora.federated.flower.grid import CLOCKS, PATIENCE, GridExchange
from privlora.federated.flower.records import message_type, packed
from privlora.federated.messages import BAD_CONFIG, OTHER_NAME, Reply, Request

FLOWER = logging.getLogger("flwr")


def echo(requests: Sequence[Request]) -> list[Reply]:
    return [Reply(r.client, r.kind, r.round, r.tensors, r.values) for r in requests]


def request(client: str, kind: str = "train", number: int = 1) -> Request:
    return Request(client, kind, number, {"x": torch.ones(2)}, {"k": 1})


class Faulty(EmbeddedGrid):
    """Whatever a test makes of the replies, of who is online, and of what Flower knows of nodes."""

    def __init__(self, clients: Sequence[str], answer: Callable = echo) -> None:
        super().__init__(clients, answer)
        self.online = set(self.get_node_ids())
        self.registered: dict[int, str] = {}
        self.change: Callable[[Message], Iterable[Message]] = lambda message: [message]
        self.seen: list[list[Message]] = []
        self.timeouts: list[float | None] = []

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self.registered.get(node)) for node in sorted(self.online)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        self.seen.append(sent)
        self.timeouts.append(timeout)
        reached = [message for message in sent if message.metadata.dst_node_id in self.online]
        return [
            out for reply in super().send_and_receive(reached, timeout=timeout) for out in self.change(reply)
        ]


def exchange(grid: Grid, invited: Sequence[str] | None = None, seconds: float = 10) -> GridExchange:
    """Its clock goes one second a look, and waiting is without effect."""
    ticks = iter(range(10**6))
    return GridExchange(grid, seconds, invited, pause=lambda _: None, clock=lambda: float(next(ticks)))


def met(*names: str) -> tuple[Faulty, GridExchange]:
    """A grid, and an exchange over it that knows these clients."""
    grid = Faulty(names)
    over = exchange(grid)
    over.names()
    return grid, over


def clients(replies: Iterable[Reply]) -> list[str]:
    return sorted(reply.client for reply in replies)


def other(message: Message, reply: Reply) -> Message:
    """In place of a reply, for the same request."""
    message.content = packed(reply)
    return message


def test_requests_arrive_together_and_whole() -> None:
    seen: list[list[Request]] = []
    grid = EmbeddedGrid(["b", "a"], lambda requests: seen.append(requests) or echo(requests))
    over = exchange(grid)
    assert over.names() == ["a", "b"]
    replies = [*over.send([request("a"), request("b")])]
    assert clients(replies) == ["a", "b"]
    assert [sorted(r.client for r in batch) for batch in seen] == [["a", "b"]]
    assert seen[0][0].tensors["x"].tolist() == [1, 1]
    assert list(over.send([])) == []
    assert clients(over.send([request("a"), request("elsewhere")])) == ["a"]


def test_messages_say_their_round_and_expire() -> None:
    grid = Faulty(["a"])
    over = exchange(grid, seconds=7)
    list(over.send([request("a", "sketch", 4)]))
    metadata = grid.seen[-1][0].metadata
    assert (metadata.message_type, metadata.group_id) == (message_type("sketch"), "4")
    assert metadata.ttl == 7 + CLOCKS
    assert grid.timeouts[-1] == 7


def test_two_requests_for_one_client() -> None:
    with pytest.raises(RunError, match="two requests"):
        exchange(EmbeddedGrid(["a"], echo)).send([request("a"), request("a", "sketch")])


@pytest.mark.parametrize(
    "change",
    [
        lambda message: [],
        lambda message: [Message(Error(2, "a record about Alice"), reply_to=message)],
        lambda message: [other(message, Reply("b", "train", 1))],
        lambda message: [other(message, Reply("a", "train", 2))],
        lambda message: [other(message, Reply("a", "sketch", 1))],
        lambda message: [other(message, Reply("a", "name", 0))],
    ],
)
def test_what_is_no_answer_counts_as_dropped_out(change: Callable, caplog: pytest.LogCaptureFixture) -> None:
    grid, over = met("a", "b")
    grid.change = lambda message: change(message) if message.metadata.src_node_id == 1 else [message]
    assert clients(over.send([request("a"), request("b")])) == ["b"]
    assert "Alice" not in caplog.text
    if "error" in caplog.text:
        assert "a (node 1) answered with an error (Flower’s 2, CLIENT_APP_RAISED_EXCEPTION)" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda message: [_failed(message)],
        lambda message: [other(message, Reply("b", "leave", 1))],
        lambda message: [other(message, Reply("", "train", 1, refused=BAD_CONFIG))],
    ],
)
def test_where_draws_are_secret_no_line_says_whose_answer_failed(
    change: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor that any did: it is said aside. What all are asked, as to join, is no secret."""
    for secret in (True, False):
        grid, aside = Faulty(["a", "b", "c"]), list[str]()
        over = GridExchange(grid, 10, aside=aside.append if secret else None)
        over.names()
        grid.change = change
        caplog.clear()
        list(over.send([request("a"), request("c")]))
        said = [record.getMessage() for record in caplog.records]
        assert (len(said), len(aside)) == ((0, 2) if secret else (2, 0))
        assert all("(node " in line for line in [*said, *aside])
        assert all(line.startswith("round 1: ") for line in aside)
        grid.change = lambda message: [_failed(message)]
        list(over.send([request("a", "join", 0)]))
        assert "a (node 1) answered with an error" in caplog.text


def test_where_draws_are_secret_what_flower_logs_of_them_is_said_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own grid says that messages were too large, or could not be sent."""

    class Talking(Faulty):
        def send_and_receive(self, messages: Iterable[Message], **given: object) -> list[Message]:
            FLOWER.warning("not all of %d messages could be pushed", len(sent := list(messages)))
            return super().send_and_receive(sent, **given)  # type: ignore[arg-type]

    for secret in (True, False):
        grid, aside = Talking(["a", "b"]), list[str]()
        over = GridExchange(grid, 10, aside=aside.append if secret else None)
        over.names()
        for kind, hidden in (("join", False), ("train", secret)):
            caplog.clear()
            assert len(list(over.send([request("a", kind)]))) == 1
            line = "not all of 1 messages could be pushed"
            assert (line in caplog.text, aside) == (not hidden, [f"Flower: {line}"] if hidden else [])
    FLOWER.warning("afterwards")
    assert "afterwards" in caplog.text


@pytest.mark.parametrize(("said", "words"), [("", BAD_CONFIG), ("souht", OTHER_NAME)])
def test_a_node_that_is_set_up_wrongly_refuses_under_its_registered_name(
    said: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Faulty(["north", "south"])
    grid.registered = {1: "north", 2: "south"}
    over = exchange(grid, ["north", "south"])
    assert over.names() == ["north", "south"]
    wrong = Reply(said, "join", 0, values={"x": 1}, refused=words)
    grid.change = lambda message: [other(message, wrong)] if message.metadata.src_node_id == 2 else [message]
    replies = {r.client: r for r in over.send([request(name, "join", 0) for name in ("north", "south")])}
    assert replies["north"].refused is None
    assert replies["south"] == Reply("south", "join", 0, refused=words)
    assert f"south (node 2) refuses join: {words}; its own log says what to mend" in caplog.text


def test_a_node_whose_config_is_wrong_is_not_waited_for_until_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = Faulty(["a", "b"])
    wrong = Reply("", "name", 0, refused=BAD_CONFIG)
    grid.change = lambda message: [other(message, wrong)] if message.metadata.src_node_id == 2 else [message]
    clock = [0.0]

    def pause(seconds: float) -> None:
        clock[0] += seconds

    over = GridExchange(grid, 3600, ["a", "b"], pause=pause, clock=lambda: clock[0])
    assert over.names() == ["a"]
    assert PATIENCE <= clock[0] < PATIENCE + 5
    assert "b: not waited for any longer" in caplog.text
    assert caplog.text.count("node 2 does not give its name") == 1  # however often it is asked
    two = GridExchange(grid, 3600, ["a", "b", "c"], pause=pause, clock=lambda: clock[0])
    assert two.names() == ["a"]
    assert clock[0] >= 3600  # of two that are absent, one may still come


def test_whom_the_server_waits_for_and_whom_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "privlora")
    assert exchange(Faulty(["north", "souht"]), ["north", "south"]).names() == ["north"]
    assert caplog.text.count("waiting for south, 10 s at most") == 1  # however often it looks
    said = "souht (node 2) is no client of this federation, and is not asked; did you mean 'south'?"
    assert caplog.text.count(said) == 1


def _failed(message: Message) -> Message:
    return Message(metadata=message.metadata, error=Error(2, "a record"))  # type: ignore[call-overload]


def test_the_first_of_two_answers_counts() -> None:
    grid, over = met("a")
    grid.change = lambda message: [
        Message(packed(Reply("a", "train", 1, values={"k": k})), reply_to=_asked(message)) for k in (1, 2)
    ]
    assert [reply.values["k"] for reply in over.send([request("a")])] == [1]


def _asked(reply: Message) -> Message:
    """A request to which another reply goes the same way as ``reply``."""
    metadata = reply.metadata
    asked = Message(packed(Reply("a", "train", 1)), metadata.src_node_id, "train.train", group_id="1")
    asked.metadata.__dict__["_message_id"] = metadata.reply_to_message_id
    return asked


def test_only_who_is_invited_takes_part() -> None:
    grid = Faulty(["a", "b", "c"])
    over = exchange(grid, ["c", "a"])
    assert over.names() == ["a", "c"]
    assert clients(over.send([request("a"), request("b")])) == ["a"]


def test_names_waits_for_who_is_invited_but_not_for_ever() -> None:
    grid = Faulty(["a", "b"])
    grid.online = {1}
    waited: list[float] = []
    ticks = iter(range(10**6))

    def pause(seconds: float) -> None:
        waited.append(seconds)
        grid.online = {1, 2} if len(waited) == 2 else grid.online

    patient = GridExchange(grid, 30, ["a", "b"], pause=pause, clock=lambda: float(next(ticks)))
    assert patient.names() == ["a", "b"]
    assert len(waited) == 2
    asked = [message.metadata.dst_node_id for messages in grid.seen for message in messages]
    assert asked == [1, 2]  # nobody is asked twice
    grid.online = {2}
    assert exchange(grid, ["a", "b"]).names() == ["b"]


def test_a_name_that_two_give_is_nobodys() -> None:
    over = exchange(Faulty(["a", "twin", "twin"]))
    assert over.names() == ["a"]
    assert list(over.send([request("twin")])) == []


def test_a_registered_name_is_not_asked_for() -> None:
    grid = Faulty(["a", "b", "c"])
    grid.registered = {1: "x", 2: "no public name"}
    assert exchange(grid).names() == ["c", "x"]
    assert [[message.metadata.dst_node_id for message in messages] for messages in grid.seen] == [[3]]


def test_a_reply_to_an_earlier_message_does_not_count() -> None:
    """Of a client that was slower than the timeout."""
    (grid, over), late = met("a", "b"), []

    def slow(message: Message) -> list[Message]:
        if message.metadata.src_node_id == 2 and message.metadata.message_type == "train.train":
            late.append(message)
            return late[:-1]
        return [message]

    grid.change = slow
    for number in (1, 2):
        assert clients(over.send([request("a", number=number), request("b", number=number)])) == ["a"]
    assert len(late) == 2


@pytest.mark.parametrize("name", ["../a", "a/b", "", "a b", "a" * 65, "."])
def test_a_name_that_is_no_public_name_is_nobodys(name: str) -> None:
    assert exchange(EmbeddedGrid(["a", name], echo)).names() == ["a"]


def test_a_client_that_comes_back_on_another_node_is_found() -> None:
    grid = Faulty(["a", "b", "b"])
    grid.online = {1, 2}
    over = exchange(grid, ["a", "b"])
    assert over.names() == ["a", "b"]
    grid.online = {1}
    assert clients(over.send([request("a"), request("b")])) == ["a"]
    grid.online = {1, 3}
    assert clients(over.send([request("a"), request("b")])) == ["a", "b"]
    assert [m.metadata.dst_node_id for m in grid.seen[-1]] == [1, 3]
