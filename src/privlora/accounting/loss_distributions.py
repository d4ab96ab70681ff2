"""The privacy loss distributions (PLD) of dp_accounting, in arrays where it takes one number at a time.

The numbers are those of dp_accounting within rounding, and so is what makes them upper bounds: the same truncation, the
same connected dots, the same Chernoff bounds on what a composition leaves out, which counts as infinite loss.
dp_accounting takes a second to import, so this module is imported inside the functions that need it.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray
from scipy import fft
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

from privlora.accounting.events import TruncatedPoissonSampling

Floats = NDArray[np.float64]

_BLOCK = 1 << 14
_ORDERS = 20  # of the Chernoff bounds, on both sides, as in dp_accounting
_LENGTHS_PER_OCTAVE = 8  # a spectrum serves all compositions of about its length
_TRIED = 15  # losses at once
_SMALL = 1e-9  # below this delta, rounding in sums over frequencies would show
_VANISHED = -100.0  # log of a factor that is nothing beside rounding


def gaussian_pld(
    noise_multiplier: float, sample_rate: float, relation: NeighboringRelation, grid: float
) -> PrivacyLossDistribution:
    """As dp_accounting's `from_gaussian_mechanism`: one release of a Poisson sample, sensitivity 1.

    Args:
        noise_multiplier: standard deviation, > 0.
        sample_rate: q, in (0, 1].
        relation: of neighbouring data sets.
        grid: spacing of the discretised loss.
    """

    def one_way(adjacency: AdjacencyType) -> FastPmf:
        loss = _GaussianLoss(noise_multiplier, sampling_prob=sample_rate, adjacency_type=adjacency)
        bounds = loss.connect_dots_bounds()
        low, high = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
        deltas = loss.get_delta_for_epsilon(np.arange(low, high + 1) * grid)
        return FastPmf.of(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, low, high, deltas))

    if relation == NeighboringRelation.REPLACE_ONE:
        return PrivacyLossDistribution(one_way(AdjacencyType.REPLACE))
    removed = one_way(AdjacencyType.REMOVE)
    if sample_rate == 1:
        return PrivacyLossDistribution(removed)
    return PrivacyLossDistribution(removed, one_way(AdjacencyType.ADD))


def truncated_pld(
    noise_multiplier: float, sampling: TruncatedPoissonSampling, relation: NeighboringRelation, grid: float
) -> PrivacyLossDistribution:
    """As dp_accounting's `from_truncated_subsampled_gaussian_mechanism` (arXiv:2508.15089)."""
    plain = gaussian_pld(noise_multiplier, sampling.sample_rate, relation, grid)
    size, most, q = sampling.dataset_size, sampling.max_batch_size, sampling.sample_rate
    truncated = float(binom.sf(most - 1, size - 1, q))  # given that the unit was sampled
    if truncated == 0:
        return plain
    sampled = float(binom.sf(most, size, q)) * most / truncated / size  # given that units were taken away
    # One unit more pushes another one out: twice the sensitivity.
    pushing = gaussian_pld(noise_multiplier / 2, sampled, NeighboringRelation.REPLACE_ONE, grid)
    mixed = pushing.compute_mixture(plain, truncated)
    return with_fast_pmfs(mixed)


def with_fast_pmfs(pld: PrivacyLossDistribution) -> PrivacyLossDistribution:
    """The same distribution, which composes and answers fast."""
    removed, added = FastPmf.of(pld._pmf_remove), pld._pmf_add
    return (
        PrivacyLossDistribution(removed)
        if pld._symmetric
        else PrivacyLossDistribution(removed, FastPmf.of(added))
    )


