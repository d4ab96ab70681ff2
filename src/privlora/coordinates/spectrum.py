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

# Smaller singular values are treated as equal to this fraction of the largest: they may be rounding error.
_LEAST = 1e-2
_TINY = 1e-30


def root_spectrum(t: Tensor) -> Tensor:
    """t (units, k, r) with the square roots of each matrix's singular values: t (t^T t)^-1/4, zero for zero.

    Commutes with rotations of both sides, so the result does not depend on a basis. Entries must be finite.
    """
    size = t.abs().amax(dim=(-2, -1), keepdim=True)
    unit = t / size.clamp_min(_TINY)
    # The Gram matrix's rounding, 1e-7 of the largest, is small beside _LEAST^2; a copy of t in float64 would cost more
    # than all the rest.
    values, vectors = torch.linalg.eigh((unit.mT @ unit).double())
    values = torch.maximum(values, _LEAST**2 * values[..., -1:]).clamp_min(_TINY)
    roots = (vectors * values.unsqueeze(-2) ** -0.25) @ vectors.mT  # (units, r, r)
    return unit @ (roots * size.double().sqrt()).to(t.dtype)


def root_norms(squares: Tensor) -> Tensor:
    """Factors that turn each module's norm n, given as n^2 (modules, units) after root_spectrum, into n^1/2; 0 for 0.

    A module whose gradient is below 1e-4 of the unit's largest may be rounding error only and is scaled towards zero:
    it gets n^5 / least^(9/2), where least is the n of a gradient of 1e-4. Rounding error must not be amplified, because
    copies of one record have the same rounding errors, and these add up.
    """
    least = (_LEAST**2 * squares.amax(dim=0)).clamp_min(_TINY)
    # n itself is the root of a raw norm: below the least, the result falls with that norm to the power of 5/2.
    return torch.maximum(squares, least) ** -0.25 * (squares / least).clamp(max=1.0) ** 2
