"""Direct preference optimisation: one number a record, of its chosen and its rejected answer.

Rafailov, Sharma, Mitchell, Ermon, Manning and Finn, "Direct Preference Optimization" (NeurIPS 2023), Eq. 7:

    loss = -log sigmoid(margin)
    margin = beta (log p(chosen) - log p_ref(chosen) - log p(rejected) + log p_ref(rejected))

with log p the sum over an answer's tokens, and p_ref the base model without its adapter. A record's loss depends on its
own two answers alone, so that its gradient is clipped as any other record's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from privlora.data.batching import MicroBatch
from privlora.losses import label_states, token_losses


def log_likelihoods(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """(rows,) sums of log p over each row's label tokens, in float32 or better, with a graph; batch: on the device."""
    found = label_states(model, batch.input_ids, batch.attention_mask, batch.labels)
    return -found.per_row(token_losses(found))


def margins(own: Tensor, reference: Tensor, beta: float) -> Tensor:
    """(rows / 2,) of log-likelihoods (rows,) in turn chosen and rejected, by the model and by the reference."""
    gain = own - reference
    return beta * (gain[0::2] - gain[1::2])


def preference_losses(found: Tensor) -> Tensor:
    """Eq. 7 of margins, in nats; 0.693 where the model is the reference."""
    return torch.nn.functional.softplus(-found)
