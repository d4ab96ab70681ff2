"""Rules on both factors, fed with the gradients that differences along one direction stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from privlora.coordinates import DirectionCoordinates, Vector
from privlora.mechanisms import Release
from privlora.optimizers.factor_torch import FactorAdamW, FactorSGD

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
