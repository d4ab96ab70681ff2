"""E.1: one step of DP-LoRA-FA and of M2, their spectra and their noise, against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.one_step import (
    length_distortion,
    rdp_factor,
    update_covariances,
    wishart_spectrum,
)


def factors(rank: int, dimension: int, draws: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((draws, rank, dimension)) / math.sqrt(rank)


@pytest.mark.parametrize(("rank", "dimension"), [(4, 100), (16, 256), (30, 40)])
def test_lemma_6(rank: int, dimension: int) -> None:
    a = factors(rank, dimension, 400)
    values = np.linalg.eigvalsh(a @ a.mT)
    low, high = wishart_spectrum(rank, dimension, 0.05)
    outside = (values[:, 0] < low) | (values[:, -1] > high)
    assert outside.mean() <= 0.05
    assert values[:, -1].max() > 0.7 * high  # and not far above


def test_lemma_18() -> None:
    rank, vectors, failure = 64, 20, 0.1
    gamma = length_distortion(rank, vectors, failure)
    printed = length_distortion(rank, vectors, failure, printed=True)
    assert gamma < printed
    assert printed**2 / 2 - printed**3 / 3 == pytest.approx(2 * math.log(vectors / failure) / rank)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((50, vectors))
    x /= np.linalg.norm(x, axis=0)
    energies = ((factors(rank, 50, 1000) @ x) ** 2).sum(1)
    assert (energies.max(1) > 1 + gamma).mean() <= failure
    one = length_distortion(rank, 1, failure)
    assert (energies[:, 0] > 1 + one).mean() == pytest.approx(failure, abs=0.03)
    flat = ((factors(rank, 50, 1000) @ x) ** 2).sum((1, 2)) / vectors  # a matrix counts as one vector
    assert (flat > 1 + length_distortion(rank, 1, failure, printed=True)).mean() <= failure


def test_noise_of_both_steps() -> None:
    """The covariances are those of simulated updates, and of the same order: d to d + r + 1 on average."""
    rank, dimension, sigma, draws = 6, 24, 0.7, 60_000
    a, rng = factors(rank, dimension, 1)[0], np.random.default_rng(4)
    on_b = sigma * rng.standard_normal((draws, rank)) @ a
    before = sigma * math.sqrt(rank / dimension) * rng.standard_normal((draws, dimension)) @ a.T @ a
    for noise, expected in zip((on_b, before), update_covariances(a, sigma), strict=True):
        found = noise.T @ noise / draws
        np.testing.assert_allclose(found, expected, atol=6 * np.abs(expected).max() / math.sqrt(draws))
    traces = np.array(
        [[np.trace(c) for c in update_covariances(each, 1.0)] for each in factors(16, 128, 300)]
    )
    assert traces.mean(0) == pytest.approx([128, 128 + 16 + 1], rel=0.02)


def test_rdp_of_both_steps() -> None:
    """Of two Gaussians, by pseudo-inverses, for a dense difference; and the spectrum, which lies within the bounds."""
    rank, dimension, failure = 16, 256, 1e-3
    low, high = rdp_factor(rank, dimension, failure)
    for a in factors(rank, dimension, 20):
        gradient = np.random.default_rng(5).standard_normal((3, dimension))
        mean = gradient @ a.T @ a
        lengths = [
            np.trace(mean @ np.linalg.pinv(c, rcond=1e-10, hermitian=True) @ mean.T)
            for c in update_covariances(a, 1.0)
        ]
        assert low <= lengths[0] / lengths[1] <= high
        values = np.linalg.eigvalsh(a @ a.T) * rank / dimension
        assert low <= values[0] <= values[-1] <= high
    assert rdp_factor(64, 2048, 1e-3) == pytest.approx((0.5433, 1.5950), rel=1e-3)


def test_refuses_what_is_out_of_range() -> None:
    for bad in ((0, 4, 0.1), (5, 4, 0.1), (2, 4, 0.0)):
        with pytest.raises(PrivacyError):
            wishart_spectrum(*bad)
    with pytest.raises(PrivacyError):
        length_distortion(4, 100, 1e-6, printed=True)
    with pytest.raises(PrivacyError):
        update_covariances(np.ones(3), 1.0)
    assert scipy.stats.chi2.sf(64 * (1 + length_distortion(64, 2, 0.1)), 64) == pytest.approx(0.05)
