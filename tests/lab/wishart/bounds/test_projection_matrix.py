"""Proposition 2': the true matrix is recognised from one noise-free output, any other is refuted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.matrix import examine


def project(rng: np.random.Generator, v: np.ndarray, r: int) -> np.ndarray:
    z = rng.standard_normal((v.shape[0], r)) / np.sqrt(r)
    return z @ (z.T @ v)


@pytest.mark.parametrize(("m", "r"), [(2, 1), (2, 4), (10, 4), (10, 16), (10, 60), (50, 100), (80, 100)])
def test_every_output_betrays_its_matrix(m: int, r: int) -> None:
    rng, smallest = np.random.default_rng(m + r), np.inf
    for _ in range(25):
        candidates = [rng.standard_normal((50, m))]
        candidates.append(candidates[0] + 1e-3 * rng.standard_normal((50, m)))
        truth = int(rng.integers(2))
        output = project(rng, candidates[truth], r)
        assert examine(candidates[truth], output, r).accepts()
        wrong = examine(candidates[1 - truth], output, r)
        assert not wrong.accepts()
        smallest = min(smallest, wrong.asymmetry)
    assert smallest > 1e-7


def test_degenerate_pairs_pass() -> None:
    rng = np.random.default_rng(0)
    v, row = rng.standard_normal((20, 6)), rng.standard_normal((1, 6))
    first, second = rng.standard_normal((20, 1)) @ row, rng.standard_normal((20, 1)) @ row
    if np.vdot(first @ row.T, project(rng, second, 60) @ row.T) < 0:
        second = -second
    output = project(rng, first, 60)
    cases = [(v, 2.0 * v, project(rng, v, 4)), (first, second, output)]
    for true, other, y in cases:
        assert examine(true, y, 60).accepts()
        assert examine(other, y, 60).asymmetry < 1e-8
    assert not examine(-v, project(rng, v, 4), 4).accepts()  # the sign shows in the eigenvalues
    assert not examine(v, project(rng, v, 4), 3).accepts()  # and so does the rank


def test_one_step_of_lora_fa_shows_its_gradient() -> None:
    """W = W0 + B A with A frozen and B = 0: the update is -lr G A^T A, and one example more or less is seen in it."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 30, generator=generator).double(), torch.randint(5, (40,), generator=generator)
    base = torch.randn(5, 30, generator=generator).double()
    a = torch.randn(4, 30, generator=generator).double() / 2

    def full_gradient(examples: slice) -> np.ndarray:
        weight = base.clone().requires_grad_()
        torch.nn.functional.cross_entropy(x[examples] @ weight.T, y[examples], reduction="sum").backward()
        assert weight.grad is not None
        return weight.grad.numpy().T

    b = torch.zeros(5, 4, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(x @ (base + b @ a).T, y, reduction="sum").backward()
    assert b.grad is not None
    update = (-0.1 * b.grad @ a).numpy().T
    with_all, without_one = full_gradient(slice(0, 40)), full_gradient(slice(0, 39))
    assert examine(with_all, -update, 4).accepts()
    assert not examine(without_one, -update, 4).accepts(1e-4)


def test_vectors_under_one_projection_are_a_matrix() -> None:
    rng = np.random.default_rng(3)
    steps = rng.standard_normal((40, 3))
    released = project(rng, steps, 8)  # the same M for three queries
    other = steps.copy()
    other[:, 1] += 0.01 * rng.standard_normal(40)
    assert examine(steps, released, 8).accepts()
    assert not examine(other, released, 8).accepts()


def test_refuses_what_does_not_fit() -> None:
    v = np.ones((4, 2))
    for candidate, output in ((v, v.T), (v[:, 0], v[:, 0]), (v * np.nan, v)):
        with pytest.raises(PrivacyError):
            examine(candidate, output, 2)
    with pytest.raises(PrivacyError):
        examine(v, v, 0)
