"""From what an attack got right to lower bounds on epsilon that hold with a stated confidence.

Two games are played. In the game of many trials, a secret bit per trial says whether the canary was there, and every
trial is a fresh run of the mechanism. In the game of one run, each of m canaries has its own secret bit, all of them
are in or out of one and the same run, and the attacker guesses the bits of those it is surest of.

| function          | game   | what is assumed of the mechanism     | source                                        |
|-------------------|--------|--------------------------------------|-----------------------------------------------|
| threshold_epsilon | trials | nothing                              | Kairouz et al. 2015; Nasr et al. 2021         |
| accuracy_mu       | trials | it is mu-GDP for some mu             | Dong et al. 2022; Hoeffding 1956              |
| one_run_epsilon   | run    | nothing                              | Steinke, Nasr and Jagielski 2023, Theorem 5.2 |
| one_run_refutes   | run    | a whole privacy curve, to be refuted | Mahloujifar, Melis and Chaudhuri 2025         |
| signals_mu        | run    | Gaussian noise of unknown size       | ours, in the place of the limit theorem of    |
|                   |        |                                      | Agrawal et al. 2026 (arXiv 2606.12733)        |

A bound says "with probability ``confidence`` over the attack, the true epsilon is at least this", not "is this". All
bounds are for add-or-remove-one of a canary. Thresholds and numbers of guesses must not be chosen on the trials that
are judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import beta, binom

from privlora.accounting.accountants import delta_curve, epsilon, merged, rough_epsilon
from privlora.accounting.events import StepEvent
from privlora.accounting.projection.gaussian import gaussian_delta
from privlora.errors import ConfigError

Floats = NDArray[np.float64]

# Given the probability of an event on one data set, the least that it can have on a neighbouring one.
Floor = Callable[[float], float]

LARGEST_EPSILON = 100.0  # where searches end: no attack of this size can show more
GRID, _POINTS = 5e-3, 64  # of the curves that are to be refuted: coarse is pessimistic, so the bound holds
_EPSILON_GRID = 1e-3  # of the epsilon that goes with a bound, which is no finer than one in 200 itself


@dataclass(frozen=True)
class Errors:
    """Counts of one threshold: of ``absent`` trials without the canary, of ``present`` ones with it."""

    false_positives: int
    absent: int
    false_negatives: int
    present: int

    def __post_init__(self) -> None:
        for hits, trials in ((self.false_positives, self.absent), (self.false_negatives, self.present)):
            _check_counts(hits, trials)

    @property
    def correct(self) -> int:
        return self.absent + self.present - self.false_positives - self.false_negatives

    def if_none(self) -> Errors:
        """Of as many trials, all guesses right."""
        return Errors(0, self.absent, 0, self.present)


def _rate_at_most(hits: int, trials: int, confidence: float) -> float:
    """Clopper-Pearson upper bound on a probability, from ``hits`` successes in ``trials`` independent draws."""
    _check_counts(hits, trials)
    _check_confidence(confidence)
    return 1.0 if hits == trials else float(beta.ppf(confidence, hits + 1, trials - hits))


def rate_at_least(hits: int, trials: int, confidence: float) -> float:
    """The lower bound that goes with ``_rate_at_most``."""
    return 1.0 - _rate_at_most(trials - hits, trials, confidence)


def _epsilon_of_rates(false_positive_rate: float, false_negative_rate: float, delta: float) -> float:
    """Smallest epsilon at ``delta`` that allows a test with these error rates (Kairouz, Oh and Viswanath 2015).

    max of ln((1 - delta - FPR) / FNR) and ln((1 - delta - FNR) / FPR), at least 0; inf where a rate is 0.
    """
    best, rates = 0.0, (false_positive_rate, false_negative_rate)
    for one, other in (rates, rates[::-1]):
        if 1 - delta - one > other:
            best = max(best, math.inf if other == 0 else math.log((1 - delta - one) / other))
    return best


def threshold_epsilon(errors: Errors, delta: float, confidence: float) -> float:
    """Lower bound on epsilon at ``delta`` without any assumption, from both error rates of independent trials.

    Each rate gets its Clopper-Pearson bound at half of the error probability.
    """
    each = 1 - (1 - confidence) / 2
    false_positive_rate = _rate_at_most(errors.false_positives, errors.absent, each)
    false_negative_rate = _rate_at_most(errors.false_negatives, errors.present, each)
    return _epsilon_of_rates(false_positive_rate, false_negative_rate, delta)


def accuracy_mu(errors: Errors, confidence: float) -> float:
    """Smallest mu of Gaussian DP that allows as many right guesses in balanced independent trials, at least 0.

    No test has a balanced accuracy above (1 + delta(0)) / 2 = Phi(mu / 2). The number of right guesses is a sum of
    independent bits of two kinds, whose tail is at most that of a binomial with the mean rate (Hoeffding 1956), so one
    Clopper-Pearson bound serves both worlds. Raises ConfigError unless both worlds have as many trials.
    """
    if errors.present != errors.absent:
        counts = f"{errors.present} trials with the canary and {errors.absent} without"
        raise ConfigError(f"{counts} are no fair coin", fix="play as many of either")
    accuracy = rate_at_least(errors.correct, errors.present + errors.absent, confidence)
    return max(0.0, 2 * float(ndtri(accuracy)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at ``delta`` of a mechanism that is exactly mu-GDP (a Gaussian mechanism of noise multiplier 1 / mu)."""

    def excess(epsilon: float) -> float:
        return float(gaussian_delta(epsilon, mu**2)) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-10))


