"""What a client may answer: names and shapes that follow from public numbers, finite, of bounded norm.

One client must not be able to stop a round or to move the common state without bound, whatever it sends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from privlora.federated.messages import wrong
from privlora.federated.rules.base import Rule, Shapes

LARGEST_NORM: Final = 1e6
"""Of all tensors of a message together; what is above it is no longer taken for honest."""


def expected(rule: Rule, stage: str, number: int) -> Shapes:
    """Names and shapes of every client's answer to a stage of round ``number``."""
    return type(rule).shapes(stage, number, rule.groups, rule.settings)[1]


def refuse_unfit(
    message: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    largest_norm: float,
    whose: str = "an answer",
) -> None:
    """Raises RunError unless ``message`` has exactly these names and shapes, is real, finite and not above the norm.

    largest_norm: public, of all tensors together (L2). What is said shows neither values nor names that a client chose.
    """
    missing, extra = expected.keys() - message.keys(), message.keys() - expected.keys()
    if missing or extra:
        raise wrong(f"{whose} lacks {len(missing)} of {len(expected)} tensors and has {len(extra)} others")
    for name, shape in expected.items():
        _refuse_unfit_tensor(name, message[name], shape, whose)
    # Where float64 overflows, the norm is infinite and is refused.
    norms = (torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in message.values())
    if not math.hypot(*map(float, norms)) <= largest_norm:
        raise wrong(f"the norm of {whose} is above {largest_norm:g}")


def _refuse_unfit_tensor(name: str, tensor: object, shape: tuple[int, ...], whose: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise wrong(f"{name!r} of {whose} is not a plain tensor")
    if tuple(tensor.shape) != tuple(shape):
        raise wrong(f"{name!r} of {whose} does not have the shape {tuple(shape)}")
    if not tensor.dtype.is_floating_point:
        raise wrong(f"{name!r} of {whose} does not hold real floating-point numbers")
    if not bool(torch.isfinite(tensor).all()):
        raise wrong(f"{name!r} of {whose} is not finite")
