"""M2, noise then project: M (V + E), E with independent N(0, sigma^2) entries. The bound of the paper.

Given M, the privacy loss of a pair that differs by Delta is N(eta/2, eta) with eta = ||P Delta||^2 / sigma^2, P the
orthogonal projector onto M's range (Lemma 16: M (M^2)^+ M = P). For a fresh M that range is uniform, so the captured
share s = ||P Delta||^2 / ||Delta||^2 is Beta(r/2, (d-r)/2) for a difference of rank one, and an average of such
variables for higher ranks (Lemma 17). Theorem 5 splits on s; nothing changes when M is published. It needs the full
difference to be bounded (clip before projecting), and M drawn for this one release, independently of data and
history: from the second step on a frozen A has no such law, since a gradient may then lie in its row space.

Units: sigma = noise std / sensitivity C, C the bound on ||Delta||_F (2 C under replacing one record).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import betaincc

from privlora.accounting.calibration import calibrate_noise_multiplier
from privlora.accounting.events import PoissonSampling, Projections, StepEvent
from privlora.accounting.projection.energy import stop_loss
from privlora.accounting.projection.gaussian import Floats, gaussian_delta
from privlora.lab.wishart.bounds.gaussian import in_range, solve_noise, two_sided_tail

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
