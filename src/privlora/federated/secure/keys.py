"""Who a client is, and keys that two parties agree on: Ed25519 signatures, X25519 agreement, HKDF-SHA256.

Everything here has a security level of 128 bits. Secrets come from the operating system.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from privlora.errors import PrivacyError, RunError
from privlora.federated.messages import NAME_PATTERN
from privlora.training.files import for_owner, temporary

KEY: Final = 32
"""Bytes of a public or private key of either kind, of a derived key and of a digest."""
SIGNATURE: Final = 64
"""Bytes of a signature."""

_PROTOCOL = b"privlora secure sum 1"


def digest(label: str, *parts: bytes | str | int) -> bytes:
    """SHA-256 (32 bytes) of labelled parts. Each is written with its type and length, so no two lists read alike."""
    hashed = hashlib.sha256(_PROTOCOL)
    for part in (label, *parts):
        kind, data = _bytes(part)
        hashed.update(kind + len(data).to_bytes(8, "little") + data)
    return hashed.digest()


def _bytes(part: bytes | str | int) -> tuple[bytes, bytes]:
    if isinstance(part, bytes):
        return b"b", part
    return (b"s", part.encode()) if isinstance(part, str) else (b"i", str(part).encode())


def derive(secret: bytes, purpose: bytes) -> bytes:
    """HKDF-SHA256 of ``secret``: a key of 32 bytes for one ``purpose``, which is public and a digest."""
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=purpose).derive(secret)


def exchange(private: bytes, public: bytes) -> bytes:
    """X25519: the secret (32 bytes) that two parties share.

    Raises PrivacyError for a public key of small order, with which everybody knows the secret.
    """
    try:
        theirs = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(theirs)
    except ValueError:
        why, fix = "masks made from it would hide nothing", "find its maker, and leave that client out"
        raise PrivacyError("a public key gives a secret that everybody knows", why=why, fix=fix) from None


def public_key(private: bytes) -> bytes:
    """The X25519 public key (32 bytes) of a private key (32 bytes)."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def new_key() -> bytes:
    """A fresh X25519 private key (32 bytes) from the operating system."""
    return secrets.token_bytes(KEY)


def check_name(name: str) -> str:
    """The name of a client as it may stand in messages: 1 to 64 of letters, digits, '.', '_', '-'. Raises RunError."""
    if not re.fullmatch(NAME_PATTERN, name):
        what = "a client's name is not 1 to 64 letters, digits, '.', '_' or '-'"
        raise RunError(what, why="names are signed and listed", fix="rename the client")
    return name


@dataclass(frozen=True)
class PublicIdentity:
    """What others know of a client. signing: Ed25519, 32 bytes. agreement: X25519, 32 bytes."""

    name: str
    signing: bytes
    agreement: bytes

    def __post_init__(self) -> None:
        check_name(self.name)
        if len(self.signing) != KEY or len(self.agreement) != KEY:
            what = f"the keys of client {self.name} do not have {KEY} bytes each"
            raise RunError(what, fix="look at what that client sent when it joined")

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits, to be compared over another channel than the server. The name is not part of it."""
        return digest("identity", self.signing, self.agreement).hex()

    def signed(self, signature: bytes, message: bytes) -> bool:
        """Whether this client signed ``message``."""
        try:
            Ed25519PublicKey.from_public_bytes(self.signing).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


class Identity:
    """A client's long-term keys: who it is in every sum. They never leave its folder."""

    def __init__(self, signing: bytes, agreement: bytes) -> None:
        """Both private keys have 32 bytes."""
        self._signing = Ed25519PrivateKey.from_private_bytes(signing)
        self._agreement = agreement
        self._seed = signing

    @classmethod
    def create(cls) -> Identity:
        """New keys from the operating system."""
        return cls(secrets.token_bytes(KEY), new_key())

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read what ``save`` wrote. Raises RunError if the file is damaged or others may read it."""
        try:
            data, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            raise RunError(f"the keys {path} cannot be read: {error.strerror}", fix="join again") from None
        if mode & 0o077:
            fix = "delete the file and join again under a new identity"
            raise RunError(f"others may read the keys {path}", why="they can pass for this client", fix=fix)
        if len(data) != 2 * KEY:
            raise RunError(f"the keys {path} are damaged", fix="delete the file and join again")
        return cls(data[:KEY], data[KEY:])

    def save(self, path: Path) -> None:
        """Write both keys (64 bytes) to a new file that its owner alone may read. Raises RunError if there is one.

        The file has its name once it is whole, so a process that is killed leaves no half of it.
        """
        half = temporary(path)
        try:
            try:
                with open(half, "wb", opener=for_owner) as file:
                    file.write(self._seed + self._agreement)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(half, path)  # unlike a rename it replaces nothing
            finally:
                half.unlink(missing_ok=True)
        except OSError as error:
            what = f"the keys {path} cannot be written: {error.strerror}"
            raise RunError(what, fix="use the client's own folder") from None

    def public(self, name: str) -> PublicIdentity:
        """What this client tells the server when it joins under ``name``."""
        signing = self._signing.public_key().public_bytes_raw()
        return PublicIdentity(name, signing, public_key(self._agreement))

    def sign(self, message: bytes) -> bytes:
        """A signature (64 bytes) of ``message``, which is a digest of this module."""
        return self._signing.sign(message)

    def agree(self, public: bytes) -> bytes:
        """The secret (32 bytes) shared with the owner of a public key. Raises PrivacyError for one of small order."""
        return exchange(self._agreement, public)
