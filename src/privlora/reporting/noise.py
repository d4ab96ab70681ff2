"""How much the noise of one step moves each weight matrix: in closed form, and measured on draws of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from privlora.coordinates import Coordinates
from privlora.mechanisms import NoiseSource

_MOST_DRAWS = 32
_SEED = 0
# More draws of a large adapter would take longer and say little more: a draw averages over its coordinates.
_MOST_NORMALS = 40_000_000


@torch.no_grad()
def noise_on_weights(coordinates: Coordinates, noise_std: float) -> dict[str, Any]:
    """Root mean square of ||effect of the noise on W||_F for each module, to first order at its state.

    noise_std: tau = sigma C / b. "closed_form" is None where the coordinates know none. "measured" takes draws that are
    in no release: the norm of the noise there must stay secret, because it would help to subtract it. They are public,
    and the same each time, so that a report which is made anew says the same.
    """
    source = NoiseSource(_SEED)
    draws = max(2, min(_MOST_DRAWS, _MOST_NORMALS // coordinates.dimension))

    def draw(shape: tuple[int, ...]) -> Tensor:
        return source.standard_normal(shape).to(coordinates.adapter.device, coordinates.dtype)

    coordinates.install()  # effects are at the installed state
    sites = coordinates.adapter.sites
    squares = torch.zeros(len(sites), dtype=torch.float64)
    for _ in range(draws):
        effect = coordinates.weight_effect(coordinates.standard_normal(draw))
        squares += torch.cat([_product_norm_squared(a.double(), b.double()) for a, b in effect]).cpu()
    known: Sequence[float | None] = coordinates.expected_squares() or [None] * len(sites)
    modules = {
        site.name: {
            "closed_form": None if expected is None else noise_std * expected**0.5,
            "measured": noise_std * (total / draws) ** 0.5,
        }
        for site, expected, total in zip(sites, known, squares.tolist(), strict=True)
    }
    return {"draws": draws, "modules": modules}


def _product_norm_squared(left: Tensor, right: Tensor) -> Tensor:
    """||left right^T||_F^2 without forming the product."""
    return ((left.mT @ left) * (right.mT @ right)).sum(dim=(-2, -1))
