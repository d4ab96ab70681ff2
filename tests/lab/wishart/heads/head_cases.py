"""A small classification problem for heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.lab.wishart.head_mechanisms import MECHANISMS, HeadMechanism
from privlora.lab.wishart.head_settings import HeadSettings
from privlora.lab.wishart.heads import HeadData
from privlora.mechanisms import NoiseSource, Noising
from privlora.mechanisms.charges import Uncharged

RECORDS, COLUMNS, CLASSES = 24, 12, 3

# Every method with noise, at rank 4 where it has a rank.
NOISY = {
    "dp-sgd": HeadSettings("dp-sgd", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8),
    "lora-fa": HeadSettings("lora-fa", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8, rank=4),
    "m2": HeadSettings("m2", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8, rank=4),
    "m2 wishart": HeadSettings("m2", 4, 0.5, 0.7, 0.8, rank=4, projection="wishart"),
    "m2-unclipped": HeadSettings("m2-unclipped", 4, 0.5, noise_multiplier=0.7, clip_norm=9.0, rank=4),
    "m1": HeadSettings("m1", 4, 0.5, noise_multiplier=0.7, clip_norm=0.8, rank=4),
    "project-then-clip": HeadSettings("project-then-clip", 4, 0.5, 0.7, 0.8, rank=4),
    "project-then-clip fresh": HeadSettings("project-then-clip", 4, 0.5, 0.7, 0.8, rank=4, fresh=True),
}


def problem() -> HeadData:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(RECORDS, COLUMNS, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (RECORDS,), generator=generator)
    return HeadData(features, labels, CLASSES, dataset_size=RECORDS)


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, n]) for n in range(count)]


def release(settings: HeadSettings, heads: int, columns: int = COLUMNS, seed: int = 0) -> HeadMechanism:
    pens = [Noising(Uncharged(), NoiseSource(100 * seed + n)) for n in range(heads)]
    hidden, public = generators(heads, seed), generators(heads, seed + 1)
    event = StepEvent(PoissonSampling(1.0), settings.noise_multiplier)
    return MECHANISMS[settings.method](settings, columns, torch.float64, pens, event, hidden, public)


def everyone(heads: int, records: int = RECORDS) -> Tensor:
    return torch.ones(heads, records, dtype=torch.bool)


def seeds(count: int) -> Sequence[int]:
    return range(10, 10 + count)
