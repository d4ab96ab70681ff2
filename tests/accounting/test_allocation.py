"""What a pass of balls in bins costs: against the Gaussian, integration, another accountant, and finer grids."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, stats

from privlora.accounting import Plan, allocation, calibrate_noise_multiplier, delta_of, epsilon
from privlora.accounting.accountants import _step_pld
from privlora.accounting.allocation import PassLoss
from privlora.accounting.events import MOST_BINS, BallsInBinsSampling, PoissonSampling, StepEvent
from privlora.accounting.loss_distributions import allocation_pld
from privlora.errors import PrivacyError

EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 3.0])


def cost(sigma: float, bins: int, steps: int, delta: float = 1e-5) -> float:
    return epsilon([(StepEvent(BallsInBinsSampling(bins), sigma), steps)], delta)


def gaussian(sigma: float) -> np.ndarray:
    norm = stats.norm
    return np.array(
        [
            norm.cdf(1 / (2 * sigma) - e * sigma) - math.exp(e) * norm.cdf(-1 / (2 * sigma) - e * sigma)
            for e in EPSILONS
        ]
    )


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0])
def test_one_bin_is_the_gaussian_mechanism(sigma: float) -> None:
    loss, true = PassLoss.of(sigma, 1), gaussian(sigma)
    for found in (loss.removed(EPSILONS), loss.added(EPSILONS)):
        assert (found >= true - 1e-12).all()
        assert (found <= true + 3e-5).all()


def in_two_bins(sigma: float, eps: float) -> tuple[float, float]:
    """(removed, added): of the second X by Black's formula, over the first one by quadrature."""
    level, norm = math.exp(eps), stats.norm

    def call(strike: float) -> float:
        if strike <= 0:
            return 1 - strike
        d = (-math.log(strike)) * sigma + 0.5 / sigma
        return float(norm.cdf(d) - strike * norm.cdf(d - 1 / sigma))

    def one(z: float) -> float:
        return math.exp(z / sigma - 0.5 / sigma**2)

    def removed(z: float) -> float:
        return float(norm.pdf(z)) * call(2 * level - one(z)) / 2

    def added(z: float) -> float:
        strike = 2 / level - one(z)
        return float(norm.pdf(z)) * (call(strike) - 1 + strike) * level / 2

    return tuple(integrate.quad(of, -9, 9, limit=400, points=[0.0, 3.0])[0] for of in (removed, added))


@pytest.mark.parametrize("sigma", [0.6, 1.0, 2.0])
def test_two_bins_are_what_integration_gives(sigma: float) -> None:
    loss = PassLoss.of(sigma, 2)
    for eps, removed, added in zip(EPSILONS, loss.removed(EPSILONS), loss.added(EPSILONS), strict=True):
        for found, true in zip((removed, added), in_two_bins(sigma, eps), strict=True):
            assert true - 1e-9 <= found <= true + 4e-5


