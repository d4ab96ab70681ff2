"""Bases of a point's columns and of new ones: by products, and by reflections where those fail."""

from __future__ import annotations

import pytest
import torch
from fixed_rank_cases import a_point, a_tangent, assert_valid, dense_truncation, normal, seeded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from privlora.geometry import bases
from privlora.geometry.bases import Basis, decomposed, in_parts, joint_bases, singular_values
from privlora.geometry.fixed_rank import (
    Point,
    Tangent,
    average,
    average_all,
    random_point,
    retract,
    retract_all,
    standard_normal_tangent,
)

ROUNDING = {torch.float32: 2e-6, torch.float64: 2e-14}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=["float32", "float64"])


def no_reflections(first: Tensor, new: Tensor) -> Basis:
    raise AssertionError("Householder QR of a step that products can do")


def orthonormal(g: torch.Generator, m: int, a: int) -> Tensor:
    return torch.linalg.qr(normal(g, 3, m, a)).Q


def assert_basis(basis: Basis, first: Tensor, new: Tensor) -> None:
    tol = ROUNDING[new.dtype] * (
        5 if len(first[0]) > 1000 else 1
    )  # LAPACK's own reflections of tall matrices
    columns = basis.R.shape[-2]
    assert columns == min(first.shape[-2], first.shape[-1] + new.shape[-1])
    eye = torch.eye(columns, dtype=new.dtype).expand(len(new), columns, columns)
    Q, whole = basis.times(eye).double(), torch.cat([first, new], dim=-1).double()
    assert (Q.mT @ Q - torch.eye(columns)).abs().max() < tol
    wrong = (Q @ basis.R.double() - whole).norm(dim=-2)
    assert (wrong <= tol * whole.norm(dim=-2)).all()  # each column to its own size


def new_columns(kind: str, first: Tensor, b: int, g: torch.Generator) -> Tensor:
    L, m, a = first.shape
    new = normal(g, L, m, b)
    if kind == "graded":
        return new * torch.logspace(-20, 20, b, dtype=torch.float64)
    if kind == "tiny":
        return 1e-12 * new
    if kind == "zero":
        return 0.0 * new
    if kind == "one zero column":
        return new * (torch.arange(b) != 1)
    if kind == "rank one":
        return new[..., :1] * normal(g, L, 1, b)
    if kind == "nearly dependent":
        return new[..., :1] + 1e-6 * new
    if kind == "inside":
        return first @ normal(g, L, a, b)
    if kind == "nearly inside":
        return first @ normal(g, L, a, b) + 1e-5 * new
    return new


KINDS = (
    "plain",
    "graded",
    "tiny",
    "zero",
    "one zero column",
    "rank one",
    "nearly dependent",
    "inside",
    "nearly inside",
)


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "a", "b"), [(40, 6, 3), (9, 6, 3), (8, 6, 3), (3, 3, 3), (9, 1, 1), (9000, 2, 2)]
)
def test_it_is_a_basis_whatever_the_new_columns_are(
    kind: str, m: int, a: int, b: int, dtype: torch.dtype
) -> None:
    g = seeded(1)
    first = orthonormal(g, m, a).to(dtype)
    new = new_columns(kind, first.double(), b, g).to(dtype)
    (basis,) = joint_bases([(first, new)])
    assert_basis(basis, first, new)


def test_one_module_that_needs_reflections_takes_its_group_with_it() -> None:
    g = seeded(0)
    first, new = orthonormal(g, 20, 4), normal(g, 3, 20, 3)
    first[1, :, -1] = 0
    (basis,) = joint_bases([(first, new)])
    assert_basis(basis, first, new)


@DTYPES
def test_columns_of_zeros_of_the_point_are_filled(dtype: torch.dtype) -> None:
    g = seeded(2)
    first = torch.cat([orthonormal(g, 20, 3), torch.zeros(3, 20, 2, dtype=torch.float64)], dim=-1).to(dtype)
    new = normal(g, 3, 20, 3).to(dtype)
    (basis,) = joint_bases([(first, new)])
    assert_basis(basis, first, new)


@DTYPES
def test_steps_and_averages_need_products_alone(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(bases, "_by_reflections", no_reflections)
    g = seeded(3)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=g, dtype=dtype)

    point = mean = random_point(3, 48, 40, 6, g, dtype)
    for rate in (1.0, 0.1, 1e-3, 1e-5, 1e-7):
        for _ in range(4):
            point = retract(point, standard_normal_tangent(point, draw), -rate)
            mean = average((mean, point), 0.1)
    assert_valid(mean, tol=2 * ROUNDING[dtype])


