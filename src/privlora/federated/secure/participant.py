"""A client in one secure sum: four answers, each given once, after which its secrets of this sum are gone.

It reveals, of each other client, either what undoes its self-mask or what undoes its pair masks, never both, and only
for one list of survivors that ``threshold`` clients signed. A request that breaks this ends the sum for this client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from privlora.errors import PrivloraError, RunError
from privlora.federated.messages import ASKED, refusal
from privlora.federated.secure import masks, shares, wire
from privlora.federated.secure.keys import (
    KEY,
    SIGNATURE,
    Identity,
    derive,
    digest,
    exchange,
    new_key,
    public_key,
)
from privlora.federated.secure.shares import LETTER, Share
from privlora.federated.secure.wire import FEWEST, Announcement, Message, Terms, Turn, least_threshold

Stand = Literal["shared", "masked", "agreed", "over"]
_DIFFERENCE = "the difference of both sums belongs to those who left, so give up the round"


class Participant:
    """Between answers it is kept as ``to_bytes``, which is secret: in the client's folder, with mode 0600.

    Write the new bytes before an answer leaves, so that a process that starts again cannot answer twice.
    """

    def __init__(self, identity: Identity, name: str, terms: Terms, *, whole: bool) -> None:
        """Made by ``begin`` and ``from_bytes``. Without secrets of a sum it answers nothing."""
        self._identity, self.name, self.terms, self._whole = identity, name, terms, whole
        self._stand: Stand = "over"
        self._key = self._seed = self._context = b""
        self._sharers: tuple[str, ...] = ()
        self._held: dict[str, Share] = {}
        self.survivors: tuple[str, ...] = ()
        """Whose vectors the sum holds, once this client has signed for it."""

    @classmethod
    def begin(
        cls,
        identity: Identity,
        name: str,
        request: Message,
        *,
        turn: Turn,
        pins: Mapping[str, str] | None = None,
        colluding: int = 0,
        earlier: Sequence[str] | None = None,
    ) -> tuple[Participant, Message]:
        """Answer "share": n names and 64 n bytes of keys come, 128 + 64 (n - 1) bytes go.

        turn: the sum that this client knows to be next, and has not begun before; the caller notes it before the answer
        leaves. pins: the fingerprint of each client that may be on the roster. colluding: clients that may work for the
        server; the threshold has to protect against it and them. earlier: the survivors of this round's earlier sum;
        they are the roster, and none of them may drop out, because two sums over different clients differ by those who
        left. Raises PrivacyError if anything of it does not hold.
        """
        terms = Terms.of(request)
        if terms.turn != turn:
            raise refusal(
                "a sum for another run, round or stage than is next", "earlier sums could be undone"
            )
        if identity.public(name) not in terms.roster:
            raise refusal("a roster without this client under its own keys", "its masks would not cancel")
        _check_company(terms, pins, colluding, earlier)
        made = cls(identity, name, terms, whole=earlier is not None)
        return made, made._share()

    @property
    def over(self) -> bool:
        """Whether this client answers no more; its secrets are gone then, and what was kept of it can be deleted."""
        return self._stand == "over"

    # --- the four answers ---

    def _share(self) -> Message:
        key, seed, names = new_key(), shares.new_seed(), self.terms.names
        split = dict(zip(names, shares.split(seed, key, self.terms.threshold, len(names)), strict=True))
        public, seal = public_key(key), wire.seal_of(self.terms, self.name, seed)
        self._stand, self._key, self._seed = "shared", key, seed
        return {
            "key": public,
            "seal": seal,
            "signature": self._identity.sign(wire.to_sign(self.terms, self.name, public, seal)),
            "letters": b"".join(
                shares.seal(split[other], self._letter_to(other)) for other in names if other != self.name
            ),
        }

    def mask(self, request: Message, vector: masks.Vector, sent: bytes) -> Message:
        """Answer "mask": 128 k + 64 (k - 1) bytes come, k names, and 32 bytes and the vector go.

        vector: (length,) uint32 or uint64; masked in place, and for no other sum. sent: ``agreed_digest`` of all that
        this client got from the server for this sum: clients that got others do not cancel its masks.
        Raises PrivacyError for keys and shares that are not of this sum; RunError for a vector of another length.
        """
        with self._answering("shared"):
            read = wire.fields("mask", request, ASKED)
            length = read["length"]
            masks.check_vector(vector, self.terms.bits, length)
            shown = self._announcements(read)
            letters = self._letters(read, shown)
            self._context = wire.context_of(self.terms, shown, sent, length)
            others = {one.name: one.key for one in shown if one.name != self.name}
            added, taken = masks.pair_keys(self._context, self._key, self.name, others)
            own = masks.self_key(self._context, self.name, self._seed)
            self._held |= letters
            self._sharers = tuple(one.name for one in shown)
            self._key, self._stand = b"", "masked"
            masks.shift(vector, [own, *added], taken)
        return {"vector": vector, "context": self._context}

    def agree(self, request: Message) -> Message:
        """Answer "agree": names come, a signature of 64 bytes goes.

        Raises PrivacyError for a list under which the sum would reveal more.
        """
        with self._answering("masked"):
            survivors = wire.name_list(wire.fields("agree", request, ASKED)["names"])
            self._check_survivors(survivors)
            self.survivors, self._stand = survivors, "agreed"
        return {"signature": self._identity.sign(wire.agreement_of(self._context, survivors))}

    def unmask(self, request: Message) -> Message:
        """Answer "unmask": names and signatures come, 16 bytes per survivor and 32 per client that dropped go.

        Of its own self-mask a survivor gives the seed itself: shares of it are for those who cannot answer any more.
        Raises PrivacyError for another list than this client signed, or one that fewer than ``threshold`` signed.
        """
        with self._answering("agreed"):
            read = wire.fields("unmask", request, ASKED)
            if read["names"] != ",".join(self.survivors):
                raise refusal("survivors that this client did not sign", "two lists reveal two sums")
            self._check_signatures(read)
            dropped = [name for name in self._sharers if name not in self.survivors]
            reply: Message = {
                "seeds": b"".join(
                    self._seed if name == self.name else self._held[name].seed for name in self.survivors
                ),
                "keys": b"".join(self._held[name].key for name in dropped),
            }
            self.end()
        return reply

    def end(self) -> None:
        """Forget the secrets of this sum, finished or not."""
        self._stand, self._key, self._seed, self._held = "over", b"", b"", {}

    # --- checks ---

    @contextmanager
    def _answering(self, stand: Stand) -> Iterator[None]:
        """Requests come in order and once; one that is refused ends the sum for this client."""
        if self._stand != stand:
            raise refusal("a request of a sum came twice or out of order", "two answers would undo a mask")
        try:
            yield
        except PrivloraError:
            self.end()
            raise

    def _announcements(self, read: Message) -> list[Announcement]:
        names = wire.name_list(read["names"])
        if not set(names) <= set(self.terms.names) or self.name not in names:
            raise refusal("keys of another roster than this client shared with", "its masks would not cancel")
        if len(names) < self.terms.threshold or (self._whole and names != self.terms.names):
            raise refusal(f"a sum with {len(names)} clients left", "fewer than agreed would hide each")
        keys, seals = (wire.pieces(read, field, KEY, len(names)) for field in ("keys", "seals"))
        signatures = wire.pieces(read, "signatures", SIGNATURE, len(names))
        shown = [Announcement(*one) for one in zip(names, keys, seals, signatures, strict=True)]
        for one in shown:
            if not one.genuine(self.terms):
                raise refusal(f"a key that client {one.name} did not sign", "its maker could undo masks")
        if len(set(keys)) < len(keys):
            raise refusal("two clients with one key", "one party would be counted as several")
        if keys[names.index(self.name)] != public_key(self._key):
            raise refusal("this client's own key was replaced", "its masks would not cancel")
        return shown

    def _letters(self, read: Message, shown: Sequence[Announcement]) -> dict[str, Share]:
        senders = [one for one in shown if one.name != self.name]
        letters = wire.pieces(read, "letters", LETTER, len(senders))
        return {
            one.name: shares.unseal(letter, self._letter_from(one), one.name)
            for one, letter in zip(senders, letters, strict=True)
        }

    def _check_survivors(self, survivors: Sequence[str]) -> None:
        if not set(survivors) <= set(self._sharers) or self.name not in survivors:
            raise refusal("survivors that are not of this sum", "it would hold other vectors than it should")
        if len(survivors) < self.terms.threshold:
            raise refusal(f"a sum over {len(survivors)} clients", "fewer clients than agreed would hide each")
        if self._whole and tuple(survivors) != self.terms.names:
            raise refusal("a later sum of the round without all clients of the earlier one", _DIFFERENCE)

    def _check_signatures(self, read: Message) -> None:
        signers = wire.name_list(read["signers"])
        agreed = wire.agreement_of(self._context, self.survivors)
        signatures = wire.pieces(read, "signatures", SIGNATURE, len(signers))
        right = set(signers) <= set(self.survivors) and all(
            self.terms.member(signer).signed(signature, agreed)
            for signer, signature in zip(signers, signatures, strict=True)
        )
        if not right or len(signers) < self.terms.threshold:
            what = f"fewer than {self.terms.threshold} clients signed the list of survivors"
            raise refusal(what, "other clients may have been shown another list")

    # --- keys of letters ---

    def _letter_to(self, other: str) -> bytes:
        to = self.terms.member(other).agreement
        secret = exchange(self._key, to) + self._identity.agree(to)
        return derive(secret, digest("letter", self.terms.digest, self.name, other, public_key(self._key)))

    def _letter_from(self, sender: Announcement) -> bytes:
        # The server may come to know the sender's key of this sum; it never knows the second secret.
        long_term = self.terms.member(sender.name).agreement
        secret = self._identity.agree(sender.key) + self._identity.agree(long_term)
        return derive(secret, digest("letter", self.terms.digest, sender.name, self.name, sender.key))

    # --- between processes ---

    def to_bytes(self) -> bytes:
        """All that the next answer depends on except the identity; about 300 bytes a client of the roster. Secret."""
        state = {
            "name": self.name,
            "terms": {n: v.hex() if isinstance(v, bytes) else v for n, v in self.terms.request().items()},
            "whole": self._whole,
            "stand": self._stand,
            "key": self._key.hex(),
            "seed": self._seed.hex(),
            "context": self._context.hex(),
            "sharers": self._sharers,
            "held": {name: share.to_bytes().hex() for name, share in self._held.items()},
            "survivors": self.survivors,
        }
        return json.dumps(state).encode()

    @classmethod
    def from_bytes(cls, data: bytes, identity: Identity) -> Participant:
        """Inverse of ``to_bytes``. Raises RunError for bytes that it did not write."""
        try:
            state = json.loads(data)
            kinds = ASKED["share"]
            read = {n: bytes.fromhex(v) if kinds[n] is bytes else v for n, v in state["terms"].items()}
            terms = Terms.of(read)
            made = cls(identity, state["name"], terms, whole=state["whole"])
            made._stand = state["stand"]
            secrets = (bytes.fromhex(state[part]) for part in ("key", "seed", "context"))
            made._key, made._seed, made._context = secrets
            made._sharers, made.survivors = tuple(state["sharers"]), tuple(state["survivors"])
            held = {name: bytes.fromhex(share) for name, share in state["held"].items()}
            made._held = {name: Share.from_bytes(share) for name, share in held.items()}
        except (ValueError, KeyError, TypeError, AttributeError, PrivloraError):
            fix = "delete it; the client counts as dropped out of this sum and joins the next"
            raise RunError("what a client kept of a secure sum is damaged", fix=fix) from None
        return made


def _check_company(
    terms: Terms, pins: Mapping[str, str] | None, colluding: int, earlier: Sequence[str] | None
) -> None:
    least = max(least_threshold(len(terms.roster), colluding), colluding + FEWEST)
    if terms.threshold < least:
        what = f"a threshold of {terms.threshold} of {len(terms.roster)} clients, {colluding} of which may collude"
        fix = f"set it to {least} at least, or ask more clients"
        raise refusal(what, "the server and they could unmask one client's vector", fix)
    if earlier is not None and terms.names != tuple(earlier):
        raise refusal("a later sum of the round over other clients than the earlier one", _DIFFERENCE)
    for member in terms.roster:
        if pins is not None and pins.get(member.name) != member.fingerprint:
            what = f"client {member.name} does not have the fingerprint that is pinned"
            why, fix = "the server may have sent keys of its own", "compare fingerprints with its owner"
            raise refusal(what, why, fix)
