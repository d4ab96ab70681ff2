"""Tangent coordinates at a fixed-rank point: PRISM's space, independent of how the point is factored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.adapters.captured import pieces
from privlora.coordinates.base import Coordinates, Sums, Vector, float64_device, squared_norms
from privlora.coordinates.evened import Bases, Evened, even
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import (
    Point,
    Product,
    Tangent,
    factors,
    nearest_tangent,
    project,
    retract_all,
    standard_normal_tangent,
    tangent_dimension,
    transport,
)

# Largest right_weight: it multiplies the rounding of Q in span(V), which must stay below a mechanism's slack.
MAX_RIGHT_WEIGHT = 10.0
# Largest sum of a row of |U^T U - I| of a point that is taken in, which bounds what it stretches at any rank: norms by
# half of it, which the mechanism's slack covers. Rounding is below.
_ORTHONORMAL = 1e-4


class TangentCoordinates(Coordinates):
    """Coordinates (M, Up, w Vp) of the gradient's projection on the tangent space at Z = U S V^T (PRISM Eq. 13).

    For w = 1 they are an isometry of the tangent space, so clipping and noise depend on Z alone, and noise of standard
    deviation tau in every coordinate has intrinsic size tau sqrt(r (m + n - r)) on each weight, whatever the factors.
    For w != 1 the same holds in a rescaled metric; only the noise size changes, to tau sqrt(r (m + w^2 (n - r))).

    right_weight: w, the weight of the component that rotates V, the subspace of the layers' inputs; public. A weight
    below 1 helps where V is good from the start, as with the subspaces of a public gradient.
    Raises ConfigError unless 0 < w <= 10.
    """

    state_parts: ClassVar[tuple[str, ...]] = ("U", "S", "V")

    def __init__(
        self,
        adapter: LowRankAdapter,
        points: list[Point],
        dtype: torch.dtype = torch.float32,
        *,
        right_weight: float = 1.0,
    ) -> None:
        super().__init__(adapter, dtype)
        if not 0 < right_weight <= MAX_RIGHT_WEIGHT:
            raise ConfigError(
                f"right_weight={right_weight:g} is not above 0 and at most {MAX_RIGHT_WEIGHT:g}",
                why="it multiplies rounding too, so that gradients would be clipped by another norm than they have",
                fix="set method.right_weight to 1, or leave it out",
            )
        self.right_weight = right_weight
        self.intrinsic = right_weight == 1
        self.points = points
        self.install()

    def gradients(self, tangents: list[Tangent]) -> list[Tangent]:
        """Gradients of each group as tangent vectors, from coordinates, in the metric that these are isometric in."""
        return [replace(each, Vp=self.right_weight * each.Vp) for each in tangents]

    def transport(self, old: Point, new: Point, coordinates: Tangent) -> Tangent:
        """Coordinates at ``new`` of the tangent vector that has ``coordinates`` at ``old``, projected."""
        moved = transport(old, new, replace(coordinates, Vp=coordinates.Vp / self.right_weight))
        return replace(moved, Vp=moved.Vp * self.right_weight)

    def residuals(self, multiple: float) -> list[Point]:
        """Room for what ``move`` cuts off: triplets of zeros, at most round(multiple * r) a module."""
        rank = self.adapter.rank
        kept = round(multiple * rank)
        return [point.extended(kept).split(rank)[1] for point in self.points]

    def move(
        self, directions: list[Tangent], step: float, residuals: list[Point] | None = None
    ) -> list[Point]:
        """Go from Z + E to the best rank-r approximation of Z + E + step * direction (PRISM Eq. 22), and install it.

        directions: tangent at the present point. residuals: E, as ``residuals`` and earlier moves gave them; None: 0.
        Returns the new ones: the triplets that follow the r leading ones.
        """
        rests = self.residuals(0.0) if residuals is None else residuals
        joined = [point.joined(rest) for point, rest in zip(self.points, rests, strict=True)]
        whole = retract_all(joined, directions, step)
        points, cut = zip(*(each.split(self.adapter.rank) for each in whole), strict=True)
        self.points = list(points)
        self.install()
        return list(cut)

    def norms_squared(self, captured: Captured) -> Tensor:
        return self.module_norms_squared(captured).sum(dim=0)

    def module_norms_squared(self, captured: Captured) -> Tensor:
        # ||M||^2 + ||Up||^2 = ||P||^2. Vp is measured directly: where Q is nearly in span(V), a difference of
        # squares would be lost in rounding.
        total = torch.zeros(len(captured.p), captured.units, dtype=torch.float64, device=captured.p[0].device)
        by_group = total.split(list(self.adapter.sizes)), captured.stacked(self.adapter.sizes)
        for squares, (p, q), point in zip(*by_group, self._met_by(captured), strict=True):
            for here, some in pieces(p):
                squares[here] += squared_norms(some).double()
            for here, some in pieces(q):
                turning, along = _off(some, point.V[here])
                squares[here] += self.right_weight**2 * squared_norms(turning).double()
                squares[here] += self.right_weight**2 * _rounding(q) * squared_norms(along).double()
        return total

    def parts_squared(self, captured: Captured) -> Tensor:
        """||M||^2, ||Up||^2 and ||Vp||^2 over all modules, without the right weight: (3, units) float64. Private."""
        total = torch.zeros(3, captured.units, dtype=torch.float64, device=captured.p[0].device)
        pairs = zip(captured.stacked(self.adapter.sizes), self._met_by(captured), strict=True)
        for (p, q), point in pairs:
            (beside, core), (turning, _) = _off(p, point.U), _off(q, point.V)
            for here, t in zip(total, (core, beside, turning), strict=True):
                here += squared_norms(t).double().sum(dim=0)
        return total

    def evened(self, captured: Captured) -> Evened:
        """P and Q of each module with the roots of their singular values, projected back to one tangent vector.

        M is the mean of its two estimates, one from each side. A function of the point and the unit's tangent vector.
        """
        points = self._met_by(captured)
        bases = Bases([point.U for point in points], [point.V for point in points], self.right_weight)
        return even(captured, self.adapter.sizes, scales=[1.0] * len(self.adapter.sites), bases=bases)

    def to_vector(self, sums: Sums) -> Vector:
        # In float64, as sums are: clipping bounds no rounding error of the projected sum, which mixes all units.
        made: Vector = []
        for point, pair in zip(self.points, sums, strict=True):
            # Several sums at one point (stacked.JointAdapter) stand one after the other.
            p, q = (t.unflatten(0, (-1, len(point.S))) for t in pair)
            tangent = project(point.to(p), p, q)
            parts = (tangent.M, tangent.Up, self.right_weight * tangent.Vp)
            made.append(tuple(t.flatten(0, 1) for t in parts))
        return made

    def nearest(self, vector: Vector) -> Vector:
        """Up projected off U and Vp off V, in float64."""
        made: Vector = []
        for point, parts in zip(self.points, vector, strict=True):
            entries = Tangent(*(t.to(float64_device(t.device)).double() for t in parts))
            found = nearest_tangent(point.to(entries.M), entries)
            made.append(tuple(t.to(parts[0]) for t in (found.M, found.Up, found.Vp)))
        return made

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        tangents = (standard_normal_tangent(point, draw) for point in self.points)
        return [(t.M, t.Up, t.Vp) for t in tangents]

    def frame(self) -> dict[str, Tensor]:
        return {f"{g}.{name}": getattr(point, name) for g, point in enumerate(self.points) for name in "UV"}

    def followed(self, vector: Vector, frame: Mapping[str, Tensor]) -> Vector:
        """The weight update that ``vector`` was, projected on the space here: what of it this space can take back.

        In a rescaled metric (w != 1) that is no contraction, and the sides follow each by itself: U M V^T + Up V^T in
        the columns of V here, U Vp^T in those of U.
        """
        made: Vector = []
        for g, (point, parts) in enumerate(zip(self.points, vector, strict=True)):
            bases = {name: _orthonormal(frame[f"{g}.{name}"].to(parts[0])) for name in "UV"}
            old = Point(bases["U"], point.S.to(parts[0]), bases["V"])
            new = Point(_orthonormal(point.U.to(old.U)), old.S, _orthonormal(point.V.to(old.V)))
            there = nearest_tangent(old, Tangent(*parts))
            if self.right_weight == 1:
                here = transport(old, new, there)
            else:
                left = (old.U @ there.M + there.Up) @ (old.V.mT @ new.V)
                core = new.U.mT @ left
                here = nearest_tangent(new, Tangent(core, left, there.Vp @ (old.U.mT @ new.U)))
            made.append((here.M, here.Up, here.Vp))
        return made

    def moved_numbers(self) -> list[int]:
        pairs = zip(self.adapter.groups, self.points, strict=True)
        return [tangent_dimension(group.m, group.n, point.rank) for group, point in pairs]

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return sum(tangent_dimension(site.m, site.n, adapter.rank) for site in adapter.sites)

    @classmethod
    def entries_of(cls, adapter: LowRankAdapter) -> int:
        r = adapter.rank  # Up and Vp are stored with their zero parts in U and V
        return sum(r * (r + site.m + site.n) for site in adapter.sites)

    def expected_squares(self) -> list[float]:
        """r (m + w^2 (n - r)): PRISM Eq. 21 for w = 1."""
        r, w = self.points[0].rank, self.right_weight
        return [r * (site.m + w**2 * (site.n - r)) for site in self.adapter.sites]

    def install(self) -> None:
        for group, point in zip(self.adapter.groups, self.points, strict=True):
            self.adapter.install(group, point.U, point.S, point.V)

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        return [factors(point) for point in self.points]

    def state_dict(self) -> dict[str, Tensor]:
        return points_to_tensors(self.points)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.points = self._orthonormal(points_from_tensors(tensors, self.points))
        self.install()

    @staticmethod
    def _orthonormal(points: list[Point]) -> list[Point]:
        """The points. Raises ConfigError if columns of U or V are not orthonormal."""
        for basis in (basis for point in points for basis in (point.U, point.V)):
            off = basis.mT @ basis - torch.eye(basis.shape[-1]).to(basis)
            if not float(off.abs().sum(dim=-1).max()) <= _ORTHONORMAL:
                raise ConfigError(
                    "the columns of a point's U or V are not orthonormal",
                    why="gradients would be clipped by another norm than they are released with",
                    fix="average points with geometry.fixed_rank.average, or make one with point_from_factors",
                )
        return points

    def as_points(self) -> list[Point]:
        return self.points

    def as_products(self) -> list[Product]:
        return [(point.U, point.S, point.V) for point in self.points]

    def stacked(self, adapter: LowRankAdapter, count: int) -> TangentCoordinates:
        return type(self)(adapter, self._copies(count), self.dtype, right_weight=self.right_weight)

    def _copies(self, count: int) -> list[Point]:
        return [Point(*(torch.cat([t] * count) for t in (p.U, p.S, p.V))) for p in self.points]

    def _met_by(self, captured: Captured) -> list[Point]:
        """The points as units meet them: those of a stack with (L, units, …), each unit at its own adapter's."""
        if captured.owners is None or len(self.points[0].S) == len(self.adapter.groups[0].sites):
            return self.points  # all meet at it, whosever they are
        count, owners = len(captured.owners), captured.owners.int().argmax(dim=0)

        def of_units(t: Tensor) -> Tensor:
            return t.unflatten(0, (count, -1))[owners].transpose(0, 1)

        return [Point(of_units(p.U), of_units(p.S), of_units(p.V)) for p in self.points]


