"""Named float tensors as one vector of integers modulo 2^32 or 2^64, and sums of such vectors as tensors again.

An entry x is round(x 2^f). f is as large as a public bound on |x| and the number of clients allow, so that no sum wraps
around. An entry beyond the bound is refused: a value that is cut in silence is wrong in every later round.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from privlora.errors import ConfigError, RunError
from privlora.federated.secure.keys import digest
from privlora.federated.secure.masks import Vector, check_vector, ring_type

Number = bytes | str | int | float

_PIECE = 1 << 20  # entries that are float64 at a time
_MOST = 1 << 16  # clients
_LIMIT = 2.0**12  # of an entry of an update that is a release already

FIXED_BITS = 64
"""Of the ring of such updates."""


@dataclass(frozen=True)
class FixedPoint:
    """How numbers become integers. bits: 32 or 64. limit: of |x|, public. clients: that a sum may have. All public."""

    bits: int
    limit: float
    clients: int

    def __post_init__(self) -> None:
        ring_type(self.bits)
        if not (0 < self.limit < math.inf and 0 < self.clients <= _MOST):
            raise ConfigError(
                f"a secure sum with entries up to {self.limit:g} of {self.clients} clients",
                why="entries would wrap around",
                fix=f"set a positive bound that no released entry exceeds, and 1 to {_MOST} clients",
            )

    @property
    def fraction(self) -> int:
        """f: the largest with clients * (limit 2^f + 1/2) < 2^(bits - 1), and at most 52; the grid is 2^-f wide."""
        largest = Fraction(2 ** (self.bits - 1), self.clients) - Fraction(1, 2)
        power = min(52, self.bits - math.frexp(self.limit)[1])
        while Fraction(self.limit) * Fraction(2) ** power >= largest:
            power -= 1
        return power

    @property
    def error(self) -> float:
        """Of an entry of a sum over ``clients``, at most: half a grid step each, beside rounding to float64."""
        return self.clients * 2.0 ** -(self.fraction + 1)


def for_releases(clients: int) -> FixedPoint:
    """Of updates that are releases already. clients: in a round."""
    return FixedPoint(FIXED_BITS, _LIMIT, clients)


def agreed_digest(terms: str, sent: Mapping[str, Tensor]) -> bytes:
    """32 bytes: all that a client's answer follows from next to its records. terms: `public_settings` as YAML.

    Masks depend on it. A client whose terms differ in anything, such as what sums are divided by, rounds to another
    lattice, and its noise would be too small or too large for the others'.
    """
    return digest_of(sent, {"terms": terms})


@dataclass(frozen=True)
class Layout:
    """The order and shapes in which named tensors lie in a vector: by name, each row-major."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Of tensors like these."""
        names = tuple(sorted(tensors))
        return cls(names, tuple(tuple(tensors[name].shape) for name in names))

    @property
    def length(self) -> int:
        """Of the vector."""
        return sum(math.prod(shape) for shape in self.shapes)


def encode(tensors: Mapping[str, Tensor], layout: Layout, point: FixedPoint) -> Vector:
    """(length,) uint32 or uint64 of float tensors. Raises RunError for other names or shapes, NaN and large entries."""
    if Layout.of(tensors) != layout:
        raise RunError(
            "tensors do not have the names and shapes of the secure sum",
            why="entries would be added to others than their own",
            fix="use one version of privlora and one configuration everywhere",
        )
    vector = np.empty(layout.length, ring_type(point.bits))
    low = 0
    for name in layout.names:
        for piece in tensors[name].detach().cpu().reshape(-1).split(_PIECE):
            vector[low : low + len(piece)] = _integers(piece.double().numpy(), point)
            low += len(piece)
    return vector


def _integers(values: np.ndarray, point: FixedPoint) -> np.ndarray:
    # "Not within" rather than "beyond", so that NaN is refused too.
    if not (np.abs(values) <= point.limit).all():
        raise RunError(
            f"an entry for a secure sum is not a number, or is beyond {point.limit:g}",
            why="it would wrap around and spoil the sum of all clients",
            fix="raise the bound, or lower the learning rate or the noise",
        )
    return np.rint(values * 2.0**point.fraction).astype(np.int64).astype(ring_type(point.bits))


def decode(vector: Vector, layout: Layout, point: FixedPoint) -> dict[str, Tensor]:
    """Float64 tensors of a sum over at most ``point.clients`` vectors. Raises RunError for another length or dtype."""
    check_vector(vector, point.bits, layout.length)
    signed = vector.view(np.int32 if point.bits == 32 else np.int64)
    numbers = torch.from_numpy(signed.astype(np.float64) * 2.0**-point.fraction)
    sizes = [math.prod(shape) for shape in layout.shapes]
    parts = zip(layout.names, layout.shapes, numbers.split(sizes), strict=True)
    return {name: part.reshape(shape).clone() for name, shape, part in parts}


def digest_of(tensors: Mapping[str, Tensor], values: Mapping[str, Number] | None = None) -> bytes:
    """32 bytes that stand for what a server sent: named tensors of any dtype, to the last bit, and plain values."""
    parts: list[bytes | str | int] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        entries = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).digest()
        parts += [name, str(tensor.dtype), ",".join(map(str, tensor.shape)), entries]
    for name, value in sorted((values or {}).items()):
        parts += [name, value.hex() if isinstance(value, float) else value]
    return digest("sent", len(tensors), *parts)