class _GaussianLoss(GaussianPrivacyLoss):
    """The loss of the Gaussian mechanism, whose curve is computed for all epsilons at once."""

    def get_delta_for_epsilon(self, epsilon: Floats) -> Floats:
        """(n,) delta at each of the (n,) epsilons, in [0, 1]."""
        deltas = np.zeros(len(epsilon))
        inside = np.ones(len(epsilon), bool)
        if self.sampling_prob < 1 and self.adjacency_type == AdjacencyType.ADD:
            inside = epsilon < -math.log1p(-self.sampling_prob)
        elif self.sampling_prob < 1 and self.adjacency_type == AdjacencyType.REMOVE:
            inside = epsilon > math.log1p(-self.sampling_prob)
            deltas[~inside] = -np.expm1(epsilon[~inside])
        at = self._cutoffs(epsilon[inside])
        deltas[inside] = self.mu_upper_cdf(at) - np.exp(epsilon[inside] + self.mu_lower_log_cdf(at))
        return np.clip(deltas, 0.0, 1.0)

    def noise_cdf(self, x: Any) -> Any:
        """Of the noise."""
        return ndtr(np.asarray(x) / self._standard_deviation)

    def noise_log_cdf(self, x: Any) -> Any:
        """Log of `noise_cdf`."""
        return log_ndtr(np.asarray(x) / self._standard_deviation)

    def _cutoffs(self, losses: Floats) -> Floats:
        """The largest outputs (n,) at which the privacy loss is at least each of `losses`."""
        variance = self._standard_deviation**2
        if self.adjacency_type == AdjacencyType.REMOVE:
            return -0.5 - _without_sampling(losses, self.sampling_prob) * variance
        if self.adjacency_type == AdjacencyType.ADD:
            return 0.5 + _without_sampling(-losses, self.sampling_prob) * variance
        return variance * (_replaced(losses, self.sampling_prob, self._standard_deviation) - losses / 2)


def _without_sampling(losses: Floats, q: float) -> Floats:
    """log(1 + (e^loss - 1) / q): the loss, before sampling, of what has this loss after it; -inf at log(1 - q)."""
    if q == 1:
        return losses
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 1.0)) / q, -1.0))
        return np.where(losses < 1, small, losses - math.log(q) + np.log1p(-(1 - q) * np.exp(-losses)))


def _replaced(losses: Floats, q: float, sigma: float) -> Floats:
    """arcsinh(-sinh(loss / 2) e^(1 / (2 sigma^2)) (1 - q) / q) (supplement of dp_accounting), without overflow."""
    if q == 1:
        return np.zeros_like(losses)
    half = np.abs(losses) / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
    log_of_it = log_sinh + 0.5 / sigma**2 + math.log1p(-q) - math.log(q)
    return -np.sign(losses) * np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_of_it), log_of_it)


