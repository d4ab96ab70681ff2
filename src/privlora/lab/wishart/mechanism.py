"""The Wishart projection mechanism of Hu et al. (2026) on plain tensors: releases M v, M V + E (M1) and M (V + E) (M2).

M = Z Z^T with Z in R^{d x r}, independent N(0, 1/r) entries, so that E[M] = I. One object is one draw of M and makes
one release; what would void the guarantee is refused, not warned about. The mechanisms that train language models are
elsewhere (`privlora.coordinates.projected`); this is the mechanism by itself, for queries that fit in memory.

| asked for                                         | what happens                                              |
|---------------------------------------------------|-----------------------------------------------------------|
| a second release from one object                  | refused: several vectors under one M are a matrix         |
| a matrix without noise                            | refused: not private at any epsilon (Proposition 2)       |
| M itself, after a vector or M1 release            | refused: it has to stay secret                            |
| M itself, before an M2 release                    | refused: a record could be written to lie in M's range    |
| a vector whose norm is not 1                      | refused: the output shows the norm                        |
| an alignment too small for delta                  | refused: the outputs' supports differ with more than delta|

Refusals that depend on the data (a mean that is too short, a zero gradient) are not covered by any epsilon: do not
publish them. Everything is float64 on the CPU; Z and E come from two generators keyed by the operating system.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.gaussian import in_range
from privlora.lab.wishart.bounds.vector import VectorQuery, alignment_of_mean, guaranteed_epsilon
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.noising import Charged

# Of a unit norm, from rounding in float32. The vector is brought to norm 1 in float64 before it is released.
_NORM_TOLERANCE = 1e-5


@dataclass(frozen=True)
class VectorRelease:
    """M v, (d,) float64, and what it costs: (epsilon, delta)-DP under replacing one record, within the collection.

    epsilon: at ``delta``, for all pairs that are aligned at least ``alignment`` (`guaranteed_epsilon`).
    """

    value: Tensor
    epsilon: float
    delta: float
    alignment: float


class WishartProjection:
    """One draw of M for one release.

    dimension: d. rank: r, the number of columns of Z; it may exceed d.
    insecure_seed: reproducible Z and E for tests. Whoever knows it undoes the release.

    Raises:
        PrivacyError: a size is below 1.
    """

    def __init__(self, dimension: int, rank: int, *, insecure_seed: int | None = None) -> None:
        in_range(dimension >= 1 and rank >= 1, dimension=dimension, rank=rank)
        self.dimension, self.rank = dimension, rank
        keys = (None, None) if insecure_seed is None else (2 * insecure_seed, 2 * insecure_seed + 1)
        self._factor = NoiseSource(keys[0]).standard_normal((dimension, rank)) / math.sqrt(rank)
        self._noise = NoiseSource(keys[1])
        self._released: str | None = None

    def publish(self) -> Tensor:
        """Z (d, r), for everybody, once M2 was released: its guarantee holds with a public M.

        Raises:
            PrivacyError: nothing was released yet, or a vector or M1 release was made with this M.
        """
        if self._released is None:
            why = "whoever foresees M can write a record that lies in its range, which no random M is likely to hit"
            raise PrivacyError(
                "M cannot be shown before it is used", why=why, fix="publish it after noise_then_project"
            )
        if self._released != "M2":
            why = "given M that output is a fixed function of the data, up to the noise"
            fix = "keep it secret, or release by noise_then_project"
            raise PrivacyError(f"M cannot be shown: it made a {self._released} release", why=why, fix=fix)
        return self._factor.clone()

    def release_vector(self, query: Tensor, *, alignment: float, delta: float) -> VectorRelease:
        """M v for a unit vector v (d,), without noise (Theorem 1).

        Args:
            query: v = f(S), of norm 1 for every data set S.
            alignment: rho, guaranteed for all neighbouring data sets (see `normalised_mean`, `ball_noise`).
            delta: at which epsilon is stated.

        Raises:
            PrivacyError: see the table above.
        """
        if query.ndim != 1:
            raise PrivacyError(
                f"a query of shape {tuple(query.shape)} is not a vector",
                why="M V without noise is not private: V^T M V is symmetric for the true V alone (Proposition 2)",
                fix="use noise_then_project (M2) for matrices",
            )
        unit = _unit_columns(query[:, None], self.dimension)
        epsilon = guaranteed_epsilon(delta, VectorQuery(self.dimension, self.rank, alignment))
        if math.isinf(epsilon):
            raise PrivacyError(
                f"at rank {self.rank}, alignment={alignment} is too small for delta={delta}",
                why="with a higher probability the output cannot come from the neighbouring data set",
                fix="raise the rank, the alignment (ball_noise) or delta",
            )
        self._spend("vector")
        return VectorRelease(self._apply(unit)[:, 0], epsilon, delta, alignment)

    def project_then_noise(self, matrix: Tensor, noise_std: float) -> Tensor:
        """M1: M V + E (d, m) for V with unit columns. For study; see `bounds.matrix`.

        noise_std: of E's entries, above 0.

        Raises:
            PrivacyError: a column's norm is not 1, or see the table above.
        """
        in_range(0 < noise_std < math.inf, noise_std=noise_std)  # none would be private at no epsilon
        unit = _unit_columns(matrix, self.dimension)
        self._spend("M1")
        return self._noised(self._apply(unit), noise_std)

    def noise_then_project(self, matrix: Tensor, noise_std: float) -> Tensor:
        """M2: M (V + E) (d, m). M may be published. Account by `bounds.noisy.theorem_5`, or better by
        `privlora.accounting.projection.composition`, with noise_multiplier = noise_std / sensitivity.

        Args:
            matrix: V, a sum of contributions that were clipped before; the caller knows its sensitivity.
            noise_std: of E's entries, above 0.

        Raises:
            PrivacyError: the shape does not fit, or see the table above.
        """
        in_range(0 < noise_std < math.inf, noise_std=noise_std)  # none would be private at no epsilon
        values = _as_matrix(matrix, self.dimension)
        self._spend("M2")
        return self._apply(self._noised(values, noise_std))

    def _noised(self, values: Tensor, noise_std: float) -> Tensor:
        # No ledger: `_spend` allows one release, and the caller accounts for it.
        return Charged(1, self._noise).tensor(values, scale=noise_std, divisor=1.0, dtype=torch.float64)

    def _apply(self, values: Tensor) -> Tensor:
        return self._factor @ (self._factor.mT @ values)

    def _spend(self, kind: str) -> None:
        if self._released is not None:
            raise PrivacyError(
                f"this projection already made a {self._released} release",
                why="vectors under one M are the columns of a matrix, and without noise a matrix is not private; "
                "the accounting of M2 takes every projection to be fresh",
                fix="draw a new WishartProjection for each release",
            )
        self._released = kind


def normalised_mean(rows: Tensor, smallest_norm: float) -> tuple[Tensor, float]:
    """u / ||u|| (d,) float64 of the mean u of rows (n, d), each shortened to norm 1, and the alignment it guarantees.

    The alignment 1 - 2/(n c)^2 holds for neighbours whose means are both at least c = `smallest_norm` long.

    Raises:
        PrivacyError: the rows are not finite, or their mean is shorter than c: then this data set is outside the
            collection that is protected. That this was raised is itself a fact about the data.
    """
    in_range(rows.ndim == 2 and bool(torch.isfinite(rows).all()), rows=tuple(rows.shape))
    alignment = alignment_of_mean(rows.shape[0], smallest_norm)
    values = rows.double()
    mean = (values / values.norm(dim=1, keepdim=True).clamp_min(1.0)).mean(0)
    length = float(mean.norm())
    if length < smallest_norm:
        raise PrivacyError(
            f"the mean is shorter than smallest_norm={smallest_norm}",
            why="replacing one record could turn it further than the stated alignment",
            fix="state a smaller norm before looking at the data, or average more records",
        )
    return mean / length, alignment


def ball_noise(vector: Tensor, radius: float, *, insecure_seed: int | None = None) -> Tensor:
    """(v + z) / ||v + z|| (d,) float64, z uniform in the ball of `radius`: a better aligned query (Lemma 10).

    The new alignment is `bounds.vector.ball_noise_alignment`, whose failure is added to delta. The
    noise is private: it must not be shown.

    Raises:
        PrivacyError: v is not a unit vector, or the radius is not positive.
    """
    unit = _unit_columns(vector[:, None], vector.shape[0])[:, 0]
    in_range(0 < radius < math.inf, radius=radius)
    # d coordinates of a uniform point on the unit sphere of R^(d+2) are uniform in the unit ball of R^d.
    sphere = NoiseSource(insecure_seed).standard_normal((unit.shape[0] + 2,))
    moved = unit + radius * sphere[:-2] / sphere.norm()
    return moved / moved.norm()


@dataclass(frozen=True)
class Descent:
    """Weights after RP-GD, and (epsilon, delta) of all steps together, by basic composition."""

    weights: Tensor
    epsilon: float
    delta: float


def projected_gradient_descent(
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    learning_rate: float,
    steps: int,
    rank: int,
    alignment: float,
    delta: float,
    insecure_seed: int | None = None,
) -> Descent:
    """RP-GD (B.2), w - lr M g / ||g||, with a fresh secret M in every step.

    One M for all steps, as the paper words it, would not be private.

    Args:
        gradient: mean gradient (d,) of the private loss at weights (d,).
        start: public initial weights (d,).
        alignment: guaranteed for the gradients of neighbouring data sets at every weights that can be reached.
        delta: of all steps together, spent evenly.

    Raises:
        PrivacyError: steps is below 1, a gradient is zero or not finite, or see `WishartProjection.release_vector`.
    """
    in_range(steps >= 1, steps=steps)
    weights, epsilon = start, 0.0
    for step in range(steps):
        seed = None if insecure_seed is None else insecure_seed + step
        projection = WishartProjection(start.shape[0], rank, insecure_seed=seed)
        direction = gradient(weights).double()
        length = float(direction.norm())
        if not 0 < length < math.inf:
            raise PrivacyError(
                "the mean gradient is zero or not finite, so it has no direction",
                why="the step is private only for gradients that are aligned at neighbouring data sets",
                fix="stop before the optimum",
            )
        release = projection.release_vector(direction / length, alignment=alignment, delta=delta / steps)
        weights = weights - learning_rate * release.value.to(weights)
        epsilon += release.epsilon
    return Descent(weights, epsilon, delta)


def retrieval_scores(candidates: Tensor, released: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Private retrieval (B.2): <c, M e> for public candidates (N, d) and a released embedding M e (d,).

    Returns:
        scores (N,), unbiased for <c, e>, and a bound on their standard deviation over M (N,): the variance is
        (||c||^2 + <c, e>^2) / r, at most 2 ||c||^2 / r.
    """
    values = candidates.double()
    return values @ released.double(), values.norm(dim=1) * math.sqrt(2 / rank)


def _unit_columns(matrix: Tensor, dimension: int) -> Tensor:
    values = _as_matrix(matrix, dimension)
    norms = values.norm(dim=0)
    if not bool(((norms - 1).abs() <= _NORM_TOLERANCE).all()):
        raise PrivacyError(
            "a vector's norm is not 1",
            why="the output shows the norm, which must not depend on the data",
            fix="divide by the norm",
        )
    return values / norms


def _as_matrix(matrix: Tensor, dimension: int) -> Tensor:
    fit = matrix.ndim == 2 and matrix.shape[0] == dimension and bool(torch.isfinite(matrix).all())
    in_range(fit, matrix=tuple(matrix.shape), rows=dimension)
    return matrix.detach().to("cpu", torch.float64)
