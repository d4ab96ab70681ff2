"""Small problems for every optimizer of every space: a loss of the dense updates Z of two shapes of modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny_models import tiny_model
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates import (
    Coordinates,
    DirectionCoordinates,
    FactorCoordinates,
    OneFactorCoordinates,
    ProjectedCoordinates,
    PublicGradients,
    SpanSpace,
    TangentCoordinates,
    Vector,
    WishartCoordinates,
)
from privlora.geometry.fixed_rank import Point, random_point
from privlora.mechanisms import Release
from privlora.methods import METHODS, SPACES, make_optimizer

RANK, SCALE = 3, 2.0
SPANS = {row.space for row in METHODS.values() if row.public_texts}
EVERY_OPTIMIZER = sorted({(row.space, optimizer) for row in METHODS.values() for optimizer in row.optimizers})
Dense = list[Tensor]  # (L, m, n) a group


def label(pair: tuple[str, str]) -> str:
    return ":".join(pair)


def coordinates_at(adapter: LowRankAdapter, space: str, points: list[Point]) -> Coordinates:
    """The points in a space; factor spaces hold them as left = U S / s, right = V, projected ones as products."""
    if space.startswith("tangent") and space not in SPANS:
        return TangentCoordinates(adapter, points, points[0].S.dtype)
    if space in ("projected", "wishart"):
        dense_kind = WishartCoordinates if space == "wishart" else ProjectedCoordinates
        updates = [p.U * p.S[:, None] @ p.V.mT for p in points]
        return dense_kind(adapter, updates, dtype=points[0].S.dtype)
    if space in SPANS:
        inner = coordinates_at(adapter, "tangent" if "tangent" in space else "factors", points)
        found: Coordinates = SPACES[space].coordinates(inner)  # type: ignore[arg-type]
        return found
    own: dict[str, type[FactorCoordinates]] = {
        "one-factor": OneFactorCoordinates,
        "direction": DirectionCoordinates,
    }
    kind = own.get(space, FactorCoordinates)
    pairs = [(p.U * p.S[:, None] / SCALE, p.V) for p in points]
    return kind(adapter, pairs, SCALE, points[0].S.dtype)


def dense(coordinates: Coordinates) -> Dense:
    return [a @ b.mT for a, b in coordinates.factors()]


def to_vector(coordinates: Coordinates, gradients: Dense) -> Vector:
    """Coordinates of dense gradients, through P = G right and Q = G^T left of what the model has installed."""
    raw: Vector = []
    for group, g in zip(coordinates.adapter.groups, gradients, strict=True):
        left, right = (torch.stack([getattr(s, side) for s in group.sites]) for side in ("left", "right"))
        raw.append((g @ right, g.mT @ left))
    return coordinates.to_vector(raw)


class Problem:
    """A loss of Z, an optimizer of a space on it, and its steps with or without noise.

    The start has singular values of order 1, or is zero (random subspaces) where ``from_zero`` is set. Targets lie in
    the row space of the frozen factor where one is frozen: nothing else can be reached.
    """

    def __init__(
        self,
        space: str,
        optimizer: str,
        loss: Callable[[Dense, Dense], Tensor] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        target_rank: int = RANK,
        from_zero: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.adapter = LowRankAdapter(
            tiny_model(dtype=dtype), rank=RANK, target_modules=["q_proj", "down_proj"]
        )
        self.loss_of = loss or low_rank_recovery
        points, self.targets = [], []
        for g in self.adapter.groups:
            start, target = (random_point(len(g.sites), g.m, g.n, RANK, generator, dtype) for _ in "ab")
            points.append(Point(start.U, torch.zeros_like(start.S), start.V) if from_zero else start)
            right = start.V if space == "one-factor" else target.V
            self.targets.append((target.U * target.S[:, None])[..., :target_rank] @ right.mT[:, :target_rank])
        self.coordinates = coordinates_at(self.adapter, space, points)
        if isinstance(self.coordinates, SpanSpace):
            self.coordinates.refresh = self.public_gradients
        settings = SPACES[space].optimizers[optimizer].settings
        self.optimizer = make_optimizer(space, optimizer, self.coordinates, settings)

    def loss(self) -> float:
        return float(self.loss_of(dense(self.coordinates), self.targets))

    def gradients(self) -> Dense:
        at = [z.detach().requires_grad_(True) for z in dense(self.coordinates)]
        return list(torch.autograd.grad(self.loss_of(at, self.targets), at))

    def public_gradients(self) -> PublicGradients:
        """Those of the loss, and of four other matrices: the gradient lies in their span."""
        inner = self.coordinates.inner  # type: ignore[attr-defined]
        generator, gradients = torch.Generator().manual_seed(4), self.gradients()
        others = [
            [torch.randn(g.shape, generator=generator, dtype=g.dtype) for g in gradients] for _ in range(4)
        ]
        vectors = [to_vector(inner, each) for each in (gradients, *others)]
        rows = [torch.cat([t.flatten() for parts in vector for t in parts]) for vector in vectors]
        return PublicGradients(torch.stack([row / row.norm().clamp_min(1e-12) for row in rows]))

    def release(self, noise_std: float = 0.0) -> Release:
        """noise_std: of the gradient that the release stands for, on average over its entries."""
        self.coordinates.prepare()
        if isinstance(self.coordinates, SpanSpace):
            noise_std /= self.coordinates.decoded_std(1.0)
        noise = self.coordinates.standard_normal(
            lambda shape: torch.randn(shape, dtype=self.coordinates.dtype)
        )
        clean = to_vector(self.coordinates, self.gradients())
        vector = [
            tuple(t + noise_std * xi for t, xi in zip(parts, xis, strict=True))
            for parts, xis in zip(clean, noise, strict=True)
        ]
        return Release(vector, noise_std, step=1)

    def step(self, learning_rate: float, noise_std: float = 0.0) -> None:
        self.optimizer.step(self.release(noise_std), learning_rate)
        self.coordinates.advance()


def low_rank_recovery(z: Dense, targets: Dense) -> Tensor:
    """||Z - target||^2 / 2."""
    return sum(((a - b).square().sum() for a, b in zip(z, targets, strict=True)), torch.zeros(())) / 2


def quadratic(z: Dense, targets: Dense) -> Tensor:
    """A quadratic whose curvatures span a factor of 100 over the rows of each matrix."""
    total = torch.zeros(())
    for a, b in zip(z, targets, strict=True):
        curvature = torch.logspace(-1, 1, a.shape[1], dtype=a.dtype)[:, None]
        total = total + (curvature * (a - b).square()).sum()
    return total / 2


def logistic(z: Dense, targets: Dense) -> Tensor:
    """Cross-entropy of softmax(Z x) on 64 fixed inputs a module, whose labels are the largest of target x."""
    total = torch.zeros(())
    for a, b in zip(z, targets, strict=True):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, a.shape[2], generator=generator, dtype=a.dtype)
        logits, labels = x @ a.mT, (x @ b.mT).argmax(dim=-1)
        total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return total


LOSSES = {"quadratic": quadratic, "recovery": low_rank_recovery, "logistic": logistic}
