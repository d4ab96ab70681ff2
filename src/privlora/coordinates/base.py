"""What every space of gradients offers to a mechanism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter

# One tuple of tensors for each group of equal modules, each with a leading dimension L = modules of the group.
Vector = list[tuple[Tensor, ...]]


def add_vectors(a: Vector, b: Vector) -> Vector:
    """a + b."""
    return [tuple(x + y for x, y in zip(xs, ys, strict=True)) for xs, ys in zip(a, b, strict=True)]


def float64_device(device: torch.device) -> torch.device:
    """``device``, or the CPU where it has no float64 (Apple's GPUs)."""
    return torch.device("cpu") if device.type == "mps" else device


class Coordinates(ABC):
    """A state of the adapter (the point where gradients are taken) and Euclidean coordinates of gradients there.

    A mechanism sums P and Q of clipped units first and asks for coordinates once (``to_vector`` is linear), so the
    norm of what is released is the norm that was clipped. The state may change only between two releases.
    """

    # Whether the coordinates are isometric for weight updates, so that the noise on W has a closed form.
    intrinsic: bool

    @property
    def event_layers(self) -> tuple[tuple[int, int], ...]:
        """StepEvent.projections of a release here; () if the accounting is that of the plain Gaussian mechanism."""
        return ()

    def __init__(self, adapter: LowRankAdapter, dtype: torch.dtype = torch.float32) -> None:
        self.adapter = adapter
        self.dtype = dtype

    @abstractmethod
    def norms_squared(self, captured: Captured) -> Tensor:
        """||coordinates of unit i||^2 over all modules, (units,) float64. Private."""

    @abstractmethod
    def balance(self, captured: Captured) -> Captured:
        """Each unit's finite gradient after step one of spectral clipping (coordinates.spectrum)."""

    @abstractmethod
    def to_vector(self, raw: Vector) -> Vector:
        """Coordinates of a (weighted sum of) raw gradients: one (P (L, m, r), Q (L, n, r)) a group. In their dtype."""

    @abstractmethod
    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        """A Gaussian vector with identity covariance on every coordinate that a gradient can reach.

        draw: standard normal entries of a shape; the vector is computed in their dtype and on their device.
        """

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Number of coordinates = E||standard_normal||^2."""

    @abstractmethod
    def install(self) -> None:
        """Write the state into the adapter, for the next forward pass."""

    @abstractmethod
    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """The weight update as A B^T: one (A (L, m, r), B (L, n, r)) a group."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The state as named tensors."""

    @abstractmethod
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the state and install it."""

    @property
    def draws(self) -> int | None:
        """Number of the current projection where each release needs a new one; else None."""
        return None

    def begin(self) -> None:  # noqa: B027 - most coordinates have nothing to do
        """Called by a mechanism whose noise is secure, when it is made."""

    def advance(self) -> None:  # noqa: B027 - most coordinates have nothing to do
        """Called once after each step: draw what the next release needs."""

    def weighted_sum(self, captured: Captured, weights: Tensor) -> Vector:
        """sum_i weights_i (P_i, Q_i), stacked by group, float64; weights: (units,). Private until noised.

        In float32 the sum of thousands of aligned units would round by more than C / 1e5.
        """
        # One module's gradients at a time are copied to float64.
        factors = _in_float64(weights)
        sums = [
            tuple(torch.tensordot(factors, _in_float64(t), dims=1) for t in pair)
            for pair in zip(captured.p, captured.q, strict=True)
        ]
        stacked: Vector = []
        start = 0
        for group in self.adapter.groups:
            members = sums[start : start + len(group.sites)]
            stacked.append(tuple(torch.stack(ts) for ts in zip(*members, strict=True)))
            start += len(group.sites)
        return stacked

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Site name -> (A (m, r), B (n, r))."""
        return name_factors(self.adapter, self.factors())


def _in_float64(t: Tensor) -> Tensor:
    return t.to(float64_device(t.device)).double()


def name_factors(
    adapter: LowRankAdapter, factors: list[tuple[Tensor, Tensor]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Site name -> (A, B), from one stacked pair a group."""
    return {
        site.name: (a[k], b[k])
        for group, (a, b) in zip(adapter.groups, factors, strict=True)
        for k, site in enumerate(group.sites)
    }
