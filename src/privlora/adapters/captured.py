"""Per-unit gradients of one micro-batch, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Stacks = list[tuple[Tensor, Tensor]]
"""P and Q of each group's L modules in one piece of memory: (L, units, r, m) and (L, units, r, n), transposed.

So each module's rows over all units are one matrix (units r, m), and products with it are single GEMMs.
"""


# Entries that are copied at a time: on a CPU what its caches hold, on a device what fills it.
_PIECE, _PIECE_OF_DEVICES = 2**19, 2**26


def pieces(t: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some sites of a stack (L, units, r, m) at a time, and which; at least one."""
    size = _PIECE if t.device.type == "cpu" else _PIECE_OF_DEVICES
    step = max(1, size // max(1, t[0].numel()))
    return ((slice(first, first + step), t[first : first + step]) for first in range(0, len(t), step))


@dataclass(frozen=True)
class Captured:
    """Gradients of one micro-batch, per privacy unit: lists over ``adapter.sites`` (groups laid end to end).

    p[s]: (units, m_s, r), q[s]: (units, n_s, r), or the adapter's ``columns`` of them; float32, or float64 for a
    float64 model. dense_squares: (units,) float64, at least ||G_i||_F^2 over all sites, where the adapter wants it.
    owners: (K, units) bool, the one adapter that each unit trains, where K are stacked. columns: (units, d) float64,
    what coordinates made of each unit by itself, where they do; without p and q where no gradient was taken. stacks:
    the memory that p and q are views of, where it is one piece a group. Private data.
    """

    p: list[Tensor]
    q: list[Tensor]
    dense_squares: Tensor | None = None
    owners: Tensor | None = None
    columns: Tensor | None = None
    stacks: Stacks | None = None

    @staticmethod
    def of_stacks(
        stacks: Stacks, dense_squares: Tensor | None = None, owners: Tensor | None = None
    ) -> Captured:
        """Views of ``stacks``."""
        p, q = ([t.mT for pair in stacks for t in pair[side]] for side in (0, 1))
        return Captured(p, q, dense_squares, owners, stacks=stacks)

    @property
    def units(self) -> int:
        return len(self._one)

    @property
    def device(self) -> torch.device:
        return self._one.device

    @property
    def _one(self) -> Tensor:
        if self.p:
            return self.p[0]
        assert self.columns is not None
        return self.columns

    def stacked(self, sizes: Sequence[int]) -> Stacks:
        """P and Q by group, of so many sites each: ``stacks``, or copies."""
        if self.stacks is not None:
            return self.stacks
        by_group = zip(torch.arange(len(self.p)).split(list(sizes)), strict=True)
        return [
            (torch.stack([self.p[s].mT for s in sites]), torch.stack([self.q[s].mT for s in sites]))
            for (sites,) in by_group
        ]

    def finite(self) -> Tensor:
        """(units,) bool: whether every entry of a unit's gradient is finite."""
        if self.columns is not None and not self.p:
            return self.columns.isfinite().all(dim=1)
        sides = [t for pair in self.stacks for t in pair] if self.stacks is not None else [*self.p, *self.q]
        # The units' dimension is the third from the end; what stands before it are modules.
        sums = [t.sum(dim=(-2, -1)).double().reshape(-1, self.units).sum(dim=0) for t in sides]
        return torch.isfinite(torch.stack(sums)).all(dim=0)

    @staticmethod
    def cat(parts: Sequence[Captured]) -> Captured:
        """The units of all parts, in order."""
        p = [torch.cat(ts) for ts in zip(*(part.p for part in parts), strict=True)]
        q = [torch.cat(ts) for ts in zip(*(part.q for part in parts), strict=True)]
        squares = [part.dense_squares for part in parts if part.dense_squares is not None]
        owners = [part.owners for part in parts if part.owners is not None]
        return Captured(
            p, q, torch.cat(squares) if squares else None, torch.cat(owners, dim=1) if owners else None
        )

    @staticmethod
    def gathered(parts: Iterable[Captured], units: int) -> Captured:
        """The same of ``units`` parts of one unit each, made one after the other: none is held twice."""
        whole: Stacks = []
        squares, owners = list[Tensor](), list[Tensor]()
        unit = 0
        for part in parts:
            assert part.stacks is not None
            if not whole:
                whole = [
                    (p.new_empty(len(p), units, *p.shape[2:]), q.new_empty(len(q), units, *q.shape[2:]))
                    for p, q in part.stacks
                ]
            for places, pair in zip(whole, part.stacks, strict=True):
                for place, t in zip(places, pair, strict=True):
                    place[:, unit] = t[:, 0]
            squares += [] if part.dense_squares is None else [part.dense_squares]
            owners += [] if part.owners is None else [part.owners]
            unit += 1  # noqa: SIM113 - enumerate holds a part while the next one is made
            del part
        return Captured.of_stacks(
            whole, torch.cat(squares) if squares else None, torch.cat(owners, dim=1) if owners else None
        )

    def added(self, unit_index: Tensor, units: int) -> Captured:
        """Rows added up over units, from stacks: unit_index (rows,) int64, the unit of each row."""
        assert self.stacks is not None

        def add(t: Tensor) -> Tensor:
            return t.new_zeros(len(t), units, *t.shape[2:]).index_add_(1, unit_index.to(t.device), t)

        return Captured.of_stacks([(add(p), add(q)) for p, q in self.stacks])

    def some(self, units: slice) -> Captured:
        """P and Q of some units alone; views."""
        return Captured([t[units] for t in self.p], [t[units] for t in self.q])

    def zero(self, units: Tensor) -> None:
        """Set the gradients of the marked units (a bool mask) to zero, in place."""
        if units.device.type == "cpu" and not bool(units.any()):
            return  # elsewhere it is dearer to ask than to write
        for t in (*self.p, *self.q):
            t.masked_fill_(units[:, None, None], 0.0)
