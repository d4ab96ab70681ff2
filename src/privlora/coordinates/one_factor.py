"""One-factor coordinates: one factor is frozen at its public start, only the other one is trained."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates.factors import FactorCoordinates

Side = Literal["left", "right"]


class OneFactorCoordinates(FactorCoordinates):
    """Gradients of one factor alone in W = W0 + s left right^T (left = lora_B, right = lora_A^T), the other frozen.

    Only dloss/dleft = s P (or dloss/dright = s Q) is clipped, noised and counted, so W moves inside the row space of
    right (the column space of left), and noise on the trained factor is linear in W: no product of two noises appears
    (Sun et al. 2024, FFA-LoRA). A unit whose other gradient is not finite still counts, because it is not used.

    side: which factor is trained. Training them in turn, the frozen one orthonormal, moves both subspaces.
    """

    def __init__(
        self,
        adapter: LowRankAdapter,
        factors: list[tuple[Tensor, Tensor]],
        scale: float,
        dtype: torch.dtype = torch.float32,
        *,
        side: Side = "left",
    ) -> None:
        self.side = side
        self.sides = (("left", "right").index(side),)
        super().__init__(adapter, factors, scale, dtype)

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        """Of left, which the methods of the table train."""
        return sum(adapter.rank * site.m for site in adapter.sites)

    @property
    def dimension(self) -> int:
        return sum(
            self.adapter.rank * (site.m, site.n)[side] for site in self.adapter.sites for side in self.sides
        )

    def stacked(self, adapter: LowRankAdapter, count: int) -> OneFactorCoordinates:
        pairs = self._copies(count)
        return OneFactorCoordinates(adapter, pairs, self.scale, self.dtype, side=self.side)
