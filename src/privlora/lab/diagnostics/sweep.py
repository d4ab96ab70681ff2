"""Sizes of noise and of moves on Z, for low-rank pairs batched over L modules; no m x n matrix is formed.

Notation: left (L, m, r), right (L, n, r), Z = scale * left right^T; every function computes in float64. `gauge_sweep`
shows the laws at a fixed Z: one update, many pairs of factors (PRISM Corollary 2.3, Figures 12 and 13).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.coordinates import Vector
from privlora.geometry.fixed_rank import Point, factors, point_from_factors, standard_normal_tangent


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


def _chi_square_bound(degrees: int, failure: float) -> float:
    """What a chi-square variable exceeds with probability ``failure`` at most (PRISM Proposition A.24)."""
    t = math.log(1 / failure)
    return degrees + 2 * math.sqrt(degrees * t) + 2 * t


def bilinear_bound(m: int, n: int, r: int, noise_std: float, failure: float) -> float:
    """What ||xi_left xi_right^T||_F exceeds with probability 2 ``failure`` at most (PRISM Lemma A.5)."""
    return noise_std**2 * math.sqrt(_chi_square_bound(m * r, failure) * _chi_square_bound(n * r, failure))


def tangent_bound(m: int, n: int, r: int, noise_std: float, failure: float) -> float:
    """What the norm of PRISM's noise on Z exceeds with probability ``failure`` at most (PRISM Eq. 48)."""
    return noise_std * math.sqrt(_chi_square_bound(r * (m + n - r), failure))


def federated_noise(
    left: Tensor, right: Tensor, noise_std: float, clients: int
) -> dict[str, tuple[float, float]]:
    """Linear and quadratic part of the noise's energy on a mean of ``clients`` updates (FedASK Lemma 1, put right).

    noise_std: tau, of one client's factors, all of which start at left (m, r) and right (n, r). The paper's linear part
    has another factor r. "one factor": only right is noised (FedASK, FFA). "both, products averaged": FedEx, FlexLoRA.
    "both, factors averaged": FedAvg.
    """
    (m, r), n, square = left.shape, right.shape[0], noise_std**2
    linear = square * float(factor_statistic(left[None], right[None], 1.0)) / clients
    quadratic = bilinear_law(m, n, r, 1.0, noise_std)
    return {
        "one factor": (square * n * float(_squares(left)) / clients, 0.0),
        "both, products averaged": (linear, quadratic / clients),
        "both, factors averaged": (linear, quadratic / clients**2),
    }


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
