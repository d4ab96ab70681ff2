"""Averaging of the iterates in Z: less noise in the adapter, at no privacy cost."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from privlora.coordinates import Coordinates
from privlora.coordinates.base import name_factors
from privlora.coordinates.tangent import points_from_tensors, points_to_tensors
from privlora.geometry.fixed_rank import Point, average_all, factors


class IterateAverage:
    """Exponential moving average of Z_t = W_t - W0, brought back to rank r after each step.

    Z_avg <- retraction of (1 - w) Z_avg + w Z_t with w = max(1 - decay, 10 / (9 + t)), so that early iterates are
    forgotten (De et al. 2022, section 3, average factors' entries; the average of products is what the model uses).
    """

    def __init__(self, coordinates: Coordinates, decay: float) -> None:
        self.coordinates = coordinates
        self.decay = decay
        self.restart()

    def restart(self) -> None:
        """Forget all iterates but the present one."""
        self._points: list[Point] = self.coordinates.as_points()
        self._count = 0

    def update(self) -> float:
        """Take in the coordinates' state after a step; returns its weight w."""
        self._count += 1
        weight = max(1.0 - self.decay, 10.0 / (9.0 + self._count))
        if weight >= 1:
            self._points = self.coordinates.as_points()
        else:
            self._points = average_all(self._points, self.coordinates.as_products(), weight)
        return weight

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """The averaged update as one (A (L, m, r), B (L, n, r)) a group, where the coordinates are."""
        there = (A.device for A, _, _ in self.coordinates.as_products())
        return [factors(point.to(device)) for point, device in zip(self._points, there, strict=True)]

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Site name -> (A (m, r), B (n, r)) of the averaged update."""
        return name_factors(self.coordinates.adapter, self.factors())

    def state_dict(self) -> dict[str, Tensor]:
        return {**points_to_tensors(self._points), "count": self._points[0].S.new_tensor(self._count)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self._points = points_from_tensors(tensors, self._points)
        self._count = int(tensors["count"])
