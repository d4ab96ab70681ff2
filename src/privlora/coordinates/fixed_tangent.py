"""Tangent coordinates at a base that stays: what moves is a tangent vector, so moves of several clients add up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Coordinates
from privlora.coordinates.tangent import TangentCoordinates, points_from_tensors, points_to_tensors
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, Product, Tangent

_PARTS = ("M", "Up", "Vp")


class FixedTangentCoordinates(TangentCoordinates):
    """The model computes with W0 + Z + xi, where xi = U M V^T + Up V^T + U Vp^T is tangent at the base Z = U S V^T.

    xi starts at zero and is summed up linearly; nothing is retracted. The low-rank term that the model sees has twice
    the base's rank r: left' right'^T with left' = [U S + U M + Up, U] (m, 2r) and right' = [V, Vp] (n, 2r). With P' and
    Q' of these operands, G V is the first half of P' = G right' and G^T U the second half of Q' = G^T left': the
    adapter keeps these halves alone. So coordinates of gradients are those of TangentCoordinates at the base, and one
    space for every xi. Gradients themselves are taken at W0 + Z + xi.

    points: the base. Raises ConfigError unless the adapter's rank is twice theirs.
    """

    def __init__(
        self,
        adapter: LowRankAdapter,
        points: list[Point],
        dtype: torch.dtype = torch.float32,
        *,
        right_weight: float = 1.0,
    ) -> None:
        if any(adapter.rank != 2 * point.rank for point in points):
            raise ConfigError(
                f"an adapter of rank {adapter.rank} cannot hold tangent vectors at points of rank {points[0].rank}",
                why="a base of rank r and what moves have rank 2r together",
                fix="make the adapter with twice the rank of the base",
            )
        adapter.columns = (
            slice(adapter.rank // 2),
            slice(adapter.rank // 2, None),
        )  # of P' and Q': G V and G^T U
        self._moved = [Tangent.zero(point) for point in points]
        self._shared: list[Point | None] | None = None
        super().__init__(adapter, points, dtype, right_weight=right_weight)

    def _met_by(self, captured: Captured) -> list[Point]:
        """Clients of one round share their base, and one product with it is faster than one for each unit."""
        if self._shared is None:
            count = len(self.points[0].S) // len(self.adapter.groups[0].sites)
            self._shared = [_first_of(point, count) for point in self.points]
        shared = [point for point in self._shared if point is not None]
        return shared if len(shared) == len(self.points) else super()._met_by(captured)

    def moved(self) -> list[Tangent]:
        """xi of each group: M (L, r, r), Up (L, m, r), Vp (L, n, r)."""
        return self._moved

    def residuals(self, multiple: float) -> list[Point]:
        """None, whatever is asked for: a sum of tangent vectors is tangent, so ``move`` cuts nothing off."""
        return [point.split(point.rank)[1] for point in self.points]

    def move(
        self, directions: list[Tangent], step: float, residuals: list[Point] | None = None
    ) -> list[Point]:
        """xi <- xi + step * direction, and install it. The base stays, and with it what optimizers remember there."""
        self._moved = [t.add(d, alpha=step) for t, d in zip(self._moved, directions, strict=True)]
        self.install()
        return self.residuals(0.0)

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        r = adapter.rank // 2
        return sum(r * (site.m + site.n - r) for site in adapter.sites)

    @classmethod
    def entries_of(cls, adapter: LowRankAdapter) -> int:
        r = adapter.rank // 2
        return sum(r * (r + site.m + site.n) for site in adapter.sites)

    def install(self) -> None:
        for group, (left, right) in zip(self.adapter.groups, self.factors(), strict=True):
            self.adapter.install(group, left, left.new_ones(left.shape[0], left.shape[-1]), right)

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """The weight update Z + xi as left' (L, m, 2r) and right' (L, n, 2r)."""
        pairs = []
        for point, t in zip(self.points, self._moved, strict=True):
            left = point.U * point.S[:, None, :] + point.U @ t.M + t.Up
            pairs.append((torch.cat([left, point.U], dim=-1), torch.cat([point.V, t.Vp], dim=-1)))
        return pairs

    def as_points(self) -> list[Point]:
        return Coordinates.as_points(self)

    def as_products(self) -> list[Product]:
        return Coordinates.as_products(self)

    def state_dict(self) -> dict[str, Tensor]:
        moved = {f"{g}.{name}": getattr(t, name) for g, t in enumerate(self._moved) for name in _PARTS}
        return points_to_tensors(self.points) | moved

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """A base and what has moved there; a base alone (no M, Up, Vp of any group) starts with xi = 0."""
        points = self._orthonormal(points_from_tensors(tensors, self.points))
        moved = [Tangent.zero(point) for point in points]
        if any(name.endswith(_PARTS) for name in tensors):
            moved = [
                Tangent(*(tensors[f"{g}.{name}"].to(t.M) for name in _PARTS)) for g, t in enumerate(moved)
            ]
        self.points, self._moved, self._shared = points, moved, None
        self.install()

    def stacked(self, adapter: LowRankAdapter, count: int) -> TangentCoordinates:
        copies = super().stacked(adapter, count)
        copies.load_state_dict({name: torch.cat([t] * count) for name, t in self.state_dict().items()})
        return copies


def _first_of(point: Point, count: int) -> Point | None:
    """The first of ``count`` copies (L, …), None where they differ."""
    copies = [t.unflatten(0, (count, -1)) for t in (point.U, point.S, point.V)]
    alike = all(torch.equal(t, t[:1].expand_as(t)) for t in copies)
    return Point(*(t[0] for t in copies)) if alike else None
