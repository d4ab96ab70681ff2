"""A clipping norm that follows a quantile of the units' norms, learnt from noisy counts (Andrew et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# C_t stays within this factor of where it started, even if all gradients are zero or infinite.
_FARTHEST = 1e6


class AdaptiveClipNorm:
    """C_t, the norm to which units are clipped at step t. Public: a function of earlier noisy counts alone.

    C_{t+1} = C_t exp(-rate (f_t - quantile)), where f_t is the noisy share of the batch's norms that are <= C_t
    (Andrew et al. 2021, section 2). initial: C_1 > 0. quantile: in (0, 1). rate: the paper has 0.2, which is too slow
    for short runs.
    """

    def __init__(self, initial: float, quantile: float, rate: float = 0.5) -> None:
        self.initial = initial
        self.quantile = quantile
        self.rate = rate
        self.value = initial

    def update(self, share: float) -> None:
        """Move ``value`` by the noisy share of norms that were <= ``value``; with noise, it may lie outside [0, 1]."""
        moved = self.value * math.exp(self.rate * (self.quantile - min(max(share, 0.0), 1.0)))
        self.value = min(max(moved, self.initial / _FARTHEST), self.initial * _FARTHEST)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": torch.tensor(self.value, dtype=torch.float64)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.value = float(tensors["value"])
