"""The same update in other factors goes through a whole federation of tan or joint in the same way.

Noise is drawn in a space's own coordinates, so under one seed it differs with the gauge. Here it is the projection of
one m x n matrix of normals, which has the same law and depends on the tangent space alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated_cases import Federation, drawing, everyone, owners, settings_of, without_noise
from tiny_models import everything_in_double, tiny_model
from torch import Tensor

from privlora.coordinates.base import Vector
from privlora.coordinates.tangent import TangentCoordinates
from privlora.federated.server import RuleServer
from privlora.geometry.fixed_rank import Point, point_from_factors
from privlora.mechanisms import Release, SumMechanism, noising
from privlora.training.models import adapter_for

NAMES = ["owner-0", "owner-1"]
RELEASE = SumMechanism.release


def ambient(point: Point, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates (M, Up, Vp) of the projection of (L, m, n) on the tangent space."""
    left, right = drawn @ point.V, drawn.mT @ point.U
    M = point.U.mT @ left
    return M, left - point.U @ M, right - point.V @ M.mT


def normals(self: TangentCoordinates, seed: int) -> Vector:
    made: Vector = []
    for g, point in enumerate(self.points):
        exact = point.to(point.U.double())
        rng = torch.Generator().manual_seed(1000 * seed + g)
        shape = exact.U.shape[0], exact.U.shape[1], exact.V.shape[1]
        made.append(ambient(exact, torch.randn(shape, generator=rng, dtype=torch.float64)))
    return made


def federated(folder: Path, rule: str, start: list[Point], patch: pytest.MonkeyPatch) -> list[Tensor]:
    drawing(patch, everyone)
    patch.setattr(noising, "grid_width", lambda noise_std: 0.0)  # its axes are those of a gauge
    steps = iter(range(1, 100))
    if rule == "joint":
        without_noise(patch)

        def noised(self: SumMechanism, total: np.ndarray, step: int, *, shares: int) -> Release:
            """Noise of a known gauge in the place of the shares'."""
            release = RELEASE(self, total, step, shares=shares)
            xi = normals(self.coordinates, step)  # type: ignore[arg-type]
            tau = release.noise_std
            vector = [
                tuple(t + tau * n.to(t) for t, n in zip(*pair, strict=True))
                for pair in zip(release.vector, xi, strict=True)
            ]
            return Release(vector, tau, step, release.clip_norm)

        patch.setattr(SumMechanism, "release", noised)
    else:
        patch.setattr(TangentCoordinates, "standard_normal", lambda self, draw: normals(self, next(steps)))
    chosen = settings_of(rule, NAMES, federation={"rounds": 3}, privacy={"clip_norm": 0.3})
    made = Federation(folder, chosen, owners(2), model=tiny_model(dtype=torch.float64))
    if isinstance(made.server, RuleServer):
        made.server.rule.start_at(start)
    else:
        state = made.parts.coordinates.state_dict()
        made.parts.coordinates.load_state_dict(
            {**state, **{f"{g}.{n}": getattr(p, n) for g, p in enumerate(start) for n in "USV"}}
        )
    return made.run().updates()


def starts(kind: str) -> tuple[list[Point], list[Point]]:
    """One update of each group twice, in factors of two gauges."""
    model = tiny_model(dtype=torch.float64)
    chosen = settings_of("tan", NAMES)
    rng = torch.Generator().manual_seed(3)
    pairs: tuple[list[Point], list[Point]] = ([], [])
    for group in adapter_for(chosen, model).groups:
        L, m, n, r = len(group.sites), group.m, group.n, 2

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        if kind == "zero":
            U, V = torch.linalg.qr(normal(L, m, r)).Q, torch.linalg.qr(normal(L, n, r)).Q
            turned = [torch.linalg.qr(normal(L, r, r)).Q for _ in "UV"]
            S = torch.zeros(L, r, dtype=torch.float64)
            pairs[0].append(Point(U, S, V))
            pairs[1].append(Point(U @ turned[0], S, V @ turned[1]))
            continue
        A, B, gauge = 0.1 * normal(L, m, r), normal(L, n, r), normal(L, r, r) + 3 * torch.eye(r).double()
        for found, (a, b) in zip(pairs, ((A, B), (A @ gauge, B @ torch.linalg.inv(gauge).mT)), strict=True):
            found.append(point_from_factors(a, b, torch.Generator().manual_seed(len(found))))
    return pairs


@pytest.mark.parametrize("rule", ["tan", "joint"])
@pytest.mark.parametrize("kind", ["zero", "update"])
def test_the_gauge_of_the_start_makes_no_difference(
    rule: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding for tan; joint's lattice has axes of its own, and rounds each gauge by up to half a step of it."""
    found: list[Any] = []
    with everything_in_double():
        for k, start in enumerate(starts(kind)):
            with monkeypatch.context() as patch:
                found.append(federated(tmp_path / str(k), rule, start, patch))
    for a, b in zip(*found, strict=True):
        assert float((a - b).norm()) <= (1e-9 if rule == "tan" else 1e-5) * float(b.norm())
