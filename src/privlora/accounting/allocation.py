"""The privacy loss of one pass in which each unit joins one of m steps, dealt by itself and uniformly (balls in bins).

With one unit more, the m noisy sums have at worst the law P = mean over i of N(e_i, sigma^2 I), without it
Q = N(0, sigma^2 I), also where each sum depends on those before it (Chua et al., arXiv:2412.16802, theorem 3.3;
Feldman and Shenfeld, arXiv:2502.08202). Their ratio has under Q the law of

    S = (X_1 + ... + X_m) / m,    X_i = exp(N(-1 / (2 sigma^2), 1 / sigma^2)) independent,

and delta is E_Q (S - e^eps)+ where the unit is removed and E_Q (1 - e^eps S)+ where it is added. Both are means of
convex functions of S. So any spread of S that keeps its mean gives an upper bound, and one that is independent for
each X_i is a spread of their sum: each number is split among the two points of a geometric grid around it, so that its
mean stays, after each addition again. The error is of second order in the grid, and of one sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from privlora.errors import PrivacyError

Floats = NDArray[np.float64]

_COARSEST = 0.01  # step between logarithms of the grid
_FINE = 0.05  # steps times sigma sqrt(m): then spreads add a thousandth to the variance of the loss
_MOST_POINTS = 8000  # beyond which steps are larger, which is an upper bound as well, and takes seconds
_FARTHEST = 9.0  # standard deviations: what lies beyond is below 1e-18, and counted
_NOTHING = 1e-19  # of all mass together, at either end of a sum: it is moved inwards and counted
_LARGEST = 700.0  # loss whose exponential is a number


@dataclass(frozen=True)
class _Sum:
    """Of a number of X. masses: under Q, at exp(step (first + k)). at_zero: under Q. beyond: what the mean lacks, which
    lies infinitely far up."""

    step: float
    first: int
    masses: Floats
    at_zero: float
    beyond: float

    @property
    def values(self) -> Floats:
        return np.exp(self.step * np.arange(self.first, self.first + len(self.masses)))

    def __add__(self, other: _Sum) -> _Sum:
        step, ends = self.step, (self.first + len(self.masses), other.first + len(other.masses))
        first = min(self.first, other.first)
        masses = np.zeros(max(ends) + math.ceil(math.log(2) / step) + 1 - first)
        for apart in range(other.first - ends[0] + 1, ends[1] - self.first):
            # Of all i the product of the masses at i and at i + apart, whose values add up to that of i + above.
            start, stop = max(self.first, other.first - apart), min(ends[0], ends[1] - apart)
            both = (
                self.masses[start - self.first : stop - self.first]
                * other.masses[start + apart - other.first : stop + apart - other.first]
            )
            above = max(apart, 0) + math.log1p(math.exp(-step * abs(apart))) / step
            lower = math.floor(above)
            share = math.expm1(step * (above - lower)) / math.expm1(step)
            place = start + lower - first
            masses[place : place + len(both)] += (1 - share) * both
            masses[place + 1 : place + 1 + len(both)] += share * both
        for one, others in ((self, other), (other, self)):
            masses[one.first - first : one.first - first + len(one.masses)] += others.at_zero * one.masses
        return _Sum(step, first, masses, self.at_zero * other.at_zero, self.beyond + other.beyond)._trimmed()

    def _trimmed(self) -> _Sum:
        """Without ends that hold next to nothing: the mean of low ones goes to the first value that stays, and
        `PassLoss.of` misses their other mass; of high ones the last value takes the mass and infinity the mean."""
        weights = self.masses * self.values
        start = int(np.searchsorted(np.cumsum(self.masses), _NOTHING))
        stop = len(weights) - int(np.searchsorted(np.cumsum(weights[::-1]), _NOTHING * weights.sum()))
        if not 0 <= start < stop:
            return self
        kept = self.masses[start:stop].copy()
        high = float(self.masses[stop:].sum())
        low_mean, high_mean = (float(weights[part].sum()) for part in (slice(0, start), slice(stop, None)))
        bottom, top = self.values[[start, stop - 1]].tolist()
        kept[0] += low_mean / bottom
        kept[-1] += high
        beyond = self.beyond + max(0.0, high_mean - top * high)
        return _Sum(self.step, self.first + start, kept, self.at_zero, beyond)


def _one(sigma: float, bins: int) -> _Sum:
    shift, spread = 0.5 / sigma**2, 1 / sigma
    farthest = shift + _FARTHEST * spread
    if farthest > _LARGEST:
        raise PrivacyError(
            f"noise_multiplier={sigma:.3g} is too little to price a pass of balls in bins",
            why="a unit that is drawn can be told as it is",
            fix="raise noise_multiplier",
        )
    step = max(min(_COARSEST, _FINE / (sigma * math.sqrt(bins))), 2 * farthest / _MOST_POINTS)
    first, last = (round(way * farthest / step) for way in (-1, 1))
    losses = step * np.arange(first, last + 1)
    at = np.exp(losses)

    def cells(mean: float) -> tuple[float, Floats, float]:
        """Below the grid, between its points and above it."""
        z = (losses - mean) / spread
        below, above = ndtr(z), ndtr(-z)
        return float(below[0]), np.where(z[1:] < 0, np.diff(below), -np.diff(above)), float(above[-1])

    # X is P / Q, so its mean over a cell under Q is the cell's mass under P.
    (low, inside, high), (p_low, p_inside, p_high) = cells(-shift), cells(shift)
    up = np.clip((p_inside - at[:-1] * inside) / np.diff(at), 0.0, inside)
    masses = np.zeros(len(at))
    masses[1:] += up
    masses[:-1] += inside - up
    to_first = min(low, p_low / float(at[0]))
    masses[0] += to_first
    masses[-1] += high
    return _Sum(step, first, masses, low - to_first, max(0.0, p_high - float(at[-1]) * high))


@dataclass(frozen=True)
class PassLoss:
    """Of one pass. losses: log S where S > 0, ascending, (n,); masses: under Q, (n,). at_zero: of S = 0, under Q.
    beyond: of infinite S, under P."""

    losses: Floats
    masses: Floats
    at_zero: float
    beyond: float

    @classmethod
    def of(cls, noise_multiplier: float, bins: int) -> PassLoss:
        """noise_multiplier: sigma > 0. bins: m, 1 to `events.MOST_BINS`. Raises PrivacyError for too little noise."""
        power, total, left = _one(noise_multiplier, bins), None, bins
        while True:
            if left % 2:
                total = power if total is None else total + power
            left //= 2
            if not left:
                break
            power = power + power
        assert total is not None
        losses = total.step * np.arange(total.first, total.first + len(total.masses), dtype=np.float64)
        losses -= math.log(bins)
        # What rounding has lost is where it costs most.
        under_q, under_p = float(total.masses.sum()), float((total.masses * np.exp(losses)).sum())
        at_zero = max(total.at_zero, 1 - under_q)
        return cls(losses, total.masses, at_zero, max(total.beyond / bins, 1 - under_p))

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the losses that have a probability."""
        present = self.losses[self.masses > 0]
        return float(present[0]), float(present[-1])

    def removed(self, epsilons: Floats) -> Floats:
        """delta where the unit is in the first data set alone, at each of ascending ``epsilons``, (k,)."""
        p, q = (_from_above(m) for m in (self.masses * np.exp(self.losses), self.masses))
        above = np.searchsorted(self.losses, epsilons, side="right")
        return np.clip(p[above] - np.exp(epsilons) * q[above] + self.beyond, 0.0, 1.0)

    def added(self, epsilons: Floats) -> Floats:
        """delta where the unit is in the second data set alone, at each of ascending ``epsilons``, (k,)."""
        p, q = (_from_above(m[::-1]) for m in (self.masses * np.exp(self.losses), self.masses))
        above = np.searchsorted(-self.losses[::-1], epsilons, side="right")
        return np.clip(q[above] - np.exp(epsilons) * p[above] + self.at_zero, 0.0, 1.0)


def _from_above(masses: Floats) -> Floats:
    """(n + 1,) sums of all masses from each index on, small ones first."""
    return np.concatenate([np.cumsum(masses[::-1])[::-1], [0.0]])