def test_only_the_group_that_needs_it_is_reflected(monkeypatch: pytest.MonkeyPatch) -> None:
    reflected = []

    def counted(first: Tensor, new: Tensor) -> Basis:
        reflected.append(first.shape[-2])
        return real(first, new)

    real = bases._by_reflections
    monkeypatch.setattr(bases, "_by_reflections", counted)
    g = seeded(4)
    points = [a_point(m, 30, 3, "plain", g) for m in (20, 21, 22)]
    tangents = [a_tangent(point, g) for point in points]
    tangents[1] = Tangent(tangents[1].M, 0 * tangents[1].Up, tangents[1].Vp)
    many = retract_all(points, tangents, -0.3)
    assert reflected == [21]
    for point, tangent, new in zip(points, tangents, many, strict=True):
        alone = retract(point, tangent, -0.3)
        assert (alone.embedding() - new.embedding()).abs().max() < 1e-13
    means = average_all(points, [(p.U, p.S, p.V) for p in many], 0.2)
    for point, new, mean in zip(points, many, means, strict=True):
        assert (mean.embedding() - average((point, new), 0.2).embedding()).abs().max() < 1e-13


@DTYPES
@pytest.mark.parametrize("size", [1e-20, 1e-12, 1e12, 1e20])
def test_a_retraction_of_any_size_is_the_truncated_svd(size: float, dtype: torch.dtype) -> None:
    g = seeded(5)
    point = a_point(24, 20, 4, "plain", g)
    spread = torch.tensor([30.0, 10.0, 3.0, 1.0], dtype=torch.float64)  # leaves a gap after the fourth
    xi = a_tangent(point, g)
    xi = Tangent(1e-3 * size * xi.M, size * xi.Up * spread, 1e-3 * size * xi.Vp)
    expected = dense_truncation(point.embedding() - xi.embedding(point), 4)
    rounded = Tangent(xi.M.to(dtype), xi.Up.to(dtype), xi.Vp.to(dtype))
    new = retract(Point(point.U.to(dtype), point.S.to(dtype), point.V.to(dtype)), rounded, -1.0)
    assert_valid(new, tol=2 * ROUNDING[dtype])
    wrong = (new.U.double() * new.S.double()[:, None]) @ new.V.double().mT - expected
    assert (wrong / expected.abs().max()).norm() < 20 * ROUNDING[dtype]


def test_float32_does_not_drift_over_a_thousand_steps() -> None:
    g = seeded(6)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=g)

    point = mean = random_point(1, 30, 24, 3, g, torch.float32)
    exact = mean.embedding().double()
    for _ in range(1000):
        point = retract(point, standard_normal_tangent(point, draw), -0.02)
        mean = average((mean, point), 0.05)
        u, s, vh = torch.linalg.svd(0.95 * exact + 0.05 * point.embedding().double(), full_matrices=False)
        exact = (u[..., :3] * s[:, None, :3]) @ vh[:, :3]
    assert_valid(point, tol=2e-6)
    assert_valid(mean, tol=2e-6)
    assert (mean.embedding().double() - exact).norm() < 1e-4 * exact.norm()


def test_singular_values_keep_the_order_of_their_matrices() -> None:
    g = seeded(7)
    matrices = [normal(g, L, a, b) for L, a, b in ((2, 5, 5), (1, 4, 5), (3, 5, 5), (2, 4, 5))]
    for matrix, (u, s, vh) in zip(matrices, singular_values(matrices), strict=True):
        assert (u * s[:, None, :] @ vh - matrix).abs().max() < 1e-13


@pytest.mark.parametrize(("size", "where"), [(32, "cuda"), (33, "cpu"), (48, "cpu")])
def test_what_a_gpu_would_take_one_by_one_is_decomposed_beside_it(size: int, where: str) -> None:
    seen = []

    def function(t: Tensor) -> tuple[Tensor, ...]:
        seen.append(t.device.type)
        return t, t

    with FakeTensorMode():
        found = decomposed(function, torch.empty(7, size, size, device="cuda"))
    assert seen == [where]
    assert [t.device.type for t in found] == ["cuda", "cuda"]
    assert decomposed(function, torch.ones(7, size, size))[0].device.type == "cpu"


def test_a_gpu_gets_no_more_matrices_at_once_than_its_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(bases, "in_parts", lambda function, matrices, at_once: asked.append(at_once) or [])
    with FakeTensorMode():
        decomposed(torch.linalg.eigh, torch.empty(70, 2048, 8, 8, device="cuda"))
    assert len(asked) == 1
    assert asked[0] < 143_000  # which an H200 was seen to refuse


@pytest.mark.parametrize("at_once", [1, 4, 15, 100])
def test_matrices_keep_their_places_in_parts(at_once: int) -> None:
    t = normal(seeded(8), 3, 5, 4, 4)
    t = t @ t.mT
    whole, parts = torch.linalg.eigh(t), in_parts(torch.linalg.eigh, t, at_once)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_host_waits_once_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def tolist(tensor: Tensor) -> list[bool]:
        reads.append(tensor.shape)
        return real(tensor)

    def refused(tensor: Tensor) -> bool:
        raise AssertionError("a value is read back")

    real = Tensor.tolist
    g = seeded(8)
    points = [a_point(m, 30, 3, "plain", g) for m in (20, 21, 22)]
    tangents = [a_tangent(point, g) for point in points]
    monkeypatch.setattr(Tensor, "tolist", tolist)
    for name in ("__bool__", "__float__", "__int__", "item"):
        monkeypatch.setattr(Tensor, name, refused)
    retract_all(points, tangents, -0.3)
    assert reads == [torch.Size([4])]  # sides of equal shape are one batch
