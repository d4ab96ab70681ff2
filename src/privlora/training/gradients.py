"""One micro-batch through the model: per-unit gradients in, nothing else kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.adapters.lowrank import Compared
from privlora.coordinates import float64_device
from privlora.data.batching import MicroBatch
from privlora.losses import (
    batch_logits,
    class_losses,
    label_states,
    log_likelihoods,
    margins,
    preference_losses,
    weighted_cross_entropy,
)
from privlora.stages import BACKWARD, CAPTURE, FORWARD, LOSS, listener, stage
from privlora.training.model_checks import routes_tokens, steady_width


def micro_batch_gradients(
    adapter: LowRankAdapter,
    batch: MicroBatch,
    *,
    summed: bool = False,
    public: bool = False,
    sound: list[Tensor] | None = None,
) -> tuple[Captured, Tensor]:
    """Gradients of each privacy unit, and its loss (units,); both are private, unless the records are ``public``.

    A unit's loss is the mean over its drawn records of the mean over each record's label tokens, so it depends on
    that unit alone. ``summed`` gives one gradient, added up over all units (non-private mode). In models that route
    tokens each unit is computed by itself (`model_checks.routes_tokens`), and where coordinates want it
    (`LowRankAdapter.one_by_one`); public texts go through together, since nobody is hidden among them. So is each unit
    of a micro-batch in which one is not finite; with ``sound`` nobody waits for the device to say so: it gets a 0-dim
    bool, and unless that is true the gradients must not be used. Where losses are compared in the place of gradients
    (`LowRankAdapter.compared`) there are `Captured.columns` alone.
    """
    if adapter.compared is not None:
        return _differences(adapter, adapter.compared, batch, summed)
    if summed or public or not (adapter.one_by_one or routes_tokens(adapter.model)):
        captured, losses = _run(adapter, batch, summed)
        # Kernels can carry NaN from one row into another (bfloat16 on CPUs does); alone, a unit spoils only itself.
        if summed or batch.unit_count == 1:
            return captured, losses
        finite = captured.finite().all()
        if sound is not None:
            sound.append(finite)
            return captured, losses
        if bool(finite):
            return captured, losses
    each = list[Tensor]()

    def parts() -> Iterator[Captured]:
        for unit in batch.each_unit():
            captured, loss = _run(adapter, unit, summed)
            each.append(loss)
            yield captured
            del captured  # before the next one is made

    return Captured.gathered(parts(), batch.unit_count), torch.cat(each)


def steadied(adapter: LowRankAdapter, batch: MicroBatch) -> MicroBatch:
    """The micro-batch as it is computed: for a model below float32, padded by 1 to 32 more columns.

    The order in which kernels sum depends on the width, and the choice of attention kernel on whether there is padding.
    In float32 that changes a gradient by 1e-6 of itself; in bfloat16 by 1 to 4 %, in the same way for similar records,
    so that it would add up if it followed the company of a record. On CPUs it follows the record alone: all rows of a
    micro-batch have one such width (`own_width`). Stays within the model's positions.
    """
    if not adapter.reduced_precision:
        return batch
    return batch.widened(steady_width(adapter, batch.input_ids.shape[1]))


def _differences(
    adapter: LowRankAdapter, compared: Compared, batch: MicroBatch, summed: bool
) -> tuple[Captured, Tensor]:
    """Each unit's loss to one side less that to the other, over the way between: two passes, no graph."""
    # Beside others its losses would be rounded otherwise, and the difference is small.
    units = [batch] if summed else list(batch.each_unit())
    sides = list[Tensor]()
    for steps in (1.0, -1.0):
        with adapter.passing(), compared.aside(steps):
            sides.append(torch.cat([_losses(adapter, steadied(adapter, unit))[1] for unit in units]))
    ahead, behind = (losses.to(float64_device(losses.device)).double() for losses in sides)
    columns = ((ahead - behind) / (2 * compared.perturbation))[:, None]
    columns = columns.sum(dim=0, keepdim=True) if summed else columns
    return Captured([], [], columns=columns), (sides[0] + sides[1]) / 2


def _run(adapter: LowRankAdapter, batch: MicroBatch, summed: bool) -> tuple[Captured, Tensor]:
    batch = steadied(adapter, batch)
    with adapter.capture(batch.record_index, summed=summed):
        total, unit_losses = _losses(adapter, batch)
        with stage(BACKWARD):
            total.backward()
    with stage(CAPTURE):
        if summed:
            return adapter.captured(), unit_losses
        return adapter.captured(batch.unit_index, batch.unit_count), unit_losses


def _losses(adapter: LowRankAdapter, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The loss to call backward on, and each unit's part of it (units,)."""
    if (heard := listener()) is not None:
        heard.micro_batch()
    total, row_losses = _kind(batch)(adapter, batch)
    with stage(LOSS):
        unit_index = batch.unit_index.to(row_losses.device, non_blocking=True)
        return total, row_losses.new_zeros(batch.unit_count).index_add_(0, unit_index, row_losses)


def _kind(batch: MicroBatch) -> Callable[[LowRankAdapter, MicroBatch], tuple[Tensor, Tensor]]:
    if batch.beta is not None:
        return _of_preferences
    return _of_texts if batch.answers is None else _of_labels


def _of_texts(adapter: LowRankAdapter, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The loss to call backward on, and each row's weighted part of it (rows,)."""
    with stage(FORWARD):
        batch = batch.to(adapter.device)
        found = label_states(adapter.model, batch.input_ids, batch.attention_mask, batch.labels)
    with stage(LOSS):
        total, losses = weighted_cross_entropy(found, batch.token_weight, is_root=True)
        return total, found.per_row(losses * found.at_labels(batch.token_weight))


def _of_labels(adapter: LowRankAdapter, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The same of texts with a label, whose loss is one number a record."""
    answers = batch.answers
    assert answers is not None
    with stage(FORWARD):
        batch = batch.to(adapter.device)
        logits = batch_logits(adapter.model, batch)
    with stage(LOSS):
        weights = batch.row_weight.to(logits.device, logits.dtype, non_blocking=True)
        losses = weights * class_losses(logits, answers)
        return losses.sum(), losses.detach()


def _of_preferences(adapter: LowRankAdapter, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The same of preferences, whose loss is one number a record, shared by its two rows."""
    beta = batch.beta
    assert beta is not None
    with stage(FORWARD):
        batch = batch.to(adapter.device)
        with adapter.without_terms():
            reference = log_likelihoods(adapter.model, batch)
        own = log_likelihoods(adapter.model, batch)
    with stage(LOSS):
        weights = batch.row_weight[0::2].to(own.device, own.dtype, non_blocking=True)
        losses = weights * preference_losses(margins(own, reference, beta))
        return losses.sum(), losses.detach().repeat_interleave(2) / 2
