"""The only type that crosses from the private side to the public one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from privlora.adapters import Captured
from privlora.coordinates import Coordinates, Sums, Vector, add_vectors
from privlora.coordinates.base import float64_device
from privlora.errors import ConfigError, PrivacyError


@dataclass(frozen=True)
class Release:
    """One noisy mean gradient. Made by a mechanism, read by an optimizer; no private quantity is left in it.

    vector: coordinates in the space that made it. noise_std: the standard deviation tau = sigma C / b of the noise in
    every coordinate (0 if there is no privacy); of correlated noise that of this step, which is larger. step: 1, 2, …,
    the number that the ledger gave it. clip_norm: the norm at which units were clipped, public; infinite where none
    was.
    """

    vector: Vector
    noise_std: float
    step: int
    clip_norm: float = float("inf")

    def of(self, groups: slice) -> Release:
        """What was released in some groups of the vector alone."""
        return replace(self, vector=self.vector[groups])

    def plus(self, public: Vector) -> Release:
        """The same release with a PUBLIC gradient added, in the release's coordinates: post-processing.

        noise_std, step and clip_norm stay, as they state what was released. Raises ConfigError for other shapes.
        """
        shapes = [[tuple(t.shape) for t in parts] for parts in public]
        if shapes != [[tuple(t.shape) for t in parts] for parts in self.vector]:
            raise ConfigError(
                "a public gradient does not have the shapes of the release that it is added to",
                why="its entries would be added to those of other coordinates",
                fix="give it in the coordinates of the release, as coordinates.to_vector gives gradients",
            )
        pairs = zip(self.vector, public, strict=True)
        there = [tuple(p.to(t) for t, p in zip(parts, given, strict=True)) for parts, given in pairs]
        return replace(self, vector=add_vectors(self.vector, there))


@dataclass
class PrivateSum:
    """PRIVATE. What a logical batch comes to before noise; sums of disjoint parts of it add up, wherever they are.

    vector: float64, in a release's coordinates; None for no unit. count: +1/2 for each norm of C_t at most and -1/2 for
    others, where the clipping norm is adaptive. place: where and how it was made (`Mechanism.place`); None for nothing.
    Each sum goes into one other sum or one release, and is spent.
    """

    vector: Vector | None
    count: float = 0.0
    place: str | None = None
    spent: bool = False

    def __add__(self, other: PrivateSum) -> PrivateSum:
        if self.place is not None:
            other.refuse_elsewhere(self.place)
        given = [each.vector for each in (self.spend(), other.spend()) if each.vector is not None]
        vector = add_vectors(*given) if len(given) == 2 else given[0] if given else None
        return PrivateSum(vector, self.count + other.count, self.place or other.place)

    def refuse_elsewhere(self, place: str) -> None:
        """Raise PrivacyError unless the sum was made at this place."""
        if self.place not in (None, place):
            raise PrivacyError(
                "a private sum was made at another point, clipping norm or projection",
                why="it would have parts that the noise does not reach, or that nothing bounds",
                fix="give every process the same state before its gradients are taken, and release before a step",
            )

    def spend(self) -> PrivateSum:
        """Itself, once. Raises PrivacyError the second time."""
        if self.spent:
            raise PrivacyError(
                "a private sum is used a second time",
                why="its units would count twice, or be released twice for one draw",
                fix="take a new sum for each release, and add each part once",
            )
        self.spent = True
        return self


class Processes(Protocol):
    """Those that take gradients of one batch together, as a mechanism needs them (training.ranks)."""

    @property
    def first(self) -> bool:
        """Whether this is the one that releases."""

    def add(self, tensor: Tensor) -> Tensor:
        """In the first process the sum of all processes' tensors of one shape; elsewhere nothing that is of use."""

    def refuse_unlike(self, what: str, value: object, *, why: str, fix: str) -> None:
        """Raise PrivacyError unless ``value`` is equal in all of them."""


