"""LoRA-RITE: no factoring of W changes its steps, and its steps are the paper's in cases that can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from optimizer_cases import LOSSES, RANK, SCALE, Problem, dense, to_vector
from torch import Tensor

from privlora.coordinates import FactorCoordinates
from privlora.mechanisms import Release
from privlora.optimizers import FactorAdamW, FactorLamb, FactorRiemannian, FactorRite, Optimizer

STEPS, RATE = 25, 0.02


def transforms(coordinates: FactorCoordinates, condition: float) -> list[Tensor]:
    """An invertible T (L, r, r) of that condition number for each group."""
    generator = torch.Generator().manual_seed(7)
    spectrum = torch.logspace(0, float(torch.tensor(condition).log10()), RANK, dtype=torch.float64) / 3
    found = []
    for left in coordinates.left:
        q1, q2 = (
            torch.linalg.qr(torch.randn(len(left), RANK, RANK, generator=generator, dtype=torch.float64)).Q
            for _ in range(2)
        )
        found.append((q1 * spectrum) @ q2.mT)
    return found


def trajectory(kind: type[Optimizer], condition: float | None, loss: str = "quadratic") -> list[Tensor]:
    """Z after each noiseless step; from (left T, right T^-T) if a condition number of T is given."""
    problem: Any = Problem("factors", "rite", LOSSES[loss], dtype=torch.float64)
    c = problem.coordinates
    pairs = list(zip(c.left, c.right, strict=True))
    if condition is not None:
        pairs = [
            (a @ t, torch.linalg.solve(t, b.mT).mT)
            for (a, b), t in zip(pairs, transforms(c, condition), strict=True)
        ]
    # W = s left right^T, so right carries T^-T.
    problem.coordinates = FactorCoordinates(c.adapter, pairs, SCALE, torch.float64)
    make: Any = kind
    problem.optimizer = make(problem.coordinates)
    points = [torch.cat([z.flatten() for z in dense(problem.coordinates)])]
    for _ in range(STEPS):
        problem.step(RATE)
        points.append(torch.cat([z.flatten() for z in dense(problem.coordinates)]))
    return points


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("condition", [1.0, 30.0, 1000.0])
def test_every_factoring_gives_the_same_trajectory(loss: str, condition: float) -> None:
    plain, other = trajectory(FactorRite, None, loss), trajectory(FactorRite, condition, loss)
    assert float((plain[-1] - plain[0]).norm()) > 0.2 * float(plain[0].norm())
    for one, two in zip(plain, other, strict=True):
        assert float((one - two).norm()) < 1e-6 * float(one.norm())


@pytest.mark.parametrize("kind", [FactorAdamW, FactorLamb, FactorRiemannian])
def test_the_other_rules_do_not_have_this(kind: type[Optimizer]) -> None:
    plain, other = trajectory(kind, None), trajectory(kind, 30.0)
    assert float((plain[-1] - other[-1]).norm()) > 1e-2 * float(plain[-1].norm())


def start() -> tuple[Any, FactorRite]:
    problem: Any = Problem("factors", "rite", dtype=torch.float64)
    return problem.coordinates, problem.optimizer


def test_the_first_step_is_the_polar_factor_of_the_unmagnified_gradient() -> None:
    """g (g^T g / m)^-1/2 = sqrt(m) polar(g), and W moves by it along the other factor's orthonormal basis."""
    c, optimizer = start()
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(len(a), a.shape[1], b.shape[1], generator=generator, dtype=torch.float64)
        for a, b in zip(c.left, c.right, strict=True)
    ]
    before = [(a.clone(), b.clone()) for a, b in c.trained]
    optimizer.step(Release(to_vector(c, gradients), 0.0, 1), RATE)
    for g, (left, right), (new_left, new_right) in zip(gradients, before, c.trained, strict=True):
        for k in range(len(g)):
            for dense_gradient, own, other, new in (
                (g[k], left[k], right[k], new_left[k]),
                (g[k].mT, right[k], left[k], new_right[k]),
            ):
                basis = torch.linalg.qr(other).Q
                u, _, vh = torch.linalg.svd(dense_gradient @ basis, full_matrices=False)
                step = len(own) ** 0.5 * u @ vh
                torch.testing.assert_close(
                    (own - new) @ other.mT, RATE * step @ basis.mT, rtol=1e-8, atol=1e-10
                )


def test_with_the_other_factor_at_rest_it_is_a_matrix_adam() -> None:
    """Right gets no gradient, so the basis stays: moments are plain averages of g^T g / m and of g V^-1/2."""
    c, optimizer = start()
    rng = np.random.default_rng(0)
    left, right = (c.trained[0][part][0].numpy().copy() for part in (0, 1))
    inverse = np.linalg.inv(np.linalg.qr(right).R)
    squares, means = [], []
    for step in range(1, 11):
        gradient = rng.standard_normal(left.shape)
        vector = [tuple(torch.zeros_like(t) for t in ts) for ts in c.trained]
        vector[0][0][0] = torch.from_numpy(gradient)
        g = gradient @ inverse
        squares.append(g.T @ g / len(g))
        v = _average(squares, 0.999)
        means.append(g @ scipy.linalg.sqrtm(np.linalg.inv(v)).real)
        left = left - RATE * _average(means, 0.9) @ inverse.T
        optimizer.step(Release(vector, 0.0, step), RATE)
        np.testing.assert_allclose(c.left[0][0].numpy(), left, rtol=1e-7, atol=1e-9)
        np.testing.assert_array_equal(c.right[0][0].numpy(), right)


def _average(values: list[np.ndarray], beta: float) -> np.ndarray:
    """The exponential average without the bias of a start at zero."""
    weights = np.array([beta ** (len(values) - 1 - i) for i in range(len(values))])
    return np.tensordot(weights / weights.sum(), np.stack(values), axes=1)


def test_second_moments_that_a_turning_basis_loses_are_kept_as_escaped_mass() -> None:
    c, optimizer = start()
    generator = torch.Generator().manual_seed(0)

    def random_step(rate: float) -> None:
        vector = c.standard_normal(lambda s: torch.randn(s, generator=generator, dtype=torch.float64))
        optimizer.step(Release(vector, 0.0, 1), rate)

    for _ in range(3):
        random_step(0.0)
    assert all(float(side.escaped.max()) < 1e-12 for _, side in optimizer._named_sides())  # nothing turned
    lowest = [side.v.clone() for _, side in optimizer._named_sides()]
    random_step(5.0)  # the factors become something else altogether
    random_step(0.0)
    for (_, side), before in zip(optimizer._named_sides(), lowest, strict=True):
        assert float(side.escaped.min()) > 0.01 * float(torch.linalg.eigvalsh(before).amin())


def test_from_zero_it_moves_one_factor_first_and_then_both() -> None:
    problem: Any = Problem("factors", "rite", dtype=torch.float64, from_zero=True)
    c = problem.coordinates
    right = [b.clone() for b in c.right]
    problem.step(RATE, noise_std=0.1)
    assert all(torch.equal(a, b) for a, b in zip(right, c.right, strict=True))
    assert all(float(a.norm()) > 0 for a in c.left)
    problem.step(RATE, noise_std=0.1)
    assert not any(torch.equal(a, b) for a, b in zip(right, c.right, strict=True))
    assert all(bool(t.isfinite().all()) for t in c.state_dict().values())
