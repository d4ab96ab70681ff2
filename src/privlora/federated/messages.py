"""What travels between server and clients, and nothing else: every field of every kind of message is listed here.

A message is a release, what follows from releases, a public number, a key, or a number that is masked. It holds no
loss, no norm, no count of records and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal, Protocol

import numpy as np
from torch import Tensor

from privlora.errors import PrivacyError, RunError

NAME_PATTERN: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Of clients' public names: servers name files after them, and they are signed and listed."""

Number = int | float | str | bytes

SUM: Final = "sum"
"""The one tensor of an answer that goes into a sum: (entries,) ring integers; float64 where nothing is hidden."""

TOGETHER: Final = 16
"""Clients of one process whose passes are taken together: more save nothing, and memory stays that of so many."""

REFUSED: Final = "refused"
"""All that a client says where it does not answer, but for the words below."""

NO_RECORDS: Final = "its records cannot be read"
NO_MODEL: Final = "its base model is not found"
BAD_CONFIG: Final = "its node config is wrong"
OTHER_NAME: Final = "its node config gives it another name"

ABOUT_ITS_PLACE: Final = frozenset({BAD_CONFIG, OTHER_NAME})
"""Refusals of any message: of a client that was set up wrongly."""

BEFORE_IT_BEGINS: Final = frozenset({NO_RECORDS, NO_MODEL})
"""Refusals to join, and of nothing else: why a round is refused may follow from what a record holds."""


@dataclass(frozen=True)
class Request:
    """From the server to one client. kind: one of KINDS. round: 1, 2, …; 0 before the first."""

    client: str
    kind: str
    round: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """From a client to the server. refused: in the place of an answer, in fixed words; else None."""

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


class InProcess:
    """Clients of one process: answers come from one call for some of them, ``TOGETHER`` at a time, when they are read.

    answer: from requests to the replies of those that did not drop out.
    """

    def __init__(
        self, clients: Iterable[str], answer: Callable[[Sequence[Request]], Iterable[Reply]]
    ) -> None:
        self._clients, self._answer = sorted(clients), answer

    def names(self) -> list[str]:
        return self._clients

    def send(self, requests: Sequence[Request]) -> Iterator[Reply]:
        waiting = (request for request in requests if request.client in self._clients)
        while portion := list(islice(waiting, TOGETHER)):
            yield from self._answer(portion)


def refusal(what: str, why: str | None = None, fix: str = "look at the server") -> PrivacyError:
    """A client's answer to a request that no honest server makes."""
    return PrivacyError(what, why=why, fix=fix)


def wrong(what: str) -> RunError:
    """The server's to an answer that no honest client gives."""
    why = "it is dropped, and the client counts as dropped out"
    return RunError(what, why=why, fix="look at that client")


KINDS: Final = ("join", "share", "train", "sketch", "agree", "unmask", "leave")
"""In the order in which a client meets them; "share", "agree" and "unmask" belong to secure sums."""


TRAINING: Final = ("train", "sketch")
"""The kinds of messages that are stages of a round, and hold tensors."""

Fields = Mapping[str, type]
Phase = Literal["share", "mask", "agree", "unmask"]

PHASES: Final[tuple[Phase, ...]] = ("share", "mask", "agree", "unmask")
"""In the order of a sum."""

_KEYS: Final[Fields] = {"signing": bytes, "agreement": bytes}
ASKED: Final[Mapping[str, Fields]] = {
    "share": {"run": str, "round": int, "stage": str, "threshold": int, "bits": int, "names": str, **_KEYS},
    "mask": {"length": int, "names": str, **dict.fromkeys(("keys", "seals", "signatures", "letters"), bytes)},
    "agree": {"names": str},
    "unmask": {"names": str, "signers": str, "signatures": bytes},
}
ANSWERED: Final[Mapping[str, Fields]] = {
    "share": {"key": bytes, "seal": bytes, "signature": bytes, "letters": bytes},
    "mask": {"vector": np.ndarray, "context": bytes},
    "agree": {"signature": bytes},
    "unmask": {"seeds": bytes, "keys": bytes},
}
"""The fields of a secure sum's messages, by phase; `secure.wire` says what they hold."""

