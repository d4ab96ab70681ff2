"""A private step of several processes: one draw, one sum, one charge, one noise, one move."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from privlora.data.batching import nobody
from privlora.errors import ConfigError
from privlora.stages import PROCESSES, stage
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.ranks import Ranks, deal
from privlora.training.sharding import Passes, is_sharded
from privlora.training.step import Drawn, Step
from privlora.training.torch_ranks import explained

_COORDINATES, _CLIP_NORM = "coordinates/", "clip_norm/"


class SharedStep:
    """``step`` by all ``ranks`` together; each has a Step like it, and calls ``take`` as often.

    The first process draws the batch and deals its units out whole, so that each is clipped once; it alone adds the
    sums up, charges, draws noise and moves the state. The others have a state to take gradients at: before each batch
    it is copied from the first, and a mechanism refuses to add sums of unlike states.

    Raises PrivacyError for states that are unlike, RankStopped where another process is gone.
    """

    def __init__(self, step: Step, ranks: Ranks) -> None:
        if step.draw is None:
            raise ConfigError("a step of several processes has no sampler", fix="give it `draw`")
        self._step, self._ranks = step, ranks
        step.prepare = self._prepare
        model = step.state.adapter.model
        self._passes = Passes(model, ranks, self._idle) if is_sharded(model) else None
        if self._passes is not None:
            self._idle(True)  # a first pass finds out what follows the output layer: in all processes at once

    def take(self) -> Tensor:
        """One step; PRIVATE: in the first process the losses of all units (units,), elsewhere of those here."""
        with stage(PROCESSES):
            own = self._ranks.dealt(self._shares)
        # Of a spread base each pass is a collective, which ends where another process does.
        with self._in_step(backward=True), nullcontext() if self._passes is None else explained():
            found = self._step.accumulate(own)
        with stage(PROCESSES):
            losses = torch.cat(self._ranks.gathered(found.cpu()))
            total = self._step.mechanism.take_all(self._ranks)
        # Last: whoever loses another process knows that nothing was released of this batch.
        if self._ranks.first:
            self._step.release(total)
        return losses

    def waiting(self) -> AbstractContextManager[None]:
        """In all processes at once: inside, the first one may go through the model, without a backward pass."""
        return self._in_step(backward=False)

    def _in_step(self, *, backward: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._passes is None else self._passes.in_step(backward=backward)

    def _idle(self, backward: bool) -> None:
        step = self._step
        adapter, batch = step.state.adapter, nobody(step.examples.pad_token_id)
        with (
            training_passes(adapter.model, step.masks, dropout=step.dropout),
            torch.set_grad_enabled(backward),
        ):
            if backward:
                micro_batch_gradients(adapter, batch, summed=not step.mechanism.needs_examples)
            else:
                there = batch.to(adapter.device)
                adapter.model(input_ids=there.input_ids, attention_mask=there.attention_mask)

    def _shares(self) -> list[Drawn]:
        """PRIVATE. A fresh batch's units, for each process."""
        assert self._step.draw is not None
        drawn = self._step.draw()
        weights = [_tokens(unit, self._step.examples.lengths) for unit in drawn]
        return [[drawn[number] for number in share] for share in deal(weights, self._ranks.size)]

    def _prepare(self) -> None:
        """Public work by the first process, and what gradients depend on for all."""
        coordinates, adaptive = self._step.state.coordinates, self._step.state.adaptive
        if self._ranks.first:
            coordinates.prepare()

        def own() -> dict[str, Tensor]:
            found = {_COORDINATES + name: t for name, t in coordinates.shared().items()}
            clipped = {} if adaptive is None else adaptive.state_dict()
            return found | {_CLIP_NORM + name: t for name, t in clipped.items()}

        with stage(PROCESSES):
            given = self._ranks.copied(own)
        if not self._ranks.first:
            coordinates.take_shared(_below(_COORDINATES, given))
            if adaptive is not None:
                adaptive.load_state_dict(_below(_CLIP_NORM, given))


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _tokens(unit: int | np.ndarray, lengths: np.ndarray) -> int:
    """What a unit costs: rows are padded to its longest."""
    own: Sequence[int] = lengths[np.atleast_1d(unit)]
    return len(own) * int(max(own, default=0))
