"""Canaries in gradient space: weight gradients that an attacker fixes, seen by the adapter as any record's would be.

A mechanism has to bound whatever gradient a record could have, so an attacker may choose it. A canary's gradient in
module s is G_s = size_s u v^T with random unit vectors u, v, whatever the state of the training: the adapter sees
P = G right and Q = G^T left for the operands of the moment, so a canary lives in every space of coordinates, also in
those that move. Far longer than the clipping norm, it enters the sum with norm C, the most that is promised; the
directions of different canaries are nearly orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import Vector
from privlora.coordinates.base import squared_norms
from privlora.coordinates.span import flattened
from privlora.errors import ConfigError
from privlora.mechanisms import MOST_RAISED, GaussianMechanism

_LARGE = 1e3  # norm of a canary; a clipping norm near it would no longer bite
_CHUNK = 64  # canaries whose P and Q are in memory at a time


@dataclass(frozen=True)
class GradientCanaries:
    """``count`` canaries. For each site s: members[s] (k_s,) are those that are not zero there, left[s] (k_s, m_s) and
    right[s] (k_s, n_s) their unit rows, sizes[s] (k_s,) float64 their Frobenius norms."""

    count: int
    members: list[Tensor]
    left: list[Tensor]
    right: list[Tensor]
    sizes: list[Tensor]

    def captured(self, adapter: LowRankAdapter, which: Tensor | None = None) -> Captured:
        """Gradients of the canaries ``which`` (int64 indices; None: all) at the adapter's present operands."""
        chosen = torch.arange(self.count) if which is None else which
        place = torch.full((self.count,), -1)
        place[chosen] = torch.arange(len(chosen))
        ps, qs = [], []
        squares = torch.zeros(len(chosen), dtype=torch.float64)
        for s, site in enumerate(adapter.sites):
            left, right = adapter.met_at(site)
            dtype = torch.promote_types(left.dtype, torch.float32)
            p = torch.zeros(len(chosen), site.m, right.shape[-1], dtype=dtype, device=adapter.device)
            q = torch.zeros(len(chosen), site.n, left.shape[-1], dtype=dtype, device=adapter.device)
            here = place[self.members[s]] >= 0
            rows = place[self.members[s][here]]
            u, v = (side[s][here].to(adapter.device, dtype) for side in (self.left, self.right))
            size = self.sizes[s][here]
            u = u * size[:, None].to(u)
            p[rows] = u[:, :, None] * (v @ right.to(dtype))[:, None]
            q[rows] = v[:, :, None] * (u @ left.to(dtype))[:, None]
            squares[rows] += size.square()
            ps.append(p)
            qs.append(q)
        return Captured(ps, qs, squares.to(adapter.device) if adapter.dense_norms else None)


def draw_canaries(
    adapter: LowRankAdapter,
    count: int,
    generator: torch.Generator,
    *,
    norm: float = _LARGE,
    site: int | None = None,
    spread: bool = True,
) -> GradientCanaries:
    """Random canaries of Frobenius norm ``norm`` each.

    spread: over all modules alike; else each canary lies in one module, all modules in turn, which takes less memory.
    site: in this module alone. A canary that is large everywhere hides a module that escapes clipping, so play each.
    """
    canaries = GradientCanaries(count, [], [], [], [])
    number = len(adapter.sites)
    for s, each in enumerate(adapter.sites):
        if site is not None:
            here = torch.arange(count if s == site else 0)
        elif spread:
            here = torch.arange(count)
        else:
            here = torch.arange(min(s, count), count, number)  # none where modules are more than canaries
        canaries.members.append(here)
        for rows, side in ((each.m, canaries.left), (each.n, canaries.right)):
            drawn = torch.randn(len(here), rows, generator=generator)
            side.append(torch.nn.functional.normalize(drawn, dim=1))
        part = norm / number**0.5 if spread and site is None else norm
        canaries.sizes.append(torch.full((len(here),), part, dtype=torch.float64))
    return canaries


