"""Next-token losses: one number per sequence, never a mean over a batch.

Only label positions reach the output layer: hidden states are gathered before it, so prompts, padding and last tokens
cost no logits. The gradient is computed with the loss, one block of rows at a time, so no second copy of the
log-probabilities is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privlora.adapters.targets import output_layer
from privlora.data.examples import IGNORED

_BLOCK = 512  # rows of logits that are in float32 at a time


@dataclass(frozen=True)
class LabelLogits:
    """Logits (k, vocabulary) of the k label positions of a batch and their targets (k,), on the model's device.

    rows, columns: (k,) int64, where labels were given: label j is token columns[j] of row rows[j], and logits[j] are
    those at the position before it. batch: number of rows.
    """

    logits: Tensor
    targets: Tensor
    rows: Tensor
    columns: Tensor
    batch: int

    def at_labels(self, values: Tensor) -> Tensor:
        """``values`` (batch, T) at the label positions, (k,), on the logits' device."""
        found = values[self.rows.to(values.device), self.columns.to(values.device)]
        return found.to(self.logits.device, non_blocking=True)

    def per_row(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (k,) over the label positions of each row, (batch,)."""
        rows = self.rows.to(values.device, non_blocking=True)
        return values.new_zeros(self.batch).index_add_(0, rows, values)

    def counts(self) -> Tensor:
        """Number of label positions of each row, (batch,) int64, where labels were given."""
        return torch.bincount(self.rows, minlength=self.batch)

    def row_means(self, values: Tensor) -> Tensor:
        """Mean of ``values`` (k,) over the label positions of each row, (batch,) float64; 0 where there is none."""
        return (self.per_row(values) / self.counts().clamp_min(1).to(values.device)).double()


def label_logits(
    model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> LabelLogits:
    """Run a causal LM on (batch, T) token ids; labels (batch, T) are not shifted, -100 is ignored.

    Labels may lie on the CPU whatever the model's device: then nothing has to be read back to find them.
    """
    rows, before = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    flat = rows * labels.shape[1] + before
    head = output_layer(model)

    def gather(hidden: Tensor) -> Tensor:
        return hidden.flatten(0, 1).index_select(0, flat.to(hidden.device, non_blocking=True))

    def gather_hidden(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (gather(args[0]).unsqueeze(0), *args[1:])

    handle = head.register_forward_pre_hook(gather_hidden) if head is not None else None
    try:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    finally:
        if handle is not None:
            handle.remove()
    logits = logits.squeeze(0) if handle is not None else gather(logits)
    targets = labels[rows, before + 1].to(logits.device, non_blocking=True)
    return LabelLogits(logits, targets, rows, before + 1, len(labels))


def weighted_cross_entropy(
    found: LabelLogits, weights: Tensor, *, is_root: bool = False
) -> tuple[Tensor, Tensor]:
    """sum_k weights_k * (-log p_k) as a scalar to call backward on, and the k token losses (float32, no graph).

    weights: (batch, T), taken at label positions. The weight of a token may depend on its own record only. is_root:
    whether ``backward`` will be called on the scalar itself, which saves a pass over the step's largest tensor.
    """
    total, losses = _WeightedCrossEntropy.apply(
        found.logits, found.targets, found.at_labels(weights), is_root
    )
    return total, losses


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor, is_root: bool
    ) -> tuple[Tensor, Tensor]:
        needs_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if needs_gradient else None
        dtype = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(len(targets), dtype=dtype, device=logits.device)
        # In float32 the gradient's own memory holds the log-probabilities on their way to it.
        in_place = gradient is not None and gradient.dtype == dtype
        for start in range(0, len(targets), _BLOCK):
            block = slice(start, start + _BLOCK)
            room = gradient[block] if gradient is not None and in_place else None
            log_p = torch.log_softmax(logits[block], dim=-1, dtype=dtype, out=room)
            picked = targets[block, None]
            losses[block] = -log_p.gather(1, picked)[:, 0]
            if gradient is not None:
                w = weights[block, None].to(dtype)
                p = log_p.exp_().mul_(w).scatter_add_(1, picked, -w)
                if not in_place:
                    gradient[block] = p
        ctx.save_for_backward(gradient)
        ctx.is_root = is_root
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient if ctx.is_root else gradient * upstream.to(gradient.dtype), None, None, None
