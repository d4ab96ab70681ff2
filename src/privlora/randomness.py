"""Random numbers for sampling, noise, masks and projections, which nobody can replay unless the key is public.

The stream is AES-128 in counter mode: block i is AES(key, i) of the 128-bit little-endian counter i. Without the key it
cannot be told from coin flips unless AES is broken. That makes bits unforeseeable and nothing more: normals made of
them are floating-point numbers, not samples of an exact discrete law.
"""

from __future__ import annotations

import secrets

import numpy as np
from randomgen import AESCounter

_KEY = 128  # bits
_STREAM = 64  # bits of the counter in which the blocks of one stream are counted


def private_generator(insecure_seed: int | None = None) -> np.random.Generator:
    """AES-128 in counter mode, keyed with 128 bits of the operating system. The key is kept nowhere.

    insecure_seed: for tests only. It replaces the key, so draws repeat and nothing made with them is private.
    """
    return counter_generator(private_key(insecure_seed))


def private_key(insecure_seed: int | None = None) -> int:
    """128 bits of the operating system, for ``counter_generator``; whoever asks keeps it in memory alone.

    insecure_seed: as above.
    """
    return secrets.randbits(_KEY) if insecure_seed is None else insecure_seed


def counter_generator(key: int, stream: int = 0) -> np.random.Generator:
    """AES-128 in counter mode with ``key`` modulo 2^128, from block 2^64 ``stream`` on; ``stream`` in [0, 2^64).

    Streams of one key share no block before one of them is 2^64 blocks long, and AES maps no two blocks to one.
    """
    return np.random.Generator(AESCounter(key=key % 2**_KEY, counter=stream << _STREAM))


def aes_instructions() -> bool:
    """Whether the processor has AES instructions; without them the same stream is made several times slower."""
    return bool(AESCounter().use_aesni)