@pytest.mark.parametrize(("sigma", "bins"), [(0.5, 8), (0.73, 31), (1.5, 6)])
def test_a_grid_is_an_upper_bound_and_a_fine_one_a_lower(
    sigma: float, bins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for step in (0.02, 0.01, 0.005):
        monkeypatch.setattr(allocation, "_COARSEST", step)
        monkeypatch.setattr(allocation, "_FINE", math.inf)
        loss = PassLoss.of(sigma, bins)
        assert loss.masses.sum() + loss.at_zero == pytest.approx(1, abs=1e-11)
        assert (loss.masses * np.exp(loss.losses)).sum() + loss.beyond == pytest.approx(1, abs=1e-11)
        found.append((loss.removed(EPSILONS), loss.added(EPSILONS)))
    for rough, fine in pairwise(found):
        for one, other in zip(rough, fine, strict=True):
            assert (other <= one + 1e-12).all()
            assert (one - other <= 1e-4).all()


@pytest.mark.parametrize(
    ("sigma", "bins", "passes", "delta", "low", "high"),
    [
        (1.0, 2, 1, 1e-6, 4.1954, 4.2089),
        (0.5, 8, 1, 1e-5, 7.9154, 7.9258),
        (0.7309, 31, 1, 1e-5, 2.9368, 2.9464),
        (1.6262, 6, 5, 1e-5, 2.5473, 2.5641),
    ],
)
def test_the_accountant_of_others_has_it_between_its_bounds(
    sigma: float, bins: int, passes: int, delta: float, low: float, high: float
) -> None:
    """Bounds of PLD_accounting 2.0 (Feldman and Shenfeld), by geometric and Fourier convolutions."""
    assert low < cost(sigma, bins, passes * bins, delta) < high


@pytest.mark.parametrize(("bins", "steps", "sigma"), [(6, 30, 1.63), (13, 65, 1.22), (30, 60, 0.84)])
def test_it_costs_less_than_poisson_sampling_and_a_broken_pass_as_much_as_a_whole_one(
    bins: int, steps: int, sigma: float
) -> None:
    found = cost(sigma, bins, steps)
    poisson = epsilon([(StepEvent(PoissonSampling(1 / bins), sigma), steps)], 1e-5)
    assert 0.7 * poisson < found < 0.97 * poisson
    assert cost(sigma, bins, steps - bins + 1) == found
    assert cost(sigma, bins, steps - bins) < found < cost(sigma, bins, steps + 1)
    assert delta_of([(StepEvent(BallsInBinsSampling(bins), sigma), steps)], found) <= 1e-5 * (1 + 1e-3)


def test_noise_is_calibrated_to_a_target() -> None:
    found = calibrate_noise_multiplier(BallsInBinsSampling(6), 30, 3.0, 1e-5, cache=False)
    assert found.noise_multiplier == pytest.approx(1.453, rel=1e-3)
    assert found.epsilon <= 3.0
    assert cost(found.noise_multiplier * 0.999, 6, 30) > 3.0


@pytest.mark.parametrize(("bins", "passes", "target"), [(10, 300, 3.0), (50, 300, 3.0), (10, 100, 0.5)])
def test_much_noise_does_not_cost_more_than_poisson_sampling(bins: int, passes: int, target: float) -> None:
    """The grid follows the noise: at one step for all its spreads outweighed what passes save."""
    sigma = calibrate_noise_multiplier(
        PoissonSampling(1 / bins), passes * bins, target, 1e-5
    ).noise_multiplier
    assert cost(sigma, bins, passes * bins) < target


@pytest.mark.parametrize(("sigma", "bins"), [(0.15, MOST_BINS), (0.3, 10_000), (1.0, MOST_BINS), (300.0, 10)])
def test_far_off_no_mass_is_lost(sigma: float, bins: int) -> None:
    """And epsilon is above that of a unit that any one of its steps tells: a call on one X, m times."""
    loss = PassLoss.of(sigma, bins)
    assert loss.masses.sum() + loss.at_zero >= 1 - 1e-15
    assert (loss.masses * np.exp(loss.losses)).sum() + loss.beyond >= 1 - 1e-15
    for eps, found in zip(EPSILONS, loss.removed(EPSILONS), strict=True):
        strike = bins * math.exp(eps)
        d = -math.log(strike) * sigma + 0.5 / sigma
        alone = stats.norm.cdf(d) - strike * stats.norm.cdf(d - 1 / sigma)
        assert found >= alone * (1 - 1e-9) - 1e-15


def test_each_way_is_composed_with_its_own() -> None:
    """With another run, whose two directions differ as well: exchanged, epsilon would be below the larger one."""
    event, other = StepEvent(BallsInBinsSampling(3), 0.5), StepEvent(PoissonSampling(0.3), 0.5)
    loss = PassLoss.of(0.5, 3)
    assert loss.removed(EPSILONS)[3] != pytest.approx(loss.added(EPSILONS)[3], rel=0.05)
    pld = allocation_pld(0.5, BallsInBinsSampling(3), 1e-3)
    for pmf, deltas in ((pld._pmf_remove, loss.removed), (pld._pmf_add, loss.added)):
        assert pmf.get_delta_for_epsilon(1.0) == pytest.approx(deltas(np.array([1.0]))[0], rel=1e-3)
    assert epsilon([(event, 3), (other, 3)], 1e-5) > max(cost(0.5, 3, 3), epsilon([(other, 3)], 1e-5))


def test_a_delta_below_what_rounding_loses_is_refused_at_once_and_a_large_one_is_not() -> None:
    with pytest.raises(PrivacyError, match="too small for passes of 2000 steps"):
        calibrate_noise_multiplier(BallsInBinsSampling(2000), 10_000, 3.0, 1e-12, cache=False)
    found = calibrate_noise_multiplier(BallsInBinsSampling(2000), 2000, 1.0, 6e-4, cache=False)
    assert found.epsilon <= 1.0


def test_both_ways_of_composing_agree() -> None:
    from dp_accounting import NeighboringRelation

    event = StepEvent(BallsInBinsSampling(6), 1.5)
    ours, theirs = (
        _step_pld(event, NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3, way).self_compose(5)
        for way in (False, True)
    )
    assert ours.get_epsilon_for_delta(1e-5) == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=1e-6)


