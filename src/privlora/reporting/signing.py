"""A signature of an annex, and so of the ledger's head and of every file that it names: Ed25519, by a user's key.

The private key is read, used and forgotten; the annex gets the public key and the signature.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from privlora.disk import WINDOWS
from privlora.errors import ConfigError, PrivacyError

ALGORITHM: Final = "Ed25519"
_DOMAIN: Final = b"privlora annex 1\n"
_LONGEST: Final = 64 * 1024  # bytes of a key's file
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_INSTALL: Final = "pip install 'cryptography>=50.0'"


def signed(annex: Mapping[str, Any], key: Any) -> dict[str, Any]:
    """The annex with a signature by ``key`` (of `read_private_key`)."""
    public = key.public_key().public_bytes_raw().hex()
    value = key.sign(_message(annex)).hex()
    return {**annex, "signature": {"algorithm": ALGORITHM, "public_key": public, "value": value}}


def is_signed_rightly(annex: Mapping[str, Any]) -> bool:
    """Whether the signature is one of this annex by the key that it names. Raises ConfigError without cryptography."""
    exceptions, ed25519, _ = _library("the signature of an annex")
    found = annex.get("signature")
    if not isinstance(found, Mapping) or found.keys() != {"algorithm", "public_key", "value"}:
        return False
    shaped = (
        re.fullmatch(r"[0-9a-f]{64}", str(found["public_key"])),
        re.fullmatch(r"[0-9a-f]{128}", str(found["value"])),
    )
    if found["algorithm"] != ALGORITHM or not all(shaped):
        return False
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(found["public_key"]))
        key.verify(bytes.fromhex(found["value"]), _message(annex))
    except (exceptions.InvalidSignature, ValueError):
        return False
    return True


def fingerprint_of(public_key: str) -> str:
    """SHA-256 of a public key (32 bytes in hexadecimal), for reading out: 16 digits in groups of four."""
    digest = hashlib.sha256(bytes.fromhex(public_key)).hexdigest()
    return " ".join(digest[place : place + 4] for place in range(0, 16, 4))


def read_private_key(path: Path, passphrase: Callable[[], str]) -> Any:
    """The Ed25519 key in a PEM file. passphrase: asked for that of a key which has one.

    Raises ConfigError for what is no such key, PrivacyError for one without a passphrase that others may read.
    """
    _, ed25519, serialization = _library("--sign")
    content, mode = _content(path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError:  # it has a passphrase
        key = _unlocked(serialization, path, content, passphrase())
    except Exception:  # noqa: BLE001 - of the library's own, for algorithms that it does not have
        raise _no_key(path, "private") from None
    else:
        if mode & _OTHERS and not WINDOWS:
            raise PrivacyError(
                f"the key in {str(path)!r} has no passphrase, and others may read it (mode {stat.S_IMODE(mode):o})",
                why="whoever reads it signs in your name",
                fix=f"chmod 600 {path}; and make a new key, if others use this machine",
            )
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _no_key(path, "private")
    return key


def read_public_key(path: Path) -> str:
    """The 32 bytes of an Ed25519 public key, in hexadecimal, from a PEM file or one that holds these digits. Raises
    ConfigError; PrivacyError for a private key, which is not to be passed around."""
    _, ed25519, serialization = _library("--public-key")
    content, _ = _content(path)
    if b"PRIVATE KEY" in content:
        raise PrivacyError(
            f"{str(path)!r} holds a private key",
            why="whoever verifies needs the public one alone",
            fix=f"openssl pkey -in {path} -pubout -out public.pem",
        )
    digits = content.strip().lower()
    if re.fullmatch(rb"[0-9a-f]{64}", digits):
        return digits.decode()
    try:
        key = serialization.load_pem_public_key(content)
    except Exception:  # noqa: BLE001 - of the library's own, for algorithms that it does not have
        raise _no_key(path, "public") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _no_key(path, "public")
    return key.public_bytes_raw().hex()


def _message(annex: Mapping[str, Any]) -> bytes:
    """What is signed: the ledger's head, and the annex's own hash, which covers all that it says."""
    return _DOMAIN + f"{annex['ledger']['head']}\n{annex['sha256']}\n".encode()


def _unlocked(serialization: Any, path: Path, content: bytes, passphrase: str) -> Any:
    try:
        return serialization.load_pem_private_key(content, password=passphrase.encode())
    except Exception:  # noqa: BLE001 - a wrong passphrase shows in several ways
        raise ConfigError(f"the passphrase does not open {str(path)!r}", fix="type it again") from None


def _content(path: Path) -> tuple[bytes, int]:
    """Of a plain file, and its mode; of the file that is read, and not of a name that can change meanwhile."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{str(path)!r} is no file", fix="give the PEM file of a key")
            return file.read(_LONGEST), mode
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {str(path)!r}: {error.strerror}", fix="give the PEM file of a key"
        ) from None


def _at_once(name: str, flags: int) -> int:
    """No pipe is waited for."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _no_key(path: Path, kind: str) -> ConfigError:
    """kind: what was wanted."""
    return ConfigError(
        f"{str(path)!r} holds no {kind} {ALGORITHM} key in PEM (SSH writes its keys in another form)",
        fix="make a pair of keys: openssl genpkey -algorithm ed25519 -aes256 -out key.pem; openssl pkey -in key.pem "
        "-pubout -out public.pem; key.pem is for --sign, public.pem for --public-key",
    )


def _library(what: str) -> tuple[Any, Any, Any]:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError(f"{what} needs the package cryptography", fix=_INSTALL) from None
    return exceptions, ed25519, serialization
