"""A small classification problem for heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from privlora.heads import HeadSettings
from privlora.heads.releases import RELEASES, HeadRelease

RECORDS, COLUMNS, CLASSES = 24, 12, 3

# Every method with noise, at rank 4 where it has a rank.
NOISY = {
    "dp-sgd": HeadSettings("dp-sgd", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8),
    "lora-fa": HeadSettings("lora-fa", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8, rank=4),
    "m2": HeadSettings("m2", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8, rank=4),
    "m2 wishart": HeadSettings("m2", 4, 0.5, 0.7, 0.8, rank=4, projection="wishart"),
    "m1": HeadSettings("m1", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8, rank=4),
    "project-then-clip": HeadSettings("project-then-clip", 4, 0.5, 0.7, 0.8, rank=4),
    "project-then-clip fresh": HeadSettings("project-then-clip", 4, 0.5, 0.7, 0.8, rank=4, fresh=True),
}


def problem(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(RECORDS, COLUMNS, generator=generator, dtype=dtype)
    labels = torch.randint(CLASSES, (RECORDS,), generator=generator)
    return features, labels


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, n]) for n in range(count)]


def release(settings: HeadSettings, heads: int, columns: int = COLUMNS, seed: int = 0) -> HeadRelease:
    noise, public = generators(heads, seed), generators(heads, seed + 1)
    return RELEASES[settings.method](settings, columns, torch.float64, noise, public)


def everyone(heads: int, records: int = RECORDS) -> Tensor:
    return torch.ones(heads, records, dtype=torch.bool)


def seeds(count: int) -> Sequence[int]:
    return range(10, 10 + count)
