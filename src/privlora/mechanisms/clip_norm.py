"""A clipping norm that follows a quantile of the units' norms, learnt from noisy counts (Andrew et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# Share of 1 / sigma^2 that the count takes: the noise on the sum is 0.5 % larger, that on the count is 5 sigma.
_COUNTS_SHARE = 0.01
# C_t stays within this factor of where it started, even if all gradients are zero or infinite.
_FARTHEST = 1e6


def split_noise_multiplier(noise_multiplier: float) -> tuple[float, float]:
    """Noise multiplier of the sum and standard deviation of the count in one release of (sum / C, count).

    A unit moves the sum by at most C, and the count (of +1/2 and -1/2) by 1/2. So both together are one Gaussian
    mechanism with 1/sigma^2 = 1/sigma_sum^2 + 1/(2 sigma_count)^2 (Andrew et al. 2021, Theorem 1).

    >>> split_noise_multiplier(1.0)
    (1.005037815259212, 5.0)
    """
    return noise_multiplier / math.sqrt(1 - _COUNTS_SHARE), noise_multiplier / (2 * math.sqrt(_COUNTS_SHARE))


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
