"""The engine's coordinates, mechanism and optimizers on K adapters at once.

Coordinates and optimizers work on stacks of modules and never mix two of them, so the state of K adapters is that of
one adapter with K times as many modules, adapters outermost. Only what belongs to a unit, its norm and its place in a
sum, has to know whose unit it is: that is what StackedCoordinates add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from privlora.adapters import Captured
from privlora.coordinates import Coordinates, FactorCoordinates, TangentCoordinates, Vector
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point
from privlora.mechanisms import NoiseSource
from privlora.methods import make_optimizer
from privlora.optimizers import IterateAverage
from privlora.stacked.adapter import OwnedCaptured, StackedAdapter, owners_of
from privlora.training.assembly import Parts


def stack_parts(parts: Parts, count: int, records: int) -> Parts:
    """``count`` copies of freshly built parts, side by side, for so many records; ``parts`` is left as it is.

    Raises ConfigError for methods whose update is dense.
    """
    adapter = StackedAdapter.like(parts.adapter, count, records)
    coordinates = _stacked(parts.coordinates, adapter)
    hyper = parts.hyper
    return replace(
        parts,
        coordinates=coordinates,
        optimizer=make_optimizer(parts.method.space, hyper.optimizer, coordinates, hyper.settings),
        average=IterateAverage(coordinates, hyper.averaging) if hyper.averaging else None,
    )


def _stacked(one: Coordinates, adapter: StackedAdapter) -> Coordinates:
    def copies(t: Tensor) -> Tensor:
        return t.repeat(adapter.count, *(1 for _ in t.shape[1:]))

    if isinstance(one, TangentCoordinates):
        points = [Point(copies(p.U), copies(p.S), copies(p.V)) for p in one.points]
        return TangentCoordinates(adapter, points, one.dtype, right_weight=one.right_weight)
    if isinstance(one, FactorCoordinates):
        pairs = [(copies(a), copies(b)) for a, b in zip(one.left, one.right, strict=True)]
        return type(one)(adapter, pairs, one.scale, one.dtype)
    raise ConfigError(
        "methods whose update is dense cannot be trained side by side",
        why="each adapter would need a copy of the weights of its own",
        fix="choose a method of low-rank factors, or train one adapter after the other",
    )


class StackedCoordinates(Coordinates):
    """What a mechanism sees of K adapters: norms of each unit at its own adapter's state, sums adapter by adapter.

    inner: on a StackedAdapter; the optimizer's. A vector has the modules of all adapters, adapters outermost.
    """

    adapter: StackedAdapter

    def __init__(self, inner: Coordinates) -> None:
        assert isinstance(inner.adapter, StackedAdapter)
        super().__init__(inner.adapter, inner.dtype)
        self.inner = inner
        self.intrinsic = inner.intrinsic

    def norms_squared(self, captured: Captured) -> Tensor:
        return self._met_by(captured).norms_squared(captured)

    def balance(self, captured: Captured) -> Captured:
        evened = self._met_by(captured).balance(captured)
        return OwnedCaptured(evened.p, evened.q, owners=owners_of(captured))

    def weighted_sum(self, captured: Captured, weights: Tensor) -> Vector:
        """sum of weights_i (P_i, Q_i) over each adapter's own units, float64."""
        owners = owners_of(captured)
        chosen = torch.zeros(self.adapter.count, captured.units, dtype=torch.float64, device=owners.device)
        chosen[owners, torch.arange(captured.units, device=owners.device)] = weights.double()
        sums = [  # (K, m, r), (K, n, r) each
            tuple((chosen @ t.double().flatten(1)).unflatten(1, t.shape[1:]) for t in pair)
            for pair in zip(captured.p, captured.q, strict=True)
        ]
        stacked: Vector = []
        start = 0
        for group in self.adapter.groups:
            members = sums[start : start + len(group.sites)]
            stacked.append(tuple(torch.stack(ts, dim=1).flatten(0, 1) for ts in zip(*members, strict=True)))
            start += len(group.sites)
        return stacked

    def to_vector(self, raw: Vector) -> Vector:
        return self.inner.to_vector(raw)

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return self.inner.standard_normal(draw)

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    def install(self) -> None:
        self.inner.install()

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        return self.inner.factors()

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(tensors)

    def _met_by(self, captured: Captured) -> Coordinates:
        """The inner coordinates with, for each module, the point of each unit's own adapter: (L, units, …)."""
        if not isinstance(self.inner, TangentCoordinates):
            return self.inner  # norms of factor gradients do not depend on the state
        owners = owners_of(captured)

        def of_units(t: Tensor) -> Tensor:
            return t.unflatten(0, (self.adapter.count, -1))[owners].transpose(0, 1)

        met = copy(self.inner)
        met.points = [Point(of_units(p.U), of_units(p.S), of_units(p.V)) for p in self.inner.points]
        return met


class StackedNoise(NoiseSource):
    """Each adapter's part of a stack from a generator of its own, in the order in which a run of its own would draw."""

    def __init__(self, sources: Sequence[NoiseSource]) -> None:
        self.secure = all(source.secure for source in sources)
        self._sources = sources

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        each = (shape[0] // len(self._sources), *shape[1:])
        return torch.cat([source.standard_normal(each) for source in self._sources])
