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
    """Logits (k, vocabulary) of the k label positions of a batch, their targets (k,) and positions in the batch.

    where: bool (rows, T - 1); entry (i, t) is true if token t + 1 of row i is a label, predicted at position t.
    """

    logits: Tensor
    targets: Tensor
    where: Tensor

    def per_row(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (k,) over the label positions of each row, (rows,)."""
        rows = self.where.nonzero()[:, 0]
        return values.new_zeros(self.where.shape[0]).index_add_(0, rows, values)

    def row_means(self, values: Tensor) -> Tensor:
        """Mean of ``values`` (k,) over the label positions of each row, (rows,) float64; 0 where there is none."""
        return (self.per_row(values) / self.where.sum(dim=1).clamp_min(1)).double()


def label_logits(
    model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> LabelLogits:
    """Run a causal LM on (rows, T) token ids; labels (rows, T) are not shifted, -100 is ignored."""
    where = labels[:, 1:] != IGNORED
    head = output_layer(model)

    def gather(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return (hidden[:, :-1][where.to(hidden.device)].unsqueeze(0), *args[1:])

    handle = head.register_forward_pre_hook(gather) if head is not None else None
    try:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    finally:
        if handle is not None:
            handle.remove()
    logits = logits.squeeze(0) if handle is not None else logits[:, :-1][where]
    return LabelLogits(logits, labels[:, 1:][where].to(logits.device), where)


def weighted_cross_entropy(found: LabelLogits, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_k weights_k * (-log p_k) as a scalar to call backward on, and the k token losses (float32, no graph).

    weights: (rows, T), taken at label positions. The weight of a token may depend on its own record only.
    """
    chosen = weights[:, 1:][found.where].to(found.logits.device)
    total, losses = _WeightedCrossEntropy.apply(found.logits, found.targets, chosen)
    return total, losses


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
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
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,) = ctx.saved_tensors
        # The loss is nearly always the root: no pass over the largest tensor of the step to multiply it by 1.
        return gradient if upstream == 1 else gradient * upstream.to(gradient.dtype), None, None
