"""The clipping norm that follows a quantile: where it goes, how far, and what the count costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from privlora.mechanisms import AdaptiveClipNorm, split_noise_multiplier


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0])
def test_the_two_noises_are_one_mechanism(sigma: float) -> None:
    on_sum, on_count = split_noise_multiplier(sigma)
    # Andrew et al. 2021, Theorem 1: the noise of the sum for a total of sigma.
    assert on_sum == pytest.approx((sigma**-2 - (2 * on_count) ** -2) ** -0.5)
    assert 1 < on_sum / sigma < 1.0051


def test_it_finds_the_quantile() -> None:
    rng = np.random.default_rng(0)
    for quantile, start in ((0.5, 0.01), (0.5, 100.0), (0.9, 1.0), (0.1, 1.0)):
        clip = AdaptiveClipNorm(start, quantile)
        for _ in range(400):
            norms = np.exp(rng.standard_normal(64))
            clip.update(float((norms <= clip.value).mean()) + 0.05 * rng.standard_normal())
        reached = float((np.exp(rng.standard_normal(10_000)) <= clip.value).mean())
        assert reached == pytest.approx(quantile, abs=0.1)


def test_noise_moves_it_no_further_than_data_could() -> None:
    for shares in ((50.0, 1.0), (-50.0, 0.0)):
        wild, tame = AdaptiveClipNorm(2.0, 0.5), AdaptiveClipNorm(2.0, 0.5)
        wild.update(shares[0])
        tame.update(shares[1])
        assert wild.value == tame.value


@pytest.mark.parametrize(("share", "end"), [(1.0, 2e-6), (0.0, 2e6)])
def test_it_stays_finite(share: float, end: float) -> None:
    clip = AdaptiveClipNorm(2.0, 0.5)
    for _ in range(2000):
        clip.update(share)
    assert clip.value == pytest.approx(end)


def test_one_step() -> None:
    clip = AdaptiveClipNorm(1.0, 0.25, rate=0.2)
    clip.update(0.75)
    assert clip.value == pytest.approx(math.exp(-0.1))


def test_it_is_kept_exactly() -> None:
    clip, other = AdaptiveClipNorm(1.0, 0.5), AdaptiveClipNorm(1.0, 0.5)
    clip.update(0.123456789)
    other.load_state_dict(clip.state_dict())
    assert other.value == clip.value
