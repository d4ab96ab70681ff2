"""M2, noise then project: M (V + E), E with independent N(0, sigma^2) entries. The bound of the paper.

Given M, the privacy loss of a pair that differs by Delta is N(eta/2, eta) with eta = ||P Delta||^2 / sigma^2, P the
orthogonal projector onto M's range (Lemma 16: M (M^2)^+ M = P). For a fresh M that range is uniform, so the captured
share s = ||P Delta||^2 / ||Delta||^2 is Beta(r/2, (d-r)/2) for a difference of rank one, and an average of such
variables for higher ranks (Lemma 17). Theorem 5 splits on s; nothing changes when M is published. It needs the full
difference to be bounded (clip before projecting), and M drawn for this one release, independently of data and
history: from the second step on a frozen A has no such law, since a gradient may then lie in its row space.

Units: sigma = noise std / sensitivity C, C the bound on ||Delta||_F (2 C under replacing one record).

Where every difference has rank one, as for a linear head on one feature vector per unit, the energy that a projection
captures is X itself, and `rank_one_delta` and what follows from it are exact. Layers that see several tokens of a unit
have no such differences. No accountant can check that, so events, ledgers and `privlora.accounting.epsilon` state the
rank-free bound, which is at most a little larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import orth
from scipy.optimize import brentq, minimize_scalar
from scipy.special import betainc, betaincc

from privlora.accounting.accountants import DEFAULT_GRID, check_delta
from privlora.accounting.calibration import calibrate_noise_multiplier
from privlora.accounting.events import PoissonSampling, Projections, StepEvent
from privlora.accounting.projection.composition import check_step, connect_dots, inflection, slope
from privlora.accounting.projection.energy import energy_edges, stop_loss
from privlora.accounting.projection.gaussian import Floats, gaussian_delta
from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.gaussian import in_range, solve_noise, two_sided_tail

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


Form = Literal["two-sided", "exact"]
"""What stands for the Gaussian part: the paper's tau, or the exact delta_G, which is smaller."""

# Of delta: tried for the event that a projection captures too much.
_FAILURE_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_CURVES = {"two-sided": two_sided_tail, "exact": gaussian_delta}


@dataclass(frozen=True)
class SplitBound:
    """delta = gaussian + failure, and the threshold s on the captured energy at which it was split."""

    delta: float
    threshold: float
    gaussian: float
    failure: float


def loss_given_projection(factor: ArrayLike, difference: ArrayLike, noise_std: float) -> tuple[float, float]:
    """Lemma 16: mean and variance of M2's privacy loss, a normal variable, given M = Z Z^T.

    They are eta/2 and eta, eta = ||P Delta||_F^2 / sigma^2, P the orthogonal projector on the range of Z.

    Args:
        factor: Z (d, r). difference: Delta = V - V' (d, m). noise_std: sigma > 0, of E's entries.

    Raises:
        PrivacyError: the shapes do not fit, or noise_std is out of range.
    """
    z, delta = np.asarray(factor, np.float64), np.asarray(difference, np.float64)
    in_range(z.ndim == delta.ndim == 2 and len(z) == len(delta), factor=z.shape, difference=delta.shape)
    in_range(0 < noise_std < math.inf, noise_std=noise_std)
    eta = float(np.linalg.norm(orth(z).T @ delta) / noise_std) ** 2
    return eta / 2, eta


def captured_tail(threshold: ArrayLike, rank: int, dimension: int, difference_rank: int | None) -> Floats:
    """An upper bound on P(||P Delta||^2 > s ||Delta||^2), for the range of a fresh Wishart matrix (Lemma 17).

    Args:
        threshold: s in [0, 1], any shape.
        rank: r >= 1. dimension: d; from r = d on all is captured.
        difference_rank: k, the largest rank of a difference: min(1, k P(X > s)), exact at k = 1. None: any rank,
            inf over a < s of E(X - a)_+ / (s - a), about 2.6 P(X > s) (from the convex order, not in the paper).

    Returns:
        float64 in [0, 1], the shape of `threshold`.

    Raises:
        PrivacyError: an argument is out of range.
    """
    s = np.asarray(threshold, np.float64)
    in_range(rank >= 1 and dimension >= 1, rank=rank, dimension=dimension)
    in_range(difference_rank is None or difference_rank >= 1, difference_rank=difference_rank)
    in_range(bool(np.all((s >= 0) & (s <= 1))), threshold=threshold)
    if rank >= dimension:
        return np.where(s < 1, 1.0, 0.0)
    if difference_rank is not None:
        return np.minimum(1.0, difference_rank * betaincc(rank / 2, (dimension - rank) / 2, s))
    return np.where(s < 1, np.minimum(1.0, _any_rank(s, rank, dimension)), 0.0)


