"""Roots of singular values: the law, its symmetries, and inputs at the edge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from privlora.coordinates.evened import root_factors, root_norms


def matrices(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 20, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def root_spectrum(t: Tensor) -> Tensor:
    factors, squares = root_factors(t.mT @ t)
    rooted = t @ factors.to(t.dtype)
    torch.testing.assert_close(
        rooted.double().square().sum(dim=(-2, -1)),
        squares,
        rtol=1e-4 if t.dtype == torch.float32 else 1e-9,
        atol=0,
    )
    return rooted


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_it_takes_the_roots_of_the_singular_values_and_keeps_their_vectors(
    dtype: torch.dtype, accuracy: float
) -> None:
    t = matrices(dtype=dtype)
    u, s, vh = torch.linalg.svd(t.double(), full_matrices=False)
    expected = (u * s.sqrt().unsqueeze(-2)) @ vh
    assert root_spectrum(t).dtype == dtype
    torch.testing.assert_close(root_spectrum(t).double(), expected, rtol=accuracy, atol=accuracy)


def test_rotations_of_either_side_pass_through() -> None:
    t = matrices()
    left, right = (
        torch.linalg.qr(matrices(1)[0] @ matrices(2)[0].T)[0],
        torch.linalg.qr(matrices(3)[0, :4])[0],
    )
    torch.testing.assert_close(root_spectrum(left @ t @ right), left @ root_spectrum(t) @ right)


def test_each_matrix_is_on_its_own() -> None:
    t = matrices()
    torch.testing.assert_close(root_spectrum(t)[2:3], root_spectrum(t[2:3]), rtol=1e-12, atol=1e-14)


def test_units_of_very_different_sizes_are_on_their_own() -> None:
    # What counts as rounding of one unit may be all that there is of another.
    squares = torch.tensor([[1e6, 1e-6], [1e2, 1e-9]], dtype=torch.float64)
    apart = torch.cat([root_norms(squares[:, unit : unit + 1]) for unit in range(2)], dim=1)
    torch.testing.assert_close(root_norms(squares), apart, rtol=1e-12, atol=0)
    t = matrices() * torch.tensor([1e6, 1.0, 1e-6, 1e-9, 1e3], dtype=torch.float64)[:, None, None]
    alone = torch.cat([root_spectrum(t[unit : unit + 1]) for unit in range(5)])
    torch.testing.assert_close(root_spectrum(t), alone, rtol=1e-9, atol=1e-15)


def test_a_weak_direction_is_evened_out_alike_beside_a_matrix_of_large_values() -> None:
    # With the largest entry at 1, singular values reach from 1 to the root of the number of entries.
    weak = torch.zeros(20, 4, dtype=torch.float64)
    weak.diagonal().copy_(torch.tensor([1.0, 0.5, 0.1, 0.02]))
    both = torch.stack([weak, torch.ones(20, 4, dtype=torch.float64)])
    torch.testing.assert_close(root_spectrum(both)[:1], root_spectrum(both[:1]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1e-12, 1e-8, 1e8, 1e15])
def test_it_is_homogeneous_of_degree_one_half(size: float) -> None:
    t = matrices(dtype=torch.float32)
    torch.testing.assert_close(root_spectrum(t * size) / size**0.5, root_spectrum(t), rtol=1e-4, atol=1e-5)


def test_what_is_too_small_to_be_measured_is_zero() -> None:
    t = matrices(dtype=torch.float32) * 1e-21
    assert torch.equal(root_spectrum(t), torch.zeros_like(t))


def test_zero_stays_zero_and_a_missing_direction_stays_missing() -> None:
    t = matrices(dtype=torch.float32)
    t[0] = 0.0
    t[1, :, 0] = t[1, :, 1]
    rooted = root_spectrum(t)
    assert torch.equal(rooted[0], torch.zeros(20, 4))
    assert float(torch.linalg.svdvals(rooted[1])[-1]) < 1e-5
    assert bool(torch.isfinite(rooted).all())


def test_root_norms() -> None:
    squares = torch.tensor([[16.0, 0.0], [1e-2, 0.0], [1e-12, 0.0]], dtype=torch.float64)
    norms = root_norms(squares) * squares.sqrt()
    # The last module's norm, 1e-6, is below 1 % of the first one's, 0.04: as there, times the fourth power of the rest.
    expected = torch.tensor(
        [[2.0, 0.0], [10**-0.5, 0.0], [1e-6 / 0.2 * (1e-6 / 0.04) ** 4, 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0)


def test_root_norms_fall_without_a_jump() -> None:
    least = 1e-4  # of squares
    around = torch.tensor([[1.0], [least * (1 + 1e-9)], [least * (1 - 1e-9)]], dtype=torch.float64)
    factors = root_norms(around)
    torch.testing.assert_close(factors[1], factors[2], rtol=1e-7, atol=0)
    assert float(root_norms(torch.tensor([[1.0], [1e-8]], dtype=torch.float64))[1] * 1e-4) < 1.1e-11
