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

    shapes: of one client's Vector, and of the server's.
    """

    shapes: Shapes

    @classmethod
    def of(cls, coordinates: Coordinates) -> Layout:
        """Of vectors in these coordinates."""

        def zeros(shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape, dtype=coordinates.dtype, device=coordinates.adapter.device)

        blank = coordinates.standard_normal(zeros)
        return cls(tuple(tuple(tuple(t.shape) for t in parts) for parts in blank))

    @property
    def entries(self) -> int:
        """Of one client's flat vector."""
        return sum(self._sizes)

    def flat(self, vector: Vector, clients: int = 1) -> Tensor:
        """(clients, entries) float64 on the CPU. Raises PrivacyError if the shapes are others.

        clients: K sums at one point, tensors (K L, ...) with clients outermost (stacked.JointAdapter).
        """
        found = tuple(tuple(tuple(t.shape) for t in parts) for parts in vector)
        due = tuple(tuple((clients * s[0], *s[1:]) for s in parts) for parts in self.shapes)
        if found != due:
            raise PrivacyError(
                f"sums of shapes {found} where {due} are due for {clients} clients",
                why="a client's units would be in the share of another, without the noise that is theirs",
                fix="sum in the coordinates that are released, for as many clients as are asked",
            )
        rows = [t.cpu().double().reshape(clients, -1) for parts in vector for t in parts]
        return torch.cat(rows, dim=1)

    def vector(self, flat: Tensor) -> Vector:
        """Inverse of ``flat`` for one client, on the device and in the dtype of its argument."""
        pieces = iter(flat.split(self._sizes))
        return [tuple(next(pieces).reshape(shape) for shape in parts) for parts in self.shapes]

    @property
    def _sizes(self) -> list[int]:
        return [prod(shape) for parts in self.shapes for shape in parts]
