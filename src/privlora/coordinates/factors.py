"""Factor coordinates: the usual DP-LoRA space, in which A and B are two plain parameter matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Coordinates, Vector


class FactorCoordinates(Coordinates):
    """Gradients of both factors of W = W0 + s left right^T, as peft stores them (left = lora_B, right = lora_A^T).

    dloss/dleft = s P and dloss/dright = s Q. Depends on the gauge: (c left, right / c) is the same weight but
    another clipping norm and another noise on W (PRISM Prop. 2.2), which is what tangent coordinates remove.
    """

    intrinsic = False

    def __init__(
        self,
        adapter: LowRankAdapter,
        factors: list[tuple[Tensor, Tensor]],
        scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(adapter, dtype)
        self.scale = scale
        self.left = [a.to(dtype) for a, _ in factors]  # (L, m, r) each
        self.right = [b.to(dtype) for _, b in factors]  # (L, n, r)
        self.install()

    def norms_squared(self, captured: Captured) -> Tensor:
        total = torch.zeros(captured.units, dtype=torch.float64, device=captured.p[0].device)
        for t in (*captured.p, *captured.q):
            total += t.square().sum(dim=(-2, -1)).double()
        return total * self.scale**2

    def to_vector(self, raw: Vector) -> Vector:
        return [(p * self.scale, q * self.scale) for p, q in raw]

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        shapes = [(a.shape, b.shape) for a, b in zip(self.left, self.right, strict=True)]
        return [(draw(tuple(a)), draw(tuple(b))) for a, b in shapes]

    @property
    def dimension(self) -> int:
        return sum(t.numel() for t in (*self.left, *self.right))

    def install(self) -> None:
        for group, left, right in zip(self.adapter.groups, self.left, self.right, strict=True):
            mid = left.new_full((left.shape[0], left.shape[-1]), self.scale)
            self.adapter.install(group, left, mid, right)

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.left, self.right, strict=True)
        return [(a.detach() * self.scale, b.detach()) for a, b in pairs]

    def state_dict(self) -> dict[str, Tensor]:
        left = {f"{g}.left": t.detach() for g, t in enumerate(self.left)}
        return left | {f"{g}.right": t.detach() for g, t in enumerate(self.right)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for g, (left, right) in enumerate(zip(self.left, self.right, strict=True)):
                left.copy_(tensors[f"{g}.left"])
                right.copy_(tensors[f"{g}.right"])
        self.install()
