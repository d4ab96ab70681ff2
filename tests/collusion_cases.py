"""A server of a secure sum that works with some of its clients, keeps what each answer gives, and opens what it can."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from privlora.federated.secure import masks, shares, wire
from privlora.federated.secure.keys import Identity
from privlora.federated.secure.participant import Participant


class Collusion:
    """After all have shared and masked.

    people: the honest clients, which answer ``agree`` and ``unmask`` as `Participant` does. own: the others, with the
    shares that they hold. keys: private ones of this sum, of ``own``. public: of all. vectors: masked ones.
    """

    def __init__(
        self,
        people: Mapping[str, Any],
        own: Mapping[str, Participant],
        identities: Mapping[str, Identity],
        keys: Mapping[str, bytes],
        public: Mapping[str, bytes],
        vectors: Mapping[str, np.ndarray],
        threshold: int,
    ) -> None:
        self.people, self.own, self.identities = dict(people), list(own), identities
        self.keys, self.public, self.threshold = dict(keys), public, threshold
        self.honest, self.names = sorted(people), sorted({*people, *own})
        self.vectors = {name: vectors[name].copy() for name in people}
        self.seeds: dict[str, bytes] = {}
        self.seed_shares: dict[str, dict[int, bytes]] = {name: {} for name in people}
        self.key_shares: dict[str, dict[int, bytes]] = {name: {} for name in people}
        for owner, holder in itertools.product(people, own):
            held = own[holder]._held[owner]
            self.seed_shares[owner][self.names.index(holder)] = held.seed
            self.key_shares[owner][self.names.index(holder)] = held.key

    def tell(self, group: Sequence[str], listed: Sequence[str]) -> None:
        """``group`` signs that ``listed`` stayed, with all colluding clients, and reveals what it then does."""
        listed = sorted(listed)
        names = {"names": ",".join(listed)}
        signed = {name: self.people[name].agree(names)["signature"] for name in group}
        agreed = wire.agreement_of(self.people[group[0]]._context, listed)
        signed |= {name: self.identities[name].sign(agreed) for name in self.own if name in listed}
        signatures = b"".join(signature for _, signature in sorted(signed.items()))
        for name in group:
            ask = {**names, "signers": ",".join(sorted(signed)), "signatures": signatures}
            reply, place = self.people[name].unmask(ask), self.names.index(name)
            dropped = [other for other in self.people[name]._sharers if other not in listed]
            for owner, seed in zip(listed, wire.pieces(reply, "seeds", 16, len(listed)), strict=True):
                if owner == name:
                    self.seeds[owner] = seed
                elif owner in self.honest:
                    self.seed_shares[owner][place] = seed
            for owner, key in zip(dropped, wire.pieces(reply, "keys", 32, len(dropped)), strict=True):
                self.key_shares[owner][place] = key

    def opened(self, chosen: Sequence[str]) -> np.ndarray | None:
        """The sum of the vectors of ``chosen``; None where a mask stays on it."""
        for owner in self.honest:
            if len(self.seed_shares[owner]) >= self.threshold:
                self.seeds.setdefault(owner, shares.join_seed(self.seed_shares[owner], self.threshold))
            if len(self.key_shares[owner]) >= self.threshold:
                self.keys[owner] = shares.join_key(self.key_shares[owner], self.threshold)
        total = sum((self.vectors[name] for name in chosen), np.zeros_like(self.vectors[chosen[0]]))
        for name in chosen:
            if name not in self.seeds:
                return None
            context = self.people[name]._context
            masks.shift(total, taken=[masks.self_key(context, name, self.seeds[name])])
            for other in set(self.people[name]._sharers) - set(chosen):
                if other in self.keys:  # made from the other one's side, which takes what this one adds
                    public = {name: self.public[name]}
                    added, taken = masks.pair_keys(context, self.keys[other], other, public)
                elif name in self.keys:
                    public = {other: self.public[other]}
                    taken, added = masks.pair_keys(context, self.keys[name], name, public)
                else:
                    return None
                masks.shift(total, added, taken)
        return np.asarray(total)
