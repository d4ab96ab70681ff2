"""The only type that crosses from the private side to the public one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from privlora.adapters import Captured
from privlora.coordinates import Coordinates, Sums, Vector


@dataclass(frozen=True)
class Release:
    """One noisy mean gradient. Made by a mechanism, read by an optimizer; no private quantity is left in it.

    vector: coordinates in the space that made it. noise_std: the standard deviation tau = sigma C / b of the noise in
    every coordinate (0 if the mode is not private). step: 1, 2, …, the number that the ledger gave it. clip_norm: the
    norm at which units were clipped, public; infinite where none was.
    """

    vector: Vector
    noise_std: float
    step: int
    clip_norm: float = float("inf")


class Mechanism(ABC):
    """Takes captured gradients of a logical batch in any number of micro-batches; gives one Release."""

    coordinates: Coordinates

    # The non-private mean needs no gradient per example, which lets the adapter add rows up at once.
    needs_examples: bool

    # The private sum of the logical batch under way.
    _sum: Sums | None = None

    def discard(self) -> None:
        """Forget a logical batch that was abandoned half-way; in the next sum its units would count twice."""
        self._sum = None

    @abstractmethod
    def accumulate(self, captured: Captured) -> None:
        """Add one micro-batch's units to the sum."""

    @abstractmethod
    def release(self) -> Release:
        """End the logical batch, also an empty one."""

    @abstractmethod
    def sensitivity(self, adjacency: str = "add-or-remove-one") -> float:
        """Largest norm by which one privacy unit moves the sum; infinite if it is not bounded."""