def theorem_5(
    epsilon: float,
    noise_multiplier: float,
    rank: int,
    dimension: int,
    difference_rank: int | None,
    *,
    threshold: float | None = None,
    form: Form = "exact",
) -> SplitBound:
    """Theorem 5 of Hu et al. (2026), one M2 release: delta = tau(epsilon; s/sigma^2) + min(1, k P(X > s)).

    Args:
        epsilon: above 0. noise_multiplier: sigma > 0. rank, dimension, difference_rank: see `captured_tail`.
        threshold: s in (0, 1]; None searches the best.
        form: "two-sided" is the printed one; "exact" is smaller and never above the plain Gaussian mechanism.

    Raises:
        PrivacyError: an argument is out of range.
    """
    in_range(0 < epsilon < math.inf, epsilon=epsilon)
    in_range(0 < noise_multiplier < math.inf, noise_multiplier=noise_multiplier)
    in_range(threshold is None or 0 < threshold <= 1, threshold=threshold)

    def parts(s: ArrayLike) -> tuple[Floats, Floats]:
        gaussian = _CURVES[form](epsilon, np.asarray(s, np.float64) / noise_multiplier**2)
        return gaussian, captured_tail(s, rank, dimension, difference_rank)

    def total(s: ArrayLike) -> Floats:
        gaussian, failure = parts(s)
        return gaussian + failure

    best = _best_threshold(total, rank, dimension) if threshold is None else threshold
    gaussian, failure = (float(part) for part in parts(best))
    return SplitBound(min(1.0, gaussian + failure), best, gaussian, failure)


def theorem_5_noise_multiplier(
    epsilon: float,
    delta: float,
    rank: int,
    dimension: int,
    difference_rank: int | None,
    *,
    form: Form = "exact",
) -> float:
    """The sigma at which Theorem 5 with the best threshold gives (epsilon, delta). Arguments as in `theorem_5`."""
    return solve_noise(
        lambda sigma: theorem_5(epsilon, sigma, rank, dimension, difference_rank, form=form).delta, delta
    )


def split_noise_multiplier(
    sampling: PoissonSampling,
    steps: int,
    target_epsilon: float,
    delta: float,
    projections: Projections,
    *,
    gradient_rank: int = 1,
) -> float:
    """The noise multiplier that Theorem 5 of Hu et al. (2026) asks for over many steps (their Appendix F.2).

    A share of delta pays, by a union over steps, layers and singular directions, for the event that some
    projection captures more than s of the energy; otherwise the steps are Gaussian with sensitivity C sqrt(s).
    The best of seven shares, or no projection at all.

    Args:
        sampling, steps, target_epsilon, delta, projections: as in `calibrate_noise_multiplier`.
        gradient_rank: k, the largest rank of one unit's gradient in one layer.

    Raises:
        PrivacyError: `gradient_rank` is not positive, or as `calibrate_noise_multiplier`.
    """
    in_range(gradient_rank >= 1, gradient_rank=gradient_rank)
    event = StepEvent(sampling, 0.0, projections)  # checks the projections
    plain = calibrate_noise_multiplier(sampling, steps, target_epsilon, delta).noise_multiplier
    if not event.is_cheaper_by_projection:
        return plain
    found = [plain]
    for share in _FAILURE_SHARES:
        energy = _energy_exceeded_with(share * delta / (steps * gradient_rank), event.projections)
        rest = calibrate_noise_multiplier(sampling, steps, target_epsilon, (1 - share) * delta)
        found.append(rest.noise_multiplier * math.sqrt(energy))
    return min(found)


