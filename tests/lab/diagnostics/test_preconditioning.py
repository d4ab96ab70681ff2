"""The preconditioners that are measured are those that the optimizers apply."""

from __future__ import annotations

import pytest
import torch
from diagnostics_cases import tiny_bench, tiny_settings
from tiny_models import tiny_model

from privlora.adapters import LowRankAdapter
from privlora.coordinates import TangentCoordinates, Vector
from privlora.coordinates.starts import factor_start
from privlora.geometry.fixed_rank import Tangent, factors, random_point
from privlora.lab.diagnostics.bench import Contender, FactorPairs
from privlora.lab.diagnostics.preconditioning import (
    OPTIMIZERS,
    aggressiveness,
    apply_preconditioner,
    effect_energy,
    preconditioning_study,
    stress,
)
from privlora.lab.diagnostics.sweep import product_energy
from privlora.mechanisms import Release
from privlora.methods import find_method, make_optimizer
from privlora.optimizers.paper import PrismPaper

TAU = 0.3
DOUBLE = torch.float64


def _contender(name: str) -> Contender:
    """Without momentum, so that a step is the preconditioned release; in float64."""
    adapter = LowRankAdapter(
        tiny_model(dtype=DOUBLE), rank=2, target_modules=r".*layers\.0\.(self_attn\.q_proj|mlp\.down_proj)"
    )
    row = find_method({"adamw": "dp-adamw", "paper": "prism-paper"}.get(name, "prism"))
    chosen = tiny_settings(method={"name": row.name, "optimizer": name, "beta1": 0.0}).method
    hyper = row.resolve(chosen, None, 4)
    if name == "adamw":
        start = factor_start(adapter, "random", seed=0, scale=1.5, dtype=DOUBLE)
        for left in start.left:
            left.copy_(torch.randn(left.shape, dtype=DOUBLE))
        return Contender(name, start, make_optimizer("factors", name, start, hyper.settings), hyper)
    g = torch.Generator().manual_seed(0)
    points = [random_point(len(group.sites), group.m, group.n, 2, g) for group in adapter.groups]
    tangent = TangentCoordinates(adapter, points, DOUBLE)
    return Contender(name, tangent, make_optimizer(row.space, name, tangent, hyper.settings), hyper)


def _vector(contender: Contender, seed: int) -> Vector:
    g = torch.Generator().manual_seed(seed)
    return contender.coordinates.standard_normal(lambda shape: torch.randn(shape, generator=g, dtype=DOUBLE))


def _dense_direction(contender: Contender, applied: Vector) -> list[torch.Tensor]:
    """The effect on Z of what ``apply_preconditioner`` returned."""
    coordinates = contender.coordinates
    if isinstance(coordinates, TangentCoordinates):
        if contender.name == "paper":
            pairs = [factors(point) for point in coordinates.points]
            return [da @ b.mT + a @ db.mT for (a, b), (da, db) in zip(pairs, applied, strict=True)]
        return [Tangent(*parts).embedding(p) for p, parts in zip(coordinates.points, applied, strict=True)]
    pairs = coordinates.factors()
    s = 1.5
    return [s * da @ b.mT + a @ db.mT for (a, b), (da, db) in zip(pairs, applied, strict=True)]


@pytest.mark.parametrize("name", ["adamw", *OPTIMIZERS, "sgd"])
def test_it_is_what_the_optimizer_does(name: str) -> None:
    contender, rate = _contender(name), 1e-7
    for seed in range(3):
        release = Release(_vector(contender, seed), TAU, seed + 1)
        before = [a @ b.mT for a, b in contender.coordinates.factors()]
        contender.optimizer.step(release, rate)
        after = [a @ b.mT for a, b in contender.coordinates.factors()]
        # The step has hardly moved the point, and the moments include this release.
        applied = apply_preconditioner(contender, release.vector, TAU)
        for old, new, expected in zip(before, after, _dense_direction(contender, applied), strict=True):
            torch.testing.assert_close((old - new) / rate, expected, rtol=1e-3, atol=1e-3)
        total = sum(float(t.square().sum()) for t in _dense_direction(contender, applied))
        assert effect_energy(contender, applied) == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "rank", "scalar"])
