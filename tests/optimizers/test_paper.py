"""PRISM's algorithm against a loop in numpy from the paper: of dense matrices, in factors of a gauge of their own."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_sylvester, sqrtm
from tiny_models import tiny_model

from privlora.adapters import LowRankAdapter
from privlora.coordinates import TangentCoordinates
from privlora.coordinates.starts import tangent_start
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import point_from_factors, project_dense, random_point
from privlora.mechanisms import Release
from privlora.optimizers import PAPER_OPTIMIZERS

RANK, TAU, RATE, STEPS = 3, 0.02, 0.05, 10
BETA1, BETA2, CLIP_NORM = 0.9, 0.999, 0.3
Matrix = NDArray[np.float64]


class Literal:
    """One module. Its factors are balanced, turned by any orthogonal matrix at the start, and aligned from then on."""

    def __init__(self, z: Matrix, name: str, generator: np.random.Generator) -> None:
        self.name, self.t = name, 0
        u, s, vt = np.linalg.svd(z)
        turn = np.linalg.qr(generator.normal(size=(RANK, RANK)))[0]
        root = np.sqrt(s[:RANK])
        self.A, self.B = (u[:, :RANK] * root) @ turn, (vt[:RANK].T * root) @ turn
        self.mA, self.mB = np.zeros_like(self.A), np.zeros_like(self.B)
        self.VA, self.VB = np.zeros((RANK, RANK)), np.zeros((RANK, RANK))

    def tangent(self, g: Matrix) -> Matrix:
        """Eq. 13."""
        pa, pb = self.A @ np.linalg.pinv(self.A), self.B @ np.linalg.pinv(self.B)
        return pa @ g + g @ pb - pa @ g @ pb

    def lift(self, g: Matrix) -> tuple[Matrix, Matrix]:
        """Eq. 14, or by the Sylvester equation (39)."""
        A, B = self.A, self.B
        M, N = A.T @ A, B.T @ B
        xi = self.tangent(g)
        eye_m, eye_n = np.eye(len(A)), np.eye(len(B))
        da = (eye_m - 0.5 * A @ np.linalg.pinv(A)) @ xi @ B @ np.linalg.inv(N)
        db = (eye_n - 0.5 * B @ np.linalg.pinv(B)) @ xi.T @ A @ np.linalg.inv(M)
        if self.name == "minimum-norm":
            omega = solve_sylvester(M, N, db.T @ B - A.T @ da)  # printed as B^T dB, which is its transpose
            da, db = da + A @ omega, db - B @ omega.T
        np.testing.assert_allclose(da @ B.T + A @ db.T, xi, atol=1e-10)
        return da, db

    def noise(self) -> tuple[Matrix, Matrix]:
        """E[dA^T dA] and E[dB^T dB] of white noise: the sum over all unit matrices."""
        m, n = len(self.A), len(self.B)
        units = np.eye(m * n).reshape(m * n, m, n)
        pairs = [self.lift(unit) for unit in units]
        return sum(a.T @ a for a, _ in pairs), sum(b.T @ b for _, b in pairs)

    def direction(self, g: Matrix) -> tuple[Matrix, Matrix]:
        self.t += 1
        m, n = len(self.A), len(self.B)
        da, db = self.lift(g)
        ca, cb = (TAU**2 * c for c in self.noise()) if self.name != "no-debiasing" else (0.0, 0.0)
        self.mA, self.mB = BETA1 * self.mA + (1 - BETA1) * da, BETA1 * self.mB + (1 - BETA1) * db
        self.VA = BETA2 * self.VA + (1 - BETA2) * (da.T @ da - ca) / m
        self.VB = BETA2 * self.VB + (1 - BETA2) * (db.T @ db - cb) / n
        floors = [TAU**2 * np.trace(np.linalg.inv(X.T @ X)) / RANK for X in (self.B, self.A)]  # Eq. 26
        made = []
        for mean, V, floor in ((self.mA, self.VA, floors[0]), (self.mB, self.VB, floors[1])):
            if self.name == "bias-correction":
                mean, V = mean / (1 - BETA1**self.t), V / (1 - BETA2**self.t)
            w, e = np.linalg.eigh((V + V.T) / 2)
            w = np.maximum(w, 0) + (0.0 if self.name == "no-floor" else floor)
            if self.name != "no-condition-bound":
                w = np.maximum(w, w.max() / 1e4)
            made.append(mean @ np.linalg.inv(sqrtm(e @ np.diag(w + 1e-24) @ e.T).real))
        return made[0], made[1]

    def move(self, ua: Matrix, ub: Matrix) -> None:
        A, B = self.A, self.B
        z = A @ B.T - ua @ B.T - A @ ub.T
        u, s, vt = np.linalg.svd(z)
        root = np.sqrt(s[:RANK])
        new_a, new_b = u[:, :RANK] * root, vt[:RANK].T * root
        if self.name != "no-alignment":
            p, _, qt = np.linalg.svd(new_a.T @ A + new_b.T @ B)
            new_a, new_b = new_a @ p @ qt, new_b @ p @ qt
        self.A, self.B = new_a, new_b


@pytest.mark.parametrize("name", PAPER_OPTIMIZERS)
def test_it_is_the_papers_loop(name: str) -> None:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=RANK, target_modules=["q_proj", "up_proj"])
    generator, numbers = torch.Generator().manual_seed(0), np.random.default_rng(1)
    points = [random_point(len(g.sites), g.m, g.n, RANK, generator) for g in adapter.groups]
    ours = TangentCoordinates(adapter, points, torch.float64)
    # Without alignment moments live in the frames of singular vectors, so the loop takes ours where it starts.
    loops = [[Literal(z.numpy(), name, numbers) for z in point.embedding()] for point in points]
    optimizer = PAPER_OPTIMIZERS[name](ours, beta1=BETA1, beta2=BETA2)
    sizes = []
    for _ in range(STEPS):
        gradients = [
            torch.from_numpy(TAU * numbers.normal(size=(len(p.S), len(p.U[0]), len(p.V[0])))) for p in points
        ]
        gradients = [g + 0.1 for g in gradients]
        at = [project_dense(p, g) for p, g in zip(ours.points, gradients, strict=True)]
        release = Release([(t.M, t.Up, t.Vp) for t in at], TAU, 1, CLIP_NORM)
        if name == "no-alignment":
            for point, modules in zip(ours.points, loops, strict=True):
                for k, loop in enumerate(modules):
                    root = point.S[k].sqrt()
                    loop.A, loop.B = (point.U[k] * root).numpy(), (point.V[k] * root).numpy()
        steps = [
            [
                tuple(RATE * x for x in loop.direction(g.numpy()))
                for loop, g in zip(modules, of_group, strict=True)
            ]
            for modules, of_group in zip(loops, gradients, strict=True)
        ]
        flat = list(zip(chain(*loops), chain(*steps), strict=True))
        size = np.sqrt(sum(np.sum((a @ loop.B.T + loop.A @ b.T) ** 2) for loop, (a, b) in flat))
        factor = min(1.0, CLIP_NORM / size) if name != "no-cap" else 1.0
        sizes.append(size)
        for loop, (a, b) in flat:
            loop.move(factor * a, factor * b)
        optimizer.step(release, RATE)
        for point, modules in zip(ours.points, loops, strict=True):
            for z, loop in zip(point.embedding(), modules, strict=True):
                np.testing.assert_allclose(z.numpy(), loop.A @ loop.B.T, atol=1e-10)
    assert name != "paper" or min(sizes) < CLIP_NORM < max(sizes)  # the cap is at work in some steps


def test_it_is_refused_at_zero() -> None:
    adapter = LowRankAdapter(tiny_model(), rank=RANK)
    with pytest.raises(ConfigError, match="cannot leave an adapter of zeros"):
        PAPER_OPTIMIZERS["paper"](tangent_start(adapter, "random", seed=0))
    one = tangent_start(LowRankAdapter(tiny_model(), rank=RANK), "spectral-split", seed=0)
    one.points[0].S[0] = 0  # a single module
    with pytest.raises(ConfigError, match="cannot leave an adapter of zeros"):
        PAPER_OPTIMIZERS["paper"](one)


@pytest.mark.parametrize("name", PAPER_OPTIMIZERS)
def test_directions_that_have_vanished_are_dropped(name: str) -> None:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=RANK, target_modules=["q_proj"])
    a, b = (torch.randn(2, 16, RANK, dtype=torch.float64) for _ in range(2))
    a[..., -1] = 1e-9 * a[..., -1]
    c = TangentCoordinates(adapter, [point_from_factors(a, b)], torch.float64)
    optimizer = PAPER_OPTIMIZERS[name](c)
    for _ in range(5):
        noise = c.standard_normal(lambda shape: 0.1 * torch.randn(shape, dtype=torch.float64))
        optimizer.step(Release(noise, 0.1, 1), 0.01)
    assert all(torch.isfinite(t).all() for t in c.state_dict().values())
    assert all(torch.isfinite(t).all() for t in optimizer.state_dict().values())
