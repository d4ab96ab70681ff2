"""The optimizer of a classifier: the method's own for the adapter, AdamW for the last layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from privlora.coordinates.base import name_factors
from privlora.coordinates.headed import HeadedCoordinates, of_head
from privlora.mechanisms import Release
from privlora.optimizers.averaging import IterateAverage
from privlora.optimizers.base import Optimizer
from privlora.optimizers.factor_torch import FactorAdamW


class HeadedOptimizer(Optimizer):
    """``body`` moves the adapter along its part of each release; AdamW moves the last layer, at the same rate.

    unit: of the last layer, which has no frozen matrix to be measured by (a new one's entries are what its initialiser
    drew, or zeros): what the body's rate is multiplied by. 1 where that is in entries; where it is in the size of the
    frozen weights, the usual unit of the body's space (`methods.Space.weight_unit`), whatever model it is on.
    """

    def __init__(self, coordinates: HeadedCoordinates, body: Optimizer, unit: float = 1.0) -> None:
        self.coordinates, self.body, self._unit = coordinates, body, unit
        self.head = FactorAdamW(coordinates.head)
        self._at = len(coordinates.headed.body.groups)

    def _update(self, release: Release, learning_rate: float) -> None:
        self.body.step(release.of(slice(None, self._at)), learning_rate)
        self.head.step(release.of(slice(self._at, None)), self._unit * learning_rate)

    def transport(self, before: Mapping[str, Tensor], noise_std: float) -> None:
        self.body.transport(before, noise_std)
        self.head.transport(of_head(before), noise_std)

    def reset(self) -> None:
        self.body.reset()
        self.head.reset()

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.body.state_dict(), **{f"head.{n}": t for n, t in self.head.state_dict().items()}}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.body.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("head.")})
        self.head.load_state_dict(of_head(tensors))


class HeadedAverage(IterateAverage):
    """`IterateAverage` of the adapter, and with the same weights the plain average of the last layer's entries."""

    def __init__(self, coordinates: HeadedCoordinates, decay: float) -> None:
        self._both = coordinates
        super().__init__(coordinates.body, decay)

    def restart(self) -> None:
        super().restart()
        self._head = self._both.head.right[0].clone()  # (1, features, outputs)

    def update(self) -> float:
        weight = super().update()
        self._head = torch.lerp(self._head, self._both.head.right[0], min(1.0, weight))
        return weight

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        left = self._both.head.left[0]
        return [*super().factors(), (left, self._head.to(left.device))]

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        return name_factors(self._both.adapter, self.factors())

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "head": self._head}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        self._head = tensors["head"].to(self._head.device, self._head.dtype)
