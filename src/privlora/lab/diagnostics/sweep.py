"""Gauge sweep at a fixed Z: one update, many pairs of factors (PRISM Corollary 2.3, Figures 12 and 13)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.geometry.fixed_rank import Point, factors, point_from_factors, standard_normal_tangent
from privlora.lab.diagnostics.laws import bilinear_law, factor_noise, factor_statistic, move_norm, tangent_law

DECADES, GAUGES, DRAWS = 3.0, 61, 64
_MOST_NORMALS = 4_000_000  # of one chunk of draws
_BAND = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Band:
    """Quantiles of ||N_Z||_F over draws, one value for each gauge."""

    p10: list[float]
    median: list[float]
    p90: list[float]


@dataclass(frozen=True)
class GaugeSweep:
    """Noise on Z of one module at gauges (c left, right / c). Norms, not energies, except where a name says so.

    factors, first_order, bilinear, prism: measured bands. factor_law_energy = tau^2 S(c) + the bilinear term;
    prism_law_energy = tau^2 tr(projector), from the point that each gauge's factors give. point_distance: how far
    that point is from the point at c = 1, in its subspaces (sine), singular values and Z (relative). amplification:
    median of the factors over median of PRISM. quietest_gauge: where S(c) is least. factor_decades: orders of magnitude
    over which the law of the factor noise's energy varies. prism_variation: largest relative change, over gauges, of
    what fixes PRISM's noise law, which are its energy and its point.
    """

    module: str
    m: int
    n: int
    r: int
    noise_std: float
    draws: int
    gauges: list[float]
    first_order: Band
    bilinear: Band
    factors: Band
    prism: Band
    factor_law_energy: list[float]
    prism_law_energy: list[float]
    point_distance: list[float]
    amplification: list[float]
    quietest_gauge: float
    factor_decades: float
    prism_variation: float


@torch.no_grad()
def gauge_sweep(
    left: Tensor,
    right: Tensor,
    *,
    noise_std: float,
    seed: int,
    scale: float = 1.0,
    module: str = "",
    gauges: int = GAUGES,
) -> GaugeSweep:
    """Sweep log10 c over linspace(-DECADES, DECADES, gauges) for Z = scale * left right^T.

    left (m, r) and right (n, r): of full rank. noise_std: tau = sigma C / b. Every gauge builds its own factors, from
    them its own canonical point, and takes its own draws. Raises ModelError for rank-deficient factors.
    """
    generator = torch.Generator(left.device).manual_seed(seed)
    left, right = left.double()[None], right.double()[None]
    (m, r), n = left.shape[1:], right.shape[1]
    base = point_from_factors(scale * left, right)
    scales = (10.0 ** torch.linspace(-DECADES, DECADES, gauges, dtype=torch.float64)).tolist()
    measured: dict[str, list[Tensor]] = {}
    factor_law, prism_law, distance = [], [], []
    for c in scales:
        a, b = c * left, right / c
        point = point_from_factors(scale * a, b)
        for name, energies in _draw(a, b, scale, point, noise_std, generator).items():
            measured.setdefault(name, []).append(energies)
        first_order = noise_std**2 * float(factor_statistic(a, b, scale))
        factor_law.append(first_order + bilinear_law(m, n, r, scale, noise_std))
        prism_law.append(noise_std**2 * float(tangent_law(point)))
        distance.append(_distance(base, point))
    bands = {name: _band(torch.stack(rows)) for name, rows in measured.items()}
    medians = zip(bands["factors"].median, bands["prism"].median, strict=True)
    return GaugeSweep(
        module=module,
        m=m,
        n=n,
        r=r,
        noise_std=noise_std,
        draws=DRAWS,
        gauges=scales,
        **bands,
        factor_law_energy=factor_law,
        prism_law_energy=prism_law,
        point_distance=distance,
        amplification=[noisy / steady for noisy, steady in medians],
        quietest_gauge=(m * float(right.square().sum()) / (n * float(left.square().sum()))) ** 0.25,
        factor_decades=math.log10(max(factor_law) / min(factor_law)),
        prism_variation=max((max(prism_law) - min(prism_law)) / max(prism_law), *distance),
    )


def _draw(
    left: Tensor, right: Tensor, scale: float, point: Point, tau: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Energies (DRAWS,) of noise of standard deviation tau in the factors, and in the tangent space at the point."""

    def normal(shape: tuple[int, ...]) -> Tensor:
        return tau * torch.randn(shape, generator=generator, dtype=torch.float64, device=left.device)

    (m, r), n = left.shape[1:], right.shape[1]
    most = max(1, _MOST_NORMALS // ((m + n) * r))
    parts = []
    for start in range(0, DRAWS, most):
        k = min(most, DRAWS - start)
        d_left, d_right = normal((k, m, r)), normal((k, n, r))
        first, bilinear, both = factor_noise(
            left.expand(k, m, r), right.expand(k, n, r), d_left, d_right, scale
        )
        many = Point(point.U.expand(k, m, r), point.S.expand(k, r), point.V.expand(k, n, r))
        prism = standard_normal_tangent(many, normal).norm_squared()
        parts.append({"first_order": first, "bilinear": bilinear, "factors": both, "prism": prism})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _band(energies: Tensor) -> Band:
    """Quantiles of the norms of energies (gauges, draws)."""
    levels = torch.tensor(_BAND, dtype=torch.float64, device=energies.device)
    return Band(*(row.tolist() for row in torch.quantile(energies.sqrt(), levels, dim=1)))


def _distance(base: Point, other: Point) -> float:
    """Largest of: sines of the angles between the subspaces, relative change of S, relative change of Z."""
    sines = [
        torch.linalg.matrix_norm(new - old @ (old.mT @ new), ord=2)
        for old, new in ((base.U, other.U), (base.V, other.V))
    ]
    values = (other.S - base.S).abs().max() / base.S.max()
    whole = move_norm(factors(base), factors(other)) / base.S.norm()
    return max(float(x) for x in (*sines, values, whole))
