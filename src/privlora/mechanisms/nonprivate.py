"""The plain mean gradient: the labelled non-private mode."""

from __future__ import annotations

import torch

from privlora.adapters import Captured
from privlora.coordinates import Coordinates
from privlora.errors import ModelError, RunError
from privlora.mechanisms.release import Mechanism, PrivateSum, Release


class MeanMechanism(Mechanism):
    """Sum of the batch's gradients over its expected size: no clipping, no noise, NO PRIVACY.

    For baselines and public data only. Refuses step T + 1, as a ledger would. Raises ModelError for a gradient
    that is not finite.
    """

    def __init__(
        self,
        coordinates: Coordinates,
        *,
        expected_batch_size: float,
        steps: int,
        done: int = 0,
        needs_examples: bool = False,
    ) -> None:
        self.coordinates = coordinates
        self.needs_examples = needs_examples
        self.expected_batch_size = expected_batch_size
        self.steps = steps
        self._done = done

    def sensitivity(self, adjacency: str = "add-or-remove-one") -> float:
        return float("inf")

    def accumulate(self, captured: Captured) -> None:
        if not bool(captured.finite().all()):
            raise ModelError(
                "the gradient of a record is not a number",
                why="without clipping the adapter is lost",
                fix="lower method.learning_rate",
            )
        self._add(self.coordinates.partial_sum(captured, torch.ones(captured.units, device=captured.device)))

    def release(self, total: PrivateSum | None = None) -> Release:
        self._count_step()
        vector = self._given(total).vector
        if vector is None:
            vector = self.coordinates.standard_normal(self._zeros)
        dtype, device = self.coordinates.dtype, self.coordinates.adapter.device
        mean = [tuple((t / self.expected_batch_size).to(dtype).to(device) for t in ts) for ts in vector]
        return Release(mean, noise_std=0.0, step=self._done)

    def _count_step(self) -> None:
        if self._done >= self.steps:
            raise RunError(f"step {self._done + 1} of a plan for {self.steps}", fix="plan more steps")
        self._done += 1

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.coordinates.dtype, device=self.coordinates.adapter.device)
