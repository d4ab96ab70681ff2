"""Masks: ChaCha20 key streams added to integer vectors modulo 2^32 or 2^64.

A stream's key is used for one vector, so every stream starts at block 0. One stream holds 2^38 bytes at most.

Float tensors become integers by their names: an entry x is round(x 2^f). f is as large as the bound on |x| and the
number of clients allow, so that no sum wraps around. An entry beyond the bound is refused: a value that is cut in
silence is wrong in every later round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from torch import Tensor

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


FIXED_BITS: Final = 64
"""Of the ring of such updates."""

LIMIT: Final = 2.0**12
"""Of an entry of an update that is a release already, in absolute value; public."""

_PIECE = 1 << 20  # entries that are float64 at a time


def _fraction_of(clients: int) -> int:
    """f: the largest with clients * (LIMIT 2^f + 1/2) < 2^63, and at most 52; the grid is 2^-f wide.

    clients: that a sum may have. An entry of a sum is off by clients 2^-(f + 1) at most, next to rounding to float64.
    """
    power = 52
    while clients * (int(LIMIT) * 2 ** (power + 1) + 1) >= 2**FIXED_BITS:
        power -= 1
    return power


def agreed_digest(terms: str, sent: Mapping[str, Tensor]) -> bytes:
    """32 bytes: all that a client's answer follows from next to its records, to the last bit.

    terms: `public_settings` as YAML. sent: tensors of any dtype, by name.

    Masks depend on it. A client whose terms differ in anything, such as what sums are divided by, rounds to another
    lattice, and its noise would be too small or too large for the others'.
    """
    parts: list[bytes | str | int] = []
    for name in sorted(sent):
        tensor = sent[name].detach().cpu().contiguous()
        entries = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).digest()
        parts += [name, str(tensor.dtype), ",".join(map(str, tensor.shape)), entries]
    return digest("sent", len(sent), *parts, "terms", terms)


def encode(tensors: Mapping[str, Tensor], clients: int) -> Vector:
    """(length,) uint64 of float tensors, by name and each row-major. Raises RunError for NaN and entries beyond LIMIT.

    clients: in the sum; public.
    """
    vector = np.empty(sum(tensor.numel() for tensor in tensors.values()), ring_type(FIXED_BITS))
    low, fraction = 0, _fraction_of(clients)
    for name in sorted(tensors):
        for piece in tensors[name].detach().cpu().reshape(-1).split(_PIECE):
            values = piece.double().numpy()
            # "Not within" rather than "beyond", so that NaN is refused too.
            if not (np.abs(values) <= LIMIT).all():
                what = f"an entry for a secure sum is not a number, or is beyond {LIMIT:g}"
                why = "it would wrap around and spoil the sum of all clients"
                raise RunError(what, why=why, fix="lower the learning rate or the noise")
            whole = np.rint(values * 2.0**fraction).astype(np.int64)
            vector[low : low + len(piece)] = whole.astype(vector.dtype)
            low += len(piece)
    return vector


def decode(vector: Vector, shapes: Mapping[str, tuple[int, ...]], clients: int) -> dict[str, Tensor]:
    """Float64 tensors of a sum over at most ``clients`` vectors. Raises RunError for another length or dtype."""
    sizes = {name: prod(shapes[name]) for name in sorted(shapes)}
    check_vector(vector, FIXED_BITS, sum(sizes.values()))
    numbers = torch.from_numpy(vector.view(np.int64).astype(np.float64) * 2.0 ** -_fraction_of(clients))
    parts = zip(sizes, numbers.split(list(sizes.values())), strict=True)
    return {name: part.reshape(shapes[name]).clone() for name, part in parts}
