"""torch's optimizers on dense updates, fed with the estimates that projected releases give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from privlora.coordinates import ProjectedCoordinates, Vector
from privlora.mechanisms import Release
from privlora.optimizers.factor_torch import TorchOptimizer


class ProjectedOptimizer(TorchOptimizer):
    """A rule on Z itself, so that its moments outlive the projections; each step draws the next projection."""

    coordinates: ProjectedCoordinates

    def _gradients(self, release: Release) -> Vector:
        return [(g,) for g in self.coordinates.gradients(release.vector)]

    def _update(self, release: Release, learning_rate: float) -> None:
        super()._update(release, learning_rate)
        self.coordinates.refresh()


class ProjectedSGD(ProjectedOptimizer):
    """torch.optim.SGD with momentum beta1, in units of the noise on an entry of the estimate, as dp-sgd.

    Without momentum it keeps no state: Z <- Z - learning_rate / tau (n / r) P Q^T (Hu et al. 2026, Algorithm 3).
    """

    settings: ClassVar[Mapping[str, float]] = {"beta1": 0.0}

    def __init__(self, coordinates: ProjectedCoordinates, *, beta1: float = 0.0) -> None:
        super().__init__(
            coordinates, lambda module: torch.optim.SGD(module.parameters(), lr=1.0, momentum=beta1)
        )

    def _gradients(self, release: Release) -> Vector:
        std = self.coordinates.gradient_std(release.noise_std)
        return [tuple(t / std for t in parts) if std else parts for parts in super()._gradients(release)]


class ProjectedAdamW(ProjectedOptimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019) on the estimates; its moments are as large as Z, twice."""

    settings: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}

    def __init__(
        self,
        coordinates: ProjectedCoordinates,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            coordinates,
            lambda module: torch.optim.AdamW(
                module.parameters(), lr=1.0, betas=betas, weight_decay=weight_decay
            ),
        )
