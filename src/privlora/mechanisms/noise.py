"""Where noise comes from."""

from __future__ import annotations

import math
import os
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from privlora.errors import PrivacyError
from privlora.mechanisms.discrete import discrete_gaussian
from privlora.randomness import private_generator


class NoiseSource:
    """Normal and discrete Gaussian draws from AES-128 in counter mode, with a 128-bit key of the operating system.

    The key is never stored, so no seed of a run, no checkpoint and no report can replay the noise; every process,
    also a resumed one, draws a fresh key. (torch's CPU generator keeps 32 bits of a seed, few enough to try them all.)

    insecure_seed: reproducible noise for tests. Whoever knows it can subtract the noise, so the run is stamped
    NOT PRIVATE.

    A copy would draw the same noise again, and the difference of two releases would show the data. So copying is
    refused, and so is use in a forked process (PrivacyError).
    """

    def __init__(self, insecure_seed: int | None = None) -> None:
        self.secure = insecure_seed is None
        self._generator = private_generator(insecure_seed)
        self._process = os.getpid()

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        """Independent N(0, 1) entries, float64, on the CPU. PrivacyError outside the process that made the source."""
        self._refuse_fork()
        return torch.from_numpy(self._generator.standard_normal(shape))

    def discrete_gaussian(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        """Independent discrete Gaussian entries, int64; otherwise as ``standard_normal``. ConfigError: no such std."""
        self._refuse_fork()
        return discrete_gaussian(self._generator, std, math.prod(shape)).reshape(shape)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                "a source of noise is used in another process than the one that made it",
                why="both would draw the same noise, and the difference of their releases has none",
                fix="make the source, or the run, in the process that uses it",
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError(
            "a source of noise cannot be copied or stored",
            why="the copy would draw the same noise, and the difference of two releases with it has none",
            fix="make a new NoiseSource",
        )
