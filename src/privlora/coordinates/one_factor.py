"""One-factor coordinates: the right factor is frozen at its public start, only the left one is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from privlora.adapters import Captured
from privlora.coordinates.base import Vector
from privlora.coordinates.factors import FactorCoordinates


class OneFactorCoordinates(FactorCoordinates):
    """Gradients of left alone in W = W0 + s left right^T (left = lora_B, right = lora_A^T, frozen).

    Only dloss/dleft = s P is clipped, noised and counted, so W moves inside the row space of right, and noise on left
    is linear in W: no product of two noises appears (Sun et al. 2024, FFA-LoRA). A unit whose Q is not finite still
    counts if its P is finite, because Q is not used (spectral clipping drops such a unit all the same).
    """

    def norms_squared(self, captured: Captured) -> Tensor:
        total = torch.zeros(captured.units, dtype=torch.float64, device=captured.p[0].device)
        for p in captured.p:
            total += p.square().sum(dim=(-2, -1)).double()
        return total * self.scale**2

    def to_vector(self, raw: Vector) -> Vector:
        return [(p * self.scale,) for p, _ in raw]

    @property
    def trained(self) -> Vector:
        return [(left,) for left in self.left]