def _orthonormal(basis: Tensor) -> Tensor:
    """The nearest basis (L, m, r) whose columns are orthonormal to the rounding of float64, by Newton and Schulz."""
    for _ in range(2):
        basis = 1.5 * basis - 0.5 * basis @ (basis.mT @ basis)
    return basis


def _off(t: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """t (L, units, r, n) off the columns of a basis (L, n, k), or of each unit's, (L, units, n, k); and t basis."""
    basis = basis.to(t)
    if basis.dim() == 4:
        along = t @ basis
        return t - along @ basis.mT, along
    rows = t.flatten(1, 2)
    along = rows @ basis
    left = torch.baddbmm(rows, along, basis.mT, alpha=-1)
    return left.unflatten(1, t.shape[1:3]), along.unflatten(1, t.shape[1:3])


def _rounding(t: Tensor) -> float:
    """What part of the projection's square is added to that of the rest, whose rounding is the projection's.

    With an error of d = 4 eps of it, (a + d)^2 <= (1 + s) a^2 + (1 + 1 / s) d^2; s = 1e-5 is far below any slack.
    """
    return 1.6e6 * torch.finfo(t.dtype).eps ** 2


def points_to_tensors(points: list[Point]) -> dict[str, Tensor]:
    """Group index and name -> tensor, for checkpoints."""
    return {f"{g}.{name}": getattr(point, name) for g, point in enumerate(points) for name in "USV"}


def points_from_tensors(tensors: Mapping[str, Tensor], like: list[Point]) -> list[Point]:
    """Inverse of ``points_to_tensors``, on the device and in the dtype of ``like``."""
    return [
        Point(*(tensors[f"{g}.{name}"].to(point.S.device, point.S.dtype) for name in "USV"))
        for g, point in enumerate(like)
    ]
