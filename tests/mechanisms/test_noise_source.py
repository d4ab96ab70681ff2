"""Noise comes from a key of the operating system that nobody else ever sees."""

from __future__ import annotations

import copy
import os
import pickle
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.stats import kstest

import privlora.randomness
from privlora.errors import PrivacyError
from privlora.mechanisms import NoiseSource, noise
from privlora.mechanisms.noise import _BLOCK
from privlora.randomness import counter_generator


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, which comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_draws_are_standard_normal_in_float64() -> None:
    drawn = NoiseSource(insecure_seed=1).standard_normal((200, 100))
    assert drawn.dtype == torch.float64
    assert drawn.shape == (200, 100)
    values = drawn.flatten().numpy()
    assert kstest(values, "norm").pvalue > 0.01
    for wrong in (2 / 3, 1.5, 1.05):
        assert kstest(wrong * values, "norm").pvalue < 1e-3
    assert len(np.unique(values)) == len(values)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_no_public_seed_fixes_it() -> None:
    drawn = []
    for _ in range(3):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        drawn.append(NoiseSource().standard_normal((50,)))
    assert not set(drawn[0].tolist()) & set(drawn[1].tolist()) & set(drawn[2].tolist())
    assert NoiseSource().secure


def test_every_source_takes_128_fresh_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def randbits(k: int) -> int:
        asked.append(k)
        return real(k)

    real = secrets.randbits
    monkeypatch.setattr(privlora.randomness.secrets, "randbits", randbits)
    NoiseSource()
    NoiseSource()
    assert asked == [128, 128]


def test_it_leaves_public_generators_alone() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    NoiseSource().standard_normal((10,))
    assert torch.equal(torch.randn(4), expected)


def test_an_insecure_seed_repeats_and_says_so() -> None:
    one, two = (NoiseSource(insecure_seed=7) for _ in range(2))
    assert torch.equal(one.standard_normal((5,)), two.standard_normal((5,)))
    assert not torch.equal(one.standard_normal((5,)), NoiseSource(insecure_seed=7).standard_normal((5,)))
    assert not one.secure


def test_long_draws_are_standard_normal_too() -> None:
    """Whole blocks and their seams; a shape that ends within the fourth."""
    drawn = NoiseSource(insecure_seed=3).standard_normal((7, 3 * _BLOCK // 7, 1))
    assert drawn.dtype == torch.float64
    assert drawn.shape == (7, 3 * _BLOCK // 7, 1)
    values = drawn.flatten().numpy()
    assert kstest(values, "norm").pvalue > 0.01
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = np.sqrt(np.prod(range(1, 2 * power, 2)) / len(values))
        assert abs((values**power).mean() - moment) < 4 * spread
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(len(values))
    assert kstest(1.05 * values, "norm").pvalue < 1e-9


def test_blocks_are_independent() -> None:
    blocks = NoiseSource(insecure_seed=4).standard_normal((6, _BLOCK)).numpy()
    for shift in (0, 1, 2):
        rolled = np.roll(blocks, shift, axis=1)
        for form in (np.asarray, np.square):
            found = np.corrcoef(form(blocks), form(rolled))[:6, 6:]
            apart = found if shift else found - np.eye(6)
            assert np.abs(apart).max() < 5 / np.sqrt(_BLOCK)


def test_no_two_blocks_have_a_stream_in_common() -> None:
    source = NoiseSource()
    draws = [source.standard_normal((size,)) for size in (3 * _BLOCK + 5, _BLOCK, 10, 2 * _BLOCK, 1)]
    values = torch.cat(draws).numpy()
    assert len(np.unique(values)) == len(values)


def test_a_block_is_the_next_stream_of_the_key() -> None:
    source = NoiseSource(insecure_seed=9)
    running, *others = (counter_generator(9, stream) for stream in range(4))
    for size in (2, _BLOCK + 3, 0, 5, 2 * _BLOCK + 1):
        drawn = source.standard_normal((size,)).numpy()
        parts = [min(_BLOCK, size - start) for start in range(0, size, _BLOCK)]
        expected = [running.standard_normal(n) for n in parts[:1]]
        expected += [others.pop(0).standard_normal(n) for n in parts[1:]]
        assert np.array_equal(drawn, np.concatenate([np.empty(0), *expected]))
    assert not others


def test_a_seed_repeats_whatever_the_threads(threads: Callable[[int], None]) -> None:
    shapes = [(5,), (3, _BLOCK), (2, 3), (4 * _BLOCK + 17,), (1, 1, 2)]
    drawn = []
    for count in (1, 2, 3, 16):
        threads(count)
        source = NoiseSource(insecure_seed=11)
        drawn.append([source.standard_normal(shape) for shape in shapes])
    for other in drawn[1:]:
        assert all(torch.equal(a, b) for a, b in zip(drawn[0], other, strict=True))


def test_threads_that_draw_at_once_share_no_stream() -> None:
    source = NoiseSource()
    with ThreadPoolExecutor(8) as pool:
        ranges = list(pool.map(lambda _: source._fresh_streams(3), range(200)))
        draws = list(pool.map(lambda _: source.standard_normal((_BLOCK + 2,)), range(4)))
    given = [stream for each in ranges for stream in each]
    assert len(set(given)) == len(given) == 600
    assert 0 not in given
    values = torch.cat(draws).numpy()
    assert len(np.unique(values)) == len(values)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_shapes_without_entries_and_without_axes(shape: tuple[int, ...]) -> None:
    source = NoiseSource(insecure_seed=5)
    drawn = source.standard_normal(shape)
    assert drawn.shape == shape
    following = source.standard_normal((2,))
    whole = NoiseSource(insecure_seed=5).standard_normal((drawn.numel() + 2,))
    assert torch.equal(whole, torch.cat([drawn.flatten(), following]))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(duplicate: Callable[[NoiseSource], object]) -> None:
    with pytest.raises(PrivacyError, match="cannot be copied"):
        duplicate(NoiseSource())


@pytest.mark.parametrize(
    "draw", [lambda s: s.standard_normal((2,)), lambda s: s.discrete_gaussian((2,), 2.0)]
)
def test_a_fork_does_not_repeat_it(
    draw: Callable[[NoiseSource], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = NoiseSource()
    draw(source)
    # As in a forked process, which has the generator's state, and perhaps the number of one that is gone.
    monkeypatch.setattr(noise, "_forks", noise._forks + 1)
    with pytest.raises(PrivacyError, match="another process"):
        draw(source)
    draw(NoiseSource())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:This process")
def test_forks_are_counted() -> None:
    before = noise._forks
    child = os.fork()
    if child == 0:
        os._exit(noise._forks - before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert noise._forks == before


def test_an_error_in_a_thread_reaches_the_caller(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that was not drawn is no noise."""
    fill = NoiseSource._fill

    def failing(self: NoiseSource, block: np.ndarray, stream: int) -> None:
        if stream == 2:
            raise MemoryError
        fill(self, block, stream)

    monkeypatch.setattr(NoiseSource, "_fill", failing)
    threads(2)
    with pytest.raises(MemoryError):
        NoiseSource().standard_normal((4 * _BLOCK,))