def test_aggressiveness_is_the_largest_gain_that_power_iteration_finds(name: str) -> None:
    contender = _contender(name)
    for seed in range(3):  # a signal far above the noise, so that the floor is not all there is
        strong = [tuple(4 * t for t in parts) for parts in _vector(contender, 0)]
        contender.optimizer.step(Release(strong, TAU, seed + 1), 1e-6)
    bound = aggressiveness(contender, TAU)
    vector = _vector(contender, 9)
    gain = 0.0
    for _ in range(3000):
        norm = sum(float(t.square().sum()) for parts in vector for t in parts) ** 0.5
        vector = apply_preconditioner(contender, [tuple(t / norm for t in parts) for parts in vector], TAU)
        gain = sum(float(t.square().sum()) for parts in vector for t in parts) ** 0.5
    assert gain <= bound * (1 + 1e-9)
    assert gain == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("name", ["rank", "scalar"])
def test_floors_bound_the_gain_as_theorem_3_5_says(name: str) -> None:
    contender = _contender(name)
    for seed in range(4):
        noise = [tuple(TAU * t for t in parts) for parts in _vector(contender, seed)]
        contender.optimizer.step(Release(noise, TAU, seed + 1), 1e-3)
        assert aggressiveness(contender, TAU) <= 1 / TAU * (1 + 1e-6)
        applied = apply_preconditioner(contender, noise, TAU)
        assert effect_energy(contender, applied) <= effect_energy(contender, noise) / TAU**2 * (1 + 1e-6)


def test_stress_is_that_of_the_state_a_method_rests_on() -> None:
    assert stress(_contender("rank")) == pytest.approx(1)
    paper = _contender("paper")
    assert isinstance(paper.coordinates, TangentCoordinates)
    assert stress(paper) == pytest.approx(
        max(float(p.S.min(dim=-1).values.rsqrt().max()) for p in paper.coordinates.points)
    )
    adamw = _contender("adamw")
    smallest = min(float(torch.linalg.svdvals(t).min()) for pair in adamw.coordinates.factors() for t in pair)
    assert stress(adamw) == pytest.approx(1 / smallest)


def _full_rank(pairs: FactorPairs) -> FactorPairs:
    g = torch.Generator().manual_seed(5)
    return [(0.3 * torch.randn(left.shape, generator=g), right) for left, right in pairs]


def test_a_study() -> None:
    with tiny_bench() as bench:
        study = preconditioning_study(bench, _full_rank(bench.start), steps=4, epsilons=(3.0, 12.0))
        total = sum(
            len(g.sites) * 2 * (g.m + g.n - 2) for g in bench.adapter.groups
        )  # sum of r (m + n - r), r = 2
    names = ["dp-adamw", *(f"prism {name}" for name in OPTIMIZERS)]
    assert [curve.method for curve in study.curves] == [run.method for run in study.runs] == names
    assert (study.burn_in, study.stepwise_epsilon) == (1, 3.0)
    low, high = study.curves[0].noise_multipliers[1], study.curves[0].noise_multipliers[0]
    assert 0 < low < high == study.stepwise_noise_multiplier
    for run in study.runs:
        assert run.steps == [2, 3, 4]
        for ratio, p, raw in zip(run.amplification, run.preconditioned, run.raw, strict=True):
            assert ratio == p / raw
    for curve in study.curves[1:]:  # raw noise: tau sqrt(sum r (m + n - r)), b = 8
        for sigma, raw in zip(curve.noise_multipliers, curve.raw, strict=True):
            assert raw == pytest.approx(sigma / 8 * total**0.5, rel=0.1)
    for run in study.runs[1:3]:  # floored at tau: at most the norm of standard normal noise
        tau = run.noise_multiplier / 8
        for p, raw in zip(run.preconditioned, run.raw, strict=True):
            assert p <= raw / tau * (1 + 1e-5)


def test_product_energy_of_the_lift_is_the_noise() -> None:
    """`paper` measures noise by its lift: (da, db) -> da V^T S^1/2 + U S^1/2 db^T is the tangent again."""
    contender = _contender("paper")
    assert isinstance(contender.coordinates, TangentCoordinates)
    assert isinstance(contender.optimizer, PrismPaper)
    for point, parts in zip(contender.coordinates.points, _vector(contender, 1), strict=True):
        da, db = contender.optimizer.lift(point, Tangent(*parts))
        a, b = factors(point)
        torch.testing.assert_close(da @ b.mT + a @ db.mT, Tangent(*parts).embedding(point))
        found = product_energy(torch.cat([da, a], dim=-1), torch.cat([b, db], dim=-1))
        torch.testing.assert_close(found, Tangent(*parts).norm_squared())
