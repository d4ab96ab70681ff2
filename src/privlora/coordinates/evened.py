"""A micro-batch after step one of spectral clipping, from r x r statistics: summed and measured, and never formed.

With P a unit's gradient on one side of a module, its Gram matrix P^T P gives the root factors R (root_factors)
and the norm of P R; U^T P gives what of it lies along a point's basis U. So the sum over units of weights w_i of P_i
w_i R_i is one matrix product per module, and the largest tensors are read, not copied.

Why: a language model's gradient of one text is dominated by a few directions of a few modules, which differ from text
to text, so that clipping sinks what texts have in common below the noise. Square roots of the singular values, and then
of the modules' norms, bring it up; the whole keeps its norm. Clipping comes after it and it is a function of one unit
alone, so neither the sensitivity nor the cost in privacy changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.adapters import Captured
from privlora.adapters.captured import Stacks
from privlora.geometry.bases import decomposed

# Smaller singular values are treated as equal to this fraction of the largest: they may be rounding error.
_LEAST = 1e-2
_TINY = 1e-30


def root_factors(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Of matrices t (..., k, r) given as t^T t (..., r, r): R with t R = t (t^T t)^-1/4, and ||t R||_F^2, (...).

    t R has the square roots of t's singular values. It commutes with rotations of both sides, so the result does not
    depend on a basis. All float64. Zero, with R = 0, where squares of t's entries are below what the dtype of the
    Gram matrix holds. Entries must be finite.
    """
    # The Gram matrix's rounding in float32, 1e-7 of the largest value, is small next to _LEAST^2.
    values, vectors = decomposed(torch.linalg.eigh, grams.double())
    top = values[..., -1:]
    seen = top > 1e8 * torch.finfo(grams.dtype).tiny
    fourth = torch.where(seen, torch.maximum(values, _LEAST**2 * top), 1.0) ** -0.25
    roots = (vectors * torch.where(seen, fourth, 0.0).unsqueeze(-2)) @ vectors.mT
    squares = torch.where(seen, values.clamp_min(0.0) * fourth.square(), 0.0).sum(dim=-1)
    return roots, squares


def root_norms(squares: Tensor) -> Tensor:
    """Factors that turn each module's norm n, given as n^2 (modules, units) after root_factors, into n^1/2; 0 for 0.

    A module whose gradient is below 1e-4 of the unit's largest may be rounding error only and is scaled towards zero:
    it gets n^5 / least^(9/2), where least is the n of a gradient of 1e-4. Rounding error must not be amplified, because
    copies of one record have the same rounding errors, and these add up.
    """
    least = (_LEAST**2 * squares.amax(dim=0)).clamp_min(_TINY)
    # n itself is the root of a raw norm: below the least, the result falls with that norm to the power of 5/2.
    return torch.maximum(squares, least) ** -0.25 * (squares / least).clamp(max=1.0) ** 2


Sums = list[tuple[Tensor, Tensor]]
"""Weighted sums of units' gradients: one (P (L, m, r), Q (L, n, r)) a group of L equal modules."""

# Units whose products are added up in the gradients' own precision; beyond that in float64. In float32 the sum of more
# that pull alike would round by what is not small next to the slack of spectral clipping.
_TOGETHER = 16
# Squares of norms are differences, which rounding may make too small: none counts as less than this part of the larger
# one. A module's two sides together are a fourth of it at least, if they are those of one gradient.
_LEAST_PART = 1e-6


@dataclass(frozen=True)
class Bases:
    """U (L, m, r) and V (L, n, r) of each group's points; or (L, units, ., r) where units meet their own."""

    left: list[Tensor]
    right: list[Tensor]
    # Norms are those of (M, Up, weight Vp).
    weight: float = 1.0


