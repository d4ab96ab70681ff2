"""The server in one secure sum: it asks, adds up what comes, and learns the sum over those who stayed, or nothing.

It holds one vector, whatever the number of clients, and a few hundred bytes a pair of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from privlora.errors import RunError
from privlora.federated.messages import ANSWERED, Phase, wrong
from privlora.federated.secure import masks, shares, wire
from privlora.federated.secure.keys import KEY, SIGNATURE, public_key
from privlora.federated.secure.shares import LETTER, SEED
from privlora.federated.secure.wire import Announcement, Message, Terms

_DOES: Final[Mapping[Phase, str]] = {
    "share": "shared keys",
    "mask": "sent a vector",
    "agree": "signed who stayed",
    "unmask": "helped to unmask",
}


class Collector:
    """Ask in the order of the four ``ask_`` methods, ``take`` the replies between them, then call ``total``.

    ``take`` raises RunError for a reply that does not count; the sum goes on, and its sender has dropped out. The
    other methods raise RunError if too few are left: the sum is void then, and nothing of any vector is known.
    """

    def __init__(self, terms: Terms, *, whole: bool = False) -> None:
        """whole: the sum is void unless every client of the roster sends its vector."""
        self.terms, self._whole = terms, whole
        self._begun = False
        self._phase: Phase | None = None
        self._asked: set[str] = set()
        self._replied: set[str] = set()
        self._shown: dict[str, Announcement] = {}
        self._letters: dict[str, dict[str, bytes]] = {}
        self._signatures: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}  # seeds that their owners gave
        self._seeds: dict[str, dict[int, bytes]] = {}
        self._keys: dict[str, dict[int, bytes]] = {}
        self._context = b""
        self._length = 0
        self._sum: masks.Vector = np.zeros(0, masks.ring_type(terms.bits))
        self.survivors: tuple[str, ...] = ()
        """Whose vectors the sum holds, sorted; known from ``ask_agreement`` on."""

    # --- requests ---

    def ask_shares(self) -> dict[str, Message]:
        """The request "share" for each client of the roster."""
        if self._begun:
            raise self._void("it was asked for twice")
        self._begun = True
        self._open("share", self.terms.names)
        return {name: self.terms.request() for name in self.terms.names}

    def ask_vectors(self, sent: bytes, length: int) -> dict[str, Message]:
        """The request "mask" for each client that shared. sent: 32 bytes, as in ``Participant.mask``."""
        self._close("share")
        shown = [self._shown[name] for name in sorted(self._shown)]
        self._context = wire.context_of(self.terms, shown, sent, length)
        self._length = length
        self._sum = np.zeros(length, self._sum.dtype)
        self._open("mask", self._shown)
        same: Message = {
            "length": length,
            "names": ",".join(one.name for one in shown),
            "keys": b"".join(one.key for one in shown),
            "seals": b"".join(one.seal for one in shown),
            "signatures": b"".join(one.signature for one in shown),
        }

        def letters(name: str) -> bytes:
            return b"".join(self._letters[one.name][name] for one in shown if one.name != name)

        return {name: {**same, "letters": letters(name)} for name in sorted(self._asked)}

    def ask_agreement(self) -> dict[str, Message]:
        """The request "agree" for each client whose vector came."""
        self._close("mask")
        self.survivors = tuple(sorted(self._replied))
        self._open("agree", self.survivors)
        return {name: {"names": ",".join(self.survivors)} for name in self.survivors}

    def ask_unmasking(self) -> dict[str, Message]:
        """The request "unmask" for each client that signed."""
        self._close("agree")
        signers = sorted(self._signatures)
        self._open("unmask", signers)
        request: Message = {
            "names": ",".join(self.survivors),
            "signers": ",".join(signers),
            "signatures": b"".join(self._signatures[name] for name in signers),
        }
        return {name: dict(request) for name in signers}

    def total(self) -> masks.Vector:
        """(length,) uint32 or uint64: the sum of the survivors' vectors, once.

        Raises RunError if too few clients helped, or if what they gave does not fit what was shown before.
        """
        self._close("unmask")
        added: list[bytes] = []
        taken = [masks.self_key(self._context, name, self._seed_of(name)) for name in self.survivors]
        left = {name: self._shown[name].key for name in self.survivors}
        for name in self._dropped:
            # What the dropped client would have added is what the survivors' pair masks with it lack.
            more, less = masks.pair_keys(self._context, self._key_of(name), name, left)
            added += more
            taken += less
        masks.shift(self._sum, added, taken)
        return self._sum

    # --- replies ---

    def take(self, phase: Phase, name: str, reply: Message) -> None:
        """Take in a client's reply, on arrival. Raises RunError for one that does not count, and changes nothing."""
        if phase != self._phase or name not in self._asked or name in self._replied:
            raise _wrong(name, f"answered {phase!r} twice, or without being asked")
        getattr(self, f"_take_{phase}")(name, wire.fields(phase, reply, ANSWERED))
        self._replied.add(name)

    def _take_share(self, name: str, reply: Message) -> None:
        others = [other for other in self.terms.names if other != name]
        letters = wire.pieces(reply, "letters", LETTER, len(others))
        key, seal = wire.blob(reply, "key", KEY), wire.blob(reply, "seal", KEY)
        shown = Announcement(name, key, seal, wire.blob(reply, "signature", SIGNATURE))
        if not shown.genuine(self.terms) or key in {one.key for one in self._shown.values()}:
            raise _wrong(name, "did not sign its own new key")
        self._shown[name] = shown
        self._letters[name] = dict(zip(others, letters, strict=True))

    def _take_mask(self, name: str, reply: Message) -> None:
        vector = masks.check_vector(reply["vector"], self.terms.bits, self._length)
        if wire.blob(reply, "context", KEY) != self._context:
            raise _wrong(name, "masked for other tensors or other clients than the others did")
        np.add(self._sum, vector, out=self._sum)

    def _take_agree(self, name: str, reply: Message) -> None:
        signature = wire.blob(reply, "signature", SIGNATURE)
        if not self.terms.member(name).signed(signature, wire.agreement_of(self._context, self.survivors)):
            raise _wrong(name, "signed another list of survivors")
        self._signatures[name] = signature

    def _take_unmask(self, name: str, reply: Message) -> None:
        dropped = self._dropped
        seeds = dict(zip(self.survivors, wire.pieces(reply, "seeds", SEED, len(self.survivors)), strict=True))
        keys = wire.pieces(reply, "keys", KEY, len(dropped))
        if not self._sealed(name, seeds[name]):
            raise _wrong(name, "gave another seed of its self-mask than it had sealed")
        self._own[name] = seeds.pop(name)
        holder = self.terms.names.index(name)
        for owner, seed in seeds.items():
            self._seeds.setdefault(owner, {})[holder] = seed
        for owner, key in zip(dropped, keys, strict=True):
            self._keys.setdefault(owner, {})[holder] = key

    # --- inside ---

    @property
    def _dropped(self) -> list[str]:
        """Clients whose keys are in the survivors' masks, but whose vectors did not come."""
        return [name for name in sorted(self._shown) if name not in self.survivors]

    def _open(self, phase: Phase, asked: Iterable[str]) -> None:
        self._phase, self._asked, self._replied = phase, set(asked), set()

    def _close(self, phase: Phase) -> None:
        """The replies of ``phase`` are in: go on, or never."""
        was, self._phase = self._phase, None
        if was != phase:
            raise self._void("it was asked for out of order, or is over")
        lost = self._whole and phase in ("share", "mask") and len(self._replied) < len(self.terms.names)
        need = len(self.terms.names) if lost else self.terms.threshold
        if len(self._replied) < need:
            said = f"{len(self._replied)} of {len(self.terms.names)} clients"
            raise self._void(f"{said} {_DOES[phase]}, {need} have to")

    def _seed_of(self, name: str) -> bytes:
        if name in self._own:
            return self._own[name]
        seed = shares.join_seed(self._seeds[name], self.terms.threshold)
        if not self._sealed(name, seed):
            raise self._void(f"the shares of the self-mask of client {name} do not fit")
        return seed

    def _sealed(self, name: str, seed: bytes) -> bool:
        return wire.seal_of(self.terms, name, seed) == self._shown[name].seal

    def _key_of(self, name: str) -> bytes:
        key = shares.join_key(self._keys[name], self.terms.threshold)
        if public_key(key) != self._shown[name].key:
            raise self._void(f"the shares of the key of client {name} do not fit")
        return key

    def _void(self, because: str) -> RunError:
        self._phase = None
        turn = self.terms.turn
        what = f"the secure sum of stage {turn.stage!r} in round {turn.round} is void: {because}"
        fix = "go on with the next round; no client answers twice in one"
        return RunError(what, why="a sum over fewer clients would say more of each", fix=fix)


def _wrong(name: str, what: str) -> RunError:
    return wrong(f"client {name} {what}")
