"""Gradients of public texts at the present state, one row a text: what spans (coordinates.span) are made of.

Private records are not used. Texts go through the model as private records do, without dropout, but together: what
they round in each other's gradients is public too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from privlora.coordinates import Coordinates, PublicGradients
from privlora.coordinates.span import lay, rows_beside
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.errors import RunError
from privlora.randomness import counter_generator
from privlora.training.footprint import free_bytes, row_tokens
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients

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
