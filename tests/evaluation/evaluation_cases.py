"""An adapter whose effect no rounding hides."""

from __future__ import annotations

import torch

from privlora.adapters import LowRankAdapter


def strong_adapter(model: torch.nn.Module) -> LowRankAdapter:
    adapter = LowRankAdapter(model, rank=2)
    for group in adapter.groups:
        sites = len(group.sites)
        left, right = torch.randn(sites, group.m, 2), torch.randn(sites, group.n, 2)
        adapter.install(group, left, torch.ones(sites, 2), right)
    return adapter
