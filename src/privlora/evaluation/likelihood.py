"""How probable a model finds each of a few answers: the prompt is run once, its cache is shared by all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privlora.adapters.targets import output_layer
from privlora.data.examples import pad_token
from privlora.errors import ConfigError, ModelError
from privlora.evaluation.batches import PromptBatch, evaluating, prompt_batches, takes_positions


def answer_log_likelihoods(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    answers: Sequence[Sequence[int]],
    *,
    max_tokens: int = 8192,
) -> np.ndarray:
    """log p(answer | prompt) in nats, (prompts, answers) float64: the sum over the answer's tokens, without EOS.

    Args:
        model: a causal LM with a key-value cache; peft models and attached adapters count as they are.
        tokenizer: its tokenizer; needs no padding token.
        prompts: token ids, at least one each.
        answers: token ids, at least one each; the same answers for every prompt.
        max_tokens: bound on answers x padded length of a batch (a single prompt may exceed it).

    Raises:
        ConfigError: a prompt or an answer is empty.
        ModelError: the model keeps no cache, or its probabilities are NaN.
    """
    if not answers or not all(map(len, answers)) or not all(map(len, prompts)):
        raise ConfigError(
            "a prompt or an answer has no token",
            fix="give every prompt and answer some text the tokenizer knows",
        )
    found = np.empty((len(prompts), len(answers)))
    longest = max(map(len, answers))
    with evaluating(model) as device:
        ids = torch.full((len(answers), longest), pad_token(tokenizer), dtype=torch.int64)
        used = torch.zeros((len(answers), longest), dtype=torch.bool)
        for row, answer in enumerate(answers):
            ids[row, : len(answer)] = torch.tensor(list(answer))
            used[row, : len(answer)] = True
        for batch in prompt_batches(
            prompts,
            tokenizer,
            room=longest,
            copies=len(answers),
            max_tokens=max_tokens,
            device=device,
        ):
            found[batch.order] = _of_batch(model, batch, ids.to(device), used.to(device)).cpu().numpy()
    if np.isnan(found).any():
        raise ModelError(
            "the model's probabilities are not numbers", fix="its training diverged: lower the learning rate"
        )
    return found


def _of_batch(model: Any, batch: PromptBatch, answers: Tensor, used: Tensor) -> Tensor:
    """(rows, answers) float64. answers: (k, L) ids, used: (k, L) where they are no padding."""
    k, length = answers.shape
    positions = {"position_ids": batch.position_ids} if takes_positions(model) else {}
    with _only_last_logits(model):
        out = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=length > 1, **positions
        )
    total = _log_p(out.logits[:, -1])[:, answers[:, 0]].double()  # (rows, k)
    if length == 1:
        return total
    cache: Any = getattr(out, "past_key_values", None)
    if not hasattr(cache, "batch_repeat_interleave"):
        raise ModelError(
            "this model keeps no key-value cache, so answers cannot share a prompt",
            fix="use scoring=generation",
        )
    cache.batch_repeat_interleave(k)
    rows = len(batch.order)
    following = answers[:, :-1].repeat(rows, 1)  # (rows k, L - 1), in the order of the cache's rows
    mask = torch.cat(
        [batch.attention_mask.repeat_interleave(k, dim=0), used[:, :-1].long().repeat(rows, 1)], 1
    )
    if positions:
        start = batch.lengths.repeat_interleave(k)[:, None]
        positions = {"position_ids": start + torch.arange(length - 1, device=start.device)}
    logits = model(
        input_ids=following, attention_mask=mask, past_key_values=cache, use_cache=True, **positions
    ).logits
    log_p = _log_p(logits).gather(2, answers[:, 1:].repeat(rows, 1)[:, :, None])[:, :, 0].double()
    rest = (log_p * used[:, 1:].repeat(rows, 1)).sum(dim=1)
    return total + rest.reshape(rows, k)


def _log_p(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def _only_last_logits(model: torch.nn.Module) -> Iterator[None]:
    """Logits of the last position only: all positions would cost rows x tokens x vocabulary."""
    head = output_layer(model)

    def last(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(last) if head is not None else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
