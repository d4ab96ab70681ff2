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

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from privlora.lab.wishart.bounds.gaussian import in_range

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
    whole = float(np.linalg.norm(product))
    rows = np.linalg.pinv(v, rcond=_ROUNDING) @ v
    values, vectors = np.linalg.eigh((product + product.T) / 2)
    scale = float(np.abs(values).max())
    reached = vectors[:, np.abs(values) > _ROUNDING * scale] if scale > 0 else vectors[:, :0]
    missed = float(np.linalg.norm(y - (y @ reached) @ reached.T))
    beyond = float(np.linalg.norm(np.linalg.svd(y, compute_uv=False)[rank:]))
    return Verdict(
        asymmetry=float(np.linalg.norm(product - product.T)) / whole if whole > 0 else 0.0,
        negative=max(0.0, -float(values.min()) / scale) if scale > 0 else 0.0,
        outside=float(np.linalg.norm(y - y @ rows)) / size,
        unexplained=max(missed, beyond) / size,
    )