def _one_run_p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound on P(at least ``correct`` of at most ``guesses`` right) if the run is (epsilon, delta)-DP.

    Theorem 5.2 of Steinke, Nasr and Jagielski (2023): with f(v) = P(Binomial(guesses, 1 / (1 + e^-epsilon)) >= v),

        f(correct) + 2 canaries delta max_{1 <= i <= canaries} (f(correct - i) - f(correct)) / i.

    Each of ``canaries`` was in or out by a fair coin of its own; the attacker may abstain.
    """
    _check_one_run(correct, guesses, canaries)
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, rate))
    steps = np.arange(1, correct + 1)  # beyond them f is 1, and the quotient falls
    gain = (binom.sf(correct - steps - 1, guesses, rate) - tail) / steps
    return min(1.0, tail + 2 * canaries * delta * float(np.max(gain, initial=0.0)))


def one_run_epsilon(correct: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    """Largest epsilon at ``delta`` that one run refutes, without any other assumption; see ``_one_run_p_value``."""
    _check_confidence(confidence)

    def refuted(epsilon: float) -> bool:
        return _one_run_p_value(correct, guesses, canaries, epsilon, delta) <= 1 - confidence

    return largest_refuted(refuted, LARGEST_EPSILON)


def one_run_refutes(floor: Floor, correct: int, guesses: int, canaries: int, confidence: float) -> bool:
    """Whether one run refutes a privacy curve: ``correct`` of exactly ``guesses`` right would be too unlikely.

    Mahloujifar, Melis and Chaudhuri (2025), derived for abstaining attackers: let p_i be the probability of i right
    guesses, and flip the bit of one canary out of all, drawn at random. The event "that canary is guessed, rightly, and
    at least j are right" has probability a_j = sum_{i >= j} (i / canaries) p_i, and after the flip b_{j-1} =
    sum_{i >= j-1} ((guesses - i) / canaries) p_i, so b_{j-1} >= floor(a_j) for every j. Were P(>= correct) equal to
    1 - confidence, the smallest a_0 + b_0 that this allows would have to be at most guesses / canaries. The smallest is
    found by putting no more than needed on each count, from ``correct`` downwards: mass that is moved up, or added,
    only raises what the counts below need.
    """
    _check_one_run(correct, guesses, canaries)
    _check_confidence(confidence)
    right = (1 - confidence) * correct / canaries
    wrong = (1 - confidence) * (guesses - correct) / canaries
    for count in range(correct - 1, -1, -1):
        needed = floor(min(1.0, right))
        if needed <= wrong:
            break  # neither of the two can change any more
        right += count / (guesses - count) * (needed - wrong)
        wrong = needed
        if right + wrong > guesses / canaries:
            return True
    return right + wrong > guesses / canaries


def signals_mu(signal: float, expected: float, energy: float, dimensions: int, confidence: float) -> float:
    """Largest 1 / noise_multiplier that the summed signals of one run's canaries refute, at least 0.

    Assumed: release t of the run, times b / C and without the records' part, is theta (f_t + sigma z_t) with z_t
    standard normal and independent of the past, f_t the sum of what the canaries of the batch would add to an honest
    mechanism, and any theta > 0. With k_t canaries drawn, K = sum_t k_t, and f_t != 0 wherever k_t > 0:

        signal    sum_t sqrt(k_t / K) <release_t, f_t> / ||f_t||, which is theta (expected + sigma N(0, 1))
        expected  sum_t sqrt(k_t / K) ||f_t||
        energy    sum_t ||Pi_t (release_t - f_t)||^2, Pi_t onto the span of canaries that were not drawn

    and ``dimensions`` is the sum of these spans', each fixed by the past and the draws. Directions may follow from
    earlier releases, and need not be orthogonal: neither law depends on them. energy >= theta^2 sigma^2 chi^2 in law,
    as what is left of f_t only adds to it; by its exponential moments at l > 0, with a tenth of the error probability,

        chi^2 > (dimensions / 2 ln(1 + 2 l) - ln(10 / error)) / l.

    The rest is for the signal. Canaries may be drawn in any way that does not depend on the noise: sampling is not
    tested.
    """
    _check_confidence(confidence)
    if not (expected > 0 and energy > 0 and dimensions > 0):
        raise ConfigError("there are no signals to sum", fix="use more canaries or steps")
    error = 1 - confidence
    log = math.log(10 / error)
    rate = math.sqrt(log / dimensions)
    least = max(0.0, (dimensions / 2 * math.log1p(2 * rate) - log) / rate)
    return max(0.0, (signal * math.sqrt(least / energy) - float(ndtri(1 - 0.9 * error))) / expected)


def _curve_floor(epsilons: Floats, deltas: Floats) -> Floor:
    """Of a mechanism that is (epsilons[k], deltas[k])-DP for every k, in both orders of every pair of neighbours.

    epsilons: (K,) >= 0. P <= e^epsilon Q + delta, for an event and for its complement, gives 2 K straight lines. A
    curve that is known at few points allows more, so what is refuted with few points is refuted.
    """
    factors = np.exp(-epsilons)
    slopes = np.concatenate([factors, 1 / factors])
    offsets = np.concatenate([-factors * deltas, 1 - deltas - 1 / factors])
    return lambda a: max(0.0, float(np.max(slopes * a + offsets)))


@lru_cache(maxsize=512)
def floor_of(events: tuple[tuple[StepEvent, int], ...]) -> Floor:
    """``_curve_floor`` of what is claimed."""
    top = min(LARGEST_EPSILON, max(4.0, rough_epsilon(merged(events))))
    epsilons = top * np.linspace(0, 1, _POINTS) ** 1.5
    return _curve_floor(epsilons, np.array(delta_curve(events, list(epsilons), grid=GRID)))


def with_mu(event: StepEvent, mu: float) -> StepEvent:
    """With a noise multiplier of 1 / mu."""
    return replace(event, noise_multiplier=1 / mu)


def epsilon_at(mu: float, event: StepEvent, steps: int, delta: float) -> float:
    """Epsilon of ``steps`` such events with a noise multiplier of 1 / mu; 0 for no mu."""
    return epsilon([(with_mu(event, mu), steps)], delta, grid=_EPSILON_GRID) if mu else 0.0


def beyond_claim(event: StepEvent, steps: int, refuted: Callable[[float], bool]) -> float:
    """Where to end a search for mu: at the claim's, or so far beyond it as is refuted and can be computed."""
    largest = 1 / event.noise_multiplier
    while refuted(largest) and rough_epsilon({with_mu(event, largest / 0.8): steps}) < LARGEST_EPSILON:
        largest /= 0.8
    return largest


