"""Noise without a trusted server: clients send noisy integers into a secure sum, and only the sum is opened.

A logical batch is spread over K clients, whose private sums are taken at one public point. Each rounds its sum to a
public lattice, adds its own discrete Gaussian noise and masks what it sends; the server learns nothing but the total
modulo 2^bits, which has the noise of at least ``survivors`` honest clients. What that costs, and why it is what the
event says, is derived in accounting.secure_sums. The masks are not made here.
"""

from __future__ import annotations

import numpy as np
import torch

from privlora.accounting.events import StepEvent
from privlora.coordinates import Coordinates, Vector
from privlora.coordinates.base import float64_device
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.mechanisms.charges import Charges
from privlora.mechanisms.gaussian import GaussianMechanism
from privlora.mechanisms.lattice import Lattice
from privlora.mechanisms.layout import Layout
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.nonprivate import MeanMechanism
from privlora.mechanisms.release import PrivateSum, Release

# An event and its lattice state the same noise multiplier, to rounding.
_ROUNDING = 1e-9


def check_lattice(lattice: Lattice, event: StepEvent, clip_norm: float) -> None:
    """Raise PrivacyError unless the lattice's noise is what ``event`` charges for."""
    if event.projections:
        raise PrivacyError(
            "a randomly projected release cannot be summed securely",
            why="rounding happens after the projection, which the cost of a projected step does not cover",
            fix="use a method that projects nothing at random",
        )
    given = lattice.noise_multiplier(clip_norm)
    if not given >= event.noise_multiplier * (1 - _ROUNDING):
        raise PrivacyError(
            f"the lattice's noise multiplier is {given:g}, the event's {event.noise_multiplier:g}",
            why="the ledger would state what was not done",
            fix="make the lattice with lattice_for, from the numbers of the plan",
        )


class ShareMechanism(GaussianMechanism):
    """A client's part, or that of K stacked clients: the clipped sum of their units, rounded, plus their noise.

    Clipping and the edge cases are those of GaussianMechanism; ``shares`` takes the place of ``release``. An empty
    batch is a zero sum with full noise, charged. The ledger shows ``event`` before noise is drawn.

    lattice: public. Its noise multiplier at ``clip_norm`` is ``event.noise_multiplier`` or more (PrivacyError).
    expected_batch_size: of the ledger's plan; shares are not divided. ledger: ChargeAll for a stack. noise: a source
    for each client, in one StackedNoise for a stack.
    """

    def __init__(
        self,
        coordinates: Coordinates,
        *,
        clip_norm: float,
        event: StepEvent,
        expected_batch_size: float,
        ledger: Charges,
        lattice: Lattice,
        noise: NoiseSource | None = None,
        clipping: str = "flat",
    ) -> None:
        super().__init__(
            coordinates,
            clip_norm=clip_norm,
            event=event,
            expected_batch_size=expected_batch_size,
            ledger=ledger,
            noise=noise,
            clipping=clipping,
        )
        check_lattice(lattice, event, clip_norm)
        self.lattice = lattice

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each coordinate of a release that has the fewest shares allowed."""
        return self.lattice.noise_std(self.lattice.survivors) / self.expected_batch_size

    def shares(self, count: int = 1) -> list[np.ndarray]:
        """End the logical batch: one vector of ring integers (entries,) for each client, in the order of ``Layout``.

        count: how many clients are stacked in the coordinates. Raises PrivacyError if entries or clients do not fit,
        and whatever the ledger raises; then nothing was drawn.
        """
        layout = Layout.of(self.coordinates)
        if layout.entries != self.lattice.entries:
            raise PrivacyError(
                f"a client has {layout.entries} entries, the lattice {self.lattice.entries}",
                why="the noise was calibrated to the rounding of as many",
                fix="make the lattice for one client's coordinates",
            )
        total = self._take().vector
        flat = None if total is None else layout.flat(total, count)
        charged = self.noising.charge(self.event)
        return list(charged.integers(flat, clients=count, lattice=self.lattice))

    def release(self, total: PrivateSum | None = None) -> Release:
        raise PrivacyError(
            "a client of a secure sum releases nothing by itself",
            why="its own noise is less than what the ledger is charged for",
            fix="send shares() into the sum, and release that with SumMechanism",
        )


class PlainSums(MeanMechanism):
    """A client's part without clipping and noise: NO PRIVACY. For public data, and to compare with central training."""

    def sums(self, count: int = 1) -> list[np.ndarray]:
        """End the logical batch: one float64 sum (entries,) for each client, in the order of ``Layout``."""
        self._count_step()
        layout = Layout.of(self.coordinates)
        total = self._take().vector
        if total is None:
            return list(np.zeros((count, layout.entries)))
        return list(layout.flat(total, count).numpy())


