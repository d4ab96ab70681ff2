"""Discrete Gaussian noise: integers k with probability proportional to exp(-k^2 / 2 s^2), many at a time.

|k| is drawn by rejection. With B a power of two, at most s / 8 (1 below s = 16), and |k| = a B + j, 0 <= j < B:

    block a      with probability proportional to exp(-(a B)^2 / 2 s^2), from a table
    offset j     uniform, from the lowest bits of a word
    accept       with probability exp(-j (2 a B + j) / 2 s^2), at least 0.19 and 0.95 or more on average for large s
    sign         one bit; negative zero is drawn again

That is the rejection of Canonne, Kamath and Steinke (2020) and of Karney (2016) with proposals much nearer to the law.

What is exact: integers, bits, and tables whose integer thresholds (of 2^64) are computed with 60 digits. The table has
levels. Each ends where 1/64 of its probability is left, which a fresh word then distributes, so for s >= 5 every
probability that is compared with a word is above 2^-11 and its relative error below 2^-53, also in the tails. What is
floating point: the probability of acceptance alone, a float64 with a relative error below 2^-49, compared with a
uniform of 53 bits.

So for s >= 5 every k up to 13 s has its probability within a factor of 1 +- 2^-47, and none beyond is drawn; those have
2^-121 in all. Below s = 5 tails fall faster than levels can follow, and are exact to 2^-62 absolutely.

What that costs in privacy is in accounting.secure_sums, which asks for s >= 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np

from privlora.errors import ConfigError

MIN_STD, MAX_STD = 0.5, 2.0**40
# Farther from zero than so many standard deviations nothing is drawn.
REACH = 13

_CHUNK = 1 << 16  # proposals at a time, so that they stay in the processor's cache
_LEVEL = Decimal(1) / 64  # a level of the table ends where this share of it is left
_DIGITS = 60


@dataclass(frozen=True)
class _Level:
    """Blocks ``first`` to ``end`` - 1. thresholds: of cumulated probability, times 2^64. A word beyond all of them goes
    to the next level, if there is one (``last``)."""

    first: int
    end: int
    thresholds: np.ndarray
    last: bool


def discrete_gaussian(generator: np.random.Generator, std: float, count: int) -> np.ndarray:
    """``count`` independent integers, int64, with P(k) proportional to exp(-k^2 / 2 std^2).

    Args:
        generator: of uniform 64-bit words; for private noise unforeseeable ones (randomness.private_generator).
        std: parameter s; the standard deviation too, to 1e-6 from s = 1 on.
        count: how many.

    Raises:
        ConfigError: ``std`` is outside [0.5, 2^40].
    """
    levels = _levels(std)
    drawn = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        # About one of twenty proposals is rejected, for small std every third.
        proposals = min(_CHUNK, (count - done) * 9 // 8 + 16)
        kept = _proposed(generator, std, levels, proposals)[: count - done]
        drawn[done : done + len(kept)] = kept
        done += len(kept)
    return drawn


def _proposed(generator: np.random.Generator, std: float, levels: tuple[_Level, ...], n: int) -> np.ndarray:
    """Those of n proposals that were accepted."""
    width = _block_width(std)
    starts = _blocks(generator, levels, n) * width
    words = _words(generator, n)
    offsets = (words & np.uint64(width - 1)).astype(np.int64)
    # Both factors are below 2^45, so only their product and the quotient are rounded.
    exponents = offsets.astype(np.float64) * (2 * starts + offsets).astype(np.float64) / (2 * std * std)
    negative = words >> np.uint64(63) == 1
    magnitudes = starts + offsets
    accepted = (generator.random(n) < np.exp(-exponents)) & ~(negative & (magnitudes == 0))
    return np.where(negative, -magnitudes, magnitudes)[accepted]


def _blocks(generator: np.random.Generator, levels: tuple[_Level, ...], n: int) -> np.ndarray:
    """n independent blocks, int64."""
    blocks = np.empty(n, dtype=np.int64)
    open_ = np.arange(n)
    for level in levels:
        found = level.first + np.searchsorted(level.thresholds, _words(generator, len(open_)), side="right")
        blocks[open_] = found
        if level.last:
            break
        open_ = open_[found == level.end]
    return blocks


def _words(generator: np.random.Generator, n: int) -> np.ndarray:
    return generator.integers(0, 2**64, n, dtype=np.uint64)


def _block_width(std: float) -> int:
    """B: the largest power of two that is at most std / 8, or 1."""
    return 1 << max(0, math.frexp(std)[1] - 4)


@lru_cache(maxsize=8)
def _levels(std: float) -> tuple[_Level, ...]:
    if not MIN_STD <= std <= MAX_STD:
        raise ConfigError(
            f"a discrete Gaussian of standard deviation {std:g} cannot be drawn",
            why="tables and 64-bit words are made for 0.5 to 2^40",
            fix="choose another width of the lattice",
        )
    width = _block_width(std)
    with localcontext() as context:
        context.prec = _DIGITS
        step = Decimal(width) ** 2 / (2 * Decimal(std) ** 2)
        weights = [(-step * a * a).exp() for a in range(int(REACH * std) // width + 1)]
        beyond = [Decimal(0)]
        for weight in reversed(weights):
            beyond.append(beyond[-1] + weight)
        left = beyond[::-1]  # left[a]: weight of blocks a, a + 1, …
        levels = []
        first = 0
        while first < len(weights):
            end = next(a for a in range(first + 1, len(left)) if left[a] < left[first] * _LEVEL)
            last = end == len(weights)
            cuts = range(first + 1, end if last else end + 1)
            scaled = [int((2**64 * (1 - left[a] / left[first])).to_integral_value()) for a in cuts]
            levels.append(_Level(first, end, np.array(scaled, dtype=np.uint64), last))
            first = end
    return tuple(levels)
