"""Bounds against hand-computed values, brute force, and simulations of mechanisms whose epsilon is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import ndtr, ndtri
from scipy.stats import binom, chi2, norm

from privlora.accounting.accountants import delta_curve
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.accounting.projection.gaussian import gaussian_delta
from privlora.auditing.bounds import (
    Errors,
    Floor,
    _curve_floor,
    _epsilon_of_rates,
    _one_run_p_value,
    _rate_at_most,
    accuracy_mu,
    gaussian_epsilon,
    largest_refuted,
    one_run_epsilon,
    one_run_refutes,
    rate_at_least,
    signals_mu,
    threshold_epsilon,
)
from privlora.errors import ConfigError
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier

DELTA = 1e-5


def gaussian_floor(mu: float) -> Floor:
    """Of mu-GDP: Phi(Phi^-1(a) - mu)."""
    return lambda a: float(norm.cdf(norm.ppf(a) - mu))


def test_clopper_pearson_by_hand() -> None:
    # No hit in n trials: (1 - p)^n = 1 - confidence.
    assert _rate_at_most(0, 59, 0.95) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert rate_at_least(59, 59, 0.95) == pytest.approx(0.05 ** (1 / 59))
    assert _rate_at_most(7, 7, 0.95) == 1.0
    upper = _rate_at_most(3, 20, 0.9)
    assert binom.cdf(3, 20, upper) == pytest.approx(0.1)


def test_epsilon_of_rates_by_hand() -> None:
    assert _epsilon_of_rates(0.1, 0.2, 0.0) == pytest.approx(math.log(8))
    assert _epsilon_of_rates(0.1, 0.2, 0.1) == pytest.approx(math.log(7))
    assert _epsilon_of_rates(0.5, 0.5, 0.0) == 0.0
    assert _epsilon_of_rates(0.0, 0.5, 0.0) == math.inf
    # Randomised response reaches its own epsilon.
    truth = 1 / (1 + math.exp(1.7))
    assert _epsilon_of_rates(truth, truth, 0.0) == pytest.approx(1.7)


@pytest.mark.parametrize("target", [0.3, 1.0, 3.0, 8.0])
def test_gaussian_epsilon_inverts_the_exact_curve(target: float) -> None:
    mu = 1 / gaussian_noise_multiplier(target, DELTA)
    assert gaussian_epsilon(mu, DELTA) == pytest.approx(target, abs=1e-6)


def test_no_evidence_is_no_epsilon() -> None:
    nothing = Errors(50, 100, 50, 100)
    assert threshold_epsilon(nothing, DELTA, 0.95) == 0.0
    assert accuracy_mu(nothing, 0.95) == 0.0
    assert gaussian_epsilon(0.0, DELTA) == 0.0
    assert one_run_epsilon(50, 100, 100, DELTA, 0.95) == 0.0


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_bounds_of_trials_cover_and_are_tight(mu: float) -> None:
    generator = np.random.default_rng(3)
    trials, rounds = 4000, 200
    above = generator.binomial(trials, ndtr(-mu / 2), size=(rounds, 2))
    errors = [Errors(int(fp), trials, int(fn), trials) for fp, fn in above]
    truth = gaussian_epsilon(mu, DELTA)
    found = np.array([accuracy_mu(e, 0.9) for e in errors])
    # Ten per cent may be above the truth; 200 rounds allow for three standard errors.
    assert (found > mu).mean() < 0.1 + 3 * 0.022
    assert np.median(found) > mu - 0.15
    assert np.mean([threshold_epsilon(e, DELTA, 0.9) > truth for e in errors]) == 0.0


def test_accuracy_needs_a_fair_coin() -> None:
    with pytest.raises(ConfigError, match="fair"):
        accuracy_mu(Errors(1, 10, 1, 20), 0.95)


def test_one_run_p_value_by_hand() -> None:
    # delta = 0: the binomial tail of randomised response.
    assert _one_run_p_value(9, 10, 50, math.log(3), 0.0) == pytest.approx(10 * 0.75**9 * 0.25 + 0.75**10)
    # Two guesses, both right, epsilon 0: f(2) = 1/4, f(1) = 3/4, f(0) = 1; the largest quotient is (3/4 - 1/4) / 1.
    assert _one_run_p_value(2, 2, 10, 0.0, 1e-3) == pytest.approx(1 / 4 + 2 * 10 * 1e-3 / 2)
    assert _one_run_p_value(0, 10, 50, 1.0, 0.0) == 1.0


def test_one_run_bound_of_randomised_response_covers_and_is_tight() -> None:
    generator = np.random.default_rng(5)
    truth, canaries = 1.5, 2000
    right = generator.binomial(canaries, 1 / (1 + math.exp(-truth)), size=400)
    found = np.array([one_run_epsilon(int(c), canaries, canaries, 0.0, 0.9) for c in np.unique(right)])
    by_count = dict(zip(np.unique(right).tolist(), found, strict=True))
    every = np.array([by_count[c] for c in right.tolist()])
    assert 0.02 < (every > truth).mean() < 0.1 + 3 * 0.015
    assert np.median(every) > 0.9 * truth


def least_total(floor_of: list[tuple[float, float]], correct: int, guesses: int, canaries: int) -> float:
    """The largest P(>= correct) that straight lines x >= slope a + offset allow, by linear programming."""
    counts = np.arange(guesses + 1)
    rows, limits = [], []
    for j in range(1, guesses + 1):
        a = np.where(counts >= j, counts, 0) / canaries
        b = np.where(counts >= j - 1, guesses - counts, 0) / canaries
        for slope, offset in floor_of:  # b >= slope a + offset
            rows.append(slope * a - b)
            limits.append(-offset)
    found = linprog(
        -(counts >= correct).astype(float),
        A_ub=np.array(rows),
        b_ub=limits,
        A_eq=np.ones((1, guesses + 1)),
        b_eq=[1.0],
        bounds=(0, 1),
    )
    assert found.success
    return float(-found.fun)


@pytest.mark.parametrize(("correct", "guesses", "canaries"), [(10, 10, 10), (10, 10, 14), (19, 20, 20)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (0.5, 0.01), (1.5, 1e-3)])
def test_one_run_refutation_is_the_linear_programme(
    correct: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> None:
    factor = math.exp(-epsilon)
    lines = [(factor, -factor * delta), (1 / factor, 1 - delta - 1 / factor)]
    most = least_total(lines, correct, guesses, canaries)
    floor = _curve_floor(np.array([epsilon]), np.array([delta]))
    assert not one_run_refutes(floor, correct, guesses, canaries, 1 - most + 1e-3 * most)
    assert one_run_refutes(floor, correct, guesses, canaries, 1 - most - 1e-2 * most)


def simulate(mu: float, canaries: int, guesses: int, generator: np.random.Generator) -> int:
    """Right guesses of the best attacker on independent Gaussian canaries."""
    present = generator.random(canaries) < 0.5
    order = np.argsort(generator.standard_normal(canaries) + mu * present)
    half = guesses // 2
    return int(present[order[-half:]].sum() + (~present[order[:half]]).sum())


@pytest.mark.parametrize(("target", "share"), [(1.0, 0.2), (3.0, 0.45), (8.0, 0.45)])
def test_one_run_bounds_of_gaussian_canaries(target: float, share: float) -> None:
    """Of the largest mu for which one run refutes mu-GDP."""

    def refuted(correct: int) -> float:
        floors = lambda mu: one_run_refutes(gaussian_floor(mu), correct, guesses, canaries, 0.95)  # noqa: E731
        return gaussian_epsilon(largest_refuted(floors, 20.0), DELTA)

    generator = np.random.default_rng(11)
    mu, canaries, guesses = 1 / gaussian_noise_multiplier(target, DELTA), 3000, 300
    right = [simulate(mu, canaries, guesses, generator) for _ in range(20)]
    found = np.array([refuted(c) for c in right])
    plain = np.array([one_run_epsilon(c, guesses, canaries, DELTA, 0.95) for c in right])
    assert (found <= target).all()
    assert (plain <= found + 1e-3).all()
    assert np.median(found) > share * target


def test_floors_agree_on_the_gaussian_mechanism() -> None:
    epsilons = np.linspace(0, 12, 400)
    by_points = _curve_floor(epsilons, gaussian_delta(epsilons, 1.3**2))
    exact = gaussian_floor(1.3)
    for a in (1e-4, 0.03, 0.4, 0.9, 1.0):
        assert by_points(a) == pytest.approx(exact(a), abs=2e-4)
        assert by_points(a) <= exact(a) + 1e-12


def test_the_floor_of_a_sampled_run_is_that_of_its_likelihood_ratio_test() -> None:
    rate, sigma = 0.3, 1.0
    epsilons = np.linspace(0, 4, 200)
    curve = delta_curve([(StepEvent(PoissonSampling(rate), sigma), 1)], list(epsilons), grid=1e-3)
    floor = _curve_floor(epsilons, np.array(curve))
    # The threshold test on x has the two rates below; none does better, in the order of the pair that is the worse one.
    for x in (-0.5, 0.5, 1.5, 2.5):
        false, true = ndtr(-x), (1 - rate) * ndtr(-x) + rate * ndtr(1 - x)
        assert floor(float(true)) <= false + 1e-6
        if x > 1:
            assert floor(float(true)) > 0.97 * false


def test_largest_refuted_is_refuted() -> None:
    assert largest_refuted(lambda x: x <= 1.234, 10.0) == pytest.approx(1.234, abs=1e-4)
    assert largest_refuted(lambda x: x <= 1.234, 10.0) <= 1.234
    assert largest_refuted(lambda x: True, 10.0) == 10.0
    assert largest_refuted(lambda x: False, 10.0) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: _rate_at_most(3, 2, 0.95),
        lambda: _rate_at_most(0, 0, 0.95),
        lambda: _rate_at_most(1, 2, 1.0),
        lambda: Errors(-1, 5, 0, 5),
        lambda: one_run_epsilon(5, 4, 10, DELTA, 0.95),
        lambda: one_run_epsilon(5, 11, 10, DELTA, 0.95),
        lambda: one_run_refutes(gaussian_floor(1.0), 5, 10, 10, 0.0),
    ],
)
def test_impossible_counts_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ConfigError):
        call()


def test_accuracy_is_what_the_normal_quantile_says() -> None:
    errors = Errors(300, 1000, 300, 1000)
    assert accuracy_mu(errors, 0.95) == pytest.approx(2 * ndtri(rate_at_least(1400, 2000, 0.95)))


def summed_signals(
    generator: np.random.Generator, sigma: float, *, theta: float = 1.0, canaries: int = 60, room: int = 200
) -> tuple[float, float, float, int]:
    """Of 16 steps at q = 0.2 with canaries that interfere, in directions that follow from the last release."""
    included = generator.random(canaries) < 0.5
    signal = expected = energy = 0.0
    dimensions = total = 0
    past = 0.0
    for _ in range(16):
        directions = generator.standard_normal((room, canaries))
        directions[0] += 3 * np.sign(past)
        directions /= np.linalg.norm(directions, axis=0)
        drawn = included & (generator.random(canaries) < 0.2)
        count = int(drawn.sum())
        if count == 0:
            continue
        part = directions[:, drawn].sum(axis=1)
        release = theta * (part + sigma * generator.standard_normal(room))
        past = float(release[0])
        length = float(np.linalg.norm(part))
        signal += math.sqrt(count) * float(release @ part) / length
        expected += math.sqrt(count) * length
        basis = np.linalg.qr(directions[:, ~drawn])[0]
        energy += float(np.square(basis.T @ (release - part)).sum())
        dimensions += basis.shape[1]
        total += count
    return signal / math.sqrt(total), expected / math.sqrt(total), energy, dimensions


@pytest.mark.parametrize("sigma", [pytest.param(3.0, marks=pytest.mark.long), 0.85])
def test_summed_signals_refute_a_correct_run_no_more_often_than_stated(sigma: float) -> None:
    """At 80 % confidence, so that a wrong level shows in few runs: 5 standard deviations above 20 % of 300."""
    generator = np.random.default_rng(0)
    found = [signals_mu(*summed_signals(generator, sigma), 0.8) for _ in range(300)]
    assert sum(mu > 1 / sigma for mu in found) <= 0.2 * 300 + 5 * math.sqrt(300 * 0.2 * 0.8)
    assert np.median(found) > 0.6 / sigma


def test_summed_signals_convict_a_quarter_of_the_noise_and_no_other_scale() -> None:
    generator = np.random.default_rng(0)
    assert all(signals_mu(*summed_signals(generator, 0.2), 0.95) > 1 / 0.8 for _ in range(10))
    assert all(signals_mu(*summed_signals(generator, 2.0, theta=0.1), 0.99) <= 1 / 2 for _ in range(10))


def test_the_noise_of_summed_signals_is_not_taken_for_smaller_than_it_is() -> None:
    """Where the signal is all, what is left is the bound on chi^2: exceeded with a tenth of the error probability."""
    for dimensions in (10, 1000):
        least = (signals_mu(1e9, 1.0, 1.0, dimensions, 0.8) / 1e9) ** 2
        assert chi2.cdf(least, dimensions) <= 0.02
    assert least > 0.9 * chi2.ppf(0.02, 1000)
    # Where the noise is known, what is left is the bound on the signal: the rest of the error probability.
    assert signals_mu(10.0, 1.0, 1e12, 10**12, 0.8) == pytest.approx(10 - ndtri(1 - 0.18), abs=1e-3)
    with pytest.raises(ConfigError, match="no signals"):
        signals_mu(1.0, 0.0, 1.0, 10, 0.95)
