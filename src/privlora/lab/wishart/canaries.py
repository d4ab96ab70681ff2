"""Static poison canaries: a record that only memory can explain (Nasr et al. 2021; protocol F.1 of Hu et al. 2026).

The attacker picks the input at random, and as its label the class that a reference model thinks least likely. A model
that did not train on the canary will not predict that label; one that did has to bend for it, and its loss tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.errors import ModelError


@dataclass(frozen=True)
class StaticPoison:
    """One canary. inputs: of the given shape, float32; label: the reference model's least likely class."""

    inputs: Tensor
    label: int


def static_poison(
    reference: Callable[[Tensor], Tensor], shape: tuple[int, ...], generator: torch.Generator
) -> StaticPoison:
    """A canary with independent N(0, 1) entries: noise in the space of normalised inputs.

    Args:
        reference: inputs (1, *shape) -> logits (1, classes), of a model trained like the target but without the
            canary. It belongs to the attacker, who trains it on what the attacker knows.
        shape: of one input, without a batch dimension.
        generator: the attacker's, seeded at will.

    Raises:
        ModelError: the logits are not finite, or not of shape (1, classes).
    """
    inputs = torch.randn(shape, generator=generator)
    logits = reference(inputs[None])
    if logits.dim() != 2 or len(logits) != 1 or not logits.isfinite().all():
        raise ModelError(
            f"the reference model gave logits {tuple(logits.shape)} that are no finite (1, classes)",
            why="the canary's label is its least likely class",
            fix="train the reference model longer, or at a lower rate",
        )
    return StaticPoison(inputs, int(logits.argmin()))
