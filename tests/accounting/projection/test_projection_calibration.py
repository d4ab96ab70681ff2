import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy import stats

import privlora.accounting.projection.calibration as calibration
from privlora.accounting import PoissonSampling, StepEvent, epsilon
from privlora.accounting.projection.calibration import (
    rank_one_epsilon,
    rank_one_noise_multiplier,
    split_noise_multiplier,
)
from privlora.errors import PrivacyError

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "projection" / "accounting.json"


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVLORA_CACHE", str(tmp_path))


def test_rank_one_is_a_little_below_the_rank_free_bound():
    event = StepEvent(PoissonSampling(0.1), 0.5, ((8, 64),))
    exact, bound = rank_one_epsilon(event, 20, 1e-3, grid=1e-3), epsilon([(event, 20)], 1e-3, grid=1e-3)
    assert exact < bound < 1.02 * exact


@pytest.mark.slow
def test_rank_one_noise_meets_its_target():
    sampling, grid = PoissonSampling(1.0), 2e-3
    sigma = rank_one_noise_multiplier(sampling, 10, 1.0, 1e-5, 16, 256, tolerance=1e-4, grid=grid)
    less, enough = (StepEvent(sampling, factor * sigma, ((16, 256),)) for factor in (1 - 3e-4, 1.0))
    assert rank_one_epsilon(enough, 10, 1e-5, grid=grid) <= 1.0 < rank_one_epsilon(less, 10, 1e-5, grid=grid)


@pytest.mark.parametrize("projections", [(), ((4, 8), (4, 16)), ((8, 8),)])
def test_rank_one_is_refused_where_it_does_not_hold(projections):
    with pytest.raises(PrivacyError, match="rank"):
        rank_one_epsilon(StepEvent(PoissonSampling(0.1), 1.0, projections), 5, 1e-5)


@pytest.fixture
def noise_by_delta(monkeypatch):
    """Plain calibration replaced by sigma = 1 - log10(delta), to be fast."""

    def calibrate(sampling, steps, target, delta):
        return SimpleNamespace(noise_multiplier=1 - math.log10(delta))

    monkeypatch.setattr(calibration, "calibrate_noise_multiplier", calibrate)
    return lambda delta: calibrate(None, None, None, delta).noise_multiplier


def test_split_takes_the_best_share_of_delta(noise_by_delta):
    def with_share(share, ranks):
        energy = stats.beta.isf(share * 1e-5 / (500 * ranks), 32, 992)
        return noise_by_delta((1 - share) * 1e-5) * energy**0.5

    for ranks in (1, 128):
        best = min(with_share(share, ranks) for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5))
        found = split_noise_multiplier(
            PoissonSampling(0.02), 500, 2.0, 1e-5, ((64, 2048),), gradient_rank=ranks
        )
        assert found == pytest.approx(best, rel=1e-9)


def test_split_sums_the_failures_of_layers_and_never_exceeds_no_projection(noise_by_delta):
    arguments = (PoissonSampling(0.02), 500, 2.0, 1e-5)
    one, two = (
        split_noise_multiplier(*arguments, sizes) for sizes in (((64, 2048),), ((64, 2048), (64, 2049)))
    )
    assert one < two < 1.02 * one
    assert split_noise_multiplier(*arguments, ((60, 64),)) == noise_by_delta(1e-5)
    assert split_noise_multiplier(*arguments, ((64, 64),)) == noise_by_delta(1e-5)
    with pytest.raises(PrivacyError, match="gradient_rank"):
        split_noise_multiplier(*arguments, ((64, 2048),), gradient_rank=0)


def test_published_table_holds_what_it_must():
    """Rank-free noise is never below rank one's, never above Theorem 5's or the plain noise, and quick to find."""
    rows = json.loads(RESULTS.read_text())["many_steps"]
    assert len(rows) >= 20
    for row in rows:
        assert row["rank_one"] <= row["rank_free"] < row["theorem_5"]["1"] <= row["theorem_5"]["128"]
        assert row["project_then_clip"] < row["rank_free"] < row["plain"]
        assert row["rank_free"] <= row["reference"]["rank_free"] * (1 + 1e-4)
        assert row["rank_one"] == pytest.approx(row["reference"]["rank_one"], rel=4e-4)
        assert row["theorem_5"]["1"] == pytest.approx(row["reference"]["theorem_5"], rel=1e-3)
        assert row["seconds"] <= 10
