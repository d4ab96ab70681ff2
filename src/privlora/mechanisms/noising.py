"""Where a private sum becomes public: charge, draw, add, divide; in this order, and nowhere else.

The gaps between floating-point numbers depend on their size, so the last digits of a sum with continuous noise can tell
what the sum was (Mironov 2012). Here noise is added in float64, and every entry is then rounded to a multiple of one
power of two, about 1/4096 of the noise's standard deviation. The grid follows from public numbers alone. The noise is
still a floating-point Gaussian that is rounded, not a sample of a discrete law. In secure sums each client rounds first
and adds integers, which are such samples (``Charged.integers``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from privlora.accounting.events import StepEvent
from privlora.coordinates.base import Vector, float64_device
from privlora.errors import PrivacyError
from privlora.mechanisms.banded import CorrelatedNoise
from privlora.mechanisms.charges import Charges
from privlora.mechanisms.lattice import Lattice
from privlora.mechanisms.noise import NoiseSource
from privlora.stages import CHARGE, NOISE, staged

# From a source of standard normal entries of a shape: the noise of a whole vector, of covariance I on all that the sum
# can reach (Coordinates.standard_normal).
Law = Callable[[Callable[[tuple[int, ...]], Tensor]], Vector]

# The grid's step is the noise's standard deviation over this, rounded down to a power of two.
_STEPS = 4096


class Noising:
    """Turns sums into releases. It knows shapes and no adapter: a sum may come from one process, from several that
    added theirs up, or from a secure sum. Whoever hands it in answers for its sensitivity.

    ledger: charged before noise is drawn. noise: where it is drawn from. correlated: what makes a step's noise of that
    and of earlier steps'; None for steps of independent noise.
    """

    def __init__(
        self, ledger: Charges, noise: NoiseSource, correlated: CorrelatedNoise | None = None
    ) -> None:
        self.ledger = ledger
        self.noise = noise
        self.correlated = correlated

    @staged(CHARGE)
    def charge(self, event: StepEvent) -> Charged:
        """What noise can be had from, once the ledger shows ``event``. Its errors pass through."""
        return Charged(self.ledger.charge(event), self.noise, self.correlated)


class Charged:
    """A release that has been paid for. step: 1, 2, …, the number that the ledger gave it."""

    def __init__(self, step: int, noise: NoiseSource, correlated: CorrelatedNoise | None = None) -> None:
        self.step = step
        self._noise = noise
        self._correlated = correlated
        self._made: set[str] = set()

    @staged(NOISE)
    def vector(
        self,
        total: Vector | None,
        law: Law,
        *,
        scale: float,
        divisor: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Vector:
        """(total + scale xi) / divisor for xi of ``law``, every tensor on its noise's grid.

        Where noise is correlated, xi is the step's row of C^-1 z (mechanisms.banded), and ``law`` draws the z of the
        step alone.

        total: PRIVATE, clipped; None for zeros. scale: sigma C. divisor: public.
        """

        self._once("vector")

        def draw(shape: tuple[int, ...]) -> Tensor:
            return self._noise.standard_normal(shape).to(float64_device(device))

        noise = law(draw) if self._correlated is None else self._correlated.next(self.step, lambda: law(draw))
        made: Vector = []
        for g, parts in enumerate(noise):
            clipped = (None,) * len(parts) if total is None else total[g]
            pairs = zip(clipped, parts, strict=True)
            made.append(tuple(noised(c, xi, scale, divisor, dtype).to(device) for c, xi in pairs))
        return made

    @staged(NOISE)
    def tensor(self, total: Tensor, *, scale: float, divisor: float, dtype: torch.dtype) -> Tensor:
        """The same for one PRIVATE tensor of any shape whose entries all get noise."""
        self._refuse_correlated("a tensor by itself")
        self._once("tensor")
        xi = self._noise.standard_normal(tuple(total.shape)).to(float64_device(total.device))
        return noised(total, xi, scale, divisor, dtype).to(total.device)

    @staged(NOISE)
    def integers(self, total: Tensor | None, *, clients: int, lattice: Lattice) -> np.ndarray:
        """(clients, entries) shares of a secure sum: rounded to the lattice, each with its client's own noise, in the
        ring. The only thing that can be had from its charge.

        total: PRIVATE, clipped, (clients, entries), row k of client k; None for zeros.
        """
        self._refuse_correlated("integers")
        self._once("integers")
        shape = (clients, lattice.entries)
        if total is not None and tuple(total.shape) != shape:
            raise _misshapen(tuple(total.shape), shape)
        noise = self._noise.discrete_gaussian(shape, lattice.share_std)
        if total is not None:
            noise += lattice.rounded(total)
        return lattice.reduced(noise)

    def _refuse_correlated(self, what: str) -> None:
        if self._correlated is not None:
            raise PrivacyError(
                f"{what} cannot have noise that is correlated between steps",
                why="the price of a cycle of steps covers one vector a step, with the noise of its row of C^-1",
                fix="set privacy.bands=1",
            )

    def _once(self, kind: str) -> None:
        # A share stands for the whole release, while a vector may come with a noisy count.
        if kind in self._made or (self._made and "integers" in {kind, *self._made}):
            raise PrivacyError(
                f"step {self.step} was charged once, and a second {kind} is asked of it",
                why="two releases of one charge have half the noise",
                fix="charge each release",
            )
        self._made.add(kind)


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
        if total.shape != xi.shape:
            raise _misshapen(tuple(total.shape), tuple(xi.shape))
        noise += total.to(xi.device).double()
    noise /= divisor
    width = grid_width(scale / divisor)
    if width:
        noise.div_(width).round_().mul_(width)  # only round_ is inexact: the width is a power of two
    return noise.to(dtype)


def _misshapen(total: tuple[int, ...], noise: tuple[int, ...]) -> PrivacyError:
    return PrivacyError(
        f"a sum of shape {total} meets noise of shape {noise}",
        why="a unit's part would be copied, and exceed what it was clipped to",
        fix="sum in the coordinates that are released",
    )
