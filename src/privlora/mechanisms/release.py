"""The only type that crosses from the private side to the public one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from privlora.adapters import Captured
from privlora.coordinates import Coordinates, Vector


@dataclass(frozen=True)
class Release:
    """One noisy mean gradient. Made by a mechanism, read by an optimizer; no private quantity is left in it.

    vector: coordinates in the space that made it. noise_std: the standard deviation tau = sigma C / b of the noise in
    every coordinate (0 if there is no privacy). step: 1, 2, …, the number that the ledger gave it. clip_norm: the
    norm at which units were clipped, public; infinite where none was.
    """

    vector: Vector
    noise_std: float
    step: int
    clip_norm: float = float("inf")


class Mechanism(ABC):
    """Takes captured gradients of a logical batch in any number of micro-batches; gives one Release."""

    coordinates: Coordinates

    # False lets the adapter sum over rows at once: the non-private mean needs no per-example gradients.
    needs_examples: bool

    # The private sum of the current logical batch.
    _sum: Vector | None = None

    def discard(self) -> None:
        """Forget an unfinished logical batch, so that its units do not count again in the next sum."""
        self._sum = None

    @abstractmethod
    def accumulate(self, captured: Captured) -> None:
        """Add one micro-batch's units to the sum."""

    @abstractmethod
    def release(self) -> Release:
        """End the logical batch and release it, even if it is empty."""

    @abstractmethod
    def sensitivity(self, adjacency: str = "add-or-remove-one") -> float:
        """How far one privacy unit can move the sum, in norm; infinite if nothing bounds it."""
