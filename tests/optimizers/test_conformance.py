"""What every optimizer of every space does: descend, keep shapes and dtypes, come back from a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizer_cases import EVERY_OPTIMIZER, LOSSES, RANK, Problem, dense, label
from torch import Tensor

from privlora.coordinates import WishartCoordinates
from privlora.methods import METHODS, SPACES, make_optimizer

every_optimizer = pytest.mark.parametrize("pair", EVERY_OPTIMIZER, ids=label)
# Ways in spans of public texts are dear, and go by rules that other spaces have, too: one a space is gone at once.
SPANS = {row.space: row.optimizers[0] for row in METHODS.values() if row.public_texts}


def is_long(pair: tuple[str, str]) -> bool:
    """Or thousands of steps, where each is along one direction."""
    return pair[0] == "direction" or pair[1] != {**SPANS, "tangent-lifted": "paper"}.get(pair[0], pair[1])


every_optimizer_far = pytest.mark.parametrize(
    "pair",
    [pytest.param(p, marks=pytest.mark.long if is_long(p) else ()) for p in EVERY_OPTIMIZER],
    ids=label,
)
# Rates without noise for rules that take the gradient in its own unit; 0.03 for all others.
RATES = {
    ("factors", "sgd"): {"quadratic": 0.02, "recovery": 0.1, "logistic": 1.0},
    ("one-factor", "sgd"): {"logistic": 1.0},
    ("tangent", "sgd"): {"logistic": 1.0},
    **{
        (space, "sgd"): {"quadratic": 0.02, "recovery": 0.1, "logistic": 1.0}
        for space in ("coefficients", "projected-span", "span-and-residual")
    },
    ("tangent-coefficients", "sgd"): {"logistic": 1.0},
    ("tangent-projected-span", "sgd"): {"logistic": 1.0},
    # Estimates through fresh projections keep their spread, and Adam its step, however near the end is.
    **{(space, "adamw"): {"recovery": 0.01, "from zero": 0.01} for space in ("projected", "wishart")},
    **{
        (space, "sgd"): {"quadratic": 0.01, "recovery": 0.1, "logistic": 1.0}
        for space in ("projected", "wishart")
    },
    ("direction", "sgd"): {
        "quadratic": 4e-4,
        "recovery": 1e-3,
        "logistic": 0.01,
        "from zero": 1e-3,
        "noise": 1e-4,
    },
    ("direction", "adamw"): {
        "quadratic": 2e-3,
        "recovery": 2e-3,
        "logistic": 5e-3,
        "from zero": 2e-3,
        "noise": 3e-3,
    },
}


def steps_of(pair: tuple[str, str]) -> int:
    """One direction of 432 a step takes longer."""
    return 6000 if pair[0] == "direction" else 250


def within(pair: tuple[str, str], usual: float) -> float:
    """Part of the loss that may be left; one direction comes less near in as many steps."""
    return max(usual, 0.05) if pair[0] == "direction" else usual


@every_optimizer_far
@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=() if name == "quadratic" else pytest.mark.long) for name in LOSSES]
)
def test_it_descends(pair: tuple[str, str], loss: str) -> None:
    problem = Problem(*pair, LOSSES[loss])
    before = problem.loss()
    for _ in range(steps_of(pair)):
        problem.step(RATES.get(pair, {}).get(loss, 0.03))
    usual = {"quadratic": 0.05, "recovery": 0.01, "logistic": 0.35}[loss]
    assert problem.loss() < within(pair, usual) * before


def test_one_direction_a_step_leads_down_too() -> None:
    """A part of the way that the long test goes."""
    problem = Problem("direction", "sgd", LOSSES["quadratic"])
    before = problem.loss()
    for _ in range(400):
        problem.step(RATES["direction", "sgd"]["quadratic"])
    assert problem.loss() < 0.8 * before


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",  # rules without second moments of directions have nothing to blow up
    [
        pytest.param(p, marks=pytest.mark.long if is_long(p) or p[1] in ("sgd", "scalar") else ())
        for p in EVERY_OPTIMIZER
    ],
    ids=label,
)
def test_it_leaves_zero_towards_a_matrix_of_rank_one(pair: tuple[str, str]) -> None:
    # Most directions of the second moments are empty: they must not be blown up.
    if pair[0] == "tangent-lifted":
        pytest.skip("Eq. 24-26 cannot start at zero, and say so")
    problem = Problem(*pair, target_rank=1, from_zero=True)
    before = problem.loss()
    for _ in range(steps_of(pair)):
        problem.step(RATES.get(pair, {}).get("from zero", 0.1 if pair[1] == "sgd" else 0.03))
    assert problem.loss() < within(pair, 1e-2) * before


@pytest.mark.long
@every_optimizer
def test_it_descends_under_noise(pair: tuple[str, str]) -> None:
    problem = Problem(*pair)
    before = problem.loss()
    for _ in range(steps_of(pair)):
        problem.step(RATES.get(pair, {}).get("noise", 0.01), noise_std=0.1)
    assert problem.loss() < 0.3 * before


@every_optimizer
def test_the_step_is_proportional_to_the_learning_rate(pair: tuple[str, str]) -> None:
    def moved(rate: float) -> Tensor:
        problem = Problem(*pair)
        before = dense(problem.coordinates)
        problem.step(rate)
        after = dense(problem.coordinates)
        return torch.cat([(y - x).flatten() for x, y in zip(before, after, strict=True)])

    small, large = moved(1e-3), moved(2e-3)
    assert float(large.norm()) > 1e-4
    assert float((large - 2 * small).norm()) < 0.03 * float(large.norm())
    assert float(moved(0.0).norm()) < 1e-5


@every_optimizer
def test_its_rate_may_change_from_step_to_step(pair: tuple[str, str]) -> None:
    problem = Problem(*pair)
    problem.step(0.01, noise_std=0.1)
    before = dense(problem.coordinates)
    problem.step(0.0, noise_std=0.1)
    for x, y in zip(before, dense(problem.coordinates), strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=1e-5)
    problem.step(0.01, noise_std=0.1)
    assert all(float((y - x).norm()) > 1e-3 for x, y in zip(before, dense(problem.coordinates), strict=True))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_names_shapes_and_dtypes_stay(pair: tuple[str, str], dtype: torch.dtype) -> None:
    problem = Problem(*pair, dtype=dtype)
    seen = []
    for _ in range(4):
        problem.step(0.01, noise_std=0.1)
        state = problem.optimizer.state_dict()
        seen.append({name: (t.shape, t.dtype) for name, t in state.items()})
        # Counters aside, everything is in the dtype of the factors.
        assert {t.dtype for t in state.values() if t.dim()} <= {dtype}
        kept = problem.coordinates.state_dict().values()
        assert {t.dtype for t in kept if t.is_floating_point()} == {dtype}
        assert all(bool(t.isfinite().all()) for t in state.values())
    assert all(names == seen[0] for names in seen)


@every_optimizer
@pytest.mark.parametrize(
    ("done", "dtype"),
    [
        (0, torch.float64),
        (3, torch.float32),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((0, torch.float32), (1, torch.float32), (1, torch.float64), (3, torch.float64))
        ),
    ],
)
def test_a_checkpoint_continues_to_the_bit(pair: tuple[str, str], dtype: torch.dtype, done: int) -> None:
    rate = RATES.get(pair, {}).get("noise", 0.02)
    problem, again = (Problem(*pair, dtype=dtype) for _ in range(2))
    for _ in range(done):
        problem.step(rate, noise_std=0.1)
    saved = copy.deepcopy([problem.coordinates.state_dict(), problem.optimizer.state_dict()])
    # Into an optimizer that has been elsewhere.
    again.step(15 * rate, noise_std=1.0)
    if done == 0:
        again = Problem(*pair, dtype=dtype)
    again.coordinates.load_state_dict(saved[0])
    if isinstance(again.coordinates, WishartCoordinates):  # whose projections no state holds
        again.coordinates._key, again.coordinates._count = (
            problem.coordinates._key,
            problem.coordinates._count,
        )
        again.coordinates._draw_projections()
    again.optimizer.load_state_dict(saved[1])
    for _ in range(3):
        release = problem.release(0.1)
        for one in (problem, again):
            one.coordinates.prepare()
            one.optimizer.step(release, rate)
    for one, other in (
        (problem.coordinates.state_dict(), again.coordinates.state_dict()),
        (problem.optimizer.state_dict(), again.optimizer.state_dict()),
    ):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


@every_optimizer
def test_a_release_is_not_changed(pair: tuple[str, str]) -> None:
    problem = Problem(*pair)
    for _ in range(2):
        release = problem.release(0.1)
        before = copy.deepcopy(release.vector)
        problem.optimizer.step(release, 0.02)
        for parts, kept in zip(release.vector, before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True))


@every_optimizer
def test_nothing_moves_but_what_is_trained(pair: tuple[str, str]) -> None:
    problem = Problem(*pair)
    before = copy.deepcopy(problem.coordinates.state_dict())
    for _ in range(3):
        problem.step(0.05, noise_std=0.1)
    frozen = {name for name, t in problem.coordinates.state_dict().items() if torch.equal(t, before[name])}
    public = {"one-factor": "right", "projected": "key", "wishart": "key", "direction": "key"}.get(
        pair[0], "nothing"
    )
    assert frozen == {name for name in before if name.endswith(public)}


@every_optimizer
def test_each_declared_setting_is_used_and_no_other_is_taken(pair: tuple[str, str]) -> None:
    def end(settings: dict[str, float]) -> Tensor:
        torch.manual_seed(0)
        problem = Problem(*pair)
        problem.optimizer = make_optimizer(*pair, problem.coordinates, settings)
        for _ in range(4):
            problem.step(0.02, noise_std=0.1)
        return torch.cat([z.flatten() for z in dense(problem.coordinates)])

    kind = SPACES[pair[0]].optimizers[pair[1]]
    own = dict(kind.settings)
    usual = end(own)
    ignored = {
        (space, "sgd"): {"beta2"} for space in ("tangent", "tangent-coefficients", "tangent-projected-span")
    }.get(pair, set())
    for name in own.keys() - ignored:
        other = {
            "beta1": 0.5,
            "beta2": 0.5,
            "weight_decay": 0.3,
            "learning_rate_ratio": 2.0,
            "floor": 3.0,
            "error_feedback": 1.0,
        }[name]
        assert not torch.allclose(end({**own, name: other}), usual, rtol=1e-4), name
    with pytest.raises(TypeError):
        end({**own, "momentum_of_nothing": 0.9})


def test_the_suite_covers_every_space() -> None:
    assert {space for space, _ in EVERY_OPTIMIZER} == set(SPACES)
    assert all(set(SPACES[s].optimizers) == {o for t, o in EVERY_OPTIMIZER if t == s} for s in SPACES)
    assert RANK > 1
