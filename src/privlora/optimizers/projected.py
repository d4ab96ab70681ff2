"""Rules on dense updates, fed with the estimates that projected releases give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from privlora.coordinates import DirectionCoordinates, ProjectedCoordinates, Vector
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer
from privlora.optimizers.factor_torch import FactorAdamW, FactorSGD
from privlora.optimizers.rate_units import scaled

_PERTURBATION = 1e-3


class DirectionSGD(FactorSGD):
    """theta <- theta - learning_rate c / tau z: DP-ZO (Tang et al. 2024), in units of the noise as dp-sgd."""

    coordinates: DirectionCoordinates
    space_settings: ClassVar[Mapping[str, float]] = {"perturbation": _PERTURBATION}

    def _gradients(self, release: Release) -> Vector:
        return super()._gradients(replace(release, vector=self.coordinates.estimate(release.vector)))


class DirectionAdamW(FactorAdamW):
    """torch.optim.AdamW (Loshchilov and Hutter 2019) on c z; its moments are as large as both factors, twice."""

    coordinates: DirectionCoordinates
    space_settings: ClassVar[Mapping[str, float]] = {"perturbation": _PERTURBATION}

    def _gradients(self, release: Release) -> Vector:
        return self.coordinates.estimate(release.vector)


class ProjectedSGD(Optimizer):
    """SGD with momentum beta1, in units of the noise on an entry of the estimate, as dp-sgd.

    Without momentum, Z <- Z - learning_rate / tau (n / r) P Q^T (Hu et al. 2026, Algorithm 3) in place, and no dense
    gradient is formed. With it, a buffer as large as Z is kept.
    """

    takes_weight_units: ClassVar[bool] = True

    def __init__(self, coordinates: ProjectedCoordinates, *, beta1: float = 0.0) -> None:
        self.coordinates = coordinates
        self._beta1 = beta1
        self._momentum = [torch.zeros_like(z) for (z,) in coordinates.trained] if beta1 else []

    def _update(self, release: Release, learning_rate: float) -> None:
        std = self.coordinates.gradient_std(release.noise_std) or 1.0
        if self._beta1:
            for buffer in self._momentum:
                buffer.mul_(self._beta1)
            self.coordinates.add_estimate(self._momentum, release.vector, 1 / std)
            for g, (z, buffer) in enumerate(zip(self.coordinates.updates, self._momentum, strict=True)):
                z.sub_(scaled(buffer, self.weight_units, g), alpha=learning_rate)
        else:
            vector: Vector = [(scaled(c, self.weight_units, g),) for g, (c,) in enumerate(release.vector)]
            self.coordinates.add_estimate(self.coordinates.updates, vector, -learning_rate / std)
        self.coordinates.install()

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{g}.momentum": buffer for g, buffer in enumerate(self._momentum)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for g, buffer in enumerate(self._momentum):
            buffer.copy_(tensors[f"{g}.momentum"])


class ProjectedAdamW(FactorAdamW):
    """torch.optim.AdamW (Loshchilov and Hutter 2019) on the estimates; its moments are as large as Z, twice."""

    coordinates: ProjectedCoordinates

    def _gradients(self, release: Release) -> Vector:
        return [(g,) for g in self.coordinates.gradients(release.vector)]
