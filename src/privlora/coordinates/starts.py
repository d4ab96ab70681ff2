"""Where training starts: subspaces and factors that are computed from public inputs only.

random          the update is zero; subspaces are uniformly random (factor methods: peft's own start of lora_A).
w0-subspace     the update is zero; subspaces are the top singular vectors of the frozen weights.
public-gradient the update is zero; subspaces are given: those of the mean gradient on public texts
                (training.texts.public_gradients; factor methods take V as their right factor).
spectral-split  the update starts as the top-r part of the frozen weights, which is subtracted from them: the model is
                unchanged and Z is far from zero; the exported rank is 2r (as PRISM's authors do; PiSSA).
<folder>        the factors of an adapter that was trained before, on other data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from privlora.adapters import Group, LowRankAdapter, read_adapter
from privlora.adapters.quantised import dense_weight
from privlora.coordinates.base import Coordinates
from privlora.coordinates.factors import FactorCoordinates
from privlora.coordinates.projected import ProjectedCoordinates
from privlora.coordinates.span import SpanSpace
from privlora.coordinates.spectral_metric import SpectralMetricCoordinates
from privlora.coordinates.tangent import TangentCoordinates
from privlora.errors import ConfigError, ModelError
from privlora.geometry.fixed_rank import Point, factors, point_at_zero, point_from_factors
from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE

Subspaces = Mapping[str, tuple[Tensor, Tensor]]
"""Site name -> orthonormal U (m, r) and V (n, r), computed from public inputs only."""


def tangent_start(
    adapter: LowRankAdapter,
    init: str,
    *,
    seed: int,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    subspaces: Subspaces | None = None,
    right_weight: float = 1.0,
    metric_power: float = 0.0,
) -> TangentCoordinates:
    """Canonical points of every group of modules; ``seed`` is public. subspaces: for public-gradient. scale: unused.

    metric_power: 0 for isometric coordinates.
    """
    generator = torch.Generator().manual_seed(seed)
    if init == RANDOM:
        points = [
            point_at_zero(_normal(g, g.m, adapter, generator), _normal(g, g.n, adapter, generator))
            for g in adapter.groups
        ]
    elif init == W0_SUBSPACE:
        points = [point_at_zero(u, v) for u, _, v in (_top(g, adapter.rank, seed) for g in adapter.groups)]
    elif init == PUBLIC_GRADIENT:
        points = [point_at_zero(u, v) for u, v in (_given(g, subspaces) for g in adapter.groups)]
    elif init == SPECTRAL_SPLIT:
        points = _split(adapter, seed, generator)
    else:
        points = [
            point_from_factors(a.double(), b.double(), generator) for a, b in _read_groups(adapter, init)
        ]
    placed = [_to(p, adapter.device, dtype) for p in points]
    if metric_power:
        return SpectralMetricCoordinates(
            adapter, placed, dtype, right_weight=right_weight, power=metric_power
        )
    return TangentCoordinates(adapter, placed, dtype, right_weight=right_weight)


def factor_start(
    adapter: LowRankAdapter,
    init: str,
    *,
    seed: int,
    scale: float,
    dtype: torch.dtype = torch.float32,
    kind: type[FactorCoordinates] = FactorCoordinates,
    subspaces: Subspaces | None = None,
    **settings: float,
) -> FactorCoordinates:
    """Factors of W = W0 + scale * left right^T; left starts at zero unless an adapter or spectral-split is given.

    kind: which of them are trained, or along what, with its own ``settings``. subspaces: for public-gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs: list[tuple[Tensor, Tensor]]
    root = scale**0.5
    if init in (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT):
        right_of: Callable[[Group], Tensor]
        if init == RANDOM:  # kaiming_uniform_(a=sqrt(5)): entries uniform in +-1/sqrt(n)
            right_of = lambda g: (2 * _uniform(g, adapter, generator) - 1) / g.n**0.5  # noqa: E731
        elif init == W0_SUBSPACE:  # the same mean square entries, 1 / (3 n)
            right_of = lambda g: _top(g, adapter.rank, seed)[2] / 3**0.5  # noqa: E731
        else:
            right_of = lambda g: _given(g, subspaces)[1] / 3**0.5  # noqa: E731
        pairs = [(torch.zeros(len(g.sites), g.m, adapter.rank), right_of(g)) for g in adapter.groups]
    elif init == SPECTRAL_SPLIT:
        halves = (factors(point) for point in _split(adapter, seed, generator))
        pairs = [(a / root, b / root) for a, b in halves]
    else:
        pairs = [(a / root, b / root) for a, b in _read_groups(adapter, init)]
    placed = [(a.to(adapter.device, dtype), b.to(adapter.device, dtype)) for a, b in pairs]
    make: Callable[..., FactorCoordinates] = kind
    return make(adapter, placed, scale, dtype, **settings)


def refuse_subspace_start(init: str) -> None:
    """Raise ConfigError for a start that dense updates do not have."""
    if init in (W0_SUBSPACE, PUBLIC_GRADIENT, SPECTRAL_SPLIT):
        raise ConfigError(
            f"adapter.init={init!r} chooses subspaces, and this method draws new ones at every step",
            fix="use random, or the folder of an adapter",
        )


