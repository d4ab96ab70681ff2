"""A public gradient that is added to each release: FedProx's pull, SCAFFOLD's control."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import EVERY_OPTIMIZER, Problem, dense, label
from torch import Tensor

from privlora.coordinates import FactorCoordinates, Vector
from privlora.errors import ConfigError
from privlora.mechanisms import Release
from privlora.methods import make_optimizer

every_optimizer = pytest.mark.parametrize("pair", EVERY_OPTIMIZER, ids=label)


def ends(pair: tuple[str, str], drift: Vector | None, steps: int = 2) -> list[Tensor]:
    problem = Problem(*pair)
    if drift is not None:
        problem.optimizer.drift = lambda: drift
    torch.manual_seed(0)
    for _ in range(steps):
        problem.step(0.02, noise_std=0.1)
    return [*dense(problem.coordinates), *problem.optimizer.state_dict().values()]


@every_optimizer
def test_the_rule_sees_the_release_plus_the_drift(pair: tuple[str, str]) -> None:
    if pair[0] == "wishart":
        pytest.skip("two objects do not share its secret projections")
    problems = Problem(*pair), Problem(*pair)
    release = problems[0].release(0.1)
    public = problems[0].coordinates.standard_normal(torch.randn)
    problems[0].optimizer.drift = lambda: public
    problems[0].optimizer.step(release, 0.02)
    sums = [
        tuple(a + b for a, b in zip(x, y, strict=True)) for x, y in zip(release.vector, public, strict=True)
    ]
    problems[1].optimizer.step(Release(sums, release.noise_std, release.step), 0.02)
    for one, other in zip(dense(problems[0].coordinates), dense(problems[1].coordinates), strict=True):
        assert torch.equal(one, other)


@every_optimizer
def test_a_drift_of_zero_changes_no_bit_and_another_one_does(pair: tuple[str, str]) -> None:
    if pair[0] == "wishart":
        pytest.skip("two objects do not share its secret projections")
    vector = Problem(*pair).coordinates.standard_normal(torch.ones)
    zero, one = ([tuple(f * t for t in parts) for parts in vector] for f in (0.0, 1.0))
    without, at_zero, moved = ends(pair, None), ends(pair, zero), ends(pair, one)
    assert all(torch.equal(a, b) for a, b in zip(without, at_zero, strict=True))
    assert not all(torch.allclose(a, b) for a, b in zip(without, moved, strict=True))


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_a_proximal_pull_acts_under_noise(mu: float) -> None:
    """theta <- theta - rate (g / tau + mu (theta - theta_0) / tau): not lost, as a pull inside of clipping would be."""
    calls, problem = list[int](), Problem("factors", "sgd")
    coordinates = problem.coordinates
    assert isinstance(coordinates, FactorCoordinates)
    start = [tuple(t.clone() for t in parts) for parts in coordinates.trained]

    def pull() -> Vector:
        calls.append(1)
        pairs = zip(coordinates.trained, start, strict=True)
        return [tuple(mu * (t - t0) for t, t0 in zip(*pair, strict=True)) for pair in pairs]

    problem.optimizer.drift = pull
    for number in range(1, 4):
        before = [t.clone() for parts in coordinates.trained for t in parts]
        release = problem.release(0.1)
        problem.optimizer.step(release, 0.01)
        assert len(calls) == number
        flat_start = [t for parts in start for t in parts]
        gradients = [t for parts in release.vector for t in parts]
        after = [t for parts in coordinates.trained for t in parts]
        for theta, theta0, gradient, then in zip(before, flat_start, gradients, after, strict=True):
            expected = theta - 0.01 / 0.1 * (gradient + mu * (theta - theta0))
            torch.testing.assert_close(then, expected, rtol=1e-5, atol=1e-6)


def test_a_release_says_of_itself_what_it_said_before() -> None:
    release = Release([(torch.ones(2),)], noise_std=0.5, step=3, clip_norm=0.1)
    found = release.plus([(torch.full((2,), 2.0, dtype=torch.float64),)])
    assert (found.noise_std, found.step, found.clip_norm) == (0.5, 3, 0.1)
    ((sum_,),), ((own,),) = found.vector, release.vector
    assert torch.equal(sum_, torch.full((2,), 3.0))  # in the release's dtype
    assert torch.equal(own, torch.ones(2))


@pytest.mark.parametrize("shape", [(1,), (2, 2)])
def test_a_drift_is_never_broadcast(shape: tuple[int, ...]) -> None:
    release = Release([(torch.ones(2),)], noise_std=0.5, step=3)
    with pytest.raises(ConfigError, match="does not have the shapes"):
        release.plus([(torch.ones(shape),)])
    with pytest.raises(ConfigError, match="does not have the shapes"):
        release.plus([])


def test_an_optimizer_has_no_drift_unless_it_is_given_one() -> None:
    problem = Problem("factors", "adamw")
    assert make_optimizer("factors", "adamw", problem.coordinates, {}).drift is None
