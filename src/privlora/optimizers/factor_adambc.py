"""DP-AdamBC: Adam whose second moment is freed from the noise's own variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from privlora.coordinates import FactorCoordinates
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer
from privlora.optimizers.rate_units import scaled

# The root of the smallest second moment where there is no noise, as Adam's epsilon.
_EPSILON = 1e-8


class FactorAdamBC(Optimizer):
    """theta <- theta - learning_rate * m^ / sqrt(max(v^ - tau^2, gamma)) (Tang et al. 2024, Algorithm 1).

    m^ and v^ are Adam's bias-corrected moments and tau = sigma C / b is the noise's standard deviation in each
    coordinate. floor: gamma in units of tau^2; a coordinate that sees only noise moves by learning_rate * m^ / (tau
    sqrt(floor)).
    """

    takes_weight_units: ClassVar[bool] = True

    def __init__(
        self, coordinates: FactorCoordinates, *, beta1: float = 0.9, beta2: float = 0.999, floor: float = 1.0
    ) -> None:
        self.coordinates = coordinates
        self.beta1, self.beta2 = beta1, beta2
        self.floor = floor
        self._count = 0
        self._parameters = [t for tensors in coordinates.trained for t in tensors]
        self._m = [torch.zeros_like(t) for t in self._parameters]
        self._v = [torch.zeros_like(t) for t in self._parameters]

    def _update(self, release: Release, learning_rate: float) -> None:
        self._count += 1
        beta1, beta2 = self.beta1, self.beta2
        noise = release.noise_std**2
        gradients = [(g, t) for g, tensors in enumerate(release.vector) for t in tensors]
        for parameter, (group, gradient), m, v in zip(
            self._parameters, gradients, self._m, self._v, strict=True
        ):
            m.lerp_(gradient, 1 - beta1)
            v.lerp_(gradient.square(), 1 - beta2)
            signal = v / (1 - beta2**self._count) - noise
            root = signal.clamp_min(max(self.floor * noise, _EPSILON**2)).sqrt()
            step = scaled(m / root, self.weight_units, group)
            parameter.sub_(step, alpha=learning_rate / (1 - beta1**self._count))
        self.coordinates.install()

    def state_dict(self) -> dict[str, Tensor]:
        tensors = {"count": torch.tensor(self._count)}
        for i, (m, v) in enumerate(zip(self._m, self._v, strict=True)):
            tensors |= {f"{i}.m": m, f"{i}.v": v}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self._count = int(tensors["count"])
        for i, (m, v) in enumerate(zip(self._m, self._v, strict=True)):
            m.copy_(tensors[f"{i}.m"])
            v.copy_(tensors[f"{i}.v"])
