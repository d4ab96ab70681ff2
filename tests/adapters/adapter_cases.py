"""Operands for an adapter, and a model's logits."""

from __future__ import annotations

from typing import Any

import torch

from privlora.adapters import LowRankAdapter


def with_operands(adapter: LowRankAdapter, size: float = 0.3) -> LowRankAdapter:
    for group in adapter.groups:
        count, rank = len(group.sites), adapter.rank
        left, right = size * torch.randn(count, group.m, rank), torch.randn(count, group.n, rank)
        adapter.install(group, left, torch.rand(count, rank), right)
    return adapter


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 19)[None]).logits