def test_what_no_bound_covers_is_refused() -> None:
    event = StepEvent(BallsInBinsSampling(4), 1.0)
    assert StepEvent.from_dict(event.to_dict()) == event
    for accountant in ("rdp", "prv"):
        with pytest.raises(PrivacyError, match="balls in bins"):
            epsilon([(event, 4)], 1e-5, accountant=accountant)
    with pytest.raises(PrivacyError, match="balls in bins are not accounted under"):
        epsilon([(event, 4)], 1e-5, adjacency="replace-one")
    for bins in (1, -3, MOST_BINS + 1, 10**400):
        with pytest.raises(PrivacyError, match="is not between 2 and"):
            BallsInBinsSampling(bins)
    for wrong in (4.0, True, "4", None):
        written = event.to_dict()
        written["sampling"]["bins"] = wrong
        with pytest.raises(PrivacyError, match="is not an integer"):
            StepEvent.from_dict(written)
    with pytest.raises(PrivacyError, match="too little to price"):
        PassLoss.of(0.02, 100)
    with pytest.raises(PrivacyError, match="one phase only"):
        calibrate_noise_multiplier(BallsInBinsSampling(4), 8, 1.0, 1e-5, others=[(PoissonSampling(0.1), 2)])
    with pytest.raises(PrivacyError, match="plain Poisson sampling"):
        StepEvent(BallsInBinsSampling(4), 1.0, ((2, 8),))
    other = StepEvent(PoissonSampling(0.1), 1.0)
    with pytest.raises(PrivacyError, match="several phases"):
        Plan(
            phases=((event, 4), (other, 2)),
            delta=1e-5,
            target_epsilon=None,
            adjacency="add-or-remove-one",
            unit="record",
            records_per_user=None,
            clip_norm=1.0,
            expected_batch_size=4.0,
            method="prism",
            dataset="notes",
        )


def test_what_lies_beyond_the_grid_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a grid that ends early nothing is lost: it is infinite loss."""
    whole = [PassLoss.of(1.0, bins) for bins in (1, 4)]
    monkeypatch.setattr(allocation, "_FARTHEST", 2.0)
    for before, loss in zip(whole, (PassLoss.of(1.0, bins) for bins in (1, 4)), strict=True):
        assert loss.beyond > 1e-3
        assert loss.masses.sum() + loss.at_zero == pytest.approx(1, abs=1e-11)
        assert (loss.masses * np.exp(loss.losses)).sum() + loss.beyond == pytest.approx(1, abs=1e-11)
        assert (loss.removed(EPSILONS) >= before.removed(EPSILONS) - 1e-4).all()
        assert (loss.added(EPSILONS) >= before.added(EPSILONS) - 1e-4).all()