class FastPmf(pld_pmf.DensePLDPmf):
    """A pessimistic discretised loss; what composing it needs is kept, so that another number of steps costs little."""

    _spectrum: tuple[Floats, Floats, int] | None = None

    @staticmethod
    def of(pmf: pld_pmf.PLDPmf) -> FastPmf:
        """The same distribution."""
        dense = pmf.to_dense_pmf()
        return FastPmf(dense._discretization, dense._lower_loss, dense._probs, dense._infinity_mass, True)

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> FastPmf:
        """The loss of `num_times` releases; mass of at most `tail_mass_truncation` is moved to infinity."""
        return _Composed(self, num_times, tail_mass_truncation)

    def compose(self, other: pld_pmf.DensePLDPmf, tail_mass_truncation: float = 0) -> FastPmf:
        """The loss of one release of each."""
        plain = (
            pld_pmf.DensePLDPmf(pmf._discretization, pmf._lower_loss, pmf._probs, pmf._infinity_mass, True)
            for pmf in (self, other)
        )
        return FastPmf.of(pld_pmf.compose_pmfs(*plain, tail_mass_truncation))

    def get_epsilon_for_delta(self, delta: float) -> float:
        """The smallest epsilon >= 0 for which delta is enough; inf if there is none."""
        if self._infinity_mass > delta:
            return math.inf
        upper, lower = self._infinity_mass, 0.0  # mass of larger losses, and the same weighted by e^-loss
        for end in range(self.size, 0, -_BLOCK):
            start = max(0, end - _BLOCK)
            losses = (np.arange(start, end) + self._lower_loss)[::-1] * self._discretization
            probs = self._probs[start:end][::-1]
            uppers = upper + np.concatenate([[0.0], np.cumsum(probs)])
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                lowers = lower + np.concatenate([[0.0], np.cumsum(np.exp(-losses) * probs)])
                above = (uppers > delta) & (lowers > 0)
                crossing = np.where(above, np.log((uppers - delta) / lowers), -math.inf)
            found = crossing[:-1] >= losses
            huge = (uppers[1:] >= delta) & (lowers[1:] == 0)  # e^-loss is zero
            first = int(np.argmax(found | huge))
            if huge[first] and not found[first]:
                return max(0.0, float(losses[first]))
            if found[first]:
                upper, lower = float(uppers[first]), float(lowers[first])
                break
            upper, lower = float(uppers[-1]), float(lowers[-1])
        return 0.0 if upper <= lower + delta else math.log((upper - delta) / lower)

    @cached_property
    def _log_moments(self) -> tuple[Floats, Floats]:
        """Orders (2 * _ORDERS,) per index of the loss, and the log of the moment generating function there."""
        factor = np.exp(np.arange(self.size) / self.size)
        orders, moments = list[float](), list[float]()
        for sign in (1, -1):
            weighted = self._probs
            for order in range(1, _ORDERS + 1):
                weighted = weighted * factor if sign == 1 else weighted / factor
                orders.append(sign * order / self.size)
                moments.append(float(weighted.sum()))
        return np.array(orders), np.log(np.array(moments))

    def _bounds(self, num_times: int, tail: float) -> tuple[int, int]:
        """The indices between which all but `tail` of the composed mass is: dp_accounting's Chernoff bounds."""
        largest = (self.size - 1) * num_times
        if tail == 0:
            return 0, largest
        orders, moments = self._log_moments
        bounds = (num_times * moments + math.log(2 / tail)) / orders
        low = max(0, math.floor(bounds[orders < 0].max()))
        return low, min(largest, math.ceil(bounds[orders > 0].min()))

    def log_spectrum(self, wanted: int) -> tuple[Floats, Floats, int]:
        """Log of the size, and angle, of the Fourier transform over at least `wanted` indices; and their number."""
        octave = math.ceil(math.log2(wanted) * _LENGTHS_PER_OCTAVE) / _LENGTHS_PER_OCTAVE
        length = fft.next_fast_len(max(wanted, math.ceil(2**octave)), real=True)
        if self._spectrum is None or self._spectrum[2] != length:
            spectrum = fft.rfft(self._probs, length)
            with np.errstate(divide="ignore"):
                self._spectrum = np.log(np.abs(spectrum)), np.angle(spectrum), length
        return self._spectrum


