"""The engine's coordinates, mechanism and optimizers on K adapters at once.

Coordinates and optimizers work on stacks of modules and never mix two of them, so the state of K adapters is that of
one adapter with K times as many modules, adapters outermost. Only what belongs to a unit, its norm and its place in a
sum, has to know whose unit it is: Captured.owners says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from privlora.mechanisms import NoiseSource
from privlora.methods import optimizer_of
from privlora.optimizers import IterateAverage
from privlora.stacked.adapter import StackedAdapter
from privlora.training.assembly import Parts


def stack_parts(parts: Parts, count: int, owner_of: Tensor) -> Parts:
    """``count`` copies of freshly built parts, side by side; ``parts`` is left as it is.

    owner_of: (all records,) int64: which copy trains on each record. Copies start alike; ``joined`` makes a state of
    different starts, for coordinates.load_state_dict.
    Raises ConfigError for methods whose space says nothing of several adapters.
    """
    adapter = StackedAdapter.like(parts.adapter, count, owner_of)
    coordinates = parts.coordinates.stacked(adapter, count)
    hyper = parts.hyper
    return replace(
        parts,
        coordinates=coordinates,
        optimizer=optimizer_of(parts.method.space, hyper, coordinates),
        average=IterateAverage(coordinates, hyper.averaging) if hyper.averaging else None,
    )


def slices(state: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Each adapter's own part of the ``state_dict`` of stacked coordinates, in order; views."""
    parts = {name: t.unflatten(0, (count, -1)).unbind() for name, t in state.items()}
    return [{name: own[k] for name, own in parts.items()} for k in range(count)]


def joined(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Inverse of ``slices``: the state of stacked coordinates, from that of each adapter's."""
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


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
