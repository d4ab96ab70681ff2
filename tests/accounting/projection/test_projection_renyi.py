import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp

from privlora.accounting import PoissonSampling, StepEvent, epsilon
from privlora.accounting.projection.composition import rank_free_rdp


def test_full_batch_matches_the_closed_form_and_its_simulation():
    (found,) = rank_free_rdp([8], 0.5, ((64, 2048),), 1.0)
    assert found == pytest.approx(0.528414, abs=1e-6)
    energy = np.random.default_rng(4).beta(32, 992, 200_000)
    sample = np.exp(8 * 7 / (2 * 0.5**2) * energy)
    error = sample.std() / np.sqrt(len(sample)) / sample.mean() / 7
    assert found == pytest.approx(np.log(sample.mean()) / 7, abs=5 * error)


@pytest.mark.parametrize("projections", [(), ((32, 32),), ((4, 64), (32, 32))])
def test_without_a_lower_rank_it_is_the_gaussian_mechanism(projections):
    orders = [2, 3, 8, 40, 63]
    plain = rdp.RdpAccountant(orders)
    plain.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(0.8)), 1)
    np.testing.assert_allclose(rank_free_rdp(orders, 0.8, projections, 0.05), plain.rdp, rtol=1e-9)


def test_the_dearest_layer_counts():
    orders = [2, 5, 20]
    alone = [rank_free_rdp(orders, 0.4, (size,), 0.1) for size in ((64, 2048), (24, 768))]
    both = rank_free_rdp(orders, 0.4, ((64, 2048), (24, 768)), 0.1)
    np.testing.assert_array_equal(both, np.maximum(*alone))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "sigma", "q", "steps"),
    [((256, 2048), 0.42, 0.02, 500), ((16, 256), 1.2, 1.0, 10), ((8, 64), 0.5, 0.1, 20)],
)
def test_it_bounds_the_pld(size, sigma, q, steps):
    events = [(StepEvent(PoissonSampling(q), sigma, (size,)), steps)]
    exact = epsilon(events, 1e-5, grid=1e-3)
    loose = epsilon(events, 1e-5, accountant="rdp")
    assert exact < loose < 1.6 * exact
