"""The engine's coordinates, mechanism and optimizers on K adapters at once.

Coordinates and optimizers work on stacks of modules and never mix two of them, so the state of K adapters is that of
one adapter with K times as many modules, adapters outermost. Only what belongs to a unit, its norm and its place in a
sum, has to know whose unit it is: that is what StackedCoordinates add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import Coordinates, Sums, Vector
from privlora.mechanisms import NoiseSource
from privlora.methods import make_optimizer
from privlora.optimizers import IterateAverage
from privlora.stacked.adapter import OwnedCaptured, StackedAdapter, owners_of
from privlora.training.assembly import Parts


def stack_parts(parts: Parts, count: int, records: int) -> Parts:
    """``count`` copies of freshly built parts, side by side, for so many records; ``parts`` is left as it is.

    Raises ConfigError for methods whose space says nothing of several adapters.
    """
    adapter = StackedAdapter.like(parts.adapter, count, records)
    coordinates = parts.coordinates.stacked(adapter, count)
    hyper = parts.hyper
    return replace(
        parts,
        coordinates=coordinates,
        optimizer=make_optimizer(parts.method.space, hyper.optimizer, coordinates, hyper.settings),
        average=IterateAverage(coordinates, hyper.averaging) if hyper.averaging else None,
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

    def norms_squared(self, captured: Captured) -> Tensor:
        return self.inner.at_units(owners_of(captured), self.adapter.count).norms_squared(captured)

    def balance(self, captured: Captured) -> Captured:
        owners = owners_of(captured)
        evened = self.inner.at_units(owners, self.adapter.count).balance(captured)
        return OwnedCaptured(evened.p, evened.q, owners=owners)

    def weighted_sum(self, captured: Captured, weights: Tensor) -> Sums:
        """sum of weights_i (P_i, Q_i) over each adapter's own units, float64."""
        owners = owners_of(captured)
        chosen = torch.zeros(self.adapter.count, captured.units, dtype=torch.float64, device=owners.device)
        chosen[owners, torch.arange(captured.units, device=owners.device)] = weights.double()
        sums = [  # (K, m, r), (K, n, r) each
            tuple((chosen @ t.double().flatten(1)).unflatten(1, t.shape[1:]) for t in pair)
            for pair in zip(captured.p, captured.q, strict=True)
        ]
        stacked: Sums = []
        start = 0
        for group in self.adapter.groups:
            p, q = zip(*sums[start : start + len(group.sites)], strict=True)
            stacked.append((torch.stack(p, dim=1).flatten(0, 1), torch.stack(q, dim=1).flatten(0, 1)))
            start += len(group.sites)
        return stacked

    def to_vector(self, sums: Sums) -> Vector:
        return self.inner.to_vector(sums)

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return self.inner.standard_normal(draw)

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        raise NotImplementedError  # a question to the inner coordinates' class

    def install(self) -> None:
        self.inner.install()

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        return self.inner.factors()

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(tensors)


class StackedNoise(NoiseSource):
    """Each adapter's part of a stack from a generator of its own, in the order in which a run of its own would draw."""

    def __init__(self, sources: Sequence[NoiseSource]) -> None:
        self.secure = all(source.secure for source in sources)
        self._sources = sources

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        each = (shape[0] // len(self._sources), *shape[1:])
        return torch.cat([source.standard_normal(each) for source in self._sources])
