"""Noise comes from a key of the operating system that nobody else ever sees."""

from __future__ import annotations

import copy
import os
import pickle
import random
import secrets
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import kstest

import privlora.randomness
from privlora.errors import PrivacyError
from privlora.mechanisms import NoiseSource


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


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(duplicate: Callable[[NoiseSource], object]) -> None:
    with pytest.raises(PrivacyError, match="cannot be copied"):
        duplicate(NoiseSource())


def test_a_fork_does_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = NoiseSource()
    source.standard_normal((2,))
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a forked process, which has the generator's state
    with pytest.raises(PrivacyError, match="another process"):
        source.standard_normal((2,))
