"""Releasing M V for a matrix V: without noise not private at any epsilon, and the test that shows it; and M1.

Proposition 2 of Hu et al. (2026) says so; the reason is a symmetry (Proposition 2', below), not that the two images
differ under one M, which is as true of vectors. For Y = M V with M = Z Z^T, the matrix V^T Y = V^T M V is symmetric.
For another candidate V' it is not, with probability 1, whatever the rank of M, unless the pair is degenerate:
V' = c V with c > 0, or both of rank at most 1 with one row space (then it is a vector query in disguise). So whoever
knows two candidates tells them apart from one output, without M.

The gradients G (n, d) of a layer with a frozen A (LoRA-FA) are multiplied from the right, dW = -lr G A^T A:
pass `G.T` and `-dW.T`. Only the sign of the learning rate matters. T vectors released under one M are the columns of
one matrix, which is why an M is used once.

M1, project then noise, releases M V + E for V with unit columns. One column changes, v_j = u + w to u' + w', where
u, u' lie in the span U (dimension p) of the other columns and w, w' are orthogonal to it. The rows of Z that the other
columns expose span a space of dimension k = min(p, r); M splits into the exposed part M_par and a residual M_perp that
is a Wishart matrix in dimension d - p with r - k degrees of freedom, independent of what is exposed (Lemmas 12 and 13).
The residual is a vector release (Lemma 2), the exposed part a Gaussian mechanism (Lemma 14, which is corrected here),
and Theorem 4 adds them up. All of that needs an M that is fresh and stays secret. If M is published, M1 is a Gaussian
mechanism whose sensitivity ||M u|| exceeds 1 on average (`public_m1_delta`): more noise than releasing V + E would
need. M1 is here for study, not as a privacy tool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import orth

from privlora.accounting.projection.gaussian import Floats, gaussian_delta
from privlora.lab.wishart.bounds.gaussian import (
    gaussian_noise_multiplier,
    in_range,
    solve_epsilon,
    solve_noise,
)
from privlora.lab.wishart.bounds.vector import Bound, VectorQuery, theorem_1

# Relative size below which an eigenvalue of V^T Y counts as rounding.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class Verdict:
    """How far a candidate V is from explaining an output Y; every field is 0 up to rounding for the true one.

    All four are 0 if and only if a positive semidefinite M of rank at most r with Y = M V exists (then
    M = Y (V^T Y)^+ Y^T is one).

    asymmetry: ||V^T Y - Y^T V||_F / ||V^T Y||_F, the score of a ROC curve. negative: -(smallest eigenvalue of V^T Y) /
    (its norm), at least 0. outside: share of Y's norm outside V's row space. unexplained: share of Y's norm that
    V^T Y does not reach, or beyond its r largest singular values.
    """

    asymmetry: float
    negative: float
    outside: float
    unexplained: float

    def accepts(self, tolerance: float = 1e-8) -> bool:
        """Whether V explains Y up to rounding (1e-8 suits float64; float32 outputs need about 1e-3)."""
        return max(self.asymmetry, self.negative, self.outside, self.unexplained) <= tolerance


def examine(candidate: ArrayLike, output: ArrayLike, rank: int) -> Verdict:
    """Test one candidate V (d, m) against a noise-free output Y = M V (d, m); M, of rank at most `rank`, is unknown.

    Raises:
        PrivacyError: the shapes differ, an entry is not finite, or rank is below 1.
    """
    v, y = np.asarray(candidate, np.float64), np.asarray(output, np.float64)
    fit = v.ndim == 2 and v.shape == y.shape and bool(np.isfinite(v).all() and np.isfinite(y).all())
    in_range(fit, candidate=v.shape, output=y.shape)
    in_range(rank >= 1, rank=rank)
    size = float(np.linalg.norm(y))
    if size == 0:
        return Verdict(0.0, 0.0, 0.0, 0.0)
    product = v.T @ y
    rows = np.linalg.pinv(v, rcond=_ROUNDING) @ v
    values, vectors = np.linalg.eigh((product + product.T) / 2)
    scale = float(np.abs(values).max())
    reached = vectors[:, np.abs(values) > _ROUNDING * scale] if scale > 0 else vectors[:, :0]
    missed = float(np.linalg.norm(y - (y @ reached) @ reached.T))
    beyond = float(np.linalg.norm(np.linalg.svd(y, compute_uv=False)[rank:]))
    return Verdict(
        asymmetry=asymmetry(product),
        negative=max(0.0, -float(values.min()) / scale) if scale > 0 else 0.0,
        outside=float(np.linalg.norm(y - y @ rows)) / size,
        unexplained=max(missed, beyond) / size,
    )


def asymmetry(product: Floats) -> float:
    """||V^T Y - Y^T V||_F / ||V^T Y||_F of V^T Y (m, m); 0 where it vanishes."""
    whole = float(np.linalg.norm(product))
    return float(np.linalg.norm(product - product.T)) / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class ColumnChange:
    """One-column adjacency: which pairs of matrices count as neighbours.

    span: p, the dimension of the span U of the other columns, at least 0. outside_share: tau = ||w||^2 = ||w'||^2 in
    [0, 1]; the two must be equal, since a vector release shows the norm. inside_alignment: rho_par in (0, 1], with
    <u, u'> >= rho_par (1 - tau). outside_alignment: rho_perp in (0, 1], with <w, w'> >= rho_perp tau.

    Raises:
        PrivacyError: a value is out of range.
    """

    span: int
    outside_share: float
    inside_alignment: float
    outside_alignment: float

    def __post_init__(self) -> None:
        aligned = 0 < self.inside_alignment <= 1 and 0 < self.outside_alignment <= 1
        in_range(self.span >= 0 and 0 <= self.outside_share <= 1 and aligned, change=self)

    @property
    def distance(self) -> float:
        """D, the largest ||v_j - v'_j||; a chain of q columns moves V by sqrt(q) D at most (Eq. 4)."""
        return math.hypot(self.inside_distance, self.outside_distance)

    @property
    def inside_distance(self) -> float:
        """Largest ||u - u'|| = sqrt(2 (1 - tau) (1 - rho_par))."""
        return math.sqrt(2 * (1 - self.outside_share) * (1 - self.inside_alignment))

    @property
    def outside_distance(self) -> float:
        """Largest ||w - w'|| = sqrt(2 tau (1 - rho_perp))."""
        return math.sqrt(2 * self.outside_share * (1 - self.outside_alignment))