@dataclass(frozen=True)
class Evened:
    """Units' gradients with the roots of singular values and of modules' norms. PRIVATE.

    norms_squared, raw_squared: (units,) float64, in coordinates, after step one and before; NaN for a unit that is not
    finite. sides: which of P and Q it changes. roots: of each such side (sites, units, r, r) float64, what multiplies
    it from the right. cores: with ``bases`` (sites, units, r, r) float64, M of the result; None: no bases.
    """

    stacks: Stacks
    norms_squared: Tensor
    raw_squared: Tensor
    sides: tuple[int, ...]
    roots: list[Tensor]
    cores: Tensor | None = None
    bases: Bases | None = None
    owners: Tensor | None = None  # as in Captured

    def weighted_sum(self, weights: Tensor) -> Sums:
        """sum_i weights_i (P_i, Q_i), stacked by group, float64; weights: (units,). Of all units, whosever they are.

        Q's part along V is that of P along U: they are one tangent vector. A side that is not evened is left out: 0.
        """
        sums: Sums = []
        site = 0
        for g, pair in enumerate(self.stacks):
            here = slice(site, site + len(pair[0]))
            site = here.stop
            found = [torch.zeros_like(t[:, 0], dtype=torch.float64).mT for t in pair]
            for side, roots in zip(self.sides, self.roots, strict=True):
                found[side] = _products(pair[side], roots[here] * weights[:, None, None])
            if self.bases is not None and self.cores is not None:
                core = torch.einsum("u,sukl->skl", weights, self.cores[here])
                for side, basis, there in ((0, self.bases.left[g], core), (1, self.bases.right[g], core.mT)):
                    basis = basis.double()
                    found[side] += basis @ (there - basis.mT @ found[side])
            sums.append((found[0], found[1]))
        return sums

    def formed(self) -> Captured:
        """The gradients themselves, where sums over all units are not enough."""
        made: Stacks = []
        site = 0
        for g, pair in enumerate(self.stacks):
            here = slice(site, site + len(pair[0]))
            site = here.stop
            found = list(pair)
            for side, roots in zip(self.sides, self.roots, strict=True):
                found[side] = roots[here].to(pair[side]).mT @ pair[side]
            if self.bases is not None and self.cores is not None:
                core = self.cores[here].to(pair[0])
                for side, basis, there in (
                    (0, self.bases.left[g], core.mT),
                    (1, self.bases.right[g], core),
                ):
                    basis = (basis if basis.dim() == 4 else basis[:, None]).to(found[side])
                    found[side] = found[side] + (there - found[side] @ basis) @ basis.mT
            made.append((found[0], found[1]))
        return Captured.of_stacks(made, owners=self.owners)


def even(
    captured: Captured,
    sizes: Sequence[int],
    *,
    scales: Sequence[float],
    sides: tuple[int, ...] = (0, 1),
    bases: Bases | None = None,
) -> Evened:
    """Step one of spectral clipping in coordinates that are the sides' entries times a scale, or tangent to points.

    captured: units that are not finite may be set to zero in it. sizes: sites of each group. scales: of each site, what
    multiplies its entries in coordinates; with bases they must be 1. sides: those that there are coordinates of.
    """
    stacks = captured.stacked(sizes)
    grams = [torch.cat([_grams(pair[side]) for pair in stacks]) for side in sides]  # (sites, units, r, r)
    finite = torch.stack([gram.isfinite().all(dim=-1).all(dim=-1).all(dim=0) for gram in grams]).all(dim=0)
    if finite.device.type != "cpu" or not bool(finite.all()):  # elsewhere it is dearer to ask than to write
        for t in (t for pair in stacks for t in pair):
            t.masked_fill_(~finite[:, None, None], 0.0)
        grams = [torch.where(finite[:, None, None], gram, 0.0) for gram in grams]
    raw = torch.stack([gram.diagonal(dim1=-2, dim2=-1).double().sum(dim=-1) for gram in grams])
    found, rooted = root_factors(torch.stack(grams))
    cores = None
    scale = torch.tensor(scales, dtype=torch.float64, device=rooted.device)[:, None] ** 2
    measured, metric = rooted, rooted.new_ones(len(sides), 1, 1)
    if bases is not None:
        both = ((0, bases.left), (1, bases.right))
        parts = [
            _along(pair[side], basis) for side, of in both for pair, basis in zip(stacks, of, strict=True)
        ]
        along = torch.cat(parts).unflatten(0, (2, -1))
        up, vq = along @ found
        cores = (up + vq.mT) / 2
        measured = rooted - torch.stack([_squares(up) - _squares(cores), _squares(vq)])
        raw[1] -= _squares(along[1])
        metric[1] = bases.weight**2
    least = _LEAST_PART * rooted
    factors = root_norms(torch.maximum(measured, least).sum(dim=0) * scale)
    norms = (metric * torch.maximum(measured, least)).sum(dim=0) * scale * factors.square()
    spread = factors[..., None, None]
    return Evened(
        stacks,
        torch.where(finite, norms.sum(dim=0), torch.nan),
        torch.where(finite, (metric * raw.clamp_min(0.0) * scale).sum(dim=(0, 1)), torch.nan),
        sides,
        [roots * spread for roots in found],
        None if cores is None else cores * spread,
        bases,
        captured.owners,
    )


def _grams(t: Tensor) -> Tensor:
    """P^T P of each unit, (L, units, r, r), from (L, units, r, m)."""
    return t @ t.mT


def _along(t: Tensor, basis: Tensor) -> Tensor:
    """U^T P of each unit, (L, units, r, r) float64, from (L, units, r, m)."""
    if basis.dim() == 4:
        return (t @ basis.to(t)).mT.double()
    rows = t.flatten(1, 2) @ basis.to(t)
    return rows.unflatten(1, t.shape[1:3]).mT.double()


def _products(t: Tensor, roots: Tensor) -> Tensor:
    """sum_i P_i R_i, (L, m, r) float64, from (L, units, r, m) and (L, units, r, r)."""
    total: Tensor | None = None
    for some, factors in zip(t.split(_TOGETHER, dim=1), roots.to(t).split(_TOGETHER, dim=1), strict=True):
        part = (factors.flatten(1, 2).mT @ some.flatten(1, 2)).double()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.mT


def _squares(t: Tensor) -> Tensor:
    return t.square().sum(dim=(-2, -1))