@dataclass(frozen=True)
class Corollary:
    """Whether Corollary 1 promises that M2 beats the plain Gaussian mechanism, and the numbers behind it.

    baseline: tau(epsilon; 1/sigma^2), what the plain mechanism costs in the paper's two-sided form. threshold: s*, at
    which the Gaussian part is half of it. failure: a closed bound on k P(X > s*), to be below baseline / 2.
    """

    baseline: float
    threshold: float
    failure: float

    @property
    def amplifies(self) -> bool:
        """True proves amplification; False proves nothing (the closed bound is thousands of times too large)."""
        return self.failure < self.baseline / 2


def corollary_1(
    epsilon: float, noise_multiplier: float, rank: int, dimension: int, difference_rank: int
) -> Corollary:
    """Corollary 1 of Hu et al. (2026) with explicit constants, from Lemma 7's chi-square tails.

    At s = (1+t)/(1-t) r/d, P(X > s) <= exp(-r t^2 / 8) + exp(-(d-r) t^2 / 4); t is taken at s = s*.

    Raises:
        PrivacyError: as `theorem_5`.
    """
    sizes = rank, dimension, difference_rank
    baseline = theorem_5(epsilon, noise_multiplier, *sizes, threshold=1.0, form="two-sided").gaussian
    if baseline == 0:
        return Corollary(0.0, 1.0, 0.0)

    def excess(log_s: float) -> float:
        half = float(two_sided_tail(epsilon, math.exp(log_s) / noise_multiplier**2))
        return half - baseline / 2

    threshold = math.exp(float(brentq(excess, -60.0, 0.0, xtol=1e-14)))
    ratio = threshold * dimension / rank
    t = (ratio - 1) / (ratio + 1)
    failure = 1.0
    if t > 0 and rank < dimension:
        tails = math.exp(-rank * t**2 / 8) + math.exp(-(dimension - rank) * t**2 / 4)
        failure = min(1.0, difference_rank * tails)
    return Corollary(baseline, threshold, failure)


def _best_threshold(total: Callable[[Floats], Floats], rank: int, dimension: int) -> float:
    """The s in (0, 1] with the smallest bound: a scan where the optimum lies, refined between its neighbours."""
    if rank >= dimension:
        return 1.0
    share = rank / dimension
    grid = np.append(np.linspace(share / 2, min(1.0, 6 * share + 30 / dimension), 150), 1.0)
    values = total(grid)
    at = int(values.argmin())
    near = (float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)]))
    found = minimize_scalar(lambda s: float(total(np.asarray(s))), bounds=near, method="bounded")
    return float(found.x) if found.fun < values[at] else float(grid[at])


def _any_rank(s: Floats, rank: int, dimension: int) -> Floats:
    """inf over a < s of E(X - a)_+ / (s - a), any a being valid: a scan over s - a, then a finer one."""
    depth = np.geomspace(1e-4, 1.0, 48)
    step = depth[1] / depth[0]
    coarse = _quotients(s[..., None] * depth, s, rank, dimension)
    best = depth[coarse.argmin(-1)]
    fine = best[..., None] * np.geomspace(1 / step, step, 48)
    closer = _quotients(s[..., None] * np.minimum(fine, 1.0), s, rank, dimension)
    return np.minimum(coarse.min(-1), closer.min(-1))


def _quotients(depth: Floats, s: Floats, rank: int, dimension: int) -> Floats:
    """E(X - a)_+ / (s - a) at a = s - depth, and 1 at depth 0."""
    excess = stop_loss(s[..., None] - depth, rank, dimension)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(depth > 0, excess / depth, 1.0)


def _energy_exceeded_with(probability: float, projections: Projections) -> float:
    """s with sum over layers of P(X_l > s) = probability, rounded up by less than 1e-12; 1 if none is below."""
    low, high = 0.0, 1.0
    for _ in range(48):
        s = (low + high) / 2
        exceeded = sum(float(betaincc(r / 2, (d - r) / 2, s)) for r, d in projections)
        low, high = (s, high) if exceeded > probability else (low, s)
    return high


