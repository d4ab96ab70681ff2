"""The optimizer of a classifier: the method's own for the adapter, AdamW for the last layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from privlora.coordinates.headed import HeadedCoordinates, of_head
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer
from privlora.optimizers.factor_torch import FactorAdamW


class HeadedOptimizer(Optimizer):
    """``body`` moves the adapter along its part of each release; AdamW moves the last layer, at the same rate."""

    def __init__(self, coordinates: HeadedCoordinates, body: Optimizer) -> None:
        self.coordinates, self.body = coordinates, body
        self.head = FactorAdamW(coordinates.head)
        self._at = len(coordinates.headed.body.groups)

    def _update(self, release: Release, learning_rate: float) -> None:
        self.body.step(release.of(slice(None, self._at)), learning_rate)
        self.head.step(release.of(slice(self._at, None)), learning_rate)

    def transport(self, before: Mapping[str, Tensor], noise_std: float) -> None:
        self.body.transport(before, noise_std)
        self.head.transport(of_head(before), noise_std)

    def place(self, device: torch.device) -> None:
        self.body.place(device)
        self.head.place(device)

    def reset(self) -> None:
        self.body.reset()
        self.head.reset()

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.body.state_dict(), **{f"head.{n}": t for n, t in self.head.state_dict().items()}}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.body.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("head.")})
        self.head.load_state_dict(of_head(tensors))
