"""Named float tensors as one vector of integers modulo 2^64, and sums of such vectors as tensors again.

An entry x is round(x 2^f). f is as large as the bound on |x| and the number of clients allow, so that no sum wraps
around. An entry beyond the bound is refused: a value that is cut in silence is wrong in every later round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.secure.keys import digest
from privlora.federated.secure.masks import Vector, check_vector, ring_type

FIXED_BITS: Final = 64
"""Of the ring of such updates."""

LIMIT: Final = 2.0**12
"""Of an entry of an update that is a release already, in absolute value; public."""

_PIECE = 1 << 20  # entries that are float64 at a time


def fraction_of(clients: int) -> int:
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
    low, fraction = 0, fraction_of(clients)
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
    numbers = torch.from_numpy(vector.view(np.int64).astype(np.float64) * 2.0 ** -fraction_of(clients))
    parts = zip(sizes, numbers.split(list(sizes.values())), strict=True)
    return {name: part.reshape(shapes[name]).clone() for name, part in parts}
