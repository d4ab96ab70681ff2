"""What a micro-batch keeps in memory, from shapes alone: nothing is read of records or of a device's state."""

from __future__ import annotations

import math
from typing import Any

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.lowrank import checkpoints
from privlora.adapters.targets import feature_sizes, output_layer

_GRADIENT_BYTES = 4  # P and Q are float32, or float64 beside activations of that


def gradient_bytes(adapter: LowRankAdapter) -> int:
    """P (m, r) and Q (n, r) of one row over all modules, as they are captured."""
    p, q = (len(range(adapter.rank)[kept]) for kept in adapter.columns)
    numbers = sum(p * site.m + q * site.n for site in adapter.sites)
    return numbers * max(_GRADIENT_BYTES, _item_size(adapter.model))


def token_bytes(model: torch.nn.Module) -> int:
    """About what one token's activations take between forward and backward pass: inputs and outputs of linear layers.

    With gradient checkpointing those of one block, and the others' inputs. Without logits.
    """
    head = output_layer(model)
    linear = [sizes for each in model.modules() if each is not head and (sizes := feature_sizes(each))]
    whole = sum(m + n for m, n in linear)
    config: Any = getattr(model, "config", None)
    blocks, width = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if checkpoints(model) and blocks and width:
        whole = whole // blocks + blocks * width
    return max(1, whole) * _item_size(model)


def row_tokens(adapter: LowRankAdapter) -> int:
    """PUBLIC. As many tokens' activations take the memory of one row's gradients: r of float32, 2 r of bfloat16.

    Shorter rows count as this long where micro-batches are cut (data.batching), so gradients never take more than the
    activations of as many tokens as are allowed.
    """
    return math.ceil(gradient_bytes(adapter) / token_bytes(adapter.model))


def _item_size(model: torch.nn.Module) -> int:
    return max((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), default=4)
