"""Gradients of public texts: one row a text, at the present state, of which spans (coordinates.span) are made; and
their mean, whose directions start a run with adapter.init=public-gradient.

Private records are not used. Texts go through the model as private records do, without dropout, but together: what
they round in each other's gradients is public too.

For the start each text's gradient G_i (m, n) of every module is divided by its norm over all modules, so that no text
dominates, and U and V of a module are the top singular vectors of the sum G. G itself is never formed: randomised
subspace iteration (Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1) asks for products G R and G^T L with thin
matrices only, which the hooks of an adapter with a zero update capture as P and Q.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import Coordinates, PublicGradients
from privlora.coordinates.span import lay, rows_beside
from privlora.coordinates.starts import Subspaces
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.errors import DataError, RunError
from privlora.geometry.fixed_rank import point_from_factors
from privlora.randomness import counter_generator
from privlora.training.footprint import free_bytes, row_tokens
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients

_OVERSAMPLING = 8
_POWER_ITERATIONS = 1
_TINY = 1e-30  # a norm whose inverse float32 can hold

PublicTexts = Callable[[Tensor | None], Examples]
"""The public texts of the next step, in order. Its argument: how much each text of the last step had to do with that
step's release, (N,) >= 0; None where nothing was released since they were asked for. Texts that evolve do so here."""


def public_gradients(
    space: Coordinates,
    texts: Examples,
    *,
    max_tokens: int,
    told: Callable[[int, int], None] | None = None,
    room: Room | None = None,
) -> PublicGradients:
    """Row j: the gradient of text j in ``space`` at its state, of the mean loss over the text's labels.

    A text whose gradient is not finite counts as zero. max_tokens: of a micro-batch. Where rows are stored follows from
    the memory that is free, see ``room_for``. told: after each micro-batch, how many gradients there are, and of how
    many texts. room: where the rows of the last call lie, which those of this one overwrite; None: they get memory of
    their own.

    Raises DataError if no gradient is finite and other than zero, RunError if there is no room for them.
    """
    adapter, done = space.adapter, 0
    rows = (room or Room()).rows(len(texts), space.entries(), space.dtype, adapter.device)
    # Short texts would fill a micro-batch's tokens with more gradients than all that are kept. Half of what units take:
    # an allocator may not find room for those in what these leave.
    at_once = rows_beside(rows.shape[1], rows.nbytes, 2)
    # Reports ask for it too, where nothing else takes gradients.
    with torch.enable_grad(), training_passes(adapter.model, counter_generator(0)):
        tokens = row_tokens(adapter)
        for batch in sequential_batches(
            texts, max_tokens=max_tokens, max_rows=at_once, row_tokens=tokens, device=adapter.device
        ):
            captured, _ = micro_batch_gradients(adapter, batch, public=True)
            captured.zero(~captured.finite())
            for unit, text in enumerate(batch.record_index.tolist()):
                lay(space, captured, unit, rows[text])
            done += len(batch.record_index)
            if told is not None:
                told(done, len(texts))
            del captured  # before the next ones are made
    return PublicGradients(rows, adapter.device)


class Room:
    """The memory of public gradients, from step to step: pages that are new to a process cost more than filling them.

    That of a GPU is given back each time, since generators work in it and it costs nothing to ask for again.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def rows(self, count: int, entries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(count, entries) numbers of any value, see ``room_for``. What was given before is given up."""
        kept, self._kept = self._kept, None
        if kept is None or kept.dtype != dtype or kept.shape[1] != entries or len(kept) < count:
            del kept  # frees it first
            kept = room_for(count, entries, dtype, device)
        if kept.device.type == "cpu":
            self._kept = kept
        return kept[:count]


