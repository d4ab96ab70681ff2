"""One random direction a step: units are described by how their losses differ along it, and no gradient is taken."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Coordinates, Sums, Vector, float64_device
from privlora.coordinates.evened import Evened
from privlora.coordinates.factors import FactorCoordinates
from privlora.errors import ConfigError
from privlora.randomness import counter_generator

# A key is kept as two non-negative int64 halves.
_HALF = 63


class DirectionCoordinates(FactorCoordinates):
    """c = (L(theta + lambda z) - L(theta - lambda z)) / (2 lambda): one number a unit (Tang et al. 2024, DP-ZO).

    theta are both factors, as FactorCoordinates have them, and z has independent standard normal entries, drawn anew
    for each release. Of records the two losses are taken and nothing else, without a graph (``aside``). Clipping and
    noise are of c, so a unit moves a release by C at most whatever z is: it is public, and anybody may foresee it.
    What is released stands for the gradient c z of theta (``estimate``).

    theta is never stepped there and back: what the model computes with is another tensor, so no bit of theta depends
    on who was in a batch. Each unit goes through the model by itself, because a difference of nearly equal losses
    enlarges what company in a micro-batch rounds.

    Gradients that are given, such as those of an audit's canaries, count by their derivative along z, which c is for
    small lambda.

    perturbation: lambda. key: of the directions, the operating system's from ``begin`` on; the direction of a release
    follows from key and count alone, which are the state's, so it is fixed before a batch is drawn. Raises ConfigError
    for dropout in the adapter, or if lambda is not positive.
    """

    entrywise = False
    forward_only = True
    # No server moves what a direction was drawn for.
    state_parts: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        adapter: LowRankAdapter,
        factors: list[tuple[Tensor, Tensor]],
        scale: float,
        dtype: torch.dtype = torch.float32,
        *,
        perturbation: float = 1e-3,
        key: int = 0,
    ) -> None:
        if adapter.dropout:
            raise ConfigError(
                "adapter.lora_dropout does not go with differences of losses",
                why="both losses would be those of other masks, and differ by these and not along the direction",
                fix="set adapter.lora_dropout=0",
            )
        if not perturbation > 0:
            raise ConfigError(
                f"perturbation={perturbation:g} is not positive",
                why="losses are compared so far along the direction, to both sides",
                fix="set method.perturbation to a small number, such as 1e-3",
            )
        super().__init__(adapter, factors, scale, dtype)
        self.perturbation = perturbation
        self._key, self._count = key, 0
        self._draw()
        adapter.compared = self
        adapter.one_by_one = True

    @contextmanager
    def aside(self, steps: float) -> Iterator[None]:
        """Inside, the model computes with theta + steps lambda z; afterwards with theta, as it was to the bit."""
        far = steps * self.perturbation
        try:
            for group, (left, right), (u, v) in zip(
                self.adapter.groups, self._pairs, self.direction, strict=True
            ):
                mid = left.new_full((left.shape[0], left.shape[-1]), self.scale)
                self.adapter.install(group, left + far * u, mid, right + far * v)
            yield
        finally:
            self.install()

    def estimate(self, vector: Vector) -> Vector:
        """The gradient c z of both factors that a released c stands for."""
        ((c,),) = vector
        return [(c * u, c * v) for u, v in self.direction]

    def encode(self, captured: Captured) -> Captured:
        return replace(captured, columns=self._columns(captured))

    def norms_squared(self, captured: Captured) -> Tensor:
        return self._columns(captured).square().sum(dim=1)

    def module_norms_squared(self, captured: Captured) -> Tensor:
        return Coordinates.module_norms_squared(self, captured)

    def evened(self, captured: Captured) -> Evened:
        return Coordinates.evened(self, captured)

    def partial_sum(self, captured: Captured, weights: Tensor) -> Vector:
        columns = self._columns(captured)
        weights = weights.to(columns)
        # 0 times a difference that is not finite is not 0.
        return [(weights @ torch.where((weights != 0)[:, None], columns, 0.0),)]

    def from_partial(self, total: Sums | Vector) -> Vector:
        return list(total)

    def to_vector(self, sums: Sums) -> Vector:
        parts = [
            (side * z.to(side)).sum()
            for pair, directions in zip(sums, self.direction, strict=True)
            for side, z in zip(pair, directions, strict=True)
        ]
        return [(self.scale * torch.stack(parts).sum()[None],)]

    def laid_out(self, captured: Captured) -> None:  # type: ignore[override]
        return None

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return [(draw((1,)),)]

    def moved_numbers(self) -> list[int]:
        return Coordinates.moved_numbers(self)

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return 1

    def expected_squares(self) -> None:  # type: ignore[override]
        return None

    def state_dict(self) -> dict[str, Tensor]:
        halves = [self._key >> _HALF, self._key & (2**_HALF - 1)]
        return super().state_dict() | {"key": torch.tensor(halves), "count": torch.tensor(self._count)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        high, low = tensors["key"].tolist()
        self._key, self._count = (high << _HALF) | low, int(tensors["count"])
        self._draw()
        super().load_state_dict(tensors)

    def begin(self) -> None:
        """A fresh key, also after a checkpoint: what was charged and lost has used its direction with other records."""
        self._key = secrets.randbits(2 * _HALF)
        self._draw()

    def advance(self) -> bool:
        """Draw the direction of the next release."""
        self._count += 1
        self._draw()
        return True

    def stacked(self, adapter: LowRankAdapter, count: int) -> FactorCoordinates:
        raise ConfigError(
            f"adapters in {type(self).__name__} cannot be trained side by side",
            why="each would be compared along a direction of its own, by passes of its own",
            fix="choose another method, or train one adapter after the other",
        )

    def _columns(self, captured: Captured) -> Tensor:
        """(units, 1) float64: what passes gave, or derivatives along z of gradients that were given."""
        if captured.columns is not None:
            return captured.columns
        total = torch.zeros(captured.units, dtype=torch.float64, device=float64_device(captured.device))
        for pair, directions in zip(captured.stacked(self.adapter.sizes), self.direction, strict=True):
            for side, z in zip(pair, directions, strict=True):  # (L, units, r, m) and (L, m, r)
                products = side.to(total.device).double() * z.mT[:, None].to(total)
                total += products.sum(dim=(0, 2, 3))
        return self.scale * total[:, None]

    def _draw(self) -> None:
        generator = counter_generator(self._key, stream=self._count)

        def like(t: Tensor) -> Tensor:
            return torch.from_numpy(generator.standard_normal(tuple(t.shape))).to(t)

        self.direction = [(like(left), like(right)) for left, right in self._pairs]
