"""Products of low-rank factors without their dense form, and public draws that every party can repeat.

left (L, m, k) and right (L, n, k) stand for left right^T; k may exceed m and n. Float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from privlora.errors import ModelError
from privlora.federated.rules.base import Groups
from privlora.geometry.fixed_rank import Point, point_from_factors
from privlora.randomness import counter_generator

# Largest entry of U^T U - I; rounding of half precision stays below.
_ORTHONORMAL = 1e-2
_ROUND = 64  # bits of the key below the round's number


def thin(left: Tensor, right: Tensor) -> Point:
    """All min(k, m, n) singular triplets of left right^T. Where S is zero, U and V are orthonormal and mean nothing."""
    QL, RL = torch.linalg.qr(left)
    QR, RR = torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(RL @ RR.mT, full_matrices=False)
    return Point(QL @ u, s, QR @ vh.mT)


def canonical(left: Tensor, right: Tensor, seed: int) -> Point:
    """The point of left right^T, whose U spans left and V spans right, also where the product vanishes.

    seed: public; draws the directions that a factor lacks. Raises ModelError if k > min(m, n).
    """
    check_rank([(len(left), left.shape[1], right.shape[1])], left.shape[-1])
    point = thin(left, right)
    rounding = max(left.shape[1], right.shape[1]) * torch.finfo(point.S.dtype).eps
    if bool((point.S[:, -1] > rounding * point.S[:, 0]).all()):
        return point
    generator = torch.Generator(left.device).manual_seed(seed)
    return point_from_factors(left, right, generator)


def orthonormal(basis: Tensor) -> bool:
    """Whether the columns of each (m, k) of a stack are orthonormal, up to rounding."""
    wide = basis.double()
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    return bool(((wide.mT @ wide - eye).abs() <= _ORTHONORMAL).all())


def balanced(point: Point, rank: int, right: Tensor) -> tuple[Tensor, Tensor]:
    """left = U S^1/2 and right = V S^1/2 of the ``rank`` leading triplets.

    A module whose product is zero has left 0 and keeps ``right`` (L, n, rank): two zero factors have no gradient.
    """
    first, _ = point.split(rank)
    root = first.S.sqrt()[:, None, :]
    nothing = (point.S[:, 0] == 0)[:, None, None]
    return first.U * root, torch.where(nothing, right, first.V * root)


def compressed(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same product in at most min(m, n) columns; nothing is lost but rounding."""
    m, n, k = left.shape[1], right.shape[1], left.shape[2]
    if k <= min(m, n):
        return left, right
    if n <= m:
        Q, R = torch.linalg.qr(right)
        return left @ R.mT, Q
    Q, R = torch.linalg.qr(left)
    return Q, right @ R.mT


def public_normal(seed: int, number: int, group: int, shape: Sequence[int]) -> Tensor:
    """Standard normal entries that follow from the public seed, the round and the group, in float64."""
    return torch.from_numpy(_generator(seed, number, group).standard_normal(shape))


def public_uniform(seed: int, number: int, group: int, shape: Sequence[int]) -> Tensor:
    """Entries uniform in [-1, 1) that follow from the public seed, the round and the group, in float64."""
    return torch.from_numpy(2 * _generator(seed, number, group).random(shape) - 1)


def _generator(seed: int, number: int, group: int) -> np.random.Generator:
    return counter_generator(seed % 2**_ROUND + (number << _ROUND), stream=group)


def check_rank(groups: Groups, rank: int) -> None:
    """Raises ModelError if some group has no ``rank`` orthonormal columns."""
    for _, m, n in groups:
        if rank > min(m, n):
            what = f"rank {rank} exceeds min(m, n) = {min(m, n)} of a {m} x {n} weight"
            raise ModelError(what, fix=f"set the adapter's rank to at most {min(m, n)}")
