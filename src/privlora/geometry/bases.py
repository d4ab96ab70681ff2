"""Orthonormal bases of a point's columns and of new ones beside them, and decompositions of small matrices.

A point's columns are orthonormal to rounding, so only the new ones need work: block Gram-Schmidt twice, each time with
one Cholesky factor of their Gram matrix (Barlow and Smoktunowicz 2013; Yamamoto et al. 2015, CholeskyQR2). That is
matrix products alone, batched over modules, where a GPU would loop over Householder factorisations of tall matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A Gram matrix this near to I (Frobenius) has a Cholesky factor that makes its columns orthonormal to rounding.
_NEAR = 0.1
# Largest root mean square condition of new columns of norm 1: what a product with the inverse may magnify rounding by.
_CONDITION = 32.0
_ROWS = 8192
# Above this size cuSOLVER decomposes the matrices of a batch one after the other.
_LOOPED = 32
# Its batched kernels fail on too many at once: on 143,000 of 8 x 8 in float64 on an H200.
_AT_ONCE = 2**14


@dataclass(frozen=True)
class Basis:
    """[first new] = Q R with Q = [blocks] mix. R is square, or wide where there are more columns than rows.

    blocks: (L, m, a) and (L, m, b), or one. mix: None for I. sound: 0-dim bool; if it holds, Q^T Q = I to rounding for
    first columns that are orthonormal to rounding, as a point's are (columns that are off by 1e-3: to 2e-4).
    """

    blocks: tuple[Tensor, ...]
    mix: Tensor | None
    R: Tensor
    sound: Tensor

    def split(self, sizes: list[int]) -> list[Basis]:
        """Of the modules of several groups, each group's."""
        blocks = zip(*(block.split(sizes) for block in self.blocks), strict=True)
        mixes = [None] * len(sizes) if self.mix is None else self.mix.split(sizes)
        return [
            Basis(of_one, mix, R, self.sound)
            for of_one, mix, R in zip(blocks, mixes, self.R.split(sizes), strict=True)
        ]

    def times(self, x: Tensor) -> Tensor:
        """Q x (L, m, p) for x (L, columns of Q, p)."""
        x = x if self.mix is None else self.mix @ x
        head, *rest = self.blocks
        made = head @ x[:, : head.shape[-1]]
        for block in rest:
            made = torch.baddbmm(made, block, x[:, head.shape[-1] :])
        return made


def joint_bases(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Basis]:
    """A Basis of [first new] for each pair of (L, m, a) and (L, m, b); columns of ``first`` orthonormal or zero.

    Exact for new columns of any size and rank: those that products cannot do go through Householder QR. Pairs of equal
    shape are one batch. One value is read back from the device, for all pairs together.
    """
    places = alike_places([(first.shape[1:], new.shape[1:]) for first, new in pairs])
    batches = [
        (torch.cat([pairs[i][0] for i in alike]), torch.cat([pairs[i][1] for i in alike])) for alike in places
    ]
    tried = [_by_products(*batch) if _fits(*batch) else None for batch in batches]
    flags = [basis.sound for basis in tried if basis is not None]
    sound = iter(torch.stack(flags).tolist() if flags else ())
    found: dict[int, Basis] = {}
    for alike, basis, batch in zip(places, tried, batches, strict=True):
        whole = basis if basis is not None and next(sound) else _by_reflections(*batch)
        found |= zip(alike, whole.split([len(pairs[i][0]) for i in alike]), strict=True)
    return [found[i] for i in range(len(pairs))]


def alike_places(shapes: Sequence[object]) -> list[list[int]]:
    """The places of each of the different shapes."""
    return [[i for i, each in enumerate(shapes) if each == shape] for shape in dict.fromkeys(shapes)]


def decomposed(function: Callable[[Tensor], Sequence[Tensor]], matrices: Tensor) -> list[Tensor]:
    """function(matrices) for a batch of small matrices, on the CPU where a GPU would take them one by one."""
    if not matrices.is_cuda:
        return list(function(matrices))
    if max(matrices.shape[-2:]) <= _LOOPED:
        return in_parts(function, matrices, _AT_ONCE)
    return [part.to(matrices.device) for part in function(matrices.cpu())]


