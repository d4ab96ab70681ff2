"""What a client may answer, and a server may send: names and shapes that follow from public numbers, finite, of
bounded norm.

One client must not be able to stop a round or to move the common state without bound, whatever it sends. A client
checks what it is sent to train on before anything is charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from privlora.errors import PrivacyError, RunError
from privlora.federated.messages import refusal, wrong
from privlora.federated.rules.algebra import orthonormal
from privlora.federated.rules.base import OFFSET, Asked, Groups, Rule, Shapes

LARGEST_NORM: Final = 1e6
"""Of all tensors of a message together; what is above it is no longer taken for honest."""


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
        tensor: object = message[name]
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise wrong(f"{name!r} of {whose} is not a plain tensor")
        if tuple(tensor.shape) != tuple(shape):
            raise wrong(f"{name!r} of {whose} does not have the shape {tuple(shape)}")
        if not tensor.dtype.is_floating_point:
            raise wrong(f"{name!r} of {whose} does not hold real floating-point numbers")
        if not bool(torch.isfinite(tensor).all()):
            raise wrong(f"{name!r} of {whose} is not finite")
    # Where float64 overflows, the norm is infinite and is refused.
    norms = (torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in message.values())
    if not math.hypot(*map(float, norms)) <= largest_norm:
        raise wrong(f"the norm of {whose} is above {largest_norm:g}")


def refuse_foreign(sent: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PrivacyError unless ``sent`` has these names and shapes, is finite and of a bounded norm, and U and V in it
    are orthonormal: what clipping bounds are coordinates in orthonormal bases."""
    try:
        refuse_unfit(sent, expected, LARGEST_NORM, "what the server sent")
    except RunError as unfit:
        raise _foreign(unfit.what) from None
    for name, tensor in sent.items():
        if name.rpartition(".")[2] in ("U", "V") and tensor.ndim == 3 and not orthonormal(tensor):
            raise _foreign(f"{name!r} of what the server sent is not orthonormal")


def broadcast_shapes(rule: type[Rule], stage: str, groups: Groups, asked: Asked) -> Shapes:
    """What an honest server sends. The last dimension is taken from what was sent for an offset, whose rank grows with
    who answered, and for a factor that need not be sent while it is zero."""
    expected = rule.shapes(stage, asked.number, groups, asked.settings)[0]
    return {name: _grown(name, shape, groups, asked) for name, shape in expected.items()}


def _grown(name: str, shape: tuple[int, ...], groups: Groups, asked: Asked) -> tuple[int, ...]:
    sent = asked.sent
    group, _, part = name.partition(".")
    if part not in OFFSET:
        whole = (*shape[:-1], asked.settings.rank)
        return whole if not shape[-1] and name in sent and tuple(sent[name].shape) == whole else shape
    both = [sent[name] for offset in OFFSET if (name := f"{group}.{offset}") in sent]
    ranks = [tensor.shape[-1] for tensor in both if tensor.ndim == len(shape)]
    _, m, n = groups[int(group)]
    # Both sides have one rank, and a product needs no more columns than its smaller side.
    return (*shape[:-1], min([*ranks, m, n]))


def _foreign(what: str) -> PrivacyError:
    why = "this client trains on what follows from the agreed terms, and on nothing else"
    return refusal(what, why, "look at the server; nothing was charged")
