"""Secrets in shares, t of which give them back, and letters in which one client sends shares to another.

Shamir's scheme over GF(2^128) of pycryptodome; letters are ChaCha20-Poly1305.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from privlora.errors import PrivacyError

SEED: Final = 16
"""Bytes of a self-mask's seed, and of one share of it."""
LETTER: Final = 3 * SEED + 16
"""Bytes of a letter: a share of a seed, a share of a private key, a tag."""

_NONCE: Final = bytes(12)  # a letter's key is used for this letter alone


@dataclass(frozen=True, repr=False)
class Share:
    """What one client holds of another's secrets. seed: 16 bytes. key: 32 bytes."""

    seed: bytes
    key: bytes

    def to_bytes(self) -> bytes:
        """48 bytes, secret."""
        return self.seed + self.key

    @classmethod
    def from_bytes(cls, data: bytes) -> Share:
        """Inverse of ``to_bytes``."""
        return cls(data[:SEED], data[SEED:])


def new_seed() -> bytes:
    """A self-mask's seed (16 bytes) from the operating system."""
    return secrets.token_bytes(SEED)


def split(seed: bytes, key: bytes, threshold: int, holders: int) -> list[Share]:
    """Shares of a seed (16 bytes) and a private key (32 bytes) for holders 0, 1, …; ``threshold`` give both back."""
    whole = (seed, key[:SEED], key[SEED:])
    parts = (Shamir.split(threshold, holders, secret, False) for secret in whole)
    return [Share(one, low + high) for (_, one), (_, low), (_, high) in zip(*parts, strict=True)]


def join_seed(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The seed (16 bytes) from the shares (16 bytes) of at least ``threshold`` holders; nonsense if one is wrong."""
    chosen = sorted(shares)[:threshold]
    return Shamir.combine([(holder + 1, shares[holder]) for holder in chosen], False)


def join_key(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The private key (32 bytes) from the shares (32 bytes) of at least ``threshold`` holders."""
    low = join_seed({holder: share[:SEED] for holder, share in shares.items()}, threshold)
    return low + join_seed({holder: share[SEED:] for holder, share in shares.items()}, threshold)


def seal(share: Share, key: bytes) -> bytes:
    """A letter (64 bytes) that only the other owner of ``key`` can read. key: 32 bytes, for this letter alone."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, share.to_bytes(), None)


def unseal(letter: bytes, key: bytes, sender: str) -> Share:
    """The share in a letter. Raises PrivacyError if it was changed, or meant for another client or another sum."""
    try:
        return Share.from_bytes(ChaCha20Poly1305(key).decrypt(_NONCE, letter, None))
    except InvalidTag:
        what = f"the shares from client {sender} were changed, or are not from this sum"
        why, fix = "shares of another sum could undo masks", "stop, and find out who changed them"
        raise PrivacyError(what, why=why, fix=fix) from None
