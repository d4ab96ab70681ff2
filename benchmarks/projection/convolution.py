"""Many small convolutional networks trained at once with LoRA-FA gradients, noise-free: the shadow models of Table 1.

Three 3 x 3 convolutions (8, 16, 32 channels), each with ReLU and max-pooling, and two dense layers (64 hidden), on
8 x 8 images. Every network has its own start, batches and projections. In every layer the mean gradient, as a matrix
(out x rest), is multiplied from the right by A^T A with a frozen A (r x rest) of N(0, 1/r) entries, and put back into
its shape before SGD with momentum sees it (F.1 of Hu et al. 2026). The N networks are the groups of one convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CHANNELS, HIDDEN = (8, 16, 32), 64


@dataclass(frozen=True)
class Training:
    """SGD with momentum and a cosine schedule; batch: records of every step. rank: None for the whole gradient."""

    rank: int | None
    epochs: int = 12
    batch: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.9


def layer_shapes(classes: int) -> list[tuple[int, int]]:
    """(out, rest) of the five weights."""
    inputs = (1, *CHANNELS[:-1])
    convolutions = [(out, 9 * of) for out, of in zip(CHANNELS, inputs, strict=True)]
    return [*convolutions, (HIDDEN, CHANNELS[-1]), (classes, HIDDEN)]


def logits(weights: Sequence[Tensor], images: Tensor) -> Tensor:
    """(N, b, classes) of networks with weights (N, out, rest) on images (b, N, 8, 8): each its own."""
    models = len(weights[0])
    values = images
    for weight in weights[:3]:
        kernels = weight.reshape(models * weight.shape[1], -1, 3, 3)
        values = F.max_pool2d(F.relu(F.conv2d(values, kernels, padding=1, groups=models)), 2)
    flat = values.view(len(images), models, -1).transpose(0, 1)  # (N, b, 32)
    return F.relu(flat @ weights[3].mT) @ weights[4].mT


def same_images(images: Tensor, models: int) -> Tensor:
    """(b, 1, 8, 8) for ``logits`` of ``models`` networks."""
    return images.expand(-1, models, -1, -1)


def train(
    images: Tensor,
    labels: Tensor,
    classes: int,
    members: Tensor,
    settings: Training,
    seeds: Sequence[int],
    start: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Weights (N, out, rest) of every layer. members: (N, n) bool, the records of each network.

    start: weights (out, rest) that the first layers of all networks begin with; the other layers begin at random.
    """
    generators = [np.random.default_rng(seed) for seed in seeds]
    shapes = layer_shapes(classes)
    weights = [
        torch.stack([_normal(g, shape) for g in generators]) * (2 / shape[1]) ** 0.5 for shape in shapes
    ]
    for layer, common in enumerate(start):
        weights[layer] = common.repeat(len(members), 1, 1)
    maps = [None] * len(shapes) if settings.rank is None else _maps(generators, shapes, settings.rank)
    rows = [np.flatnonzero(own.numpy()) for own in members]
    steps = settings.epochs * (len(images) // settings.batch)
    velocity = [torch.zeros_like(weight) for weight in weights]
    orders = [np.empty(0, dtype=np.int64)] * len(rows)
    for step in range(steps):
        for n, own in enumerate(rows):
            if len(orders[n]) < settings.batch:
                orders[n] = np.concatenate([orders[n], generators[n].permutation(own)])
        at = torch.from_numpy(np.stack([order[: settings.batch] for order in orders]))
        orders = [order[settings.batch :] for order in orders]
        found = logits([weight.requires_grad_() for weight in weights], images[at][:, :, 0].transpose(0, 1))
        loss = F.cross_entropy(found.flatten(0, 1), labels[at].flatten(), reduction="sum") / settings.batch
        gradients = torch.autograd.grad(loss, weights)
        rate = settings.learning_rate * (1 + np.cos(np.pi * step / steps)) / 2
        for weight, gradient, map_, v in zip(weights, gradients, maps, velocity, strict=True):
            weight.requires_grad_(False)
            v.mul_(settings.momentum).add_(gradient if map_ is None else gradient @ map_)
            weight -= rate * v
    return weights


def _maps(
    generators: Sequence[np.random.Generator], shapes: list[tuple[int, int]], rank: int
) -> list[Tensor | None]:
    """A^T A (N, rest, rest) of every layer."""
    maps: list[Tensor | None] = []
    for _, rest in shapes:
        factors = torch.stack([_normal(g, (rank, rest)) for g in generators]) / rank**0.5
        maps.append(factors.mT @ factors)
    return maps


def _normal(generator: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
