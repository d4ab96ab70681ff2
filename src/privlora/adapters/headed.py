"""An adapter and, beside it, the last layer of a classifier, which is trained as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from privlora.adapters.captured import Captured
from privlora.adapters.lowrank import LowRankAdapter

NEW_MODULES = "privlora_new_modules"
"""Attribute of a classifier that was loaded: names of the modules that no file of its base model held."""


class HeadedAdapter(LowRankAdapter):
    """Low-rank terms of ``body``, and of ``head`` one term of full rank on the last layer; groups of both end to end.

    Both are of one model, attached together, and see the same passes; `Captured` holds the gradients of both, so that
    one norm bounds them. ``head`` has one site, whose rank is its number of outputs.
    """

    def __init__(self, body: LowRankAdapter, head: LowRankAdapter) -> None:
        self.body, self.head = body, head
        self.model, self.rank = body.model, body.rank
        self.target_modules, self.exclude_modules = body.target_modules, body.exclude_modules
        self.layers_to_transform, self.dropout = body.layers_to_transform, body.dropout
        self.sites = [*body.sites, *head.sites]
        self.groups = [*body.groups, *head.groups]
        self.one_by_one = body.one_by_one
        self.columns = (slice(None), slice(None))

    @property
    def parts(self) -> tuple[LowRankAdapter, ...]:
        return (self.body, self.head)

    @property
    def attached(self) -> bool:
        return self.head.attached

    @property
    def gathering(self) -> bool:
        return self.body.gathering or self.head.gathering

    def attach(self) -> HeadedAdapter:
        self.body.attach()
        try:
            self.head.attach()
        except BaseException:
            self.body.detach()
            raise
        return self

    def detach(self) -> None:
        # In turn: the body's note of what was trainable is the older one.
        self.head.detach()
        self.body.detach()

    @contextmanager
    def capture(self, records: Tensor, *, summed: bool = False) -> Iterator[None]:
        with self.body.capture(records, summed=summed), self.head.capture(records, summed=summed):
            yield

    def captured(self, unit_index: Tensor | None = None, units: int | None = None) -> Captured:
        found = [part.captured(unit_index, units) for part in self.parts]
        return Captured.of_stacks([pair for each in found for pair in each.stacks or []])

    def split(self, captured: Captured) -> tuple[Captured, Captured]:
        """What ``captured`` holds of the body, and of the head; views, so that zeroing units holds for both."""
        stacks = captured.stacked(self.sizes)
        at = len(self.body.groups)
        return (
            Captured.of_stacks(stacks[:at], owners=captured.owners),
            Captured.of_stacks(stacks[at:], owners=captured.owners),
        )
