"""Releasing M V without noise for a matrix V: not private at any epsilon, and the test that shows it.

Proposition 2 of Hu et al. (2026) says so; the reason is a symmetry (Proposition 2', below), not that the two images
differ under one M, which is as true of vectors. For Y = M V with M = Z Z^T, the matrix V^T Y = V^T M V is symmetric.
For another candidate V' it is not, with probability 1, whatever the rank of M, unless the pair is degenerate:
V' = c V with c > 0, or both of rank at most 1 with one row space (then it is a vector query in disguise). So whoever
knows two candidates tells them apart from one output, without M.

The gradients G (n, d) of a layer with a frozen A (LoRA-FA) are multiplied from the right, dW = -lr G A^T A:
pass `G.T` and `-dW.T`. Only the sign of the learning rate matters. T vectors released under one M are the columns of
one matrix, which is why an M is used once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from privlora.accounting.projection.gaussian import Floats
from privlora.errors import PrivacyError

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
    v, y = _pair(candidate, output)
    if rank < 1:
        raise PrivacyError(f"rank={rank} is not positive", fix="give the number of columns of Z")
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
        asymmetry=_asymmetry(product),
        negative=max(0.0, -float(values.min()) / scale) if scale > 0 else 0.0,
        outside=float(np.linalg.norm(y - y @ rows)) / size,
        unexplained=max(missed, beyond) / size,
    )


def tell_apart(first: ArrayLike, second: ArrayLike, output: ArrayLike) -> int:
    """0 or 1: which of two candidates made the noise-free output; right with probability 1 outside degenerate pairs.

    Raises:
        PrivacyError: the shapes differ, or the pair is degenerate (`degenerate`), so that symmetry says nothing.
    """
    reason = degenerate(first, second)
    if reason is not None:
        raise PrivacyError(
            f"these candidates cannot be told apart by symmetry: {reason}",
            why="Proposition 2 excludes such pairs",
            fix="for rank one, account it as a vector release; for a scalar multiple, compare the sizes",
        )
    scores = []
    for candidate in (first, second):
        v, y = _pair(candidate, output)
        scores.append(_asymmetry(v.T @ y))
    return int(scores[1] < scores[0])


def degenerate(first: ArrayLike, second: ArrayLike, tolerance: float = 1e-10) -> str | None:
    """Why symmetry cannot tell two candidates apart, or None. Rank and equality are relative to `tolerance`."""
    v, w = _pair(first, second)
    sizes = float(np.linalg.norm(v)), float(np.linalg.norm(w))
    if min(sizes) == 0:
        return "one of them is zero"
    stacked = np.linalg.svd(np.stack([v.ravel() / sizes[0], w.ravel() / sizes[1]]), compute_uv=False)
    if stacked[1] <= tolerance:
        return "one is a multiple of the other"
    rows = np.linalg.svd(np.concatenate([v / sizes[0], w / sizes[1]]), compute_uv=False)
    if rows.size == 1 or rows[1] <= tolerance:
        return "both have rank one and the same row space"
    return None


def misfit(candidate: ArrayLike, output: ArrayLike, projection: ArrayLike) -> float:
    """||M V - Y||_F / ||Y||_F where M (d, d) is known, as LoRA-FA publishes A: 0 for the true candidate only.

    Separates any two candidates with probability 1, also one-column ones and multiples.

    Raises:
        PrivacyError: the shapes do not fit.
    """
    v, y = _pair(candidate, output)
    m = np.asarray(projection, np.float64)
    if m.shape != (v.shape[0],) * 2:
        raise PrivacyError(f"the projection has shape {m.shape}", fix=f"give M of shape {(v.shape[0],) * 2}")
    size = float(np.linalg.norm(y))
    difference = float(np.linalg.norm(m @ v - y))
    return difference / size if size > 0 else (0.0 if difference == 0 else math.inf)


def _asymmetry(product: Floats) -> float:
    size = float(np.linalg.norm(product))
    return float(np.linalg.norm(product - product.T)) / size if size > 0 else 0.0


def _pair(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 2 or a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise PrivacyError(
            f"two finite matrices of one shape are needed, here {a.shape} and {b.shape}",
            fix="give both as (d, m); a vector as (d, 1)",
        )
    return a, b