def largest_refuted(refuted: Callable[[float], bool], largest: float, tolerance: float = 1e-4) -> float:
    """Largest parameter in (0, ``largest``] that is refuted, where all smaller ones are; 0 if none is.

    Always a parameter that was tested, so the answer itself is refuted.
    """
    low, high = 0.0, largest
    if refuted(largest):
        return largest
    while high - low > tolerance:
        middle = (low + high) / 2
        if refuted(middle):
            low = middle
        else:
            high = middle
    return low


def _check_counts(hits: int, trials: int) -> None:
    if not 0 <= hits <= trials or trials < 1:
        raise ConfigError(f"{hits} of {trials} is no count of trials", fix="play at least one trial")


def _check_one_run(correct: int, guesses: int, canaries: int) -> None:
    if not 0 <= correct <= guesses <= canaries or canaries < 1:
        counts = f"{correct} right of {guesses} guesses on {canaries} canaries"
        raise ConfigError(f"{counts} is not possible", fix="guess each canary at most once")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} is not between 0 and 1", fix="0.95 is usual")


def judged_errors(absent: Floats, present: Floats, pilot: int, *, threshold: float | None = None) -> Errors:
    """Of a threshold from the first ``pilot`` trials; the side on which ``present`` lies is learnt too.

    threshold: from elsewhere, with ``present`` above it; never from the trials that are judged.
    """
    sign = 1.0
    if threshold is None:
        middles = np.median(absent[:pilot]), np.median(present[:pilot])
        sign = 1.0 if middles[1] >= middles[0] else -1.0
        # Between the two medians: the best place for equal spreads, and robust with few pilot trials.
        threshold = sign * (middles[0] + middles[1]) / 2
    absent, present = sign * absent[pilot:], sign * present[pilot:]
    wrong = int((absent > threshold).sum()), int((present <= threshold).sum())
    return Errors(wrong[0], len(absent), wrong[1], len(present))
