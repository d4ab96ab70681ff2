"""Memory of a round does not grow with its clients: what all are sent is written once, and answers are read as they
come."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from privlora.federated.flower.records import Arrays, packed
from privlora.federated.messages import InProcess, Reply, Request

ENTRIES = 1000


class Counted:
    """Clients that answer with a tensor each, and count how many of those are alive at once."""

    def __init__(self) -> None:
        self.alive = self.most = self.together = 0

    def __call__(self, requests: Sequence[Request]) -> list[Reply]:
        self.together = max(self.together, len(requests))
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Reply:
        reply = Reply(request.client, request.kind, request.round, tensors={"x": torch.zeros(ENTRIES)})
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(reply, self._gone)
        return reply

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("count", [50, 1000])
def test_answers_of_a_round_are_alive_some_at_a_time(count: int) -> None:
    names = [f"c{number:04d}" for number in range(count)]
    clients = Counted()
    exchange = InProcess(names, clients)
    sent = {"w": torch.ones(ENTRIES)}
    answered = set()
    for reply in exchange.send([Request(name, "train", 1, tensors=sent) for name in names]):
        answered.add(reply.client)
        assert reply.tensors["x"].numel() == ENTRIES
    assert answered == set(names)
    assert clients.together == 16
    assert clients.most <= 2 * 16, "those that are answered, and those that are read"


def test_nothing_is_answered_before_it_is_read() -> None:
    """A server that stops reading asks no further client to train."""
    names = [f"c{number:02d}" for number in range(40)]
    asked: list[str] = []

    def answer(requests: Sequence[Request]) -> list[Reply]:
        asked.extend(request.client for request in requests)
        return [Reply(request.client, request.kind, request.round) for request in requests]

    exchange = InProcess(names, answer)
    replies = iter(exchange.send([Request(name, "train", 1) for name in names]))
    assert asked == []
    next(replies)
    assert len(asked) == 16
    assert len(list(replies)) == 39


def test_what_all_are_sent_is_written_once() -> None:
    arrays: Arrays = {}
    sent = {"w": torch.ones(ENTRIES), "v": torch.zeros(3)}
    first, second = (packed(Request(name, "train", 1, tensors=sent), arrays) for name in ("a", "b"))
    assert _data(first) is _data(second)
    assert len(arrays) == 2
    alone = packed(Request("c", "train", 1, tensors={"w": torch.ones(ENTRIES)}), arrays)
    assert _data(alone) is not _data(first)
    assert _data(alone) == _data(first)


def _data(record: Any) -> bytes:
    return record["tensors"]["w"].data  # type: ignore[no-any-return]
