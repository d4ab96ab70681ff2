"""How much the noise of one step moves each weight matrix: in closed form, and measured on fresh draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from privlora.coordinates import (
    Coordinates,
    FactorCoordinates,
    OneFactorCoordinates,
    ProjectedCoordinates,
    TangentCoordinates,
    Vector,
)
from privlora.mechanisms import NoiseSource

_MOST_DRAWS = 32
# More draws of a large adapter would take longer and say little more: a draw averages over its coordinates.
_MOST_NORMALS = 40_000_000


@torch.no_grad()
def noise_on_weights(coordinates: Coordinates, noise_std: float) -> dict[str, Any]:
    """Root mean square of ||effect of the noise on W||_F for each module, to first order at its state.

    noise_std: tau = sigma C / b. "closed_form" is tau sqrt(r (m + w^2 (n - r))) in tangent coordinates (PRISM
    Eq. 21 for w = 1), tau s sqrt(m ||right||^2 + n ||left||^2) in factor coordinates (PRISM Prop. 2.2, Eq. 8),
    tau s sqrt(m) ||right|| where left alone is trained, and tau sqrt(m r) (n / r) / scale through a projection.
    "measured" takes fresh draws: the norm of the noise that a release contains must stay secret, because it
    would help to subtract that noise.
    """
    source = NoiseSource()
    draws = max(2, min(_MOST_DRAWS, _MOST_NORMALS // coordinates.dimension))

    def draw(shape: tuple[int, ...]) -> Tensor:
        return source.standard_normal(shape).to(coordinates.adapter.device, coordinates.dtype)

    groups = coordinates.adapter.groups
    squares = [
        torch.zeros(len(g.sites), dtype=torch.float64, device=coordinates.adapter.device) for g in groups
    ]
    for _ in range(draws):
        for total, (left, right) in zip(
            squares, _effect(coordinates, coordinates.standard_normal(draw)), strict=True
        ):
            total += _product_norm_squared(left.double(), right.double())
    modules = {
        site.name: {
            "closed_form": noise_std * float(expected[k]) ** 0.5,
            "measured": noise_std * float(total[k] / draws) ** 0.5,
        }
        for group, expected, total in zip(groups, _expected_squares(coordinates), squares, strict=True)
        for k, site in enumerate(group.sites)
    }
    return {"draws": draws, "modules": modules}


def _effect(coordinates: Coordinates, noise: Vector) -> list[tuple[Tensor, Tensor]]:
    """The change of W as left right^T, (L, m, 2r) and (L, n, 2r), for each group."""
    if isinstance(coordinates, TangentCoordinates):
        return [
            (torch.cat([p.U @ M + Up, p.U], dim=-1), torch.cat([p.V, coordinates.right_weight * Vp], dim=-1))
            for p, (M, Up, Vp) in zip(coordinates.points, noise, strict=True)
        ]
    if isinstance(coordinates, ProjectedCoordinates):
        return [
            (c, coordinates.estimate_factor(g) * q)
            for g, ((c,), q) in enumerate(zip(noise, coordinates.projections, strict=True))
        ]
    assert isinstance(coordinates, FactorCoordinates)
    s = coordinates.scale
    if isinstance(coordinates, OneFactorCoordinates):
        return [(s * d_left, right) for right, (d_left,) in zip(coordinates.right, noise, strict=True)]
    return [
        (s * torch.cat([d_left, left], dim=-1), torch.cat([right, d_right], dim=-1))
        for left, right, (d_left, d_right) in zip(coordinates.left, coordinates.right, noise, strict=True)
    ]


def _expected_squares(coordinates: Coordinates) -> list[Tensor]:
    """E||change of W||_F^2 for unit noise, (L,) for each group."""
    if isinstance(coordinates, TangentCoordinates):
        r, w = coordinates.adapter.rank, coordinates.right_weight
        return [
            torch.full((len(g.sites),), r * (g.m + w**2 * (g.n - r)), dtype=torch.float64)
            for g in coordinates.adapter.groups
        ]
    if isinstance(coordinates, ProjectedCoordinates):
        rank, groups = coordinates.adapter.rank, coordinates.adapter.groups
        return [
            torch.full((len(g.sites),), g.m * rank * coordinates.estimate_factor(k) ** 2, dtype=torch.float64)
            for k, g in enumerate(groups)
        ]
    assert isinstance(coordinates, FactorCoordinates)
    noisy_right = not isinstance(coordinates, OneFactorCoordinates)
    return [
        coordinates.scale**2 * (g.m * _squares(right.double()) + noisy_right * g.n * _squares(left.double()))
        for g, left, right in zip(
            coordinates.adapter.groups, coordinates.left, coordinates.right, strict=True
        )
    ]


def _product_norm_squared(left: Tensor, right: Tensor) -> Tensor:
    """||left right^T||_F^2 without forming the product."""
    return ((left.mT @ left) * (right.mT @ right)).sum(dim=(-2, -1))


def _squares(t: Tensor) -> Tensor:
    return t.square().sum(dim=(-2, -1))
