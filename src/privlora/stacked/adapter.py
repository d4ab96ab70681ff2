"""K adapters on one frozen model: each row of a micro-batch passes through the terms of the adapter it belongs to.

``StackedAdapter`` holds K adapters that may differ, ``JointAdapter`` one that K parties share. Both know whose each
record is, and so give sums of gradients for each party of its own (Coordinates.weighted_sum).

In a stack, factors are stacked over the adapters, left (K, m, r) and right (K, n, r) a site, and a micro-batch of
(rows, T) tokens has rows of any of them in any order. With k = owners[i] for row i,

    y_i += ((x_i @ right_k) * mid_k) @ left_k^T        P_i = E_i^T (x_i @ right_k)        Q_i = x_i^T (E_i @ left_k)

so the frozen layers, which are most of the work, see one large batch, and the gradients of a row are those that it
would have in a run of its own adapter alone (adapters.lowrank).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from privlora.adapters import Captured, Group, LowRankAdapter, Site
from privlora.adapters.lowrank import Operands
from privlora.errors import ConfigError, PrivacyError


@dataclass
class JointAdapter(LowRankAdapter):
    """One adapter at which ``count`` parties take gradients of their own records, for one step from a common point.

    Its coordinates are plain ones, made by ``coordinates.stacked(JointAdapter.like(…), 1)``: one set of operands and
    one point, at which norms are taken as well. What ``mechanism.take`` gives is stacked by party all the same, (count
    L, ...), parties outermost. It is not noised here: whoever adds the parties' sums up gives them their noise.

    owner_of: (all records,) int64, 0 to count - 1: whose each record is. Raises ConfigError for any other number.
    """

    count: int = 1
    owner_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        super().__post_init__()
        owners = self.owner_of
        if (
            owners.dim() != 1
            or owners.is_floating_point()
            or not bool(((owners >= 0) & (owners < self.count)).all())
        ):
            raise ConfigError(
                f"the records' owners are not numbers from 0 to {self.count - 1}",
                why="a record would be trained on by nobody, or by an adapter that must not see it",
                fix="give one int64 a record",
            )
        self._owners: Tensor | None = None  # (rows,) int64, of the pass under way
        self._captured: Tensor | None = None  # of the last capture

    @classmethod
    def like(cls, adapter: LowRankAdapter, count: int, owner_of: Tensor) -> Self:
        """For ``count`` parties, on the layers of ``adapter``, with the same part of W0 taken out where one is."""
        stacked = cls(
            adapter.model,
            rank=adapter.rank,
            target_modules=adapter.target_modules,
            exclude_modules=adapter.exclude_modules,
            layers_to_transform=adapter.layers_to_transform,
            dropout=adapter.dropout,
            count=count,
            owner_of=owner_of,
        )
        for mine, other in zip(stacked.sites, adapter.sites, strict=True):
            mine.offset = other.offset
        return stacked

    @contextmanager
    def serving(self, records: Tensor) -> Iterator[None]:
        """Passes inside are of a micro-batch whose row i is record records[i], (rows,) int64."""
        self._owners = self.owner_of.to(records.device)[records].to(self.device)
        try:
            yield
        finally:
            self._owners = None

    @contextmanager
    def capture(self, records: Tensor, *, summed: bool = False) -> Iterator[None]:
        with self.serving(records), super().capture(records, summed=summed):
            self._captured = self._owners
            yield

    def captured(self, unit_index: Tensor | None = None, units: int | None = None) -> Captured:
        found, owners = super().captured(unit_index, units), self._captured
        assert owners is not None
        if unit_index is not None:
            owners = owners.new_zeros(found.units).scatter_(0, unit_index.to(owners.device), owners)
        adapters = torch.arange(self.count, device=owners.device)
        return replace(found, owners=owners == adapters[:, None])


@dataclass
class StackedAdapter(JointAdapter):
    """``count`` adapters of equal shape on the same layers of ``model``, each for its own records (``owner_of``)."""

    def weight_norms(self) -> list[Tensor]:
        """Of each adapter's sites, (K L,) a group, adapters outermost."""
        return [norms.repeat(self.count) for norms in super().weight_norms()]

    def install(self, group: Group, left: Tensor, mid: Tensor, right: Tensor) -> None:
        """Set the operands of a group, adapters outermost: left (K L, m, r), mid (K L, r), right (K L, n, r)."""
        by_site = (t.unflatten(0, (self.count, -1)).transpose(0, 1) for t in (left, mid, right))
        super().install(group, *by_site)

    def _operands(self, site: Site, rows: int) -> Operands:
        if self._owners is None or len(self._owners) != rows:
            raise PrivacyError(
                "a pass through stacked adapters does not say which row belongs to which",
                why="a record would be trained on by an adapter that must not see it",
                fix="run the model inside `with adapter.serving(records):`",
            )
        left, mid, right = super()._operands(site, rows)
        owners = self._owners.to(left.device)
        return left[owners], mid[owners][:, None, :], right[owners]
