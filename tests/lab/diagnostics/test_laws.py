"""Every size against the dense matrices, and every law against Monte Carlo."""

from __future__ import annotations

import pytest
import torch

from privlora.geometry.fixed_rank import Point, project_dense, random_point, tangent_dimension
from privlora.lab.diagnostics.sweep import (
    bilinear_bound,
    bilinear_law,
    factor_noise,
    factor_statistic,
    federated_noise,
    gram_stress,
    move_norm,
    product_energy,
    product_norm,
    tangent_bound,
    tangent_law,
)

SHAPES = [(7, 5, 2), (3, 11, 3), (6, 6, 1)]


def _pair(m: int, n: int, r: int, modules: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(m * 100 + n)
    shape = {"generator": g, "dtype": torch.float64}
    return torch.randn(modules, m, r, **shape), torch.randn(modules, n, r, **shape)


@pytest.mark.parametrize(("m", "n", "r"), SHAPES)
def test_sizes_are_those_of_the_dense_matrices(m: int, n: int, r: int) -> None:
    (a, b), (da, db) = _pair(m, n, r), _pair(m + 1, n + 1, r)
    da, db = da[:, :m], db[:, :n]
    dense = torch.linalg.matrix_norm(a @ b.mT)
    torch.testing.assert_close(product_energy(a, b), dense**2)
    torch.testing.assert_close(product_norm(a, b), dense)
    s = 1.7
    first, bilinear = s * (da @ b.mT + a @ db.mT), s * da @ db.mT
    for found, expected in zip(
        factor_noise(a, b, da, db, s), (first, bilinear, first + bilinear), strict=True
    ):
        torch.testing.assert_close(found, torch.linalg.matrix_norm(expected) ** 2)
    moved = torch.linalg.matrix_norm((a + da) @ (b + db).mT - a @ b.mT)
    torch.testing.assert_close(move_norm((a, b), (a + da, b + db)), moved)


def test_a_small_move_of_a_large_matrix_is_not_lost() -> None:
    a, b = _pair(40, 30, 4)
    d = 1e-9 * _pair(40, 30, 4, 3)[0].flip(0)
    expected = torch.linalg.matrix_norm(d @ b.mT)
    torch.testing.assert_close(move_norm((a, b), (a + d, b)), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("m", "n", "r"), SHAPES)
def test_factor_noise_follows_equations_8_and_9(m: int, n: int, r: int) -> None:
    a, b = (t[:1] for t in _pair(m, n, r))
    tau, s, draws = 0.7, 1.3, 20_000
    g = torch.Generator().manual_seed(0)
    da = tau * torch.randn(draws, m, r, generator=g, dtype=torch.float64)
    db = tau * torch.randn(draws, n, r, generator=g, dtype=torch.float64)
    first, bilinear, both = factor_noise(a.expand(draws, m, r), b.expand(draws, n, r), da, db, s)
    law, second = tau**2 * float(factor_statistic(a, b, s)), bilinear_law(m, n, r, s, tau)
    for found, expected in ((first, law), (bilinear, second), (both, law + second)):
        error = float(found.std()) / draws**0.5
        assert abs(float(found.mean()) - expected) < 4 * error
        assert error < 0.02 * expected  # the check can fail


@pytest.mark.parametrize(("m", "n", "r"), SHAPES)
def test_bounds_of_a_5_and_a_24_hold_and_are_not_far(m: int, n: int, r: int) -> None:
    tau, draws, failure = 0.7, 20_000, 0.05
    g = torch.Generator().manual_seed(3)
    da, db = (tau * torch.randn(draws, d, r, generator=g, dtype=torch.float64) for d in (m, n))
    point = random_point(1, m, n, r, g)
    xi = torch.randn(draws, m, n, generator=g, dtype=torch.float64)
    tangents = tau * project_dense(point, xi).norm_squared().sqrt()
    bilinear, intrinsic = (bound(m, n, r, tau, failure) for bound in (bilinear_bound, tangent_bound))
    for found, bound, fails in (
        (product_norm(da, db), bilinear, 2 * failure),
        (tangents, intrinsic, failure),
    ):
        assert float((found > bound).double().mean()) < fails
        assert bound < 6 * float(found.median())


@pytest.mark.parametrize("clients", [1, 4])
def test_noise_of_a_federation_is_lemma_1_without_its_extra_rank(clients: int) -> None:
    (m, n, r), tau, draws = (7, 5, 2), 0.7, 20_000
    a, b = (t[0] for t in _pair(m, n, r))
    g = torch.Generator().manual_seed(4)
    da, db = (tau * torch.randn(draws, clients, d, r, generator=g, dtype=torch.float64) for d in (m, n))
    mean_a, mean_b, before = da.mean(1), db.mean(1), a @ b.mT
    drawn = {
        "one factor": a @ mean_b.mT,
        "both, products averaged": ((a + da) @ (b + db).mT).mean(1) - before,
        "both, factors averaged": (a + mean_a) @ (b + mean_b).mT - before,
    }
    for name, parts in federated_noise(a, b, tau, clients).items():
        energies = drawn[name].square().sum(dim=(-2, -1))
        error = float(energies.std()) / draws**0.5
        assert abs(float(energies.mean()) - sum(parts)) < 4 * error, name


@pytest.mark.parametrize(("m", "n", "r"), SHAPES)
def test_tangent_law_is_theorem_3_1(m: int, n: int, r: int) -> None:
    point = random_point(1, m, n, r, torch.Generator().manual_seed(1))
    assert float(tangent_law(point)) == pytest.approx(tangent_dimension(m, n, r), rel=1e-12)
    xi = torch.randn(20_000, m, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    energies = project_dense(point, xi).norm_squared()
    error = float(energies.std()) / len(energies) ** 0.5
    assert abs(float(energies.mean()) - float(tangent_law(point))) < 4 * error


def test_tangent_law_sees_frames_that_are_not_orthonormal() -> None:
    point = random_point(1, 7, 5, 2, torch.Generator().manual_seed(1))
    stretched = Point(1.1 * point.U, point.S, point.V)
    assert float(tangent_law(stretched)) != pytest.approx(tangent_dimension(7, 5, 2), rel=0.01)


def test_gram_stress() -> None:
    a, _ = _pair(9, 4, 3)
    w = torch.linalg.eigvalsh(a.mT @ a)[:, 0]
    torch.testing.assert_close(gram_stress(a), w.rsqrt())
    assert float(gram_stress(torch.zeros(1, 4, 2))) == float("inf")
