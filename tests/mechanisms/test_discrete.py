"""The discrete Gaussian: its tables digit by digit, its law by counting."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms import NoiseSource
from privlora.mechanisms.discrete import MAX_STD, REACH, _block_width, _levels, discrete_gaussian
from privlora.randomness import private_generator

SMALL = [0.5, 0.6, 1.0, 3.7, 50.0]
LARGE = [2.0**20, 1.37 * 2.0**20, 2.0**40]


def drawn(std: float, count: int, seed: int = 1) -> np.ndarray:
    return discrete_gaussian(private_generator(seed), std, count)


@pytest.mark.parametrize("std", SMALL)
def test_it_is_the_exact_law(std: float) -> None:
    count, reach = 400_000, int(10 * std) + 10
    k = np.arange(-reach, reach + 1)
    expected = np.exp(-(k**2) / (2 * std**2))
    expected *= count / expected.sum()
    found = np.bincount(drawn(std, count) + reach, minlength=2 * reach + 1).astype(float)
    assert len(found) == 2 * reach + 1
    common = expected >= 10
    # What is rare counts together, and both tails have to be there.
    rare_expected, rare_found = expected[~common].sum(), found[~common].sum()
    assert rare_found == pytest.approx(rare_expected, abs=6 * math.sqrt(rare_expected + 1))
    scaled = expected[common] * found[common].sum() / expected[common].sum()
    assert chisquare(found[common], scaled).pvalue > 1e-3


@pytest.mark.parametrize("std", LARGE)
def test_large_ones_are_normal_but_for_the_grid(std: float) -> None:
    z = drawn(std, 1_000_000)
    assert z.dtype == np.int64
    assert kstest(z / std, "norm").pvalue > 1e-3
    assert (z / std).var() == pytest.approx(1.0, abs=0.006)  # four standard errors
    assert abs((z / std).mean()) < 0.004
    assert abs(int((z < 0).sum()) - 500_000) < 2_500
    assert abs(int((z % 2 == 0).sum()) - 500_000) < 2_500
    assert (np.abs(z) > 4 * std).sum() == pytest.approx(63.3, abs=40)


@pytest.mark.parametrize("std", [50.0, 2.0**20])
def test_within_a_block_the_law_falls(std: float) -> None:
    """Chi-square of the offset in the blocks between one and two standard deviations, where uniform ones would show."""
    width = _block_width(std)
    magnitudes = np.abs(drawn(std, 400_000))
    inside = magnitudes[(magnitudes >= std) & (magnitudes < 2 * std)]
    halves = (inside % width) * 2 // width
    starts = np.arange(math.ceil(std), math.ceil(2 * std))
    weights = np.exp(-(starts.astype(float) ** 2) / (2 * std**2))
    expected = np.bincount((starts % width) * 2 // width, weights)
    found = np.bincount(halves)
    assert chisquare(found, expected * len(inside) / expected.sum()).pvalue > 1e-3
    assert chisquare(found).pvalue < 1e-6


@pytest.mark.parametrize("std", [*SMALL, 5.0, 15.9, 16.0, *LARGE])
def test_tables_are_the_law_to_their_last_digit_in_the_tails_too(std: float) -> None:
    levels, width = _levels(std), _block_width(std)
    assert width == 1 or std / 16 < width <= std / 8
    reached = Fraction(1)
    with localcontext() as context:
        context.prec = 60
        step = Decimal(width) ** 2 / (2 * Decimal(std) ** 2)
        zero: Fraction | None = None
        for number, level in enumerate(levels):
            edges = [0, *map(int, level.thresholds), *([2**64] if level.last else [])]
            assert len(edges) == level.end - level.first + 1
            for block, low, high in zip(range(level.first, level.end), edges, edges[1:], strict=False):
                probability = reached * Fraction(high - low, 2**64)
                zero = probability if zero is None else zero
                exact = Fraction((-step * block * block).exp())
                if std >= 5:
                    assert abs(probability / zero / exact - 1) < Fraction(1, 2**48)
                    assert high - low > 2**53
                else:
                    assert abs(probability / zero - exact) < Fraction(1, 2**62)
            reached *= Fraction(2**64 - edges[-1], 2**64)
            assert level.last == (number == len(levels) - 1)
            if not level.last:
                assert std < 5 or 2**64 - edges[-1] > 2**53
                assert levels[number + 1].first == level.end
    assert levels[-1].end * width > REACH * std - width


class Extreme:
    """Words of ones alone, and uniforms that accept everything."""

    def integers(self, low: int, high: int, n: int, dtype: Any) -> np.ndarray:
        return np.full(n, high - 1, dtype=dtype)

    def random(self, n: int) -> np.ndarray:
        return np.zeros(n)


@pytest.mark.parametrize("std", [*SMALL, *LARGE])
def test_nothing_lies_beyond_the_reach(std: float) -> None:
    generator: Any = Extreme()
    (z,) = discrete_gaussian(generator, std, 1)
    assert -REACH * std - _block_width(std) < z < -(REACH - 1) * std + 1


@pytest.mark.parametrize("std", [5.0, *SMALL[-1:], *LARGE])
def test_what_is_never_drawn_has_less_than_its_stated_share(std: float) -> None:
    """2^-121, of all that lies beyond 13 standard deviations: on a smaller reach delta would have to count it."""
    first = _levels(std)[-1].end * _block_width(std)  # the nearest that is not drawn
    assert first > 13 * std - _block_width(std)
    with localcontext() as context:
        context.prec = 60
        spread = 2 * Decimal(std) ** 2
        near, step = Decimal(first) ** 2 / spread, Decimal(2 * first + 1) / spread
        # Both tails, bounded by geometric ones, against sqrt(2 pi) s, which is the whole to within 2^-100.
        beyond = 2 * (-near).exp() / (1 - (-step).exp())
        assert beyond < Decimal(2) ** -120 * Decimal(math.sqrt(2 * math.pi)) * Decimal(std)


def test_only_an_insecure_seed_repeats_it() -> None:
    assert np.array_equal(drawn(9.0, 1000), drawn(9.0, 1000))
    assert not np.array_equal(drawn(9.0, 1000), drawn(9.0, 1000, seed=2))
    one, two = (NoiseSource().discrete_gaussian((1000,), 9.0) for _ in range(2))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("count", [0, 1, 17, 65_536, 70_001])
def test_there_are_as_many_as_asked_for(count: int) -> None:
    z = drawn(2.0**20, count)
    assert z.shape == (count,)
    assert len(np.unique(z)) >= 0.9 * count


def test_chunks_do_not_repeat() -> None:
    z = drawn(2.0**40, 200_000)
    assert len(np.unique(z)) == len(z)


@pytest.mark.parametrize("std", [0.0, 0.49, -1.0, 2 * MAX_STD, float("inf"), float("nan")])
def test_other_stds_are_refused(std: float) -> None:
    with pytest.raises(ConfigError, match="cannot be drawn"):
        drawn(std, 3)


def test_a_fork_does_not_draw_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = NoiseSource()
    assert source.discrete_gaussian((2, 3), 8.0).shape == (2, 3)
    monkeypatch.setattr("privlora.mechanisms.noise._forks", -1)
    with pytest.raises(PrivacyError, match="another process"):
        source.discrete_gaussian((2,), 8.0)