@lru_cache(maxsize=16)
def energy_cells(rank: int, dimension: int) -> tuple[Floats, Floats, Floats]:
    """X ~ Beta(r/2, (d-r)/2), r < d, cut at quantiles that are evenly spaced in normal scores.

    Returns edges (n+1,) from 0 to 1, and the probability (n,) and the mean of X (n,) in each cell.
    """
    edges = energy_edges(((rank, dimension),))
    shape, rest, mean = rank / 2, (dimension - rank) / 2, rank / dimension
    lower, upper = edges[:-1], edges[1:]
    probabilities = _between(shape, rest, lower, upper)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = mean * _between(shape + 1, rest, lower, upper) / probabilities
    return edges, probabilities, np.clip(np.nan_to_num(means, nan=1.0), lower, upper)


def rank_one_delta(epsilon: ArrayLike, noise_multiplier: float, rank: int, dimension: int) -> Floats:
    """delta of one M2 release of the whole data, for differences of rank one: exact but for rounding upwards.

    Each cell of the energy's law is replaced by its ends where the curve is convex in the energy, by its mean
    where it is concave, and by the line of the steepest slope in the one cell where that changes.

    Arguments and errors as in `rank_free_delta`, for one layer.
    """
    check_step(noise_multiplier, ((rank, dimension),))
    eps = np.asarray(epsilon, np.float64)
    if rank == dimension:
        return gaussian_delta(eps, noise_multiplier**-2)
    edges, probabilities, means = energy_cells(rank, dimension)
    low, high = edges[:-1], edges[1:]
    at_edges = gaussian_delta(eps[:, None], edges / noise_multiplier**2)
    at_means = gaussian_delta(eps[:, None], means / noise_multiplier**2)
    share = (means - low) / (high - low)
    chord = at_edges[:, :-1] * (1 - share) + at_edges[:, 1:] * share
    turn = inflection(eps, noise_multiplier)[:, None]
    steepest = slope(eps[:, None], turn, noise_multiplier)
    bend = np.minimum(at_edges[:, :-1] + steepest * (means - low), at_edges[:, 1:])
    value = np.where(high <= turn, chord, np.where(low >= turn, at_means, bend))
    return np.minimum(value @ probabilities, 1.0)


def rank_one_pld(
    noise_multiplier: float, rank: int, dimension: int, sample_rate: float, grid: float
) -> PrivacyLossDistribution:
    """As `rank_free_pld`, for one layer whose differences all have rank one; see `rank_one_delta`."""
    check_step(noise_multiplier, ((rank, dimension),), sample_rate)
    return connect_dots(lambda eps: rank_one_delta(eps, noise_multiplier, rank, dimension), sample_rate, grid)


def rank_one_epsilon(event: StepEvent, steps: int, delta: float, *, grid: float = DEFAULT_GRID) -> float:
    """epsilon of `steps` projected steps whose differences all have rank one: exact, but for rounding upwards.

    Args:
        event: a step with one projection; its sampling is plain Poisson.
        steps: how often it happens, at least 1.
        delta: total delta, in (0, 1).
        grid: spacing of the discretised privacy loss.

    Raises:
        PrivacyError: delta is out of range, or the event has not exactly one projection of lower rank.
    """
    check_delta(delta)
    if len(event.projections) != 1 or not event.is_cheaper_by_projection or event.noise_multiplier == 0:
        raise PrivacyError(
            f"[{event.describe()}] is not one noisy projection to a lower rank",
            why="with several layers the difference of two gradients is no longer of rank one",
            fix="use privlora.accounting.epsilon, which covers any rank and any layers",
        )
    (rank, dimension), q = event.projections[0], event.sampling.sample_rate
    if q == 0:
        return 0.0
    step = rank_one_pld(event.noise_multiplier, rank, dimension, q, grid)
    return max(0.0, float(step.self_compose(steps).get_epsilon_for_delta(delta)))


def _between(shape: float, rest: float, lower: Floats, upper: Floats) -> Floats:
    """Probability of (lower, upper] under Beta(shape, rest), from whichever tail keeps the digits."""
    below = betainc(shape, rest, upper) - betainc(shape, rest, lower)
    above = betaincc(shape, rest, lower) - betaincc(shape, rest, upper)
    return np.maximum(np.where(betainc(shape, rest, upper) < 0.5, below, above), 0.0)
