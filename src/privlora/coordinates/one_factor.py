"""One-factor coordinates: the right factor is frozen at its public start, only the left one is trained."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Sums, Vector, squared_norms
from privlora.coordinates.factors import FactorCoordinates


class OneFactorCoordinates(FactorCoordinates):
    """Gradients of left alone in W = W0 + s left right^T (left = lora_B, right = lora_A^T, frozen).

    Only dloss/dleft = s P is clipped, noised and counted, so W moves inside the row space of right, and noise on left
    is linear in W: no product of two noises appears (Sun et al. 2024, FFA-LoRA). A unit whose Q is not finite still
    counts if its P is finite, because Q is not used (spectral clipping drops such a unit all the same).
    """

    described: ClassVar[str] = "in the entries of the trained LoRA factor"
    noise_law = "Where the left factor alone is trained it is τ·s·√m·‖right‖."

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return sum(adapter.rank * site.m for site in adapter.sites)

    def norms_squared(self, captured: Captured) -> Tensor:
        return super().norms_squared(Captured(captured.p, []))

    def to_vector(self, sums: Sums) -> Vector:
        return [(p * self.scale,) for p, _ in sums]

    def expected_squares(self) -> list[float]:
        """s^2 m ||right||^2."""
        right = torch.cat([squared_norms(t.double()) for t in self.right]).tolist()
        return [self.scale**2 * site.m * b for site, b in zip(self.adapter.sites, right, strict=True)]

    @property
    def trained(self) -> Vector:
        return [(left,) for left in self.left]
