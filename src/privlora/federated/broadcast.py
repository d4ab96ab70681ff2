"""What a server may send to be trained on: checked by the client before anything is charged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from privlora.errors import PrivacyError, RunError
from privlora.federated.rules import Rule, RuleSettings
from privlora.federated.rules.base import Shapes, Sizes
from privlora.federated.rules.checks import LARGEST_NORM, refuse_unfit

# Largest entry of U^T U - I; rounding of half precision stays below.
_ORTHONORMAL = 1e-2
_OFFSET = "offset_"


def refuse_foreign(sent: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PrivacyError unless ``sent`` has these names and shapes, is finite and of a bounded norm, and U and V in it
    are orthonormal: what clipping bounds are coordinates in orthonormal bases."""
    try:
        refuse_unfit(sent, expected, LARGEST_NORM, "what the server sent")
    except RunError as unfit:
        raise _foreign(unfit.what) from None
    for name, tensor in sent.items():
        if name.rpartition(".")[2] in ("U", "V") and tensor.ndim == 3 and not _orthonormal(tensor):
            raise _foreign(f"{name!r} of what the server sent is not orthonormal")


def broadcast_shapes(
    rule: type[Rule],
    stage: str,
    number: int,
    groups: Sequence[Sizes],
    settings: RuleSettings,
    sent: Mapping[str, Tensor],
) -> Shapes:
    """What an honest server sends. The last dimension is taken from ``sent`` for an offset, whose rank grows with who
    answered, and for a factor that need not be sent while it is zero."""
    expected = rule.shapes(stage, number, groups, settings)[0]
    return {name: _grown(name, shape, sent, groups, settings.rank) for name, shape in expected.items()}


def _grown(
    name: str, shape: tuple[int, ...], sent: Mapping[str, Tensor], groups: Sequence[Sizes], rank: int
) -> tuple[int, ...]:
    group, _, part = name.partition(".")
    if not part.startswith(_OFFSET):
        whole = (*shape[:-1], rank)
        return whole if not shape[-1] and name in sent and tuple(sent[name].shape) == whole else shape
    ranks = [
        tensor.shape[-1]
        for side in ("left", "right")
        if (tensor := sent.get(f"{group}.{_OFFSET}{side}")) is not None and tensor.ndim == len(shape)
    ]
    _, m, n = groups[int(group)]
    # Both sides have one rank, and a product needs no more columns than its smaller side.
    return (*shape[:-1], min([*ranks, m, n]))


def _orthonormal(tensor: Tensor) -> bool:
    wide = tensor.double()
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    return bool(((wide.mT @ wide - eye).abs() <= _ORTHONORMAL).all())


def _foreign(what: str) -> PrivacyError:
    return PrivacyError(
        what,
        why="this client trains on what follows from the agreed terms, and on nothing else",
        fix="look at the server; nothing was charged",
    )
