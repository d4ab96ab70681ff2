"""The engine's coordinates, mechanism and optimizers on K adapters at once.

Coordinates and optimizers work on stacks of modules and never mix two of them, so the state of K adapters is that of
one adapter with K times as many modules, adapters outermost. Only what belongs to a unit, its norm and its place in a
sum, has to know whose unit it is: Captured.owners says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from privlora.mechanisms import NoiseSource
from privlora.methods import make_optimizer
from privlora.optimizers import IterateAverage
from privlora.stacked.adapter import StackedAdapter
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


class StackedNoise(NoiseSource):
    """Each adapter's part of a stack from a generator of its own, in the order in which a run of its own would draw."""

    def __init__(self, sources: Sequence[NoiseSource]) -> None:
        self.secure = all(source.secure for source in sources)
        self._sources = sources

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        each = (shape[0] // len(self._sources), *shape[1:])
        return torch.cat([source.standard_normal(each) for source in self._sources])

    def discrete_gaussian(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        each = (shape[0] // len(self._sources), *shape[1:])
        return np.concatenate([source.discrete_gaussian(each, std) for source in self._sources])
