"""Step one of spectral clipping: no module and no direction of a unit's gradient takes up the whole clipping norm.

A language model's gradient of one text is dominated by a few directions of a few modules, which differ from text to
text. Clipping scales all of it down to C, so what the texts have in common, mostly in the weaker directions, sinks
below the noise. Square roots of the singular values, and then of the modules' norms, bring it up again; the whole
keeps its norm. It is a function of one unit alone, and clipping comes after it, so it changes neither the sensitivity
nor the cost in privacy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from privlora.geometry.bases import decomposed

# Smaller singular values are treated as equal to this fraction of the largest: they may be rounding error.
_LEAST = 1e-2
_TINY = 1e-30


def root_factors(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Of matrices t (..., k, r) given as t^T t (..., r, r): R with t R = t (t^T t)^-1/4, and ||t R||_F^2, (...).

    t R has the square roots of t's singular values. It commutes with rotations of both sides, so the result does not
    depend on a basis. All float64. Zero, with R = 0, where squares of t's entries are below what the dtype of the
    Gram matrix holds. Entries must be finite.
    """
    # The Gram matrix's rounding in float32, 1e-7 of the largest value, is small beside _LEAST^2.
    values, vectors = decomposed(torch.linalg.eigh, grams.double())
    top = values[..., -1:]
    seen = top > 1e8 * torch.finfo(grams.dtype).tiny
    fourth = torch.where(seen, torch.maximum(values, _LEAST**2 * top), 1.0) ** -0.25
    roots = (vectors * torch.where(seen, fourth, 0.0).unsqueeze(-2)) @ vectors.mT
    squares = torch.where(seen, values.clamp_min(0.0) * fourth.square(), 0.0).sum(dim=-1)
    return roots, squares


def root_norms(squares: Tensor) -> Tensor:
    """Factors that turn each module's norm n, given as n^2 (modules, units) after root_factors, into n^1/2; 0 for 0.

    A module whose gradient is below 1e-4 of the unit's largest may be rounding error only and is scaled towards zero:
    it gets n^5 / least^(9/2), where least is the n of a gradient of 1e-4. Rounding error must not be amplified, because
    copies of one record have the same rounding errors, and these add up.
    """
    least = (_LEAST**2 * squares.amax(dim=0)).clamp_min(_TINY)
    # n itself is the root of a raw norm: below the least, the result falls with that norm to the power of 5/2.
    return torch.maximum(squares, least) ** -0.25 * (squares / least).clamp(max=1.0) ** 2
