"""Points, tangent vectors and dense definitions that the tests of the fixed-rank manifold share."""

from __future__ import annotations

import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor

from privlora.geometry.fixed_rank import Point, Tangent, random_point, standard_normal_tangent

MODULES = 2
SPECTRA = ("plain", "1e4", "1e8", "deficient", "zero")
Case = tuple[int, int, int, str, int]
laws = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """m, n in 3..24, r in 1..6 at most min(m, n), so 2r > m occurs; a spectrum; a seed."""
    m, n = draw(st.integers(3, 24)), draw(st.integers(3, 24))
    r = draw(st.integers(1, min(6, m, n)))
    return m, n, r, draw(st.sampled_from(SPECTRA)), draw(st.integers(0, 10_000))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def a_point(
    m: int, n: int, r: int, spectrum: str, generator: torch.Generator, modules: int = MODULES
) -> Point:
    base = random_point(modules, m, n, r, generator)
    S = {
        "plain": torch.linspace(2, 1, r),
        "1e4": torch.logspace(0, -4, r),
        "1e8": torch.logspace(0, -8, r),
        "deficient": torch.linspace(2, 1, r) * (torch.arange(r) < r // 2),
        "zero": torch.zeros(r),
    }[spectrum]
    return Point(base.U, S.double().expand(modules, r), base.V)


def a_tangent(point: Point, generator: torch.Generator) -> Tangent:
    return standard_normal_tangent(point, lambda shape: normal(generator, *shape))


def dense_projection(point: Point, G: Tensor) -> Tensor:
    """Pi_U G + G Pi_V - Pi_U G Pi_V."""
    left, right = point.U @ point.U.mT, point.V @ point.V.mT
    return left @ G + G @ right - left @ G @ right


def dense_truncation(X: Tensor, r: int) -> Tensor:
    """The best rank-r approximation of X; the draw is dropped if that is not unique to about 1e-3."""
    u, s, vh = torch.linalg.svd(X, full_matrices=False)
    following = s[:, r] if s.shape[-1] > r else torch.zeros_like(s[:, 0])
    clear_gap = s[:, r - 1] - following > 1e-3 * s[:, 0]
    assume(bool((clear_gap | (following < 1e-14 * s[:, 0])).all()))
    return (u[..., :r] * s[:, None, :r]) @ vh[..., :r, :]


def assert_valid(point: Point, tol: float = 1e-13) -> None:
    eye = torch.eye(point.rank, dtype=torch.float64)
    assert (gram(point.U, point.U) - eye).abs().max() < tol
    assert (gram(point.V, point.V) - eye).abs().max() < tol
    assert (point.S >= 0).all()
    assert (point.S.diff(dim=-1) <= 0).all()
    peaks = point.U.gather(-2, point.U.abs().argmax(dim=-2, keepdim=True))
    assert (peaks > 0).all()


def assert_tangent(point: Point, tangent: Tangent, tol: float = 1e-13) -> None:
    assert gram(point.U, tangent.Up).abs().max() < tol
    assert gram(point.V, tangent.Vp).abs().max() < tol


def gram(a: Tensor, b: Tensor) -> Tensor:
    """a^T b in float64: in float32 the sum over many rows would round by more than what is measured."""
    return a.double().mT @ b.double()


def assert_close(actual: Tensor, expected: Tensor, scale: Tensor | float = 1.0, tol: float = 1e-12) -> None:
    error, allowed = (actual - expected).norm(), tol * torch.as_tensor(scale).norm()
    assert error <= allowed, f"{error:.3g} > {allowed:.3g}"
