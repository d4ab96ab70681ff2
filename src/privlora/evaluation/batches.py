"""Prompts of different lengths in one left-padded batch, so that all end in the same column."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from privlora.data.examples import pad_token
from privlora.precision import own_context

# Kinds of rotary positions that depend on how long the longest row of a batch is.
_STRETCHED: Final = ("dynamic", "longrope")


@dataclass(frozen=True)
class PromptBatch:
    """``b`` prompts, left-padded to ``T`` tokens."""

    order: list[int]
    """(b,) which prompt each row is."""
    input_ids: Tensor
    """(b, T) int64."""
    attention_mask: Tensor
    """(b, T) int64; 1 on tokens."""

    @property
    def lengths(self) -> Tensor:
        """(b,) int64: tokens of each prompt."""
        return self.attention_mask.sum(dim=1)

    @property
    def position_ids(self) -> Tensor:
        """(b, T) int64: each token's place in its own prompt; 0 on padding."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp_min(0)


def prompt_batches(
    prompts: Sequence[np.ndarray],
    tokenizer: Any,
    *,
    room: int,
    copies: int,
    max_tokens: int,
    device: torch.device,
) -> Iterator[PromptBatch]:
    """All prompts, the longest first. A batch has at least one prompt.

    room: tokens that will follow each prompt. copies: rows that each prompt becomes. A batch's
    rows * copies * (T + room) is at most ``max_tokens``.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    start = 0
    while start < len(order):
        width = len(prompts[order[start]])
        rows = order[start : start + max(1, max_tokens // (copies * (width + room)))]
        ids = np.full((len(rows), width), pad_token(tokenizer), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, index in enumerate(rows):
            length = len(prompts[index])
            ids[row, width - length :] = prompts[index]
            mask[row, width - length :] = 1
        yield PromptBatch(rows, torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device))
        start += len(rows)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.device]:
    """Without dropout and gradients; yields the device of the inputs and restores every module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with own_context(), torch.no_grad():
            yield next(model.parameters()).device
    finally:
        for module, training in modes:
            module.training = training


def stretched_by_length(config: Any) -> bool:
    """Whether rotary positions depend on how long the longest text of a batch is, or even of those before it."""
    return any((each.get("rope_type") or each.get("type")) in _STRETCHED for each in rotary_kinds(config))


def rotary_kinds(config: Any) -> list[Mapping[str, Any]]:
    """What a model's configuration says of its rotary positions, for each kind of layer; [] where it has none."""
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [each for each in (rotary, *rotary.values()) if isinstance(each, Mapping)]


def takes_positions(model: Any) -> bool:
    """Whether the model is given the positions of its tokens (some derive them from the attention mask)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "position_ids" in inspect.signature(base.forward).parameters
