"""Sizes of noise and of moves on Z, for low-rank pairs batched over L modules; no m x n matrix is formed.

Notation: left (L, m, r), right (L, n, r), Z = scale * left right^T; every function computes in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from privlora.coordinates import Vector
from privlora.geometry.fixed_rank import Point


def energy(vector: Vector) -> float:
    """||vector||^2, of all its parts together."""
    return sum(float(t.double().square().sum()) for parts in vector for t in parts)


def product_energy(left: Tensor, right: Tensor) -> Tensor:
    """||left right^T||_F^2 as a trace of two Gram matrices, (L,)."""
    left, right = left.double(), right.double()
    return ((left.mT @ left) * (right.mT @ right)).sum(dim=(-2, -1))


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """||left right^T||_F, (L,), from QR factors: also exact where the product is a small difference of large terms."""
    r_left = torch.linalg.qr(left.double(), mode="r").R
    r_right = torch.linalg.qr(right.double(), mode="r").R
    return torch.linalg.matrix_norm(r_left @ r_right.mT)


def move_norm(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
    """||A1 B1^T - A0 B0^T||_F, (L,), of two pairs (A, B)."""
    (a0, b0), (a1, b1) = before, after
    return product_norm(torch.cat([a1, -a0], dim=-1), torch.cat([b1, b0], dim=-1))


def factor_statistic(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """S = scale^2 (m ||right||^2 + n ||left||^2), (L,): E||first-order noise||_F^2 is tau^2 S (PRISM Eq. 8)."""
    m, n = left.shape[-2], right.shape[-2]
    return scale**2 * (m * _squares(right) + n * _squares(left))


def bilinear_law(m: int, n: int, r: int, scale: float, noise_std: float) -> float:
    """E||scale * xi_left xi_right^T||_F^2 = scale^2 m n r tau^4 (PRISM Eq. 9)."""
    return scale**2 * m * n * r * noise_std**4


def factor_noise(
    left: Tensor, right: Tensor, d_left: Tensor, d_right: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Energies (L,) of the effect on Z of noise (d_left, d_right): first-order, bilinear, and of their sum."""
    first = product_energy(torch.cat([d_left, left], dim=-1), torch.cat([right, d_right], dim=-1))
    both = product_energy(torch.cat([d_left, left], dim=-1), torch.cat([right + d_right, d_right], dim=-1))
    return scale**2 * first, scale**2 * product_energy(d_left, d_right), scale**2 * both


def tangent_law(point: Point) -> Tensor:
    """E||P(Xi)||_F^2 of the tangent projector P that U and V define, (L,), for standard normal Xi (m, n).

    P(Xi) = Pu Xi + Xi Pv - Pu Xi Pv gives n tr Pu + m tr Pv - tr Pu tr Pv, which is r (m + n - r) if and only if the
    frames are orthonormal (PRISM Theorem 3.1). The traces are those of the given numbers: nothing is assumed.
    """
    m, n = point.U.shape[-2], point.V.shape[-2]
    left, right = _squares(point.U), _squares(point.V)
    return n * left + m * right - left * right


def gram_stress(factor: Tensor) -> Tensor:
    """||G^(-1/2)||_2 = 1 / (smallest singular value) for the Gram matrix G = factor^T factor, (L,)."""
    return 1.0 / torch.linalg.svdvals(factor.double())[..., -1]


def _squares(t: Tensor) -> Tensor:
    return t.double().square().sum(dim=(-2, -1))