@dataclass(frozen=True)
class ColumnBound:
    """Theorem 4's (epsilon, delta) and its parts: Lemma 2's, the Gaussian mechanism's, and Lemma 14's sensitivity."""

    total: Bound
    residual: Bound
    exposed: Bound
    sensitivity: float


def residual_bound(
    dimension: int, rank: int, change: ColumnChange, tail: float, *, improved: bool = False
) -> Bound:
    """Lemma 2: Theorem 1 for the part of M that the other columns do not expose, (d, r, rho) -> (d-p, r-k, rho_perp).

    (0, 0) where nothing is released without noise: r <= p, or w = w'. `tail` is delta' (paid three times).

    Raises:
        PrivacyError: U fills the space, or Theorem 1's conditions fail for the residual.
    """
    fit = change.span < dimension or (change.span == dimension and change.outside_share == 0)
    in_range(rank >= 1 and fit, rank=rank, change=change, dimension=dimension)
    if change.outside_distance == 0 or rank <= change.span:
        return Bound(0.0, 0.0)
    query = VectorQuery(dimension - change.span, rank - change.span, change.outside_alignment)
    return theorem_1(query, tail, improved=improved)


def exposed_sensitivity(
    dimension: int, rank: int, span: int, inside: float, outside: float, failure: float
) -> float:
    """Corrected Lemma 14: a bound on ||M_par h|| that holds with probability 1 - `failure` over Z.

    With h = h_U + h_perp, ||h_U|| = `inside`, ||h_perp|| = `outside`, k = min(p, r):

        p >= r:  (1/r) (sqrt d + sqrt r + t) (sqrt r + t) ||h||,                        t = sqrt(2 ln(2/failure)),
        p <  r:  (1/r) sqrt((sqrt r + sqrt p + t)^2 + (sqrt(d-p) + sqrt k + t)^2)
                 ((sqrt r + t) ||h_U|| + (sqrt k + t) ||h_perp||),                      t = sqrt(2 ln(4/failure)).

    The lemma's own proof takes Z B for Gaussian given B, an orthonormal basis of the exposed rows, although B is made
    of them. Its bound, with sqrt k instead of sqrt r for h_U, is exceeded almost surely where k is far below r.

    Raises:
        PrivacyError: a size or norm is out of range, or failure is not in (0, 1).
    """
    in_range(rank >= 1 and 0 <= span <= dimension, rank=rank, span=span, dimension=dimension)
    in_range(inside >= 0 and outside >= 0, inside=inside, outside=outside)
    in_range(0 < failure < 1, failure=failure)
    d, r, p = dimension, rank, span
    if p >= r:
        t = math.sqrt(2 * math.log(2 / failure))
        return (math.sqrt(d) + math.sqrt(r) + t) * (math.sqrt(r) + t) * math.hypot(inside, outside) / r
    t = math.sqrt(2 * math.log(4 / failure))
    root_k = math.sqrt(p)
    spread = math.hypot(math.sqrt(r) + root_k + t, math.sqrt(d - p) + root_k + t)
    return spread * ((math.sqrt(r) + t) * inside + (root_k + t) * outside) / r


