"""The order in which the entries of coordinates stand in one flat vector, for server and clients alike."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from privlora.coordinates import Coordinates, Vector
from privlora.errors import PrivacyError

Shapes = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Layout:
    """Groups in their order, the tensors of a group's tuple in theirs, each tensor row by row.

    Of K clients that are stacked, tensors are (K L, ...) with clients outermost, and each client has a vector of its
    own: the one that it would have alone.

    shapes: of one Vector. clients: K, 1 for one client or for a server.
    """

    shapes: Shapes
    clients: int = 1

    @classmethod
    def of(cls, coordinates: Coordinates, clients: int = 1) -> Layout:
        """Raises PrivacyError where the coordinates are not those of so many clients."""

        def zeros(shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape, dtype=coordinates.dtype, device=coordinates.adapter.device)

        blank = coordinates.standard_normal(zeros)
        shapes = tuple(tuple(tuple(t.shape) for t in parts) for parts in blank)
        if clients > 1 and any(not s or s[0] % clients for parts in shapes for s in parts):
            raise PrivacyError(
                f"these coordinates do not belong to {clients} clients side by side",
                why="a client's units would be in the share of another, without the noise that is theirs",
                fix="give the number of adapters that were stacked",
            )
        return cls(shapes, clients)

    @property
    def entries(self) -> int:
        """Of one client's flat vector."""
        return sum(prod(shape) for parts in self.shapes for shape in parts) // self.clients

    def flat(self, vector: Vector) -> Tensor:
        """(clients, entries) float64 on the CPU. Raises PrivacyError if the shapes are others."""
        found = tuple(tuple(tuple(t.shape) for t in parts) for parts in vector)
        if found != self.shapes:
            raise PrivacyError(
                f"a sum of shapes {found} where {self.shapes} are due",
                why="a unit's part would be copied, and exceed what it was clipped to",
                fix="sum in the coordinates that are released",
            )
        rows = [t.cpu().double().reshape(self.clients, -1) for parts in vector for t in parts]
        return torch.cat(rows, dim=1)

    def vector(self, flat: Tensor) -> Vector:
        """Inverse of ``flat``, on the device and in the dtype of its argument."""
        sizes = [prod(shape) // self.clients for parts in self.shapes for shape in parts]
        pieces = iter(flat.reshape(self.clients, -1).split(sizes, dim=1))
        return [tuple(next(pieces).reshape(shape) for shape in parts) for parts in self.shapes]