class Mechanism(ABC):
    """Takes captured gradients of a logical batch in any number of micro-batches; gives one Release."""

    coordinates: Coordinates

    # False lets the adapter sum over rows at once: the non-private mean needs no per-example gradients.
    needs_examples: bool

    # The private sum of the current logical batch.
    _sum: Sums | Vector | None = None

    @property
    def pending(self) -> bool:
        """Whether units stand in the sum of a batch under way."""
        return self._sum is not None

    def discard(self) -> None:
        """Forget an unfinished logical batch, so that its units do not count again in the next sum."""
        self._sum = None

    def clipped_sum(self) -> Vector | None:
        """PRIVATE. The float64 sum so far, in a release's coordinates, before noise; None if there was no unit yet.

        For audits, whose attacker knows the records' part of it.
        """
        # In float64: rounding error in directions that coordinates project out would get no noise.
        return None if self._sum is None else self.coordinates.from_partial(self._sum)

    @property
    def place(self) -> str:
        """What sums must have in common to be added and released: a hash of the state at which gradients are taken."""
        return self.coordinates.place()

    def take(self) -> PrivateSum:
        """PRIVATE. End the logical batch here: its sum, for a release of all parts of it. Nothing is left here."""
        place = self.place
        return replace(self._take(), place=place)

    def take_all(self, processes: Processes) -> PrivateSum:
        """PRIVATE. ``take`` of all ``processes`` together, for a release by the first; elsewhere nothing is left.

        Raises PrivacyError if one of them took its gradients at another state, clipping norm or projection.
        """
        own = self.take()
        processes.refuse_unlike(
            "the state, clipping norm or projection",
            own.place,
            why="the sum would have parts that the noise does not reach, or that nothing bounds",
            fix="run all processes on machines of one kind, with one version of torch and privlora",
        )
        vector = own.spend().vector
        if vector is None:
            vector = self.coordinates.standard_normal(self._no_units)
        total = [tuple(processes.add(t.double()) for t in parts) for parts in vector]
        count = float(processes.add(torch.tensor([own.count], dtype=torch.float64)))
        return PrivateSum(total, count, own.place) if processes.first else PrivateSum(None)

    def _no_units(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=float64_device(self.coordinates.adapter.device))

    def _given(self, total: PrivateSum | None) -> PrivateSum:
        """What is to be released: the own sum, or ``total`` once it is found fit. Raises PrivacyError."""
        if total is None:
            return self._take()
        if self.pending:
            raise PrivacyError(
                "a sum from elsewhere is released while units stand here",
                why="they would count in this release or in the next one, and nobody knows in which",
                fix="add take() of every mechanism that has a part of the batch, then release the total",
            )
        total.refuse_elsewhere(self.place)
        return total.spend()

    def _take(self) -> PrivateSum:
        """PRIVATE. End the logical batch and hand out its sum; nothing of it stays here."""
        try:
            return PrivateSum(self.clipped_sum())
        finally:
            # Also where this fails: in the next sum the batch's units would count twice.
            self.discard()

    def _add(self, part: Any) -> None:
        self._sum = part if self._sum is None else add_vectors(self._sum, part)

    @abstractmethod
    def accumulate(self, captured: Captured) -> None:
        """Add one micro-batch's units to the sum."""

    @abstractmethod
    def release(self, total: PrivateSum | None = None) -> Release:
        """End the logical batch and release it, even if it is empty.

        total: what ``take`` gave here plus what it gave elsewhere (other processes, other clients), for one batch that
        is spread over all of them; None for a batch that is here alone.
        """

    @abstractmethod
    def sensitivity(self, adjacency: str = "add-or-remove-one") -> float:
        """How far one privacy unit can move the sum, in norm; infinite if nothing bounds it."""


class Instrument(Mechanism):
    """Wraps another mechanism to observe it, for audits and diagnostics; ``inner`` does all the work."""

    needs_examples = True

    def __init__(self, inner: Mechanism) -> None:
        self.coordinates, self.inner = inner.coordinates, inner

    @property
    def pending(self) -> bool:
        return self.inner.pending

    def discard(self) -> None:
        self.inner.discard()

    def clipped_sum(self) -> Vector | None:
        return self.inner.clipped_sum()

    def take(self) -> PrivateSum:
        return self.inner.take()

    def accumulate(self, captured: Captured) -> None:
        self.inner.accumulate(captured)

    def release(self, total: PrivateSum | None = None) -> Release:
        return self.inner.release(self.take() if total is None else total)

    def sensitivity(self, adjacency: str = "add-or-remove-one") -> float:
        return self.inner.sensitivity(adjacency)
