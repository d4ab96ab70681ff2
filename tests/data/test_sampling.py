from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from privlora.accounting.events import PoissonSampling, TruncatedPoissonSampling
from privlora.data.sampling import PoissonSampler
from privlora.errors import ConfigError, PrivacyError
from privlora.randomness import private_generator

DRAWS = 4000


def presence(sampler: PoissonSampler, units: int, draws: int = DRAWS) -> np.ndarray:
    """(draws, units) of 0 and 1."""
    table = np.zeros((draws, units), dtype=np.int64)
    for row in table:
        row[sampler.draw()] = 1
    return table


def test_every_unit_has_probability_q() -> None:
    units, q = 50, 0.1
    counts = presence(PoissonSampler(units, q, insecure_seed=1), units).sum(axis=0)
    chi_square = ((counts - DRAWS * q) ** 2 / (DRAWS * q * (1 - q))).sum()
    assert 1e-3 < stats.chi2.sf(chi_square, df=units) < 1 - 1e-3


def test_batch_size_is_binomial() -> None:
    units, q = 50, 0.1
    sizes = presence(PoissonSampler(units, q, insecure_seed=2), units).sum(axis=1)
    edges = np.arange(1, 11)
    observed = np.bincount(np.digitize(sizes, edges), minlength=len(edges) + 1)
    cdf = np.concatenate([[0.0], stats.binom.cdf(edges - 1, units, q), [1.0]])
    assert stats.chisquare(observed, DRAWS * np.diff(cdf)).pvalue > 1e-3


def test_units_are_pairwise_independent() -> None:
    units, q = 20, 0.3
    table = presence(PoissonSampler(units, q, insecure_seed=3), units)
    together = (table.T @ table)[np.triu_indices(units, 1)]
    z = (together - DRAWS * q * q) / math.sqrt(DRAWS * q * q * (1 - q * q))
    assert abs(z).max() < 4.5  # 190 pairs; a fixed batch size of 6 would give z near -3 on average
    assert abs(z.mean()) < 0.5


@pytest.mark.parametrize("q", [0.001, 0.02, 0.5, 1.0])
def test_a_draw_has_distinct_indices_in_range(q: float) -> None:
    sampler = PoissonSampler(20_000, q, insecure_seed=4)
    for _ in range(20):
        drawn = sampler.draw()
        assert drawn.dtype == np.int64
        assert drawn.ndim == 1
        assert len(np.unique(drawn)) == len(drawn)
        assert len(drawn) == 0 or (drawn.min() >= 0 and drawn.max() < 20_000)


def test_rate_one_takes_everyone() -> None:
    assert sorted(PoissonSampler(7, 1.0, insecure_seed=0).draw()) == list(range(7))


@pytest.mark.parametrize(("units", "q"), [(100, 1e-9), (0, 0.5)])
def test_empty_batches_are_batches(units: int, q: float) -> None:
    sampler = PoissonSampler(units, q, insecure_seed=5)
    for _ in range(20):
        drawn = sampler.draw()
        assert drawn.shape == (0,)
        assert drawn.dtype == np.int64


def test_truncation_drops_uniformly_at_random() -> None:
    units, bound, q = 20, 5, 0.5
    table = presence(
        PoissonSampler(units, q, max_batch_size=bound, dataset_size=units, insecure_seed=6), units
    )
    sizes = table.sum(axis=1)
    assert sizes.max() == bound
    law = stats.binom(units, q)
    expected_size = sum(min(k, bound) * law.pmf(k) for k in range(units + 1))
    assert sizes.mean() == pytest.approx(expected_size, abs=4 * sizes.std() / math.sqrt(DRAWS))
    rate = expected_size / units
    counts = table.sum(axis=0)
    assert abs(counts - DRAWS * rate).max() < 4.5 * math.sqrt(DRAWS * rate * (1 - rate))


def test_truncation_treats_missing_units_as_empty_places() -> None:
    """The law over a unit's presence must not depend on whether the other places are filled."""
    few = PoissonSampler(1, 0.5, max_batch_size=2, dataset_size=20, insecure_seed=7)
    full = PoissonSampler(20, 0.5, max_batch_size=2, dataset_size=20, insecure_seed=8)
    rate_few = presence(few, 1)[:, 0].mean()
    rate_full = presence(full, 20)[:, 0].mean()
    assert rate_few == pytest.approx(0.1, abs=0.02)
    assert rate_full == pytest.approx(rate_few, abs=0.03)


def test_states_what_it_samples() -> None:
    assert PoissonSampler(10, 0.25).sampling == PoissonSampling(0.25)
    truncated = PoissonSampler(90, 0.25, max_batch_size=44, dataset_size=100)
    assert truncated.sampling == TruncatedPoissonSampling(0.25, 44, 100)


def test_expected_batch_size_is_public() -> None:
    neighbours = [PoissonSampler(n, 0.064, dataset_size=1000) for n in (1000, 999)]
    assert [s.expected_batch_size for s in neighbours] == [64.0, 64.0]
    with pytest.raises(ConfigError, match="dataset_size"):
        _ = PoissonSampler(1000, 0.064).expected_batch_size


def test_secure_draws_do_not_repeat_and_insecure_ones_do() -> None:
    def first(seed: int | None) -> list[int]:
        np.random.seed(0)
        return PoissonSampler(1000, 0.5, insecure_seed=seed).draw().tolist()

    assert first(None) != first(None)
    assert first(9) == first(9)
    assert not PoissonSampler(10, 0.5).insecure
    assert PoissonSampler(10, 0.5, insecure_seed=0).insecure


def test_key_comes_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def randbits(bits: int) -> int:
        asked.append(bits)
        return 7

    monkeypatch.setattr("privlora.randomness.secrets.randbits", randbits)
    private_generator()
    assert asked == [128]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"units": -1, "sample_rate": 0.1}, ConfigError, "units"),
        ({"units": 10, "sample_rate": 0.0}, ConfigError, "sample_rate"),
        ({"units": 10, "sample_rate": 1.1}, ConfigError, "sample_rate"),
        ({"units": 10, "sample_rate": float("nan")}, ConfigError, "sample_rate"),
        ({"units": 10, "sample_rate": 0.1, "dataset_size": 0}, ConfigError, "dataset_size"),
        ({"units": 10, "sample_rate": 0.1, "max_batch_size": 4}, ConfigError, "without dataset_size"),
        (
            {"units": 10, "sample_rate": 0.1, "max_batch_size": 0, "dataset_size": 10},
            ConfigError,
            "max_batch_size",
        ),
        (
            {"units": 11, "sample_rate": 0.1, "max_batch_size": 4, "dataset_size": 10},
            PrivacyError,
            "more privacy units",
        ),
    ],
)
def test_refuses(kwargs: dict[str, float], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PoissonSampler(**kwargs)  # type: ignore[arg-type]