def projected_start(
    adapter: LowRankAdapter,
    init: str,
    *,
    seed: int,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    kind: type[ProjectedCoordinates] = ProjectedCoordinates,
    subspaces: Subspaces | None = None,
) -> ProjectedCoordinates:
    """Dense updates that are zero, or those of an adapter of the same modules and rank.

    ``seed`` is public; a WishartCoordinates' projections follow from it in tests alone. scale, subspaces: unused.
    """
    refuse_subspace_start(init)
    if init == RANDOM:
        updates = [torch.zeros(len(g.sites), g.m, g.n) for g in adapter.groups]
    else:
        updates = [a @ b.mT for a, b in _read_groups(adapter, init)]
    return kind(adapter, updates, key=seed, dtype=dtype)


def span_start(
    adapter: LowRankAdapter,
    init: str,
    *,
    seed: int,
    scale: float,
    dtype: torch.dtype = torch.float32,
    subspaces: Subspaces | None = None,
    kind: type[SpanSpace],
    inner: Callable[..., Coordinates],
    **settings: float,
) -> SpanSpace:
    """A start of ``inner`` with a span around it, whose public texts come later. settings: of ``kind``."""
    start = inner(adapter, init, seed=seed, scale=scale, dtype=dtype, subspaces=subspaces)
    make: Callable[..., SpanSpace] = kind
    return make(start, **settings)


def _split(adapter: LowRankAdapter, seed: int, generator: torch.Generator) -> list[Point]:
    """The top part of the frozen weights, which is subtracted from them (PiSSA; PRISM's own code)."""
    points = []
    for g in adapter.groups:
        # What is taken out of W0 must be the same to the bit in every process, whatever its device.
        u, s, v = _top(g, adapter.rank, seed, on=torch.device("cpu"))
        points.append(point_from_factors(u * s[:, None, :], v, generator))
        adapter.subtract(g, *factors(points[-1]))
    return points


def _normal(group: Group, rows: int, adapter: LowRankAdapter, generator: torch.Generator) -> Tensor:
    return torch.randn(len(group.sites), rows, adapter.rank, generator=generator, dtype=torch.float64)


def _uniform(group: Group, adapter: LowRankAdapter, generator: torch.Generator) -> Tensor:
    return torch.rand(len(group.sites), group.n, adapter.rank, generator=generator)


def _top(group: Group, rank: int, seed: int, on: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Top singular triplets U (L, m, r), S (L, r), V (L, n, r) of the frozen weights, on the CPU.

    By randomised SVD with a public seed, on a generator of its own. on: where it is computed; None: where weights are.
    """
    generator = torch.Generator().manual_seed(seed)
    triplets = []
    for site in group.sites:
        # One layer at a time: of packed weights no more than one is ever unpacked.
        weight = dense_weight(site.name, site.module).float()
        weight = weight if on is None else weight.to(on)
        found = _randomised_svd(weight, min(rank + 8, site.m, site.n), generator)
        u, s, v = (t.cpu() for t in found)
        triplets.append((u[:, :rank], s[:rank], v[:, :rank]))
    u, s, v = (torch.stack(ts) for ts in zip(*triplets, strict=True))
    return u, s, v


def _randomised_svd(
    weight: Tensor, k: int, generator: torch.Generator, iterations: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """U (m, k), S (k,), V (n, k) of ``weight`` (m, n), by Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1.

    torch.svd_lowrank, number for number; that draws from the global generator, whose seed belongs to the user.
    """
    wide = weight.shape[0] < weight.shape[1]
    tall = weight.mT if wide else weight
    start = torch.randn(tall.shape[1], k, generator=generator, dtype=tall.dtype).to(tall.device)
    basis = torch.linalg.qr(tall @ start).Q
    for _ in range(iterations):
        basis = torch.linalg.qr(tall.mT @ basis).Q
        basis = torch.linalg.qr(tall @ basis).Q
    u, s, vh = torch.linalg.svd(basis.mT @ tall, full_matrices=False)
    u, v = basis @ u, vh.mT
    return (v, s, u) if wide else (u, s, v)


def _given(group: Group, subspaces: Subspaces | None) -> tuple[Tensor, Tensor]:
    """U (L, m, r) and V (L, n, r) of a group, from those of its sites."""
    if subspaces is None:
        raise ConfigError(
            f"adapter.init={PUBLIC_GRADIENT!r} starts from public texts, and none are at hand",
            fix="set adapter.public_text; in Python, pass build_parts a PublicStart",
        )
    u, v = (torch.stack(ts) for ts in zip(*(subspaces[site.name] for site in group.sites), strict=True))
    return u, v


def _read_groups(adapter: LowRankAdapter, folder: str) -> list[tuple[Tensor, Tensor]]:
    found = read_adapter(folder)
    for site in adapter.sites:
        a, b = found.get(site.name, (None, None))
        expected = (site.m, adapter.rank), (site.n, adapter.rank)
        if a is None or b is None or (tuple(a.shape), tuple(b.shape)) != expected:
            raise ModelError(
                f"the adapter in {folder!r} has no factors of rank {adapter.rank} for {site.name!r}",
                fix="use the adapter.r and adapter.target_modules that it was trained with",
            )
    extra = set(found) - {site.name for site in adapter.sites}
    if extra:
        raise ModelError(
            f"the adapter in {folder!r} also adapts {min(extra)!r}",
            why="that part would be lost",
            fix="add its modules to adapter.target_modules",
        )
    return [
        (
            torch.stack([found[site.name][0] for site in g.sites]),
            torch.stack([found[site.name][1] for site in g.sites]),
        )
        for g in adapter.groups
    ]


def _to(point: Point, device: torch.device, dtype: torch.dtype) -> Point:
    return Point(point.U.to(device, dtype), point.S.to(device, dtype), point.V.to(device, dtype))