def in_parts(function: Callable[[Tensor], Sequence[Tensor]], matrices: Tensor, at_once: int) -> list[Tensor]:
    """function(matrices) for (..., k, l), on no more than so many of them in one call."""
    flat = matrices.flatten(0, -3)
    if len(flat) <= at_once:
        return list(function(matrices))
    found = zip(*(function(some) for some in flat.split(at_once)), strict=True)
    return [torch.cat(parts).unflatten(0, matrices.shape[:-2]) for parts in found]


def singular_values(matrices: Sequence[Tensor]) -> list[list[Tensor]]:
    """(u, s, vh) of each batch of small matrices; those of equal shape are one call."""
    found: dict[int, list[Tensor]] = {}
    for alike in alike_places([matrix.shape[-2:] for matrix in matrices]):
        whole = decomposed(
            lambda t: torch.linalg.svd(t, full_matrices=False), torch.cat([matrices[i] for i in alike])
        )
        parts = zip(*(part.split([len(matrices[i]) for i in alike]) for part in whole), strict=True)
        found |= {i: list(of_one) for i, of_one in zip(alike, parts, strict=True)}
    return [found[i] for i in range(len(matrices))]


def _fits(first: Tensor, new: Tensor) -> bool:
    return first.shape[-1] + new.shape[-1] <= first.shape[-2]


def _by_reflections(first: Tensor, new: Tensor) -> Basis:
    Q, R = torch.linalg.qr(torch.cat([first, new], dim=-1))
    return Basis((Q,), None, R, torch.ones((), dtype=torch.bool, device=Q.device))


def _by_products(first: Tensor, new: Tensor) -> Basis:
    """``sound`` says whether it worked: not where columns are zero or nearly dependent, or their squares overflow."""
    eye = torch.eye(max(first.shape[-1], new.shape[-1]), dtype=new.dtype, device=new.device)
    own = _Root.of(_inner(first, first), eye)
    along = _inner(first, new)
    X = torch.baddbmm(new, first, along, alpha=-1)
    rough = _Root.of(_inner(X, X), eye)
    X = X @ rough.inverse
    rest = _inner(first, X)  # by which rounding in X, now blown up, leans on the first columns
    X = torch.baddbmm(X, first, rest, alpha=-1)
    fine = _Root.of(_inner(X, X), eye)
    return Basis(
        (first, X),
        _blocks(own.inverse, torch.zeros_like(along), fine.inverse),
        _blocks(own.factor, own.factor @ (along + rest @ rough.factor), fine.factor @ rough.factor),
        own.near_identity() & fine.near_identity() & rough.well_conditioned(),
    )


@dataclass(frozen=True)
class _Root:
    """The upper Cholesky factors of Gram matrices, and their inverses; NaN or anything where there is none."""

    gram: Tensor
    factor: Tensor
    inverse: Tensor
    failed: Tensor
    eye: Tensor

    @classmethod
    def of(cls, gram: Tensor, eye: Tensor) -> _Root:
        """eye: an identity of any size not below the Gram matrices'."""
        eye = eye[: gram.shape[-1], : gram.shape[-1]]
        factor, failed = torch.linalg.cholesky_ex(gram, upper=True)
        return cls(gram, factor, torch.linalg.solve_triangular(factor, eye, upper=True), failed, eye)

    def near_identity(self) -> Tensor:
        """0-dim bool, of the whole batch; so below."""
        return ((self.gram - self.eye).square().sum(dim=(-2, -1)) < _NEAR**2).all()

    def well_conditioned(self) -> Tensor:
        """Whether multiplying by the inverse rounds hardly more than solving; whatever the sizes of the columns."""
        sizes = self.factor.norm(dim=-2)[..., None]
        worst = (sizes * self.inverse).square().mean(dim=-1).sum(dim=-1)
        return ((worst < _CONDITION**2) & (self.failed == 0)).all()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """a^T b, summed over blocks of rows, as a product of few columns may add up all rows one after the other."""
    if a.shape[-2] <= _ROWS:
        return a.mT @ b
    pairs = zip(a.split(_ROWS, dim=-2), b.split(_ROWS, dim=-2), strict=True)
    return torch.stack([x.mT @ y for x, y in pairs]).sum(dim=0)


def _blocks(head: Tensor, corner: Tensor, tail: Tensor) -> Tensor:
    """[[head, corner], [0, tail]]."""
    below = torch.cat([torch.zeros_like(corner).mT, tail], dim=-1)
    return torch.cat([torch.cat([head, corner], dim=-1), below], dim=-2)