def room_for(count: int, entries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of any value, (count, entries): on the device, in the machine's memory, or else in a file without a name.

    The first that has room for them twice: the rest is for activations. Of gradients of public texts the file shows
    nothing that a release does not. Raises RunError where the disk has no room for it.
    """
    size = count * entries * dtype.itemsize
    for place in (device, torch.device("cpu")):
        if 2 * size <= free_bytes(place):
            return torch.empty(count, entries, dtype=dtype, device=place)
    try:
        with tempfile.TemporaryFile() as file:
            # A write to a page that a full disk lacks would end the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            stored = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))  # grows where it is shorter
    except OSError as error:
        raise RunError(
            f"the gradients of {count} public texts take {size / 2**30:.1f} GiB, which neither the memory nor "
            f"{tempfile.gettempdir()} has ({error.strerror})",
            fix="take fewer texts or a lower adapter.r, or let TMPDIR name a folder with more room",
        ) from None
    return torch.from_numpy(stored).view(dtype).reshape(count, entries)


def mean_gradient_subspaces(
    adapter: LowRankAdapter, texts: Examples, *, seed: int, max_tokens: int
) -> Subspaces:
    """Site name -> orthonormal U (m, r), V (n, r): top singular vectors of the mean normalised gradient; float64, CPU.

    The texts go through the model four times, in micro-batches of at most ``max_tokens`` and without dropout. A text's
    norm is estimated in the first pass: for R (n, k) standard normal, ||G_i R||^2 / k has mean ||G_i||^2 and a relative
    standard deviation of at most sqrt(2 / k), where k is r + 8 or the module's smaller side; summed over modules it is
    less. A text whose gradient is zero or not finite counts nothing. A module that no text moves gets a random start.

    adapter: detached, and left so; its operands are overwritten. seed: public.

    Raises DataError if no text has a gradient that is finite and not zero.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = []  # (L, n, k) of each group
    for g in adapter.groups:
        k = min(adapter.rank + _OVERSAMPLING, g.m, g.n)
        normal.append(torch.randn(len(g.sites), g.n, k, generator=generator, dtype=torch.float64))
    with training_passes(adapter.model, counter_generator(seed)), adapter:
        gradient = _SumOfGradients(adapter, texts, max_tokens)
        left = _bases(gradient.times(normal))
        for _ in range(_POWER_ITERATIONS):
            left = _bases(gradient.times(_bases(gradient.transposed_times(left))))
        products = gradient.transposed_times(left)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for group, basis, product in zip(adapter.groups, left, products, strict=True):
        v, s, wh = torch.linalg.svd(product, full_matrices=False)  # G is about basis product^T
        u, s, v = (basis @ wh.mT)[..., : adapter.rank], s[:, None, : adapter.rank], v[..., : adapter.rank]
        point = point_from_factors(u * s, v * s, generator)  # draws what a zero gradient lacks
        found |= {site.name: (point.U[i], point.V[i]) for i, site in enumerate(group.sites)}
    return found


def _bases(products: list[Tensor]) -> list[Tensor]:
    return [torch.linalg.qr(product).Q for product in products]


@dataclass
class _SumOfGradients:
    """G = sum_i G_i / ||G_i|| of every module, as products with thin matrices, one of each group: (L, n or m, k)."""

    adapter: LowRankAdapter
    texts: Examples
    max_tokens: int
    weights: Tensor | None = field(default=None, init=False)  # (texts,) 1 / ||G_i||, from the first product

    def times(self, right: list[Tensor]) -> list[Tensor]:
        """G right, (L, m, k). The first time, right must be standard normal: it gives the norms."""
        pairs = zip(self.adapter.groups, right, strict=True)
        left = [t.new_zeros(t.shape[0], g.m, t.shape[-1]) for g, t in pairs]
        return self._product(left, right, transposed=False)

    def transposed_times(self, left: list[Tensor]) -> list[Tensor]:
        """G^T left, (L, n, k)."""
        pairs = zip(self.adapter.groups, left, strict=True)
        right = [t.new_zeros(t.shape[0], g.n, t.shape[-1]) for g, t in pairs]
        return self._product(left, right, transposed=True)

    def _product(self, left: list[Tensor], right: list[Tensor], *, transposed: bool) -> list[Tensor]:
        for group, a, b in zip(self.adapter.groups, left, right, strict=True):
            self.adapter.install(group, a, a.new_zeros(a.shape[0], a.shape[-1]), b)
        weights = torch.zeros(len(self.texts), dtype=torch.float64) if self.weights is None else self.weights
        sums = [torch.zeros((), dtype=torch.float64) for _ in self.adapter.sites]
        tokens, device = row_tokens(self.adapter), self.adapter.device
        for batch in sequential_batches(
            self.texts, max_tokens=self.max_tokens, row_tokens=tokens, device=device
        ):
            captured, _ = micro_batch_gradients(self.adapter, batch)
            captured.zero(~captured.finite())
            if self.weights is None:
                weights[batch.record_index] = _inverse_norms(captured)
            mine = weights[batch.record_index]
            for site, t in enumerate(captured.q if transposed else captured.p):
                sums[site] = sums[site] + torch.tensordot(mine.to(t), t, dims=1).cpu().double()
        if not bool(weights.any()):
            raise DataError(
                f"no gradient of the {len(self.texts)} texts of adapter.public_text is finite and other than zero",
                fix="give records like the private ones, with something to predict",
            )
        self.weights = weights
        rest = iter(sums)  # sites are groups laid end to end
        return [torch.stack([next(rest) for _ in group.sites]) for group in self.adapter.groups]


def _inverse_norms(captured: Captured) -> Tensor:
    """1 / ||G_i|| over all modules from P_i = G_i R with standard normal R, (units,); 0 for a zero gradient."""
    squares = [p.double().square().sum(dim=(-2, -1)) / p.shape[-1] for p in captured.p]
    norms = torch.stack(squares).sum(dim=0).sqrt().cpu()
    return torch.where(norms > _TINY, 1 / norms, 0.0)