class _Composed(FastPmf):
    """The loss of many releases, as its Fourier transform; probabilities are computed if they are asked for.

    At the loss of index j, delta is the infinite mass and the sum of p(l) (1 - r^(l - j)) over j < l <= h, the last
    index, with r = e^-grid. Those sums are geometric for each frequency w, so with z = e^(iw), A = z / (1 - z),
    B = rz / (1 - rz) and S = h - j they are 1 / N times the sum over w of

        F(w) e^(iwh) ((A - B) z^-S - A + r^S B),   at w = 0   F(0) (S - (1 - r^S) r / (1 - r)):

    a few thousand products for each j that is tried, where all probabilities take a transform.
    """

    def __init__(self, step: FastPmf, count: int, tail: float) -> None:
        """step: of one release. tail: mass that may be moved to infinity."""
        self._low, self._high = step._bounds(count, tail)
        infinite = tail - math.expm1(count * math.log1p(-step._infinity_mass))
        pld_pmf.PLDPmf.__init__(self, step._discretization, infinite, True)
        self._lower_loss = step._lower_loss * count + self._low
        size, angle, self._length = step.log_spectrum(max(self.size, step.size))
        kept = count * size > _VANISHED
        number = int(np.flatnonzero(kept)[-1]) + 1  # the others have vanished
        kept = kept[:number]
        turns = (np.arange(number) * self._high % self._length)[kept] * (2 * math.pi / self._length)
        self._power = np.zeros(number, np.complex128)  # F(w) e^(iwh)
        self._power[kept] = np.exp(count * size[:number][kept] + 1j * (count * angle[:number][kept] + turns))

    @property
    def size(self) -> int:
        """How many losses."""
        return self._high - self._low + 1

    @cached_property
    def _probs(self) -> Floats:
        spectrum = np.zeros(self._length // 2 + 1, np.complex128)
        spectrum[: len(self._power)] = self._power
        # Index h stands first.
        return np.roll(fft.irfft(spectrum, self._length), self.size - 1)[: self.size]

    def get_epsilon_for_delta(self, delta: float) -> float:
        """The smallest epsilon >= 0 for which delta is enough; inf if there is none."""
        if self._infinity_mass > delta:
            return math.inf
        most = min(self.size, self._lower_loss + self.size - 1)  # steps from the last loss down to zero
        if delta < _SMALL or most < 1:
            return super().get_epsilon_for_delta(delta)
        low, high = 0, most  # delta(low) <= delta < delta(high)
        at_low, at_high = self._deltas(np.array([low, high]))
        if at_high <= delta:
            return 0.0 if most < self.size else super().get_epsilon_for_delta(delta)
        while high - low > 1:
            tried = np.arange(low, high, max(1, (high - low) // (_TRIED + 1)))[1:]
            found = self._deltas(tried)
            over = int(np.argmax(np.append(found, math.inf) > delta))
            if over < len(tried):
                high, at_high = int(tried[over]), found[over]
            if over > 0:
                low, at_low = int(tried[over - 1]), found[over - 1]
        # Between two losses delta is linear in e^epsilon.
        share = (at_high - delta) / (at_high - at_low)
        loss = (self._lower_loss + self.size - 1 - high) * self._discretization
        return max(0.0, float(loss + math.log1p(share * math.expm1(self._discretization))))

    def _deltas(self, steps: NDArray[np.int64]) -> Floats:
        """delta at the losses that are so many `steps` below the last one."""
        matrix, constants = self._evaluation
        rows, columns = (np.arange(number) for number in matrix.shape)
        inner = np.exp(self._turn(np.outer(columns, -steps)))
        outer = np.exp(self._turn(np.outer(rows * len(columns), -steps)))
        varying = (outer * (matrix @ inner)).real.sum(axis=0)
        shrunk = np.exp(-self._discretization * steps)
        first = float(self._power[0].real) * (steps - (1 - shrunk) / math.expm1(self._discretization))
        return self._infinity_mass + (varying - constants[0] + shrunk * constants[1] + first) / self._length

    @cached_property
    def _evaluation(self) -> tuple[NDArray[np.complex128], tuple[float, float]]:
        """What `_deltas` multiplies: (A - B) F e^(iwh) as a matrix, and the sums of A F e^(iwh) and B F e^(iwh)."""
        number = len(self._power)
        turns = self._turn(np.arange(1, number))
        weights = np.full(number - 1, 2.0)  # of a frequency and its negative
        weights[np.arange(1, number) * 2 == self._length] = 1.0
        plain, shrinking = (1 / np.expm1(-exponent) for exponent in (turns, turns - self._discretization))
        power = weights * self._power[1:]
        width = math.isqrt(number) + 1
        flat = np.zeros(-(-number // width) * width, np.complex128)
        flat[1:number] = power * (plain - shrinking)
        sums = float((power * plain).real.sum()), float((power * shrinking).real.sum())
        return flat.reshape(-1, width), sums

    def _turn(self, number: NDArray[np.int64]) -> NDArray[np.complex128]:
        """i times the angle of so many of the length's parts of a circle."""
        turns = np.zeros(number.shape, np.complex128)
        turns.imag = number % self._length * (2 * math.pi / self._length)
        return turns
