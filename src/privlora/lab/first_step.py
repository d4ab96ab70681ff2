"""Which data set a published adapter's first step was taken on: the attack of Hu et al. 2026, C.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from privlora.adapters.peft_files import read_adapter
from privlora.errors import ModelError
from privlora.lab.wishart.bounds.matrix import asymmetry


def first_step_asymmetries(
    model: torch.nn.Module,
    adapters: Sequence[str | Path],
    losses: Sequence[Callable[[torch.nn.Module], Tensor]],
) -> list[list[float]]:
    """For each adapter, how badly each candidate data set explains it: 0 up to rounding for the true one.

    Standard LoRA starts at lora_B = 0, so that its first step leaves lora_A, and W changes by dW = -lr s^2 G A^T A, G
    the gradient of the loss by W. So -G dW^T is symmetric for the true G, and for no other (Proposition 2'). The
    learning rate is not used. The score is the mean of `asymmetry` over the adapted layers.

    It holds for plain SGD without noise, whatever the rank. A step of Adam, a second step or noise leaves no candidate
    near 0.

    Args:
        model: before the step, in float32 or float64; its weights must be as they were, and stay so.
        adapters: folders of PEFT adapters of linear layers, each of one step from B = 0.
        losses: one for each candidate data set: model -> the loss () that the step would have minimised on it.

    Returns:
        one list for each adapter, one number in [0, sqrt 2] for each loss; its smallest names the data set.

    Raises:
        ModelError: an adapter is not of plain LoRA factors, or of layers that the model lacks.
    """
    factors = [read_adapter(folder) for folder in adapters]
    names = sorted(set().union(*factors))
    layers = dict(model.named_modules())
    if missing := [name for name in names if name not in layers]:
        raise ModelError(
            f"the model has no layer {missing[0]!r}", fix="give the model that the adapter is for"
        )
    weights: list[Tensor] = [layers[name].get_parameter("weight") for name in names]
    required = [weight.requires_grad for weight in weights]
    found: list[list[float]] = [[] for _ in factors]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for loss in losses:
            gradients = torch.autograd.grad(loss(model), weights)
            by_name = {name: each.double().cpu() for name, each in zip(names, gradients, strict=True)}
            for scores, own in zip(found, factors, strict=True):
                each = [-by_name[name] @ b.double() @ a.double().mT for name, (a, b) in own.items()]
                scores.append(sum(asymmetry(product.numpy()) for product in each) / len(each))
    finally:
        for weight, kept in zip(weights, required, strict=True):
            weight.requires_grad_(kept)
    return found
