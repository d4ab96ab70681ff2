"""Where noise comes from."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from privlora.errors import PrivacyError
from privlora.mechanisms.discrete import discrete_gaussian
from privlora.randomness import counter_generator, private_key

# Entries of one stream: long next to the making of a generator, short next to what threads share out. Another size is
# another reproducible sequence.
_BLOCK = 2**17


_forks = 0  # that led to this process; a process's number can be another one's later


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_count_fork)


class NoiseSource:
    """Normal and discrete Gaussian draws from AES-128 in counter mode, with a 128-bit key of the operating system.

    The key is never stored, so no seed of a run, no checkpoint and no report can replay the noise; every process,
    also a resumed one, draws a fresh key. (torch's CPU generator keeps 32 bits of a seed, few enough to try them all.)

    insecure_seed: reproducible noise for tests. Whoever knows it can subtract the noise, so the run is stamped
    NOT PRIVATE.

    Long draws are made in blocks, by as many threads as torch uses. Every block but a draw's first, which goes on where
    the last draw ended, is a stream of the key's that no other block ever has, so entries do not depend on threads.

    A copy would draw the same noise again, and the difference of two releases would show the data. So copying is
    refused, and so is use in a forked process (PrivacyError).
    """

    def __init__(self, insecure_seed: int | None = None) -> None:
        self.secure = insecure_seed is None
        self._key = private_key(insecure_seed)
        self._generator = counter_generator(self._key)  # stream 0
        self._used, self._lock = 1, Lock()  # streams given out so far
        self._forks = _forks

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        """Independent N(0, 1) entries, float64, on the CPU. PrivacyError outside the process that made the source."""
        self._refuse_fork()
        drawn = np.empty(math.prod(shape))
        blocks = [drawn[start : start + _BLOCK] for start in range(0, drawn.size, _BLOCK)]
        streams = [0, *self._fresh_streams(len(blocks) - 1)]
        threads = min(torch.get_num_threads(), len(blocks))
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(self._fill, blocks, streams))
        else:
            list(map(self._fill, blocks, streams))
        return torch.from_numpy(drawn.reshape(shape))

    def discrete_gaussian(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        """Independent discrete Gaussian entries, int64; otherwise as ``standard_normal``. ConfigError: no such std."""
        self._refuse_fork()
        return discrete_gaussian(self._generator, std, math.prod(shape)).reshape(shape)

    def _fill(self, block: np.ndarray, stream: int) -> None:
        generator = counter_generator(self._key, stream) if stream else self._generator
        generator.standard_normal(out=block)

    def _fresh_streams(self, count: int) -> range:
        """Numbers that no other call gets, in whatever thread."""
        with self._lock:
            first = self._used
            self._used += max(count, 0)
            return range(first, self._used)

    def _refuse_fork(self) -> None:
        if _forks != self._forks:
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
