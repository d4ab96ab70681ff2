"""Whole updates of clients, where the unit of privacy is a client: clip, then share or let a trusted server sum."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.errors import PrivacyError
from privlora.mechanisms.distributed import check_lattice
from privlora.mechanisms.lattice import Lattice
from privlora.mechanisms.noising import Noising
from privlora.ranges import CLIP_NORMS, refuse_outside

Tensors = dict[str, Tensor]

# Norms are taken in float64; what is clipped stays below C by more than their rounding.
_SLACK = 1e-9


class ClippedUpdate:
    """What is done to updates: tensors of fixed names and shapes, clipped to C in their norm over all of them.

    Replacing a client's update by zero moves a sum of updates by at most C. That a client takes part may be public in
    ``share``, whose noise is there in any case; ``release`` also covers who is in the batch.

    like: names and shapes of every update, and the dtypes of what comes back; its values are not looked at. Entries
    stand in the order of the sorted names, each tensor row by row. clip_norm: C, within
    ranges.CLIP_NORMS (PrivacyError).

    | edge case                                 | what happens                                 |
    |-------------------------------------------|----------------------------------------------|
    | an entry, or the norm, is NaN or infinite | that client counts as zero                   |
    | no client in the batch (``release``)      | zero sum, full noise, charged                |
    | the ledger refuses                        | its error passes through; nothing is made    |
    """

    def __init__(self, like: Mapping[str, Tensor], clip_norm: float) -> None:
        refuse_outside("clip_norm", clip_norm, CLIP_NORMS)
        self.clip_norm = clip_norm
        self._like = [(name, tuple(like[name].shape), like[name].dtype) for name in sorted(like)]

    @property
    def entries(self) -> int:
        return sum(prod(shape) for _, shape, _ in self._like)

    def clipped(self, update: Mapping[str, Tensor]) -> Tensor:
        """PRIVATE. (entries,) float64 on the CPU, of norm at most C. PrivacyError: other names or shapes."""
        found = [(name, tuple(update[name].shape)) for name in sorted(update)]
        if found != [(name, shape) for name, shape, _ in self._like]:
            raise PrivacyError(
                "an update has other tensors than those that were agreed on",
                why="what is not clipped is not bounded, and noise would not meet it",
                fix="give the tensors of `like`",
            )
        flat = torch.cat([update[name].detach().cpu().double().flatten() for name, _ in found])
        norm = float(flat.norm())
        if not norm < float("inf"):
            return torch.zeros_like(flat)
        return flat * min(1.0, self.clip_norm * (1 - _SLACK) / norm) if norm > 0 else flat

    def share(
        self, update: Mapping[str, Tensor], noising: Noising, event: StepEvent, lattice: Lattice
    ) -> np.ndarray:
        """A client's part of a secure sum: (entries,) ring integers, once its own ledger shows ``event``.

        Raises PrivacyError if the event counts on clients being sampled in secret, or the lattice does not fit.
        """
        if event.sampling != PoissonSampling(1.0):
            raise PrivacyError(
                "the server sees which clients take part in a secure sum",
                why="only a secret choice makes a release cost less",
                fix="charge an event with sampling PoissonSampling(1.0)",
            )
        check_lattice(lattice, event, self.clip_norm)
        if lattice.entries != self.entries:
            raise PrivacyError(
                f"an update has {self.entries} entries, the lattice {lattice.entries}",
                why="the noise was calibrated to the rounding of as many",
                fix="make the lattice for these updates",
            )
        clipped = self.clipped(update)
        shares: np.ndarray = noising.charge(event).integers(clipped[None], clients=1, lattice=lattice)[0]
        return shares

    def opened(self, total: np.ndarray, lattice: Lattice, divisor: float) -> Tensors:
        """A server's mean update, from an opened sum of shares; divisor: public."""
        return self.tensors(torch.from_numpy(lattice.opened(total) / divisor))

    def release(self, total: Tensor | None, noising: Noising, event: StepEvent, divisor: float) -> Tensors:
        """A trusted server's noisy mean update, once its ledger shows ``event``.

        total: PRIVATE, the sum of ``clipped`` over the clients that were drawn; None for none. divisor: public and
        fixed, as the expected number of clients.
        """
        if event.projections:
            raise PrivacyError("updates are not projected", fix="charge an event without projections")
        charged = noising.charge(event)
        known = torch.zeros(self.entries, dtype=torch.float64) if total is None else total
        if known.shape != (self.entries,):
            raise PrivacyError(
                f"a sum of {tuple(known.shape)} entries, not of ({self.entries},)",
                why="noise would not be what was charged for",
                fix="add what clipped() gives",
            )
        scale = event.noise_multiplier * self.clip_norm
        return self.tensors(charged.tensor(known, scale=scale, divisor=divisor, dtype=torch.float64))

    def tensors(self, flat: Tensor) -> Tensors:
        """(entries,) of any update as its tensors, in the dtypes of ``like``."""
        pieces = flat.split([prod(shape) for _, shape, _ in self._like])
        return {
            name: piece.reshape(shape).to(dtype)
            for (name, shape, dtype), piece in zip(self._like, pieces, strict=True)
        }