def theorem_4(
    dimension: int,
    rank: int,
    change: ColumnChange,
    noise_std: float,
    *,
    tail: float,
    failure: float,
    exposed_delta: float,
    improved: bool = False,
) -> ColumnBound:
    """Theorem 4 of Hu et al. (2026), one column: eps = eps_perp + eps_par, delta = delta_perp + delta_par + delta_Z.

    Two corrections: the sensitivity is that of the corrected Lemma 14, and eps_par is the exact Gaussian epsilon at
    delta_par, where the paper's sqrt(2 ln(1.25/delta)) is not valid above epsilon = 1.

    Args:
        noise_std: standard deviation of E's entries, above 0, where the columns of V have norm 1. tail: delta' of
            Lemma 2. failure: delta_Z of Lemma 14. exposed_delta: delta_par of the Gaussian mechanism.

    Raises:
        PrivacyError: a condition of Lemma 2 or 14 fails, or noise_std or exposed_delta is out of range.
    """
    in_range(0 < noise_std < math.inf, noise_std=noise_std)
    residual = residual_bound(dimension, rank, change, tail, improved=improved)
    distances = change.inside_distance, change.outside_distance
    sensitivity = exposed_sensitivity(dimension, rank, change.span, *distances, failure)
    eta = (sensitivity / noise_std) ** 2
    exposed = Bound(solve_epsilon(lambda eps: float(gaussian_delta(eps, eta)), exposed_delta), exposed_delta)
    total = Bound(residual.epsilon + exposed.epsilon, residual.delta + exposed.delta + failure)
    return ColumnBound(total, residual, exposed, sensitivity)


def theorem_3(column: Bound, columns: int) -> Bound:
    """Theorem 3: a chain of q one-column changes, by group privacy: (q eps, delta (e^{q eps} - 1) / (e^eps - 1)).

    The factor of delta, sum of e^{i eps} over i < q, must not be dropped; delta is at most 1.

    Raises:
        PrivacyError: columns is below 1.
    """
    in_range(columns >= 1, columns=columns)
    with np.errstate(over="ignore"):
        factor = float(np.exp(column.epsilon * np.arange(columns)).sum())
    return Bound(columns * column.epsilon, min(1.0, column.delta * factor))


@dataclass(frozen=True)
class Split:
    """Lemma 12: M = Z Z^T = exposed + residual, both (d, d), and residual u = 0 for u in the span of the others.

    dimension: k = min(p, r), of the rows that the other columns expose.
    """

    exposed: Floats
    residual: Floats
    dimension: int


def split_projection(factor: ArrayLike, others: ArrayLike) -> Split:
    """Lemma 12 for Z (d, r) and the unchanged columns V_-j (d, c), of any rank p.

    Raises:
        PrivacyError: the shapes do not fit.
    """
    z, _, shown = _exposed_rows(factor, others)
    seen = z @ shown
    hidden = z - seen @ shown.T
    return Split(seen @ seen.T, hidden @ hidden.T, shown.shape[1])


def redraw_residual(factor: ArrayLike, others: ArrayLike, generator: np.random.Generator) -> Floats:
    """Lemma 13: Z' (d, r) with what M V_-j shows of Z, and a fresh rest. Z' has the law of Z and exposes the same part.

    So whoever sees M V_-j, and Z's exposed part even, knows of the residual its law alone: (r-k)/r times a Wishart
    matrix of r - k degrees of freedom on the d - p dimensions beside the other columns. Errors as `split_projection`.
    """
    z, span, shown = _exposed_rows(factor, others)
    change = generator.standard_normal(z.shape) / math.sqrt(z.shape[1]) - z
    change -= span @ (span.T @ change)
    return z + change - (change @ shown) @ shown.T


