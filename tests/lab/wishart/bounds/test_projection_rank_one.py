import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from privlora.accounting import PoissonSampling, StepEvent, epsilon
from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.noisy import energy_cells, rank_one_epsilon

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "projection" / "accounting.json"


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVLORA_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("rank", "dimension"), [(1, 2), (4, 20), (8, 4096), (64, 2048), (31, 32), (2047, 2048), (1, 100_000)]
)
def test_cells_share_out_the_beta_law(rank, dimension):
    edges, probabilities, means = energy_cells(rank, dimension)
    assert edges[0] == 0
    assert edges[-1] == 1
    assert np.all(np.diff(edges) > 0)
    assert probabilities.sum() == pytest.approx(1, abs=1e-13)
    assert probabilities @ means == pytest.approx(rank / dimension, rel=1e-13)
    inside = edges[1:-1]
    below = stats.beta.cdf(inside, rank / 2, (dimension - rank) / 2)
    np.testing.assert_allclose(np.cumsum(probabilities)[:-1], below, atol=1e-12)


def test_rank_one_is_a_little_below_the_rank_free_bound():
    event = StepEvent(PoissonSampling(0.1), 0.5, ((8, 64),))
    exact, bound = rank_one_epsilon(event, 20, 1e-3, grid=1e-3), epsilon([(event, 20)], 1e-3, grid=1e-3)
    assert exact < bound < 1.02 * exact


@pytest.mark.parametrize("projections", [(), ((4, 8), (4, 16)), ((8, 8),)])
def test_rank_one_is_refused_where_it_does_not_hold(projections):
    with pytest.raises(PrivacyError, match="rank"):
        rank_one_epsilon(StepEvent(PoissonSampling(0.1), 1.0, projections), 5, 1e-5)


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
