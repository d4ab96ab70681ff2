import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import hyp1f1

from privlora.accounting.projection.energy import dominating_energy, log_moment, stop_loss

SIZES = [(1, 2), (4, 20), (8, 4096), (64, 2048), (31, 32), (2047, 2048), (1, 100_000)]


@st.composite
def projections(draw):
    rank = draw(st.integers(1, 300))
    return rank, draw(st.integers(rank + 1, 3000))


@pytest.mark.parametrize(("rank", "dimension"), SIZES)
def test_dominating_law_keeps_the_mean_and_hardly_widens(rank, dimension):
    law = dominating_energy(((rank, dimension),))
    mean = rank / dimension
    assert law.weights.min() > 0
    assert law.weights.sum() == pytest.approx(1, abs=1e-13)
    assert law.weights @ law.points == pytest.approx(mean, rel=1e-12)
    variance = stats.beta.var(rank / 2, (dimension - rank) / 2)
    assert 1 - 1e-9 <= law.weights @ (law.points - mean) ** 2 / variance < 1.0002
    np.testing.assert_allclose(law.upper_means[0], mean, rtol=1e-12)
    assert np.all(law.upper_means >= law.points)


@given(st.lists(projections(), min_size=1, max_size=3), st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_stop_loss_of_the_dominating_law_is_above_that_of_every_layer(layers, at):
    law = dominating_energy(tuple(sorted(set(layers))))
    for threshold in (at, at * max(rank / dimension for rank, dimension in layers)):
        bound = law.weights @ np.maximum(law.points - threshold, 0)
        for layer in layers:
            assert bound >= stop_loss(threshold, *layer) - 1e-14


def test_stop_loss_is_the_mean_excess():
    energy = stats.beta.rvs(2, 8, size=200_000, random_state=1)
    for threshold in (0.0, 0.1, 0.4):
        excess = np.maximum(energy - threshold, 0)
        error = excess.std() / np.sqrt(len(energy))
        assert stop_loss(threshold, 4, 20) == pytest.approx(excess.mean(), abs=5 * error)


@pytest.mark.parametrize(("rank", "dimension"), [*SIZES, (5, 5)])
def test_log_moment_is_that_of_kummers_function(rank, dimension):
    z = np.array([0.0, 1e-3, 1.0, 30.0, 300.0, 600.0])
    expected = np.log(hyp1f1(rank / 2, dimension / 2, z))
    np.testing.assert_allclose(log_moment(z, rank, dimension), expected, rtol=1e-11, atol=1e-15)


def test_log_moment_never_exceeds_its_argument_and_rises():
    z = np.geomspace(1e-3, 1e6, 60)
    value = log_moment(z, 8, 64)
    assert np.all(value <= z)
    assert np.all(np.diff(value) > 0)
