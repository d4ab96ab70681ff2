"""The privacy loss distributions (PLD) of dp_accounting, in arrays where it takes one number at a time.

The numbers are those of dp_accounting within rounding, and so is what makes them upper bounds: the same truncation, the
same connected dots, the same Chernoff bounds on what a composition leaves out, which counts as infinite loss.
dp_accounting takes a second to import, so this module is imported inside the functions that need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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

from privlora.accounting.allocation import PassLoss
from privlora.accounting.events import BallsInBinsSampling, TruncatedPoissonSampling
from privlora.errors import PrivacyError

Floats = NDArray[np.float64]

_BLOCK = 1 << 14
_MOST_POINTS = 1 << 25  # of a transform: 4 GB
_LENGTHS_PER_OCTAVE = 4  # a spectrum serves all compositions of about its length
_TRIED = 15  # losses at once
_VANISHED = -60.0  # log of a factor that is nothing beside rounding
_ORDERS = 4  # that are tried
_KEPT = 2  # spectra of a loss
_NEGLIGIBLE = 1e-7  # beside delta
_GENTLEST = -12  # log2 of the least order by which losses are tilted
_ALIASED = 25.0  # minus the log of what may be counted at another loss, beside delta
_HUGE = 600.0  # log of what is above every delta
# By how much a transform of probabilities, its logarithm or its angle may be off: far more than FFTs round by.
_ROUNDING = 2.0**-46


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


def allocation_pld(
    noise_multiplier: float, sampling: BallsInBinsSampling, grid: float
) -> PrivacyLossDistribution:
    """Of one pass of balls in bins, by dp_accounting's connected dots; sensitivity 1, one unit added or removed."""
    loss = PassLoss.of(noise_multiplier, sampling.bins)

    def one_way(low: float, high: float, deltas: Callable[[Floats], Floats]) -> pld_pmf.PLDPmf:
        first, last = math.floor(low / grid), math.ceil(high / grid)
        at = deltas(grid * np.arange(first, last + 1, dtype=np.float64))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, at)

    low, high = loss.bounds
    return PrivacyLossDistribution(one_way(low, high, loss.removed), one_way(-high, -low, loss.added))


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

    @staticmethod
    def of(pmf: pld_pmf.PLDPmf) -> FastPmf:
        """The same distribution."""
        if isinstance(pmf, FastPmf):
            return pmf
        dense = pmf.to_dense_pmf()
        return FastPmf(dense._discretization, dense._lower_loss, dense._probs, dense._infinity_mass, True)

    @property
    def parts(self) -> tuple[tuple[FastPmf, int], ...]:
        """What it is composed of: (loss of one release, how many)."""
        return ((self, 1),)

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> FastPmf:
        """The loss of `num_times` releases; mass of at most `tail_mass_truncation` is moved to infinity."""
        if num_times == 1:
            return self
        return _Composed([(part, count * num_times) for part, count in self.parts], tail_mass_truncation)

    def compose(self, other: pld_pmf.DensePLDPmf, tail_mass_truncation: float = 0) -> FastPmf:
        """The loss of one release of each."""
        return _Composed([*self.parts, *FastPmf.of(other).parts], tail_mass_truncation)

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
    def _losses(self) -> Floats:
        return (np.arange(self.size) + self._lower_loss) * self._discretization

    @cached_property
    def variance(self) -> float:
        """Of the loss where it is finite."""
        mean = float((self._probs * self._losses).sum())
        return float((self._probs * (self._losses - mean) ** 2).sum())

    @cached_property
    def _log_moments(self) -> dict[float, float]:
        return {}

    def log_moment(self, order: float) -> float:
        """Log of the mean of e^(order loss), where the loss is finite."""
        if order not in self._log_moments:
            weighted, shift = self._tilted(order)
            self._log_moments[order] = shift + math.log(weighted.sum())
        return self._log_moments[order]

    def _tilted(self, order: float) -> tuple[Floats, float]:
        """p e^(order loss - shift), and a shift with which it neither overflows nor vanishes."""
        present = np.flatnonzero(self._probs)
        exponents = order * self._losses
        shift = float(exponents[present[-1 if order > 0 else 0]])
        return self._probs * np.exp(np.minimum(exponents - shift, 0.0)), shift

    @cached_property
    def _spectra(self) -> dict[tuple[float, int], _Spectrum]:
        return {}

    def spectrum(self, order: float, length: int) -> _Spectrum:
        """Of `length` indices; the last few are kept."""
        found = self._spectra.pop((order, length), None) or self._transformed(order, length)
        self._spectra[order, length] = found
        for oldest in list(self._spectra)[:-_KEPT]:
            del self._spectra[oldest]
        return found

    def _transformed(self, order: float, length: int) -> _Spectrum:
        weighted, shift = self._tilted(order)
        transformed = fft.rfft(weighted, length)
        beside = np.abs(transformed) / transformed[0].real
        with np.errstate(divide="ignore"):
            size = np.log(beside)
        return _Spectrum(shift + math.log(transformed[0].real), beside, size, np.angle(transformed))


