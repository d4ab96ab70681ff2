"""Tangent coordinates against the dense projection, in every dtype and at hard points."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.config import MethodSettings, checked
from privlora.coordinates import TangentCoordinates, add_vectors
from privlora.coordinates.tangent import MAX_RIGHT_WEIGHT
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, Tangent, point_at_zero, project, random_point, retract

RANK = 3


def coordinates(
    dtype: torch.dtype = torch.float64, smallest: float = 1.0, right_weight: float = 1.0
) -> TangentCoordinates:
    """Random points whose singular values fall from 1 to ``smallest`` (0: the point Z = 0)."""
    generator = torch.Generator().manual_seed(0)
    adapter = LowRankAdapter(tiny_model(dtype=dtype), rank=RANK)
    points = []
    for group in adapter.groups:
        point = random_point(len(group.sites), group.m, group.n, RANK, generator)
        spectrum = torch.linspace(0, 1, RANK, dtype=torch.float64)
        s = smallest ** spectrum.expand_as(point.S) if smallest else torch.zeros_like(point.S)
        points.append(Point(point.U.to(dtype), s.to(dtype), point.V.to(dtype)))
    return TangentCoordinates(adapter, points, dtype, right_weight=right_weight)


def dense_gradients(c: TangentCoordinates, units: int) -> list[Tensor]:
    """One (units, L, m, n) a group."""
    return [torch.randn(units, len(g.sites), g.m, g.n, dtype=c.dtype) for g in c.adapter.groups]


def captured(c: TangentCoordinates, dense: list[Tensor]) -> Captured:
    p, q = [], []
    for point, g in zip(c.points, dense, strict=True):
        p += list((g @ point.V).unbind(dim=1))
        q += list((g.mT @ point.U).unbind(dim=1))
    return Captured(p, q)


def projection(point: Point, g: Tensor) -> Tensor:
    left, right = point.U @ point.U.mT, point.V @ point.V.mT
    return left @ g + g @ right - left @ g @ right


@pytest.mark.parametrize("smallest", [1.0, 1e-6, 0.0])
def test_norms_are_those_of_the_dense_projection(smallest: float) -> None:
    c = coordinates(smallest=smallest)
    dense = dense_gradients(c, 5)
    expected = sum(
        projection(point, g).square().sum(dim=(1, 2, 3)) for point, g in zip(c.points, dense, strict=True)
    )
    torch.testing.assert_close(c.norms_squared(captured(c, dense)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("smallest", [1.0, 1e-6, 0.0])
def test_a_vector_is_the_dense_projection_and_keeps_its_norm(smallest: float) -> None:
    c = coordinates(smallest=smallest)
    dense = dense_gradients(c, 4)
    weights = torch.rand(4, dtype=torch.float64)
    vector = c.to_vector(c.weighted_sum(captured(c, dense), weights))
    for point, g, parts in zip(c.points, dense, vector, strict=True):
        expected = projection(point, torch.einsum("u,ulmn->lmn", weights, g))
        embedded = Tangent(*parts).embedding(point)
        torch.testing.assert_close(embedded, expected, rtol=1e-10, atol=1e-12)
        norm = sum(t.square().sum() for t in parts)
        assert float(norm) == pytest.approx(float(expected.square().sum()), rel=1e-12)


@pytest.mark.parametrize("right_weight", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_released_is_never_larger_than_what_was_measured(
    dtype: torch.dtype, right_weight: float
) -> None:
    # Also for P and Q that no dense gradient gives, as rounding in bfloat16 makes them.
    c = coordinates(dtype, right_weight=right_weight)
    for scale in (1e-6, 1.0, 1e6):
        sizes = [(g.m, g.n) for g in c.adapter.groups for _ in g.sites]
        odd = Captured(
            [torch.randn(6, m, RANK, dtype=dtype) for m, _ in sizes],
            [scale * torch.randn(6, n, RANK, dtype=dtype) for _, n in sizes],
        )
        measured = c.norms_squared(odd)
        for unit in range(6):
            alone = torch.zeros(6, dtype=torch.float64)
            alone[unit] = 1.0
            vector = c.to_vector(c.weighted_sum(odd, alone))
            released = sum(t.double().square().sum() for parts in vector for t in parts)
            assert float(released) == pytest.approx(
                float(measured[unit]), rel=1e-5 if dtype == torch.float32 else 1e-12
            )


def test_the_right_weight_is_one_on_what_turns_v_and_on_nothing_else() -> None:
    plain, c = coordinates(), coordinates(right_weight=0.25)
    dense = dense_gradients(c, 3)
    ones = torch.ones(3)
    pairs = zip(
        *(x.to_vector(x.weighted_sum(captured(x, dense), ones)) for x in (plain, c)), c.points, strict=True
    )
    for (core, up, vp), weighted, point in pairs:
        torch.testing.assert_close(weighted, (core, up, 0.25 * vp))
        # The steepest direction in that metric counts it twice.
        (direction,) = c.gradients([Tangent(*weighted)])
        torch.testing.assert_close(direction.Vp, 0.25**2 * vp)
        # Coordinates of one vector, before and after nothing happened to the point.
        same = c.transport(point, point, Tangent(*weighted))
        torch.testing.assert_close((same.M, same.Up, same.Vp), weighted)


@pytest.mark.parametrize("right_weight", [0.25, 10.0])
@pytest.mark.parametrize("beside", [0.0, 1e-6, 1e-3])
def test_a_gradient_near_the_span_of_v_is_not_longer_than_measured(
    right_weight: float, beside: float
) -> None:
    # P is tiny beside Q, so what is measured of Q decides, and ||Q||^2 - ||V^T Q||^2 would be rounding alone.
    c = coordinates(torch.float32, right_weight=right_weight)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    odd = Captured([], [])
    for group, point in zip(c.adapter.groups, c.points, strict=True):
        for k in range(len(group.sites)):
            odd.p.append(1e-6 * normal(6, group.m, RANK))
            odd.q.append(point.V[k] @ normal(6, RANK, RANK) + beside * normal(6, group.n, RANK))
    measured = c.norms_squared(odd).sqrt()
    assert float(measured.min()) > 0
    for unit, alone in enumerate(torch.eye(6, dtype=torch.float64)):
        vector = c.to_vector(c.weighted_sum(odd, alone / measured))
        assert float(sum(t.square().sum() for parts in vector for t in parts)) <= 1 + 1e-5, unit


@pytest.mark.parametrize("right_weight", [0.0, -1.0, 10.1, 3e4, float("inf"), float("nan")])
def test_weights_that_blow_rounding_up_are_refused(right_weight: float) -> None:
    with pytest.raises(ConfigError, match="right_weight"):
        coordinates(right_weight=right_weight)
    with pytest.raises(ConfigError, match="right_weight"):
        checked(MethodSettings, {"right_weight": right_weight}, "method")


def test_the_largest_weight_is_that_of_the_settings() -> None:
    assert MethodSettings(right_weight=MAX_RIGHT_WEIGHT).right_weight == 10


@pytest.mark.parametrize("right_weight", [0.25, 1.0, 4.0])
def test_noise_is_white_whatever_the_weight(right_weight: float) -> None:
    c = coordinates(right_weight=right_weight)
    generator = torch.Generator().manual_seed(0)
    energies = torch.zeros(3, dtype=torch.float64)
    for _ in range(50):
        for parts in c.standard_normal(
            lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        ):
            energies += torch.stack([t.square().sum() for t in parts])
    sizes = [
        sum(len(g.sites) * RANK * size(g) for g in c.adapter.groups)
        for size in (lambda g: RANK, lambda g: g.m - RANK, lambda g: g.n - RANK)
    ]
    # Of 50 times 126 coordinates at least: six standard errors are 11 %.
    torch.testing.assert_close(energies / 50, torch.tensor(sizes).double(), rtol=0.12, atol=0)


def test_rounding_of_a_point_does_not_make_a_gradient_longer() -> None:
    # Hundreds of steps in float32 leave U and V nearly orthonormal; the slack of a mechanism is 1e-5.
    generator = torch.Generator().manual_seed(3)
    point = random_point(1, 2000, 1000, 8, generator, torch.float32)
    for _ in range(100):
        p, q = (torch.randn(t.shape, generator=generator) for t in (point.U, point.V))
        point = retract(point, project(point, p, q), 0.01)
    p = point.U + 0.1 * torch.randn(
        point.U.shape, generator=generator
    )  # mostly in span(U): the worst there is
    exact = project(point.to(p.double()), p.double(), torch.zeros_like(point.V).double())
    longer = exact.norm_squared().sqrt() / p.double().norm()
    assert abs(float(longer) - 1) < 5e-6


def test_to_vector_is_linear() -> None:
    c = coordinates()
    one, two = (c.weighted_sum(captured(c, dense_gradients(c, 2)), torch.ones(2)) for _ in range(2))
    together = c.to_vector(add_vectors(one, two))
    for got, want in zip(together, add_vectors(c.to_vector(one), c.to_vector(two)), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_dimension_is_r_times_m_plus_n_minus_r() -> None:
    c = coordinates()
    assert c.dimension == sum(RANK * (s.m + s.n - RANK) for s in c.adapter.sites)


def test_named_factors_multiply_to_z() -> None:
    c = coordinates(smallest=1e-3)
    named = c.named_factors()
    for group, point in zip(c.adapter.groups, c.points, strict=True):
        for k, site in enumerate(group.sites):
            a, b = named[site.name]
            torch.testing.assert_close(a @ b.T, point.embedding()[k])


def test_state_survives_a_change_of_device_and_dtype() -> None:
    c, other = coordinates(smallest=0.1), coordinates(torch.float32, smallest=0.5)
    other.load_state_dict(c.state_dict())
    assert {t.dtype for p in other.points for t in (p.U, p.S, p.V)} == {torch.float32}
    torch.testing.assert_close(other.points[0].S.double(), c.points[0].S, rtol=1e-6, atol=0)


def test_the_zero_point_is_an_ordinary_point() -> None:
    c = coordinates()
    zero = [point_at_zero(p.U, p.V) for p in c.points]
    at_zero = TangentCoordinates(c.adapter, zero, torch.float64)
    assert at_zero.dimension == c.dimension
    assert at_zero.intrinsic


def turned(c: TangentCoordinates, angle: float) -> dict[str, Tensor]:
    """The frame of points near by, whose columns also have another order and other signs."""
    generator = torch.Generator().manual_seed(4)
    frame = {}
    for name, basis in c.frame().items():
        noise = torch.randn(basis.shape, generator=generator, dtype=torch.float64).to(basis)
        near = torch.linalg.qr(basis + angle * noise).Q
        frame[name] = near.flip(-1) * torch.tensor([1.0, -1.0, 1.0]).to(basis)
    return frame


@pytest.mark.parametrize("right_weight", [1.0, 0.3, MAX_RIGHT_WEIGHT])
@pytest.mark.parametrize("angle", [0.0, 1e-3, 0.3, 10.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_that_follows_is_never_longer_and_stays_in_the_space(
    right_weight: float, angle: float, dtype: torch.dtype
) -> None:
    """What the price of correlated noise rests on: a linear map of norm 1 at most, in the metric of the noise."""
    c = coordinates(dtype, right_weight=right_weight)
    frame = turned(c, angle)
    for name in frame:  # rounding of points is taken off, whichever way it goes
        frame[name] = frame[name] * (1 + 1e-6)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        vectors = []
        for _ in range(2):
            scale = torch.randn(3, generator=generator, dtype=torch.float64)
            drawn = c.standard_normal(
                lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: B023
            )
            vectors.append([tuple(s * t for s, t in zip(scale, parts, strict=True)) for parts in drawn])
        first, second = (c.followed(vector, frame) for vector in vectors)
        both = c.followed(add_vectors(*vectors), frame)
        for g, point in enumerate(c.points):
            for one, other, total in zip(first[g], second[g], both[g], strict=True):
                torch.testing.assert_close(one + other, total)
            assert sum(t.square().sum() for t in first[g]) <= sum(t.square().sum() for t in vectors[0][g]) * (
                1 + 1e-12
            )
            _, up, vp = first[g]
            eps = 1e-13 if dtype == torch.float64 else 1e-5
            assert (point.U.double().mT @ up).abs().max() < eps * up.norm() + 1e-300
            assert (point.V.double().mT @ vp).abs().max() < eps * vp.norm() + 1e-300


@pytest.mark.parametrize("angle", [0.0, 0.3])
def test_noise_that_follows_is_what_of_its_weight_update_the_space_holds(angle: float) -> None:
    """All of it where only columns changed, which singular vectors do from step to step."""
    c = coordinates()
    frame = turned(c, angle)
    old = [Point(frame[f"{g}.U"], p.S, frame[f"{g}.V"]) for g, p in enumerate(c.points)]
    there = TangentCoordinates(c.adapter, old, torch.float64)
    vector = there.standard_normal(lambda shape: torch.randn(shape, dtype=torch.float64))
    for before, after, parts, made in zip(old, c.points, vector, c.followed(vector, frame), strict=True):

        def dense(point: Point, t: tuple[Tensor, ...]) -> Tensor:
            return point.U @ t[0] @ point.V.mT + t[1] @ point.V.mT + point.U @ t[2].mT

        update = dense(before, parts)
        across = update - after.U @ (after.U.mT @ update)
        expected = update - (across - across @ after.V @ after.V.mT)
        torch.testing.assert_close(expected, dense(after, made))
        if not angle:
            torch.testing.assert_close(update, expected)
