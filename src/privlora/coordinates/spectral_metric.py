"""Tangent coordinates in a metric that follows the singular values of Z: what has grown moves faster."""

from __future__ import annotations

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Sums, Vector, squares_of_sides
from privlora.coordinates.evened import Evened, even
from privlora.coordinates.tangent import TangentCoordinates
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, Tangent, nearest_tangent

MAX_METRIC_POWER = 2.0
# A direction that Z hardly has counts this part of the mean at least: else it would never be taken up.
_LEAST = 0.1
# Below this, singular values are no scale to divide by.
_TINY = 1e-30


class SpectralMetricCoordinates(TangentCoordinates):
    """Coordinates (M, Up, Vp) of the gradient's projection on the tangent space at Z = U S V^T, weighed by S.

    The k-th direction has the weight a_k on the left and b_k = w a_k on the right, w the right weight and

        a_k  proportional to  max(S_k / rms(S), 0.1)^p      with  sum_k a_k^2 = r (m + w^2 (n - r)) / (m + w^2 n)

    all alike at Z = 0. A unit is measured as sqrt(a_j^2 + b_i^2) M_ij, a_k times column k of Up and b_k times that of
    Vp, and a release moves Z by its entries times these weights once more. That is the metric of the gradients of the
    factors U diag(b) and V diag(a), in one gauge for all that Z follows from, and with noise that counts M once. The
    noise of a step is white in these coordinates, and moves Z in the mean square as far as that of
    ``TangentCoordinates`` does. S is released before, so the weights are post-processing.

    ``transport`` and ``followed`` take what they bring to another point for isometric coordinates, as which it never
    gets longer; as a move of Z it is then another one, since weights change from point to point.

    power: p, public. Raises ConfigError unless 0 < p <= 2.
    """

    def __init__(
        self,
        adapter: LowRankAdapter,
        points: list[Point],
        dtype: torch.dtype = torch.float32,
        *,
        right_weight: float = 1.0,
        power: float,
    ) -> None:
        if not 0 < power <= MAX_METRIC_POWER:
            raise ConfigError(
                f"metric_power={power:g} is not above 0 and at most {MAX_METRIC_POWER:g}",
                why="a larger one would leave next to nothing of all directions of a module but one",
                fix="set method.metric_power to a number from 0 to 2; 0 weighs all directions alike",
            )
        self.power = power
        super().__init__(adapter, points, dtype, right_weight=right_weight)
        self.intrinsic = False

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """a and b of each group's modules, (L, r) each."""
        found = []
        for group, point in zip(self.adapter.groups, self.points, strict=True):
            s, w = point.S, self.right_weight**2
            mean = s.square().mean(dim=-1, keepdim=True).sqrt()
            alike = mean <= _TINY
            shares = (
                torch.where(alike, 1.0, s / torch.where(alike, 1.0, mean)).clamp_min(_LEAST) ** self.power
            )
            total = point.rank * (group.m + w * (group.n - point.rank)) / (group.m + w * group.n)
            a = shares * (total / shares.square().sum(dim=-1, keepdim=True)).sqrt()
            found.append((a, self.right_weight * a))
        return found

    def install(self) -> None:
        """In the gauge in which gradients of the operands are already weighed."""
        for group, point, (a, b) in zip(self.adapter.groups, self.points, self.weights(), strict=True):
            left, right = point.U * b[:, None, :], point.V * a[:, None, :]
            self.adapter.install(group, left, point.S / (a * b), right)

    def gradients(self, tangents: list[Tangent]) -> list[Tangent]:
        made = []
        for each, (a, b) in zip(tangents, self.weights(), strict=True):
            left, right = a.to(each.M)[:, None, :], b.to(each.M)[:, None, :]
            made.append(Tangent(_of_core(left, right) * each.M, left * each.Up, right * each.Vp))
        return made

    def module_norms_squared(self, captured: Captured) -> Tensor:
        return squares_of_sides(captured, self.adapter.sizes)

    def evened(self, captured: Captured) -> Evened:
        """P and Q of each module with the roots of their singular values. A function of the point and the unit."""
        return even(captured, self.adapter.sizes, scales=[1.0] * len(self.adapter.sites))

    def to_vector(self, sums: Sums) -> Vector:
        """Each entry of M from its two measurements, by their weights: of two sides of one tangent vector nothing is
        lost, and of any others what is along none."""
        made: Vector = []
        for point, pair, (a, b) in zip(self.points, sums, self.weights(), strict=True):
            p, q = (t.unflatten(0, (-1, len(point.S))) for t in pair)
            there, left, right = point.to(p), a.to(p)[:, None, :], b.to(p)[:, None, :]
            up, vq = there.U.mT @ p, there.V.mT @ q
            core = (left * up + right.mT * vq.mT) / _of_core(left, right)
            found = nearest_tangent(there, Tangent(core, p, q))
            made.append(tuple(t.flatten(0, 1) for t in (found.M, found.Up, found.Vp)))
        return made

    def stacked(self, adapter: LowRankAdapter, count: int) -> TangentCoordinates:
        return type(self)(
            adapter, self._copies(count), self.dtype, right_weight=self.right_weight, power=self.power
        )


def _of_core(left: Tensor, right: Tensor) -> Tensor:
    """sqrt(a_j^2 + b_i^2), (L, r, r), from a and b as rows (L, 1, r)."""
    return (left.square() + right.mT.square()).sqrt()
