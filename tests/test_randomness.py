"""The private generator is AES in counter mode under a key of the operating system, and serves the sampler."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import binom, kstest

import privlora.randomness
from privlora.randomness import counter_generator, private_generator


def aes_blocks(key: int, first: int, count: int) -> np.ndarray:
    """AES-128 of ``count`` consecutive little-endian counters, as 64-bit words."""
    encrypt = Cipher(algorithms.AES(key.to_bytes(16, "little")), modes.ECB()).encryptor()
    counters = b"".join((first + i).to_bytes(16, "little") for i in range(count))
    return np.frombuffer(encrypt.update(counters), dtype="<u8")


@pytest.mark.parametrize("stream", [0, 1, 2**40 + 3])
@pytest.mark.parametrize("key", [0, 7, 2**128 - 1, 0x0123456789ABCDEF_FEDCBA9876543210])
def test_the_stream_is_aes_of_a_counter(key: int, stream: int) -> None:
    drawn = counter_generator(key, stream).bit_generator.random_raw(2000)
    assert np.array_equal(drawn, aes_blocks(key, stream << 64, 1000))


def test_the_slow_code_makes_the_same_stream() -> None:
    key = secrets.randbits(128)
    generator = counter_generator(key)
    generator.bit_generator.use_aesni = False
    assert np.array_equal(generator.bit_generator.random_raw(100), aes_blocks(key, 0, 50))


def test_the_key_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    key = secrets.randbits(128)
    monkeypatch.setattr(privlora.randomness.secrets, "randbits", lambda bits: key if bits == 128 else 0)
    assert np.array_equal(private_generator().bit_generator.random_raw(40), aes_blocks(key, 0, 20))
    monkeypatch.undo()
    one, two = (private_generator().bit_generator.random_raw(100) for _ in range(2))
    assert not set(one) & set(two)


def test_a_seed_is_the_key_of_tests() -> None:
    assert np.array_equal(private_generator(5).bit_generator.random_raw(4), aes_blocks(5, 0, 2))
    assert np.array_equal(private_generator(-1).bit_generator.random_raw(4), aes_blocks(2**128 - 1, 0, 2))


def test_what_the_sampler_draws_has_its_law() -> None:
    generator = private_generator(1)
    sizes = generator.binomial(1000, 0.1, size=4000)
    assert (
        kstest(
            binom(1000, 0.1).cdf(sizes) - generator.random(4000) * binom(1000, 0.1).pmf(sizes), "uniform"
        ).pvalue
        > 1e-3
    )
    counts = np.zeros(50)
    for _ in range(4000):
        subset = generator.choice(50, size=10, replace=False, shuffle=False)
        assert len(set(subset)) == 10
        counts[subset] += 1
    assert np.abs(counts - 800).max() < 5 * (4000 * 0.2 * 0.8) ** 0.5
