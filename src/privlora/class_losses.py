"""The loss of a classifier: one number a text, cross-entropy of its class or the squared error of its score."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from privlora.data.batching import MicroBatch
from privlora.errors import PrivacyError


def class_logits(
    model: Any, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
) -> Tensor:
    """(b, outputs) of one pass over (b, T) ids, in the model's dtype."""
    more: dict[str, Any] = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "use_cache" in inspect.signature(inner.forward).parameters:  # encoders do not know the word
        more["use_cache"] = False
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, **more).logits
    return logits


def batch_logits(model: Any, batch: MicroBatch) -> Tensor:
    """(b, outputs) of a micro-batch on the model's device, in float32 or better.

    Raises PrivacyError where texts are filled up with another token than the model finds their ends by.
    """
    known = model.config.get_text_config().pad_token_id
    if known != batch.pad_token_id:
        raise PrivacyError(
            f"texts are filled up with token {batch.pad_token_id}, and the classifier's padding token is {known}",
            why="it would take a text's last token to be elsewhere, by how long the texts beside it are",
            fix="call training.classifier.padded_as(model, tokenizer) with the tokenizer of the texts",
        )
    logits = class_logits(model, batch.input_ids, batch.attention_mask, batch.token_type_ids)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def class_losses(logits: Tensor, answers: Tensor) -> Tensor:
    """(b,) losses of (b, outputs) logits: in nats for the class of each row, squared for one output.

    answers: (b,) float64, the classes' numbers or the scores.
    """
    there = answers.to(logits.device, non_blocking=True)
    if logits.shape[-1] == 1:
        return (logits[:, 0] - there.to(logits.dtype)).square()
    return torch.nn.functional.cross_entropy(logits, there.long(), reduction="none")
