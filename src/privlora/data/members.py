"""Models that are trained side by side: which units, seed and ledger each of them has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from privlora.errors import ConfigError, PrivacyError


def check_members(
    members: Tensor, units: int, *, seeds: Sequence[int] | None, ledgers: Sequence[object] | None
) -> None:
    """Refuse what does not give each of N models its own units, and its own seed or ledger.

    Args:
        members: (N, units) bool, N >= 1: which units each model may see.
        seeds: None, or N different ones. ledgers: None, or N of them, and then no seeds.

    Raises:
        ConfigError: shapes or numbers do not fit, or a seed is given twice.
        PrivacyError: ledgers are given with seeds.
    """
    if members.dtype != torch.bool or members.dim() != 2 or members.shape[1] != units or not len(members):
        what = f"members are {tuple(members.shape)} {members.dtype}"
        raise ConfigError(what, fix=f"give bool (models, {units})")
    for name, given in (("seeds", seeds), ("ledgers", ledgers)):
        if given is not None and len(given) != len(members):
            raise ConfigError(f"{len(given)} {name} for {len(members)} models", fix="give one for each")
    if seeds is not None and ledgers is not None:
        why = "whoever knows a seed can subtract the noise"
        fix = "leave seeds out, or ledgers if this is a study"
        raise PrivacyError("models with seeds cannot be charged to ledgers", why=why, fix=fix)
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise ConfigError("two models have the same seed, and share their noise", fix="give each its own")