def bounded(mechanism: GaussianMechanism, captured: Captured) -> tuple[Captured, Tensor, Tensor]:
    """What an honest mechanism adds of units that are longer than C: their gradients, factors (units,), and which part
    of C^2 it then has, (units,): 1, or per module less where parts are missing or weak.

    Where the coordinates say that a unit has no norm, its raw norm is taken: the audited norms may be wrong. A unit
    without any gradient gets the factor 0.
    """
    if mechanism.clip_norm > _LARGE / 10:
        what = f"clip_norm={mechanism.clip_norm:g} is too large to audit"
        raise ConfigError(what, fix=f"stay below {_LARGE / 10:g}")
    captured = mechanism.coordinates.encode(captured)
    if mechanism.clipping == "spectral":
        captured = mechanism.coordinates.evened(captured).formed()
    raw = torch.stack([_raw(t) for t in captured.p]) + torch.stack([_raw(t) for t in captured.q])
    if mechanism.clipping == "per-module":
        parts = _norms(mechanism.coordinates.module_norms_squared(captured), raw)  # (modules, units)
        most = MOST_RAISED / torch.linalg.vector_norm(parts, dim=0)
        shares = (most * parts).clamp(max=len(parts) ** -0.5).nan_to_num()
        factors = torch.where(parts > 0, mechanism.clip_norm * shares / parts, 0.0)
        both = (zip(ts, factors, strict=True) for ts in (captured.p, captured.q))
        p, q = ([t * f[:, None, None].to(t) for t, f in pairs] for pairs in both)
        return Captured(p, q), torch.ones_like(shares[0]), shares.square().sum(dim=0)
    norms = _norms(mechanism.coordinates.norms_squared(captured), raw.sum(dim=0))
    return captured, torch.where(norms > 0, mechanism.clip_norm / norms, 0.0), torch.ones_like(norms)


def bounded_chunks(
    mechanism: GaussianMechanism, canaries: GradientCanaries, which: Tensor
) -> Iterator[tuple[Captured, Tensor, Tensor]]:
    """``bounded`` of the canaries ``which``, a few at a time: their P and Q take memory."""
    for chunk in which.split(_CHUNK):
        yield bounded(mechanism, canaries.captured(mechanism.coordinates.adapter, chunk))


def _raw(t: Tensor) -> Tensor:
    return squared_norms(t.double())


def _norms(squares: Tensor, raw: Tensor) -> Tensor:
    return torch.where(squares > 0, squares, raw).sqrt()


def alignments(
    mechanism: GaussianMechanism, canaries: GradientCanaries, released: Vector
) -> tuple[Tensor, Tensor]:
    """(<release, unit> b / C^2, ||unit||^2 / C^2) for each canary's contribution, two (count,) float64 on the CPU.

    The first is N(sampled ||unit||^2 / C^2, sigma^2 ||unit||^2 / C^2) if nothing else stands in the canary's direction.
    The second is 1 but where a projection comes after clipping, or each module is clipped by itself. At the present
    state of the coordinates.
    """
    coordinates = mechanism.coordinates
    sides: list[list[Tensor]] = []  # of each site
    products, energies = [], []
    for captured, factors, whole in bounded_chunks(mechanism, canaries, torch.arange(canaries.count)):
        if captured.columns is not None:  # what enters the sum: perhaps no linear function of the gradient
            inner = captured.columns @ flattened(released).to(captured.columns)
        else:
            if not sides:
                pulled = coordinates.pull_back(released)
                sides = [[t for pair in pulled for t in pair[side]] for side in (0, 1)]
            pairs = zip([*captured.p, *captured.q], [*sides[0], *sides[1]], strict=True)
            parts = [torch.einsum("uab,ab->u", t, x.to(t.dtype)).double() for t, x in pairs]
            inner = torch.stack(parts).sum(dim=0)
        products.append((factors * inner).cpu())
        energies.append((coordinates.released_share(captured).to(whole) * whole).cpu())
    scale = mechanism.expected_batch_size / mechanism.clip_norm**2
    return torch.cat(products) * scale, torch.cat(energies)
