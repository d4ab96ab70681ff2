"""Factor coordinates: the usual DP-LoRA space, in which A and B are two plain parameter matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Coordinates, Sums, Vector, squared_norms, squares_of_sides
from privlora.coordinates.evened import Evened, even

Side = Literal["left", "right"]


class FactorCoordinates(Coordinates):
    """Gradients of both factors of W = W0 + s left right^T, as peft stores them (left = lora_B, right = lora_A^T).

    dloss/dleft = s P and dloss/dright = s Q. Depends on the gauge: (c left, right / c) is the same weight but
    another clipping norm and another noise on W (PRISM Prop. 2.2), which is what tangent coordinates remove.
    """

    entrywise = True
    state_parts: ClassVar[tuple[str, ...]] = ("left", "right")
    # Which of left (0) and right (1) is trained.
    sides: tuple[int, ...] = (0, 1)

    def __init__(
        self,
        adapter: LowRankAdapter,
        factors: list[tuple[Tensor, Tensor]],
        scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(adapter, dtype)
        self.scale = scale
        # Own copies. Update them in place, never rebind them: optimizers hold views.
        self.left = [_copy(a, dtype) for a, _ in factors]  # (L, m, r) each
        self.right = [_copy(b, dtype) for _, b in factors]  # (L, n, r)
        self.install()

    @property
    def lora_scale(self) -> float | None:  # type: ignore[override]
        return self.scale if self.sides == (0, 1) else None

    @property
    def trained(self) -> Vector:
        """The tensors that training moves, one tuple a group, as releases have them."""
        return [tuple(pair[side] for side in self.sides) for pair in self._pairs]

    def norms_squared(self, captured: Captured) -> Tensor:
        return self.module_norms_squared(captured).sum(dim=0)

    def module_norms_squared(self, captured: Captured) -> Tensor:
        return squares_of_sides(captured, self.adapter.sizes, self.sides) * self.scale**2

    def evened(self, captured: Captured) -> Evened:
        """The gradients of the trained factors with the roots of their singular values."""
        scales = [self.scale] * len(self.adapter.sites)
        return even(captured, self.adapter.sizes, scales=scales, sides=self.sides)

    def to_vector(self, sums: Sums) -> Vector:
        return [tuple(pair[side] * self.scale for side in self.sides) for pair in sums]

    def laid_out(self, captured: Captured) -> tuple[list[Tensor], float]:
        found, start = list[Tensor](), 0
        for group in self.adapter.groups:
            stop = start + len(group.sites)
            for side in self.sides:
                found += (captured.p, captured.q)[side][start:stop]
            start = stop
        return found, self.scale

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return [tuple(draw(tuple(t.shape)) for t in tensors) for tensors in self.trained]

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return sum(adapter.rank * (site.m + site.n) for site in adapter.sites)

    def moved_numbers(self) -> list[int]:
        """Entries of the trained factors."""
        groups = self.adapter.groups
        return [self.adapter.rank * sum((g.m, g.n)[side] for side in self.sides) for g in groups]

    def expected_squares(self) -> list[float]:
        """s^2 (m ||right||^2 + n ||left||^2), of what is trained: PRISM Prop. 2.2, Eq. 8."""
        others = [
            torch.cat([squared_norms(t.double()) for t in other]).tolist()
            for other in (self.right, self.left)
        ]
        return [
            self.scale**2 * sum((site.m, site.n)[side] * others[side][i] for side in self.sides)
            for i, site in enumerate(self.adapter.sites)
        ]

    def install(self) -> None:
        for group, left, right in zip(self.adapter.groups, self.left, self.right, strict=True):
            mid = left.new_full((left.shape[0], left.shape[-1]), self.scale)
            self.adapter.install(group, left, mid, right)

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        return [(a * self.scale, b) for a, b in self._pairs]

    def state_dict(self) -> dict[str, Tensor]:
        left = {f"{g}.left": t for g, t in enumerate(self.left)}
        return left | {f"{g}.right": t for g, t in enumerate(self.right)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for g, (left, right) in enumerate(zip(self.left, self.right, strict=True)):
            left.copy_(tensors[f"{g}.left"])
            right.copy_(tensors[f"{g}.right"])
        self.install()

    def stacked(self, adapter: LowRankAdapter, count: int) -> FactorCoordinates:
        return FactorCoordinates(adapter, self._copies(count), self.scale, self.dtype)

    def _copies(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return [(torch.cat([a] * count), torch.cat([b] * count)) for a, b in self._pairs]

    @property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.left, self.right, strict=True))


def _copy(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.detach().to(dtype).clone(memory_format=torch.contiguous_format)


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