_RUN: Final[Fields] = {"run": str}
_IN_SUMS: Final[dict[str, Fields]] = {name: {**_RUN, "stage": str, **of} for name, of in ASKED.items()}
_OF_SUMS: Final[dict[str, Fields]] = {
    phase: {name: kind for name, kind in listed.items() if kind is not np.ndarray}  # that is the tensor SUM
    for phase, listed in ANSWERED.items()
}
_ASKED_MASKED, _MASKED = _IN_SUMS.pop("mask"), _OF_SUMS.pop("mask")
_JOIN: Final = {**_RUN, "settings": str}

REQUESTS: Final[Mapping[bool, Mapping[str, Fields]]] = {
    False: {"join": _JOIN, "train": _RUN, "sketch": _RUN, "leave": _RUN},
    True: {"join": _JOIN, "train": _ASKED_MASKED, "sketch": _ASKED_MASKED, "leave": _RUN, **_IN_SUMS},
}
"""The values of every request by kind, and their types; True: where sums are secure."""

REPLIES: Final[Mapping[bool, Mapping[str, Fields]]] = {
    False: {"join": {}, "train": {}, "sketch": {}, "leave": {"ledger": str}},
    True: {"join": _KEYS, "train": _MASKED, "sketch": _MASKED, "leave": {"ledger": str}, **_OF_SUMS},
}
"""The values of every reply by kind, and their types. Only "train" and "sketch" hold tensors: those that the rule's
shapes name, or SUM alone where sums are secure or the rule is joint."""


def refuse_unlisted(message: Request | Reply, secure: bool, tensors: Iterable[str] = ()) -> None:
    """Raise RunError unless a message holds exactly what is listed for its kind, and a refusal nothing at all.

    tensors: names; those of any group are those of each.
    """
    table = REQUESTS if isinstance(message, Request) else REPLIES
    listed = table[secure].get(message.kind)
    if type(message.round) is not int or message.round < 0:
        raise _unlisted(message, "a round that is no number")
    if listed is None:
        raise _unlisted(message, "a kind of message that is not listed")
    if isinstance(message, Reply) and message.refused is not None:
        if not _is_refusal(message.kind, message.refused) or message.tensors or message.values:
            raise _unlisted(message, "more than a refusal")
        return
    if {name: type(value) for name, value in message.values.items()} != dict(listed):
        raise _unlisted(message, "other values than are listed")
    due = set(_by_group(tensors).values())
    if set(_by_group(message.tensors).values()) != due:
        raise _unlisted(message, "other tensors than are listed")


def _is_refusal(kind: str, words: str) -> bool:
    return words == REFUSED or words in ABOUT_ITS_PLACE or (kind == "join" and words in BEFORE_IT_BEGINS)


def _by_group(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """What each group has, under the group's number."""
    found: dict[str, set[str]] = {}
    for name in names:
        group, point, own = name.partition(".")
        grouped = point and group.isdecimal()
        found.setdefault(group if grouped else "", set()).add(own if grouped else name)
    return {group: frozenset(own) for group, own in found.items()}


def _unlisted(message: Request | Reply, what: str) -> RunError:
    kind = message.kind if message.kind in KINDS else "an unknown kind"
    why, fix = "what is not listed may be private", "use one version of privlora everywhere"
    return RunError(f"{what}, in {kind} of round {message.round}", why=why, fix=fix)


def size(message: Request | Reply) -> int:
    """Bytes of what a message holds, without the engine's own wrapping."""
    values = (len(v) if isinstance(v, str | bytes) else 8 for v in message.values.values())
    return sum(t.nbytes for t in message.tensors.values()) + sum(values)