def _exposed_rows(factor: ArrayLike, others: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Z, and orthonormal bases of U = span V_-j (d, p) and of the row space of Z_U (r, k)."""
    z, columns = np.asarray(factor, np.float64), np.asarray(others, np.float64)
    in_range(z.ndim == columns.ndim == 2 and len(z) == len(columns), factor=z.shape, others=columns.shape)
    span = orth(columns)
    return z, span, orth(z.T @ span)


def m1_coefficient(dimension: int, rank: int, span: int, columns: int, failure: float) -> float:
    """Eq. 7 as printed, and Eq. 8 where p >= r: the sensitivity of Eq. 6 over that of Eq. 5.

    Eq. 5 takes M1 for a Gaussian mechanism of sensitivity ||M|| ||V - V'||_F <= (sqrt d + sqrt r + t)^2 / r sqrt(q) D;
    Eq. 6 is Theorem 3's q times Lemma 14's. With t = sqrt(2 ln(2/failure)) and k = min(p, r) their quotient is

        sqrt(q) (sqrt d + sqrt k + t) (sqrt k + t) / (sqrt d + sqrt r + t)^2.

    Where p < r it rests on Lemma 14, which is wrong there: see `exposed_sensitivity`. The factor sqrt(q), from group
    privacy, is not needed where p >= r: `m1_noise`.

    Raises:
        PrivacyError: a size is out of range, or failure is not in (0, 1).
    """
    in_range(rank >= 1 and 0 <= span <= dimension and columns >= 1, rank=rank, span=span, columns=columns)
    in_range(0 < failure < 1, failure=failure)
    t = math.sqrt(2 * math.log(2 / failure))
    root_d, root_r, root_k = math.sqrt(dimension), math.sqrt(rank), math.sqrt(min(span, rank))
    return math.sqrt(columns) * (root_d + root_k + t) * (root_k + t) / (root_d + root_r + t) ** 2


def m1_noise(epsilon: float, delta: float, rank: int, dimension: int, *, by_norm: bool = False) -> float:
    """Std of E over ||V - V'||_F with which M1 is (epsilon, delta)-DP, also for a public M: Eq. 8, put right.

    In the rank-deficient regime, r <= p, M is exposed whole, so M1 is a Gaussian mechanism given M. Its sensitivity is
    ||M (V - V')||_F <= (sqrt d + sqrt r + t)(sqrt r + t) / r ||V - V'||_F but with probability delta_Z, as
    t = sqrt(2 ln(2/delta_Z)), for every p and without group privacy: ||Z^T (V - V')||_F is a Lipschitz function of Z.
    The best of some shares of delta pays for delta_Z. It is more than V + E needs: `public_m1_noise` is exact.

    by_norm: instead the baseline of Eq. 5, sqrt d + sqrt r + t twice.

    Raises:
        PrivacyError: an argument is out of range.
    """
    in_range(rank >= 1 and dimension >= 1 and 0 < delta < 1, rank=rank, dimension=dimension, delta=delta)
    found = []
    for share in (0.01, 0.05, 0.1, 0.2, 0.5):
        t = math.sqrt(2 * math.log(2 / (share * delta)))
        whole = math.sqrt(dimension) + math.sqrt(rank) + t
        sensitivity = whole * (whole if by_norm else math.sqrt(rank) + t) / rank
        found.append(sensitivity * gaussian_noise_multiplier(epsilon, (1 - share) * delta))
    return min(found)


def public_m1_noise(epsilon: float, delta: float, rank: int, dimension: int) -> float:
    """The noise multiplier at which `public_m1_delta` is `delta`: exact for one column, whatever p. Errors as there."""
    return solve_noise(lambda sigma: public_m1_delta(epsilon, sigma, rank, dimension), delta)


def public_m1_delta(epsilon: float, noise_multiplier: float, rank: int, dimension: int) -> float:
    """Exact delta of M1 with M published, rank-one differences of norm C: E delta_G(epsilon; ||M u||^2 / sigma^2).

    ||M u||^2 ~ x (x + y) / r^2 with independent x ~ chi^2_r, y ~ chi^2_{d-1}; its mean is (r + d + 1) / r > 1.

    Args:
        noise_multiplier: noise std / C. dimension: d >= 2.

    Raises:
        PrivacyError: noise_multiplier is not positive, rank is below 1 or dimension below 2.
    """
    in_range(0 < noise_multiplier < math.inf, noise_multiplier=noise_multiplier)
    in_range(rank >= 1 and dimension >= 2, rank=rank, dimension=dimension)
    root_x, weight_x = _chi_rule(rank)
    root_y, weight_y = _chi_rule(dimension - 1)
    x = root_x[:, None] ** 2
    energy = x * (x + root_y**2) / rank**2
    return float(weight_x @ gaussian_delta(epsilon, energy / noise_multiplier**2) @ weight_y)


def _chi_rule(degrees: int) -> tuple[Floats, Floats]:
    """Gauss-Legendre nodes and weights for the norm of a standard normal vector; mass beyond is below 1e-17."""
    nodes, weights = np.polynomial.legendre.leggauss(160)
    low, high = max(0.0, math.sqrt(degrees) - 9), math.sqrt(degrees) + 9
    at = low + (high - low) * (nodes + 1) / 2
    log_density = (degrees - 1) * np.log(at) - at**2 / 2 - math.log(2) * (degrees / 2 - 1)
    return at, weights * (high - low) / 2 * np.exp(log_density - math.lgamma(degrees / 2))
