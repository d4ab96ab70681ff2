"""What a secure sum sends: plain values under listed names. n clients are on the roster, k of them shared.

| kind   | request, bytes in all                                     | reply, bytes                                |
|--------|-----------------------------------------------------------|---------------------------------------------|
| share  | run, round, stage, threshold, bits; names, 64 n of keys   | key 32, seal 32, signature 64, letters 64(n-1) |
| mask   | length; names, 128 k of keys, letters 64(k-1)             | vector, context 32                          |
| agree  | names                                                     | signature 64                                |
| unmask | names, 64 per signer                                      | 16 per survivor, 32 per client that dropped |

Lists of names are sorted and joined by commas; lists of keys are in the order of the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from privlora.errors import RunError
from privlora.federated.messages import ASKED, Fields, Phase, refusal
from privlora.federated.secure.keys import KEY, PublicIdentity, check_name, digest
from privlora.federated.secure.masks import ring_type

Message = dict[str, Any]
"""Values are bytes, int, str or, of a vector, np.ndarray: `fields` sees to it."""
FEWEST: Final = 2
"""Clients on a roster: the sum over one is its vector."""


class Turn(NamedTuple):
    """Which sum of a federation: run, round (1, 2, …) and stage, one sum for each."""

    run: str
    round: int
    stage: str


def least_threshold(clients: int, colluding: int = 0) -> int:
    """The smallest threshold that protects the other clients when ``colluding`` ones work for the server.

    It is the smallest t > (n + c) / 2. The honest clients, n - c, sign one list each, and reveal of each client one
    secret or the other. To gather t signatures of two lists, or t shares of both secrets, a server needs 2 (t - c) of
    them, which is more than there are.
    """
    return (clients + colluding) // 2 + 1


@dataclass(frozen=True)
class Terms:
    """What all clients of a sum agree on, and nobody may change on the way.

    threshold: of the clients that must stay to the end, above half of the roster. bits: 32 or 64, of the ring.
    roster: sorted by name, no key twice. Raises PrivacyError for terms under which the sum would not protect.
    """

    turn: Turn
    threshold: int
    bits: int
    roster: tuple[PublicIdentity, ...]

    def __post_init__(self) -> None:
        ring_type(self.bits)
        size, names = len(self.roster), self.names
        if size < FEWEST:
            raise refusal(f"a sum over {size} clients", "it would be one client's vector", "ask more clients")
        if not size / 2 < self.threshold <= size:
            why = "at half or below, clients could be led to reveal two different sums"
            fix = f"set it between {size // 2 + 1} and {size}"
            raise refusal(f"a threshold of {self.threshold} for {size} clients", why, fix)
        keys = [key for member in self.roster for key in (member.signing, member.agreement)]
        if names != tuple(sorted(set(names))) or len(set(keys)) < len(keys):
            raise refusal("a roster with a name or a key twice", "one party would be counted as several")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the clients on the roster, sorted."""
        return tuple(member.name for member in self.roster)

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it."""
        keys = [key for member in self.roster for key in (member.signing, member.agreement)]
        return digest("terms", *self.turn, self.threshold, self.bits, ",".join(self.names), *keys)

    def member(self, name: str) -> PublicIdentity:
        """Who has this name on the roster."""
        return self.roster[self.names.index(name)]

    def request(self) -> Message:
        """The request "share", which holds all of it."""
        return {
            **self.turn._asdict(),
            "threshold": self.threshold,
            "bits": self.bits,
            "names": ",".join(self.names),
            "signing": b"".join(member.signing for member in self.roster),
            "agreement": b"".join(member.agreement for member in self.roster),
        }

    @classmethod
    def of(cls, request: Message) -> Terms:
        """Inverse of ``request``. Raises PrivacyError as the constructor does, RunError for a damaged message."""
        read = fields("share", request, ASKED)
        names = name_list(read["names"])
        keys = (pieces(read, kind, KEY, len(names)) for kind in ("signing", "agreement"))
        members = zip(names, *keys, strict=True)
        turn = Turn(read["run"], read["round"], read["stage"])
        roster = tuple(PublicIdentity(*member) for member in members)
        return cls(turn, read["threshold"], read["bits"], roster)


@dataclass(frozen=True)
class Announcement:
    """What a client shows to all in "share". key: X25519 (32 bytes), of this sum. seal: ``seal_of`` its seed."""

    name: str
    key: bytes
    seal: bytes
    signature: bytes

    def genuine(self, terms: Terms) -> bool:
        """Whether the client of that name signed it for this sum."""
        return terms.member(self.name).signed(self.signature, to_sign(terms, self.name, self.key, self.seal))


def to_sign(terms: Terms, name: str, key: bytes, seal: bytes) -> bytes:
    """What a client signs in "share"."""
    return digest("announcement", terms.digest, name, key, seal)


def seal_of(terms: Terms, name: str, seed: bytes) -> bytes:
    """What a client shows of its self-mask's seed, so that wrong shares of it are seen."""
    return digest("seed", terms.digest, name, seed)


def context_of(terms: Terms, shown: Sequence[Announcement], sent: bytes, length: int) -> bytes:
    """32 bytes on which every mask depends: the terms, who shared which key, what the server sent, the length."""
    keys = [part for one in shown for part in (one.name, one.key, one.seal)]
    return digest("context", terms.digest, sent, length, *keys)


def agreement_of(context: bytes, survivors: Sequence[str]) -> bytes:
    """What a client signs in "agree"."""
    return digest("survivors", context, ",".join(survivors))


# --- reading messages ---


def fields(phase: Phase, message: Message, table: Mapping[str, Fields]) -> Message:
    """``message`` if it has exactly the fields of its kind, each of its type. Raises RunError."""
    wanted = table[phase]
    if set(message) != set(wanted) or any(type(message[name]) is not kind for name, kind in wanted.items()):
        raise damaged(phase)
    return message


def damaged(what: str) -> RunError:
    """Of a message that cannot be read."""
    what = f"a message of a secure sum ({what}) does not have the fields and sizes that it should"
    why, fix = "it is dropped, and its sender counts as dropped out", "use one version of privlora everywhere"
    return RunError(what, why=why, fix=fix)


def blob(message: Message, name: str, size: int) -> bytes:
    """A field that ``fields`` found to be bytes, of ``size``. Raises RunError for another size."""
    value: bytes = message[name]
    if len(value) != size:
        raise damaged(name)
    return value


def pieces(message: Message, name: str, size: int, count: int) -> list[bytes]:
    """``count`` pieces of ``size`` bytes each. Raises RunError for another length."""
    joined = blob(message, name, size * count)
    return [joined[low : low + size] for low in range(0, len(joined), size)]


def name_list(joined: str) -> tuple[str, ...]:
    """Names of clients, sorted, none twice. Raises RunError."""
    names = tuple(check_name(name) for name in joined.split(","))
    if names != tuple(sorted(set(names))):
        raise damaged("names")
    return names
