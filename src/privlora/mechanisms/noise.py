"""Where noise comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from privlora.randomness import private_generator


class NoiseSource:
    """Standard normal float64 draws from AES-128 in counter mode, with a 128-bit key of the operating system.

    The key is never stored, so no seed of a run, no checkpoint and no report can replay the noise; every process,
    also a resumed one, draws a fresh key. (torch's CPU generator keeps 32 bits of a seed, few enough to try them all.)

    insecure_seed: reproducible noise for tests. Whoever knows it can subtract the noise, so the run is stamped
    NOT PRIVATE.
    """

    def __init__(self, insecure_seed: int | None = None) -> None:
        self.secure = insecure_seed is None
        self._generator = private_generator(insecure_seed)

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        """Independent N(0, 1) entries, float64, on the CPU."""
        return torch.from_numpy(self._generator.standard_normal(shape))
