"""Masks: ChaCha20 key streams added to integer vectors modulo 2^32 or 2^64.

A stream's key is used for one vector, so every stream starts at block 0. One stream holds 2^38 bytes at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms

from privlora.errors import RunError
from privlora.federated.secure.keys import derive, digest, exchange

Vector = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
"""One-dimensional; its entries are numbers modulo 2^32 or 2^64."""

_CHUNK: Final = 1 << 18  # bytes: vector and stream stay in the second-level cache
_ZEROS: Final = bytes(_CHUNK)
_START: Final = bytes(16)  # 64-bit counter and nonce


def ring_type(bits: int) -> np.dtype[np.uint32] | np.dtype[np.uint64]:
    """How numbers modulo 2^bits are stored: little-endian. Raises RunError unless bits is 32 or 64."""
    if bits == 32:
        return np.dtype("<u4")
    if bits == 64:
        return np.dtype("<u8")
    raise RunError("a secure sum has 32 or 64 bits", fix="choose one of both")


def check_vector(vector: object, bits: int, length: int) -> Vector:
    """``vector`` if it is (length,) of the ring's dtype, contiguous. Raises RunError that shows no entry."""
    right = (
        isinstance(vector, np.ndarray)
        and vector.dtype == ring_type(bits)
        and vector.shape == (length,)
        and vector.flags.c_contiguous
    )
    if not right:
        what = f"a vector does not hold {length} integers modulo 2^{bits}"
        raise RunError(what, why="masks cancel in vectors of one length only", fix="make it with encode")
    return vector  # type: ignore[return-value]


def self_key(context: bytes, name: str, seed: bytes) -> bytes:
    """The key (32 bytes) of a client's self-mask, from its seed (16 bytes)."""
    return derive(seed, digest("self", context, name))


def pair_keys(
    context: bytes, private: bytes, name: str, others: Mapping[str, bytes]
) -> tuple[list[bytes], list[bytes]]:
    """Keys (32 bytes) of the pair masks of client ``name``: those that it adds, and those that it subtracts.

    private: its X25519 key of this sum. others: the other clients' public keys of this sum. Of two clients the first
    by name adds what the second subtracts. Raises PrivacyError for a public key of small order.
    """
    added: list[bytes] = []
    taken: list[bytes] = []
    for other, public in others.items():
        pair = sorted((name, other))
        key = derive(exchange(private, public), digest("pair", context, *pair))
        (added if name == pair[0] else taken).append(key)
    return added, taken


def shift(vector: Vector, added: Sequence[bytes] = (), taken: Sequence[bytes] = ()) -> None:
    """Add the streams of ``added`` and subtract those of ``taken``, modulo 2^32 or 2^64, in place.

    vector: (N,) uint32 or uint64, contiguous and writable. added, taken: keys of 32 bytes. Needs 256 KiB beside it.
    """
    adding, taking = [_stream(key) for key in added], [_stream(key) for key in taken]
    step = _CHUNK // vector.itemsize
    target = bytearray(_CHUNK)
    buffer = np.frombuffer(target, vector.dtype)
    for low in range(0, vector.size, step):
        part = vector[low : low + step]
        stream = buffer[: part.size]
        zeros = _ZEROS if part.size == step else _ZEROS[: part.nbytes]
        for cipher in adding:
            cipher.update_into(zeros, target)
            np.add(part, stream, out=part)
        for cipher in taking:
            cipher.update_into(zeros, target)
            np.subtract(part, stream, out=part)


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.ChaCha20(key, _START), mode=None).encryptor()
