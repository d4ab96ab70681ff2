"""Random numbers that nobody can replay: for sampling and for noise, never for anything public."""

from __future__ import annotations

import secrets

import numpy as np


def private_generator(insecure_seed: int | None = None) -> np.random.Generator:
    """A Philox counter generator keyed with 128 bits of the operating system. The key is kept nowhere.

    insecure_seed: for tests only. It replaces the key, so draws repeat and nothing made with them is private.
    """
    key = secrets.randbits(128) if insecure_seed is None else insecure_seed
    return np.random.Generator(np.random.Philox(key=key))
