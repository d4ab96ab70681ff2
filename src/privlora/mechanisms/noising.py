"""How noise meets a sum, wherever the sum came from: added in float64, snapped to a public grid, rounded once.

The gaps between floating-point numbers depend on their size, so the last digits of a sum with continuous noise can tell
what the sum was (Mironov 2012). Here every entry is rounded to a multiple of one power of two, about 1/4096 of the
noise's standard deviation, after the noise is in. The grid follows from public numbers alone. The noise is still a
floating-point Gaussian that is rounded, not a sample of a discrete law.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The grid's step is the noise's standard deviation over this, rounded down to a power of two.
_STEPS = 4096


def grid_width(noise_std: float) -> float:
    """The power of two in (tau / 8192, tau / 4096] for noise of standard deviation tau; 0, no grid, without noise.

    Also 0 where float64 has no such power (tau below 1e-319).
    """
    # By exponents, because tau / 4096 itself may underflow.
    return math.ldexp(1.0, math.frexp(noise_std)[1] - math.frexp(_STEPS)[1]) if noise_std > 0 else 0.0


def noised(total: Tensor | None, xi: Tensor, scale: float, divisor: float, dtype: torch.dtype) -> Tensor:
    """(total + scale xi) / divisor on the grid of its noise, in ``dtype``, on the device of ``xi``.

    total: PRIVATE, clipped; None for zeros. xi: standard normal, float64, of the same shape. divisor: public.
    """
    noise = xi * scale
    if total is not None:
        noise += total.to(xi.device).double()
    noise /= divisor
    width = grid_width(scale / divisor)
    if width:
        noise.div_(width).round_().mul_(width)  # only round_ is inexact: the width is a power of two
    return noise.to(dtype)