class SumMechanism:
    """The server's part: an opened sum of shares becomes a Release. It holds no data and makes no noise.

    lattice: that of the clients; None for sums of PlainSums, NO PRIVACY. clip_norm: the clients'. expected_batch_size:
    b of all clients together, public.
    """

    def __init__(
        self,
        coordinates: Coordinates,
        *,
        lattice: Lattice | None,
        expected_batch_size: float,
        clip_norm: float = float("inf"),
    ) -> None:
        if not 0 < expected_batch_size < float("inf"):
            raise ConfigError(
                f"expected_batch_size={expected_batch_size} is not positive and finite",
                fix="give the sum of the clients' expected batch sizes",
            )
        self.coordinates = coordinates
        self.lattice = lattice
        self.expected_batch_size = expected_batch_size
        self.clip_norm = clip_norm
        self.layout = Layout.of(coordinates)
        if lattice is not None and lattice.entries != self.layout.entries:
            raise ConfigError(
                f"the lattice has {lattice.entries} entries, the coordinates {self.layout.entries}",
                fix="make the lattice for these coordinates",
            )

    def release(self, total: np.ndarray, step: int, *, shares: int) -> Release:
        """The mean gradient of an opened sum, as the nearest element of the space.

        Args:
            total: (entries,) sum of shares modulo 2^bits, in the lattice's dtype; float64 without a lattice.
            step: 1, 2, …
            shares: how many clients' shares are in it; public.

        Raises:
            RunError: ``total`` has another shape or dtype.
            PrivacyError: fewer shares than the lattice's survivors.
        """
        dtype = np.dtype(np.float64) if self.lattice is None else self.lattice.dtype
        if total.shape != (self.layout.entries,) or total.dtype != dtype:
            raise RunError(
                f"a sum of shape {total.shape} and dtype {total.dtype}, not ({self.layout.entries},) and {dtype}",
                fix="sum shares of this lattice, in its ring",
            )
        opened, noise_std = total, 0.0
        if self.lattice is not None:
            if shares < self.lattice.survivors:
                raise PrivacyError(
                    f"a sum of {shares} shares, where {self.lattice.survivors} honest ones are needed",
                    why="it has less noise than the ledgers were charged for",
                    fix="open no sum of so few clients",
                )
            opened, noise_std = self.lattice.opened(total), self.lattice.noise_std(shares)
        mean = torch.from_numpy(opened / self.expected_batch_size)
        vector = self._nearest(self.layout.vector(mean))
        return Release(vector, noise_std / self.expected_batch_size, step, self.clip_norm)

    def _nearest(self, vector: Vector) -> Vector:
        adapter, dtype = self.coordinates.adapter, self.coordinates.dtype
        exact: Vector = [tuple(t.to(float64_device(adapter.device)) for t in parts) for parts in vector]
        # Noise is on every entry, also on those that no gradient reaches.
        nearest = getattr(self.coordinates, "nearest", None)
        found = exact if nearest is None else nearest(exact)
        return [tuple(t.to(dtype).to(adapter.device) for t in parts) for parts in found]
