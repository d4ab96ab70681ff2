"""What the tangent optimizers know about noise: its size, its floor, and the frames in which moments live."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates import TangentCoordinates
from privlora.geometry.fixed_rank import Point, Tangent, random_point
from privlora.mechanisms import Release
from privlora.optimizers import TANGENT_OPTIMIZERS
from privlora.optimizers.tangent import TangentRank

RANK = 3
ADAPTIVE = ["sgd", "scalar", "rank"]


def coordinates(dtype: torch.dtype = torch.float64) -> TangentCoordinates:
    generator = torch.Generator().manual_seed(0)
    adapter = LowRankAdapter(tiny_model(dtype=dtype), rank=RANK, target_modules=["q_proj", "up_proj"])
    points = [random_point(len(g.sites), g.m, g.n, RANK, generator, dtype) for g in adapter.groups]
    return TangentCoordinates(adapter, points, dtype)


def noise_release(c: TangentCoordinates, tau: float) -> Release:
    def draw(shape: tuple[int, ...]) -> Tensor:
        return tau * torch.randn(shape, dtype=c.dtype)

    return Release(c.standard_normal(draw), tau, step=1)


def moved(name: str, releases: list[Release], rate: float = 1e-4) -> Tensor:
    c = coordinates()
    before = [p.embedding() for p in c.points]
    optimizer = TANGENT_OPTIMIZERS[name](c)
    for release in releases:
        optimizer.step(release, rate)
    return torch.cat([(p.embedding() - b).flatten() for p, b in zip(c.points, before, strict=True)])


@pytest.mark.parametrize("name", TANGENT_OPTIMIZERS)
def test_the_unit_of_the_gradient_does_not_matter(name: str) -> None:
    # Clip norm, batch size and gradient scaled together: the same releases in another unit.
    release = noise_release(coordinates(), 0.2)
    scaled = Release([tuple(1e3 * t for t in parts) for parts in release.vector], 1e3 * release.noise_std, 1)
    one, other = moved(name, [release]), moved(name, [scaled])
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_pure_noise_is_never_amplified_above_its_own_unit(name: str) -> None:
    c = coordinates()
    tau = 0.05
    release = noise_release(c, tau)
    squared = sum(float(Tangent(*parts).norm_squared().sum()) for parts in release.vector)
    # The step is at most rate * noise / tau: where only noise was seen, the floor tau^2 is what divides.
    assert float(moved(name, [release]).norm()) <= 1.001e-4 * squared**0.5 / tau


@pytest.mark.parametrize("name", ["scalar", "rank"])
def test_second_moments_are_debiased_by_the_noise(name: str) -> None:
    """A strong gradient divides by its own size; noise of any size below it changes nothing in expectation."""
    c = coordinates()
    signal = [tuple(t / 0.1 for t in parts) for parts in noise_release(c, 0.1).vector]
    steps = []
    for tau in (1e-6, 0.7):
        torch.manual_seed(1)
        releases = []
        for _ in range(40):
            noise = noise_release(c, tau).vector
            vector = [
                tuple(s + n for s, n in zip(a, b, strict=True)) for a, b in zip(signal, noise, strict=True)
            ]
            releases.append(Release(vector, tau, 1))
        steps.append(float(moved(name, releases, rate=1e-6).norm()))
    assert steps[1] == pytest.approx(steps[0], rel=0.08)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_rotation_of_the_frame_changes_nothing(name: str) -> None:
    """Momentum and second moments follow the point: a long trajectory on slowly turning subspaces stays stable."""
    c = coordinates()
    optimizer = TANGENT_OPTIMIZERS[name](c)
    torch.manual_seed(0)
    for _ in range(50):
        optimizer.step(noise_release(c, 0.1), 0.05)
    for point in c.points:
        eye = torch.eye(RANK, dtype=c.dtype)
        for basis in (point.U, point.V):
            torch.testing.assert_close(
                basis.mT @ basis, eye.expand(len(basis), RANK, RANK), rtol=0, atol=1e-12
            )
        assert bool((point.S >= 0).all())
    for g, point in enumerate(c.points):
        state = optimizer.state_dict()
        assert (
            float((point.U.mT @ state[f"{g}.Up"]).abs().max()) < 1e-12
        )  # momentum is tangent at the new point
        assert float((point.V.mT @ state[f"{g}.Vp"]).abs().max()) < 1e-12


def test_the_second_moments_of_pure_noise_are_the_same_in_every_frame() -> None:
    c = coordinates()
    optimizer = TangentRank(c)
    tau, old = 0.1, c.points
    optimizer.step(noise_release(c, tau), 1.0)
    eye = torch.eye(RANK, dtype=c.dtype)
    noise = (1 - optimizer.beta2) * tau**2 * eye
    for before, after, *moments in zip(old, c.points, *optimizer._moments().values(), strict=True):
        assert float((before.U.mT @ after.U - eye).norm()) > 0.1  # the frame did turn
        for moment in moments:
            moment.copy_(noise)
    optimizer._follow(old, c.points, tau)
    for moments in optimizer._moments().values():
        for moment in moments:
            torch.testing.assert_close(moment, noise.expand_as(moment), rtol=1e-10, atol=1e-15)


def test_second_moments_keep_a_signal_where_the_frame_turns_within_itself() -> None:
    c = coordinates()
    optimizer = TangentRank(c)
    optimizer.step(noise_release(c, 0.1), 0.0)
    turns = {name: torch.linalg.qr(torch.randn(RANK, RANK, dtype=c.dtype)).Q for name in ("vl", "vr")}
    turned = [Point(point.U @ turns["vl"], point.S, point.V @ turns["vr"]) for point in c.points]
    before = {name: list(moments) for name, moments in optimizer._moments().items()}
    optimizer._follow(c.points, turned, 0.1)
    for name, moments in optimizer._moments().items():
        for old, new in zip(before[name], moments, strict=True):
            torch.testing.assert_close(new, turns[name].T @ old @ turns[name], rtol=1e-10, atol=1e-15)


def test_float32_orthonormality_does_not_drift() -> None:
    c = coordinates(torch.float32)
    optimizer = TANGENT_OPTIMIZERS["rank"](c)
    torch.manual_seed(0)
    for _ in range(300):
        optimizer.step(noise_release(c, 0.1), 0.05)
    for point in c.points:
        for basis in (point.U, point.V):
            drift = basis.mT @ basis - torch.eye(RANK)
            assert float(drift.abs().max()) < 2e-6


def test_error_feedback_loses_nothing_that_its_rank_can_hold() -> None:
    # Three steps of tangents at ever new points: with room for their whole sum, Z + E is that sum.
    c = coordinates()
    optimizer = TANGENT_OPTIMIZERS["sgd"](c, beta1=0.0, beta2=0.99, error_feedback=100.0)
    total = [p.embedding() for p in c.points]
    for _ in range(3):
        release = noise_release(c, 0.2)
        tangents = [Tangent(*parts).embedding(p) for p, parts in zip(c.points, release.vector, strict=True)]
        total = [z - 0.5 / 0.2 * t for z, t in zip(total, tangents, strict=True)]
        optimizer.step(release, 0.5)
    for z, point, residual in zip(total, c.points, optimizer._residuals, strict=True):
        torch.testing.assert_close(point.embedding() + residual.embedding(), z)
        assert point.rank == RANK
        assert float(residual.S.min()) > 0


@pytest.mark.parametrize("name", TANGENT_OPTIMIZERS)
def test_without_beta1_no_first_moment_is_kept_and_older_states_are_read(name: str) -> None:
    """Older checkpoints hold first moments of beta1 = 0 too, which nothing asks for."""
    c, again = coordinates(), coordinates()
    optimizer, resumed = (TANGENT_OPTIMIZERS[name](each, beta1=0.0) for each in (c, again))
    first, second = noise_release(c, 0.2), noise_release(c, 0.2)
    optimizer.step(first, 1e-3)
    state = optimizer.state_dict()
    moments = {f"{g}.{part}" for g in range(len(c.points)) for part in ("M", "Up", "Vp", "ma", "mb")}
    assert not moments & set(state)
    again.load_state_dict(c.state_dict())
    resumed.load_state_dict({**state, **{key: torch.full((1,), torch.nan) for key in moments}})
    for each in (optimizer, resumed):
        each.step(second, 1e-3)
    for one, other in zip(c.points, again.points, strict=True):
        assert torch.equal(one.embedding(), other.embedding())
    optimizer.reset()
    optimizer.step(first, 1e-3)


@pytest.mark.parametrize("name", ["sgd", "scalar", "rank"])
def test_no_first_moment_is_the_limit_of_a_small_beta1(name: str) -> None:
    ends = []
    for beta1 in (0.0, 1e-9):
        c = coordinates()
        optimizer = TANGENT_OPTIMIZERS[name](c, beta1=beta1)
        torch.manual_seed(0)
        for _ in range(3):
            optimizer.step(noise_release(c, 0.2), 1e-2)
        ends.append(torch.cat([p.embedding().flatten() for p in c.points]))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-9)
