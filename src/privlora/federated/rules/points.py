"""Rules whose state is the canonical point U S V^T of each group: one factor is orthonormal wherever one is frozen.

Clip norms and noise of a client that trains against an orthonormal factor do not depend on the size of the update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from privlora.federated.rules.algebra import canonical, check_rank, thin
from privlora.federated.rules.base import (
    Asked,
    Beginning,
    Both,
    Groups,
    Pairs,
    RuleSettings,
    Shapes,
    Tensors,
    Trains,
)
from privlora.federated.rules.factors import (
    SIDES,
    FactorRule,
    StateRule,
    copied,
    factor_shapes,
    groups_of,
)
from privlora.geometry.fixed_rank import Point, Tangent, retract

_PARTS = ("U", "S", "V")
_TANGENT = ("M", "Up", "Vp")


class FedSvd(FactorRule):
    """left <- U S, right <- V of mean(left_k) right^T: FFA in a gauge that is renewed each round.

    The mean has rank r and loses nothing. right turns within the span that it began with and never leaves it.
    """

    name = "fedsvd"
    summary = "FFA with right made orthonormal anew each round. Exact; the span of right stays as it began."
    reference = "FedSVD (arXiv:2505.12805)"
    two_sided = False
    _trains: ClassVar[Trains] = "left"

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        super().__init__(start, settings)
        check_rank(self.groups, settings.rank)
        self._settle()

    def _settle(self) -> None:
        for g, (left, right) in enumerate(self.factors()):
            point = thin(left, right)
            # Where S is zero, V of `thin` still lies in the span of right, which has full rank.
            self._state[f"{g}.left"] = point.U * point.S[:, None, :]
            self._state[f"{g}.right"] = point.V


class PointRule(StateRule):
    """The state is U (L, m, R), S (L, R), V (L, n, R) of each group; clients see the r leading triplets."""

    def _started(self, start: Pairs) -> Tensors:
        points = [canonical(left, right, self.settings.seed) for left, right in start]
        return _named([self._kept(point) for point in points])

    def start_at(self, points: Sequence[Point]) -> None:
        """Go on from points with subspaces of one's own choice, as a start whose update is zero has them."""
        self._state = _named([self._kept(point) for point in points])

    def _kept(self, point: Point) -> Point:
        """A point with room for what the server keeps beside it."""
        return point

    def close(self, stage: str) -> None:
        mean = self._mean.take()
        if mean:
            moved = [self._moved(g, point, mean) for g, point in enumerate(_points(self._state))]
            self._state = _named(moved)

    @abstractmethod
    def _moved(self, g: int, point: Point, mean: Tensors) -> Point:
        """The state of group g with the mean answer added."""

    def broadcast(self, stage: str) -> Tensors:
        rank = self.settings.rank
        return copied({name: tensor[..., :rank] for name, tensor in self._state.items()}, self.dtype)

    def factors(self) -> Pairs:
        firsts = [point.split(self.settings.rank)[0] for point in _points(self._state)]
        return [(point.U * point.S[:, None, :], point.V) for point in firsts]


class Alt(PointRule):
    """One factor by turns against an orthonormal other one. Odd rounds train left = U S against right = V; even rounds
    right = V S against left = U. The mean is exact in every round, and the server makes the moved factor canonical.
    """

    name = "alt"
    summary = "Trains left and right by turns against an orthonormal other one. Exact; both subspaces move."
    reference = "RoLoRA (arXiv:2502.01755) in the canonical gauge"

    @classmethod
    def trains(cls, number: int, settings: RuleSettings) -> Trains:
        return "left" if number % 2 else "right"

    @classmethod
    def shapes(
        cls, stage: str, number: int, groups: Groups, settings: RuleSettings, clients: int = 1
    ) -> Both:
        sides = SIDES[cls.trains(number, settings)]
        return point_shapes(groups, settings.rank), factor_shapes(groups, settings.rank, sides)

    def _moved(self, g: int, point: Point, mean: Tensors) -> Point:
        left, right = f"{g}.left", f"{g}.right"
        if left in mean:
            pair = point.U * point.S[:, None, :] + mean[left], point.V
        else:
            pair = point.U, point.V * point.S[:, None, :] + mean[right]
        return canonical(*pair, self.settings.seed)

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        sent, state = asked.sent, {}
        scaled = "U" if cls.trains(asked.number, asked.settings) == "left" else "V"
        for g in groups_of(sent):
            for side, part in zip(SIDES["both"], "UV", strict=True):
                basis = sent[f"{g}.{part}"]
                state[f"{g}.{side}"] = basis * sent[f"{g}.S"][:, None, :] if part == scaled else basis.clone()
        return Beginning(state=state)


class Tan(PointRule):
    """The mean of tangent vectors at one fixed point, then the best approximation of rank r.

    Clients train (M, Up, Vp) of xi = U M V^T + Up V^T + U Vp^T at the broadcast point; these coordinates are linear and
    isometric, so their mean is that of the updates, and noise in them has one size whatever the factors are. The server
    keeps up to r triplets more than it broadcasts: what one round cuts off counts in the next (error feedback).
    """

    name = "tan"
    summary = (
        "Averages tangent vectors at one point, then cuts to rank r and keeps what was cut. Exact; two-sided."
    )
    reference = "PRISM's tangent space with its base fixed for a round; Vandereycken 2013 for the coordinates"

    _trains: ClassVar[Trains] = "tangent"

    @classmethod
    def shapes(
        cls, stage: str, number: int, groups: Groups, settings: RuleSettings, clients: int = 1
    ) -> Both:
        r = settings.rank
        up: Shapes = {}
        for g, (L, m, n) in enumerate(groups):
            up |= {f"{g}.M": (L, r, r), f"{g}.Up": (L, m, r), f"{g}.Vp": (L, n, r)}
        return point_shapes(groups, r), up

    def _kept(self, point: Point) -> Point:
        return point.extended(self.settings.rank)

    def _moved(self, g: int, point: Point, mean: Tensors) -> Point:
        return retract(point, Tangent(*(mean[f"{g}.{part}"] for part in _TANGENT)), 1.0)

    @classmethod
    def answer(
        cls, stage: str, asked: Asked, end: Mapping[str, Tensor], travelled: float = 0.0
    ) -> tuple[Tensors, Tensors]:
        names = (f"{g}.{part}" for g in groups_of(asked.sent) for part in _TANGENT)
        return copied({name: end[name] for name in names}), {}


def point_shapes(groups: Groups, rank: int) -> Shapes:
    """Of "<g>.U" (L, m, rank), "<g>.S" (L, rank) and "<g>.V" (L, n, rank)."""
    found: Shapes = {}
    for g, (L, m, n) in enumerate(groups):
        found |= {f"{g}.U": (L, m, rank), f"{g}.S": (L, rank), f"{g}.V": (L, n, rank)}
    return found


def _named(points: Sequence[Point]) -> Tensors:
    return {f"{g}.{part}": getattr(point, part) for g, point in enumerate(points) for part in _PARTS}


def _points(state: Mapping[str, Tensor]) -> list[Point]:
    return [Point(*(state[f"{g}.{part}"] for part in _PARTS)) for g in groups_of(state)]