@dataclass(frozen=True)
class _Spectrum:
    """Fourier transform of a tilted loss, p e^(order loss) / moment, whose first index stands first.

    log_moment: log of the sum that it is divided by. beside, size, angle: (length // 2 + 1,), its size, the log of it,
    and its angle.
    """

    log_moment: float
    beside: Floats
    size: Floats
    angle: Floats


class _Composed(FastPmf):
    """The loss of many releases, of one kind or of several."""

    def __init__(self, parts: Sequence[tuple[FastPmf, int]], tail: float) -> None:
        """parts: (loss of one release, how many). tail: mass that may be moved to infinity."""
        self._parts, self._sums = tuple(parts), dict[float, _Sums]()
        finite = math.fsum(count * math.log1p(-part._infinity_mass) for part, count in parts)
        pld_pmf.PLDPmf.__init__(self, parts[0][0]._discretization, tail - math.expm1(finite), True)
        first = sum(count * part._lower_loss for part, count in parts)
        last = first + sum(count * (part.size - 1) for part, count in parts)
        low, high = self._between(tail) if tail > 0 else (-math.inf, math.inf)
        self._last = last if high > last * self._discretization else math.ceil(high / self._discretization)
        self._lower_loss = (
            first if low < first * self._discretization else math.floor(low / self._discretization)
        )

    @property
    def parts(self) -> tuple[tuple[FastPmf, int], ...]:
        return self._parts

    @property
    def size(self) -> int:
        """How many losses."""
        return self._last - self._lower_loss + 1

    def get_epsilon_for_delta(self, delta: float) -> float:
        """The smallest epsilon >= 0 for which delta is enough; inf if there is none."""
        if self._infinity_mass > delta:
            return math.inf
        if self._last < 1:
            return 0.0
        # Chernoff's bound on epsilon is least near the order at which the tilted loss lies about epsilon. Where losses
        # are rare and large it is far from epsilon, and what is found says which order is better.
        order = self._best(lambda order: (self.log_moment(order) - math.log(delta)) / order)
        found, tried = math.inf, set[float]()
        while order not in tried and len(tried) < _ORDERS:
            tried.add(order)
            found = min(found, self._epsilon(delta, self._sums_at(order)))
            if found in (0.0, math.inf) or self._sums_at(order).doubt(found) <= _NEGLIGIBLE * delta:
                break
            order = self._order_for(found)
        return found

    def _order_for(self, epsilon: float) -> float:
        """Where Chernoff's bound on delta is least."""
        return self._best(lambda order: self.log_moment(order) - order * epsilon)

    def _epsilon(self, delta: float, sums: _Sums) -> float:
        most = min(self.size, self._last)  # steps from the last loss down to zero
        low, high = 0, most  # delta(low) <= delta < delta(high)
        at_low, at_high = sums.deltas(np.array([low, high]))
        if at_low > delta:
            return math.inf
        if at_high <= delta:
            return 0.0 if most == self._last else self._below(delta, at_high)
        while high - low > 1:
            tried = np.arange(low, high, max(1, (high - low) // (_TRIED + 1)))[1:]
            found = sums.deltas(tried)
            over = int(np.argmax(np.append(found, math.inf) > delta))
            if over < len(tried):
                high, at_high = int(tried[over]), found[over]
            if over > 0:
                low, at_low = int(tried[over - 1]), found[over - 1]
        # Between two losses delta is linear in e^epsilon.
        share = (at_high - delta) / (at_high - at_low)
        loss = (self._last - high) * self._discretization
        return max(0.0, float(loss + math.log1p(share * math.expm1(self._discretization))))

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """The smallest delta for which epsilon >= 0 is enough, at most 1; an array for several."""
        if np.ndim(epsilon) > 0:
            return np.array([self.get_delta_for_epsilon(each) for each in epsilon])
        below = self._last - float(epsilon) / self._discretization  # steps below the last loss
        if not below > 0:
            return min(1.0, self._infinity_mass)
        sums = self._sums_at(self._order_for(float(epsilon)))
        low = min(math.floor(below), self.size)
        high = min(low + 1, self.size)
        at_low, at_high = sums.deltas(np.array([low, high]))
        if low == high:  # below all losses
            mass = self._mass
            over = float(epsilon) - (self._lower_loss - 1) * self._discretization
            return min(
                1.0, self._infinity_mass + mass - math.exp(over) * (mass + self._infinity_mass - at_low)
            )
        above = math.expm1(float(epsilon) - (self._last - high) * self._discretization)
        return min(1.0, float(at_high + above / math.expm1(self._discretization) * (at_low - at_high)))

    def _below(self, delta: float, at_lowest: float) -> float:
        """Epsilon where it is below all losses; at_lowest: delta one step below the lowest one."""
        mass = self._mass
        left, weighted = self._infinity_mass + mass - delta, mass + self._infinity_mass - at_lowest
        if left <= 0:
            return 0.0
        lowest = (self._lower_loss - 1) * self._discretization
        return max(0.0, lowest + math.log(left / weighted)) if weighted > 0 else math.inf

    @property
    def _mass(self) -> float:
        """Of all finite losses."""
        return math.exp(self.log_moment(0.0))

    def log_moment(self, order: float) -> float:
        """Log of the mean of e^(order loss), where the loss is finite."""
        return math.fsum(count * part.log_moment(order) for part, count in self._parts)

    def _between(self, tail: float) -> tuple[float, float]:
        """Losses between which all but `tail` of the finite mass is, by Chernoff bounds."""

        def farthest(sign: int) -> float:
            def bound(order: float) -> float:
                return (self.log_moment(sign * order) + math.log(2 / tail)) / order

            return bound(self._best(bound))

        return -farthest(-1), farthest(1)

    def _reach(self, order: float) -> int:
        """So many indices that what is tilted and lies beyond them, from the least epsilon on, is nothing beside it."""
        here = self.log_moment(order)
        more = self._best(beyond := lambda more: (self.log_moment(order + more) - here + _ALIASED) / more)
        return math.ceil(beyond(more) / self._discretization) - max(0, self._lower_loss)

    def _best(self, value: Callable[[float], float]) -> float:
        """The power of two at which `value` is least, about; every other one is as valid."""
        spread = math.sqrt(sum(count * part.variance for part, count in self._parts))
        steepest = -math.ceil(
            math.log2(self._discretization)
        )  # beyond this a step of the grid is another world
        start = math.floor(math.log2(5 / max(spread, 5 * self._discretization)))
        best = min(start, steepest)
        least = value(2.0**best)
        for way in (1, -1):
            while _GENTLEST <= best + way <= steepest and (found := value(2.0 ** (best + way))) < least:
                best, least = best + way, found
        return 2.0**best

    def _sums_at(self, order: float) -> _Sums:
        if order not in self._sums:
            most = sum(count * (part.size - 1) for part, count in self._parts) + 1
            size = max(min(most, max(self.size, self._reach(order))), *(part.size for part, _ in self._parts))
            if size > _MOST_POINTS:
                raise PrivacyError(
                    "epsilon of such releases would take gigabytes to compute",
                    why="so little noise, or so rare a draw, gives losses over too wide a range",
                    fix="raise noise_multiplier, or lower the number of steps",
                )
            octave = math.ceil(math.log2(size) * _LENGTHS_PER_OCTAVE) / _LENGTHS_PER_OCTAVE
            length = fft.next_fast_len(max(size, math.ceil(2**octave)), real=True)
            self._sums[order] = _Sums(self, order, length)
        return self._sums[order]


@dataclass(frozen=True)
class _Kernels:
    """A and A - B of `_Sums` for (length // 2 + 1,) frequencies w, twice where -w is another one, and their sizes."""

    plain: NDArray[np.complex128]
    both: NDArray[np.complex128]
    plain_size: Floats
    both_size: Floats


@lru_cache(maxsize=4 * _KEPT)
def _kernels(order: float, grid: float, length: int) -> _Kernels:
    half = np.sin(np.arange(length // 2 + 1) * (math.pi / length))  # sin(w / 2), from which nothing cancels
    square, turned = half * half, 2 * half * np.sqrt(1 - half * half)

    def geometric(shrinkage: float) -> tuple[NDArray[np.complex128], Floats]:
        """1 / (e^(shrinkage - iw) - 1), and its size."""
        larger, growth = math.exp(shrinkage), math.expm1(shrinkage)
        below = 1 / (growth**2 + 4 * larger * square)
        found = np.empty(len(half), np.complex128)
        np.multiply(growth - 2 * larger * square, below, out=found.real)
        np.multiply(larger * turned, below, out=found.imag)
        return found, np.sqrt(below)

    (plain, plain_size), (both, size) = geometric(order * grid), geometric((order + 1) * grid)
    a = np.empty(len(half), np.complex128)
    a.real, a.imag = 1 - 2 * square, -turned
    factor = math.exp(order * grid) * math.expm1(grid)
    both *= plain
    both *= a * factor
    both_size = plain_size * size * factor
    for each in (plain, both, plain_size, both_size):
        each[1 : (length + 1) // 2] *= 2
    return _Kernels(plain, both, plain_size, both_size)


class _Sums:
    """Delta of a composition at the losses of its grid, from Fourier transforms of the tilted losses of its parts.

    A transform of probabilities rounds by about 1e-16 a release beside 1, which is much beside a small delta. So the
    probabilities are first multiplied by e^(order loss), with an order at which the composed loss is likely to be about
    epsilon; what is found there is rounded beside delta. Whatever the order, what rounding can do is added to delta.

    At the loss of index j, delta is the infinite mass and the sum of p(l) (1 - r^(l - j)) over j < l <= h, the last
    index, with r = e^-grid. With a = e^(order grid - iw) for each frequency w, A = 1 / (a - 1), B = 1 / (a / r - 1) and
    S = h - j, those sums are geometric: e^(log_moment - order loss(j)) / N times the sum over w of

        F(w) e^(iwh) ((A - B) e^(-iwS) - e^(-order grid S) (A - r^S B)),

    a few thousand products for each j that is tried, where all probabilities take a transform. Mass beyond N losses is
    counted at a loss that is N higher or lower, and then with too much weight if anything.
    """

    def __init__(self, composed: _Composed, order: float, length: int) -> None:
        """length: N, at least the size of every part and of what is composed."""
        self._grid, self._order, self._length = composed._discretization, order, length
        self._infinite, self._last = composed._infinity_mass, composed._last
        parts = [(part.spectrum(order, length), count) for part, count in composed.parts]
        self._log_moment = math.fsum(count * spectrum.log_moment for spectrum, count in parts)
        size: Floats = np.sum([count * spectrum.size for spectrum, count in parts], axis=0)
        number = int(np.flatnonzero(size > _VANISHED)[-1]) + 1  # the others have vanished
        first = composed._last - sum(
            count * part._lower_loss for part, count in composed.parts
        )  # h from there
        angle = np.arange(number) * first % length * (2 * math.pi / length)
        angle += sum(count * spectrum.angle[:number] for spectrum, count in parts)
        power = np.exp(size[:number] + 1j * angle)
        kernels = _kernels(order, self._grid, length)
        plain, both = power * kernels.plain[:number], power * kernels.both[:number]
        self._plain, self._shrinking = float(plain.real.sum()), float((plain.real - both.real).sum())
        width = math.isqrt(number) + 1
        flat = np.zeros(-(-number // width) * width, np.complex128)
        flat[:number] = both
        self._matrix = flat.reshape(-1, width)
        # A part's transform is off by _ROUNDING beside 1: beside its own size by more where that is small.
        tiny = np.finfo(float).tiny
        off = sum(count / np.maximum(spectrum.beside[:number], tiny) for spectrum, count in parts)
        doubt = _ROUNDING * np.exp(size[:number]) * off
        self._doubts = float(doubt @ kernels.both_size[:number]), float(doubt @ kernels.plain_size[:number])

    def deltas(self, steps: NDArray[np.int64]) -> Floats:
        """delta, at least, at the losses that are so many `steps` below the last one."""
        rows, columns = (np.arange(number) for number in self._matrix.shape)
        inner = np.exp(self._turn(np.outer(columns, -steps)))
        outer = np.exp(self._turn(np.outer(rows * len(columns), -steps)))
        varying = (outer * (self._matrix @ inner)).real.sum(axis=0)
        faded, shrunk = np.exp(-self._order * self._grid * steps), np.exp(-self._grid * steps)
        sums = varying - faded * (self._plain - shrunk * self._shrinking)
        return self._infinite + self._scale(steps) * np.maximum(sums, 0.0) + self._doubtful(steps)

    def doubt(self, epsilon: float) -> float:
        """What is added to delta there for rounding, about."""
        return float(self._doubtful(np.array(self._last - epsilon / self._grid)))

    def _doubtful(self, steps: NDArray[Any]) -> Floats:
        faded = np.exp(-self._order * self._grid * steps)
        return self._scale(steps) * (self._doubts[0] + 2 * faded * self._doubts[1])  # |B| < |A|

    def _scale(self, steps: NDArray[Any]) -> Floats:
        exponent = self._log_moment - self._order * self._grid * (self._last - steps)
        return np.asarray(np.exp(np.minimum(exponent, _HUGE)) / self._length)

    def _turn(self, number: NDArray[np.int64]) -> NDArray[np.complex128]:
        """i times the angle of so many of the length's parts of a circle."""
        turns = np.zeros(number.shape, np.complex128)
        turns.imag = number % self._length * (2 * math.pi / self._length)
        return turns
