"""What travels between server and clients, and nothing else: every field of every kind of message is listed here.

A message is a release, what follows from releases, a public number, a key, or a number that is masked. It holds no
loss, no norm, no count of records and no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from torch import Tensor

from privlora.errors import RunError

Number = int | float | str | bytes


@dataclass(frozen=True)
class Fields:
    """What messages of one kind hold: names of tensors, where "*" stands for a group's number, and of plain values."""

    tensors: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Request:
    """From the server to one client. kind: a name in REQUESTS. round: 1, 2, …; 0 before the first."""

    client: str
    kind: str
    round: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """From a client to the server. refused: why there is no answer; in words that hold nothing private."""

    client: str
    kind: str
    round: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Number] = field(default_factory=dict)
    refused: str | None = None


class Exchange(Protocol):
    """Whatever carries messages."""

    def names(self) -> list[str]:
        """Of the clients that can be reached, sorted."""

    def send(self, requests: Sequence[Request]) -> Iterable[Reply]:
        """The answers, in any order, as they come: read each once, and all of them. Who dropped out has none."""


def wrong(what: str) -> RunError:
    return RunError(
        what, why="it is dropped, and the client counts as dropped out", fix="look at that client"
    )


KINDS: Final = ("join", "share", "train", "sketch", "agree", "unmask", "leave")
"""In the order in which a client meets them; "share", "agree" and "unmask" belong to secure sums."""


def size(message: Request | Reply) -> int:
    """Bytes of what a message holds, without the engine's own wrapping."""
    values = (len(v) if isinstance(v, str | bytes) else 8 for v in message.values.values())
    return sum(t.nbytes for t in message.tensors.values()) + sum(values)
