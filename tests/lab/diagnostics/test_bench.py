"""Runs on the workbench: paired, repeatable, and really those of the methods they are named after."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from diagnostics_cases import RECORDS, tiny_bench, tiny_settings
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting.events import PoissonSampling
from privlora.config.groups import MICRO_BATCH
from privlora.coordinates import FactorCoordinates, Vector
from privlora.errors import ConfigError, DataError
from privlora.lab.diagnostics.bench import Contender, Workbench, open_workbench
from privlora.mechanisms import Release
from privlora.methods import METHODS
from privlora.optimizers import Optimizer


def _releases(monkeypatch: pytest.MonkeyPatch) -> list[Release]:
    """Everything that optimizers are given from now on."""
    seen: list[Release] = []
    step = Optimizer.step

    def spy(self: Optimizer, release: Release, learning_rate: float) -> None:
        seen.append(release)
        step(self, release, learning_rate)

    monkeypatch.setattr(Optimizer, "step", spy)
    return seen


@pytest.mark.parametrize("space", ["factors", "tangent"])
def test_the_replayed_noise_is_the_release_of_an_empty_batch(
    space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases, noises = _releases(monkeypatch), []

    def watch(contender: Contender, noise: Vector, noise_std: float) -> None:
        noises.append((noise, noise_std))

    # So small a batch that all of the first three are empty.
    with tiny_bench(privacy={"expected_batch_size": 1e-4}) as bench:
        trace = bench.run(_contender(bench, space), steps=3, noise_multiplier=1.5, watcher=watch)
    assert all(math.isnan(value) for value in (*trace.clip_fraction, *trace.clip_coefficient))
    assert len(releases) == 3
    for release, (noise, tau) in zip(releases, noises, strict=True):
        assert tau == release.noise_std == pytest.approx(1.5 / 1e-4)
        for parts, expected in zip(noise, release.vector, strict=True):
            for t, e in zip(parts, expected, strict=True):
                torch.testing.assert_close(t, e, rtol=1e-5, atol=1e-5 * tau)


@pytest.mark.parametrize("space", ["factors", "tangent"])
def test_step_norms_are_those_of_the_dense_update(space: str) -> None:
    dense = []

    def watch(contender: Contender, noise: Vector, noise_std: float) -> None:
        dense.append(_dense(contender))

    with tiny_bench() as bench:
        contender = _contender(bench, space)
        trace = bench.run(contender, steps=3, noise_multiplier=1.5, watcher=watch)
        dense.append(_dense(contender))
    for norm, (before, after) in zip(trace.step_norm, pairwise(dense), strict=True):
        expected = sum(float((b - a).square().sum()) for a, b in zip(before, after, strict=True)) ** 0.5
        assert norm == pytest.approx(expected, rel=1e-4)
        assert norm > 0


def test_noise_energy_is_that_of_the_dense_effect() -> None:
    expected = []

    def watch(contender: Contender, noise: Vector, noise_std: float) -> None:
        coordinates = contender.coordinates
        assert isinstance(coordinates, FactorCoordinates)
        total = 0.0
        for (left, right), (dl, dr) in zip(
            zip(coordinates.left, coordinates.right, strict=True), noise, strict=True
        ):
            effect = (left + dl) @ (right + dr).mT - left @ right.mT
            total += float(effect.double().square().sum()) * bench.scale**2
        expected.append(total)

    with tiny_bench() as bench:
        assert bench.scale == 1.5
        trace = bench.run(bench.factor_contender(bench.start), steps=2, noise_multiplier=1.5, watcher=watch)
    assert trace.noise_energy == pytest.approx(expected, rel=1e-4)


def test_mean_noise_energy_follows_the_laws() -> None:
    ratios: dict[str, list[float]] = {"factors": [], "tangent": []}
    for seed in range(6):
        with tiny_bench(seed=seed) as bench:
            for space, found in ratios.items():
                trace = bench.run(_contender(bench, space), steps=4, noise_multiplier=1.5)
                found += [e / law for e, law in zip(trace.noise_energy, trace.law_energy, strict=True)]
    for found in ratios.values():
        assert sum(found) / len(found) == pytest.approx(1, abs=0.05)
        assert max(found) != min(found)


def test_prism_is_the_same_run_from_every_gauge_and_factors_are_not() -> None:
    with tiny_bench() as bench:
        runs = {
            space: [
                bench.run(_contender(bench, space, c), steps=3, noise_multiplier=1.5)
                for c in (0.25, 1.0, 3.0)
            ]
            for space in ("factors", "tangent")
        }
    for trace in runs["tangent"]:
        assert trace.step_norm == pytest.approx(runs["tangent"][1].step_norm, rel=1e-4)
        assert trace.clip_coefficient == pytest.approx(runs["tangent"][1].clip_coefficient, rel=1e-4)
        assert trace.factor_statistic == []
    small, one, large = runs["factors"]
    assert small.step_norm[0] > 1.5 * one.step_norm[0] > 2 * large.step_norm[0]
    assert small.factor_statistic[0] == pytest.approx(16 * one.factor_statistic[0], rel=1e-5)


def test_runs_are_repeatable_and_the_model_comes_back() -> None:
    model = tiny_model()
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    traces = []
    for seed in (0, 0, 1):
        with tiny_bench(seed=seed, model=model, adapter={"lora_dropout": 0.2}) as bench:
            traces.append(bench.run(bench.factor_contender(bench.start), steps=2, noise_multiplier=1.0))
    assert traces[0] == traces[1] != traces[2]
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


def test_a_method_of_the_run_keeps_its_settings() -> None:
    with tiny_bench(method={"name": "prism", "optimizer": "scalar", "learning_rate": 0.5}) as bench:
        prism, baseline = bench.tangent_contender(bench.start), bench.factor_contender(bench.start)
        assert (prism.name, prism.hyper.learning_rate) == ("prism scalar", 0.5)
        assert baseline.hyper.learning_rate == METHODS["dp-adamw"].rate_of(bench.settings.privacy.steps)
    with tiny_bench(method={"name": "dp-adamw", "learning_rate": 0.5, "beta2": 0.9}) as bench:
        baseline = bench.factor_contender(bench.start)
        assert (baseline.hyper.learning_rate, baseline.hyper.settings["beta2"]) == (0.5, 0.9)
        assert bench.tangent_contender(bench.start).name == "prism rank"


def test_a_rate_that_is_left_open_is_found_for_the_runs_own_method() -> None:
    with tiny_bench(method={"learning_rate": "auto"}, run={"tokens_per_micro_batch": "auto"}) as bench:
        own = bench.settings.method.learning_rate
        assert isinstance(own, float)
        assert bench.tangent_contender(bench.start).hyper.learning_rate == own
        assert bench.settings.run.tokens_per_micro_batch == MICRO_BATCH


def test_another_optimizer_takes_what_it_has_of_the_runs_settings() -> None:
    given = {"name": "prism", "error_feedback": 1.0, "right_weight": 0.5, "beta2": 0.9}
    with tiny_bench(method=given) as bench:
        own = bench.tangent_contender(bench.start)
        assert own.hyper.settings["error_feedback"] == 1.0
        assert own.coordinates.intrinsic  # the laws that are looked at hold for no other weight
        moved = [(left + 0.1, right) for left, right in bench.start]  # the paper's rule cannot leave zero
        paper = bench.tangent_contender(moved, "paper")
        assert paper.hyper.settings == {"beta1": 0.9, "beta2": 0.999}  # a method of its own


@pytest.mark.parametrize("bands", [1, 2, "auto"])
def test_the_noise_of_a_step_is_looked_at_without_bands(bands: Any) -> None:
    with tiny_bench(privacy={"bands": bands, "noise_multiplier": None, "target_epsilon": 3.0}) as bench:
        assert bench.plan.event.sampling == PoissonSampling(0.2)
        assert bench.settings.privacy.bands == 1


def _refused(records: list[dict[str, Any]] = RECORDS, **groups: dict[str, Any]) -> None:
    with open_workbench(
        tiny_settings(**groups), model=tiny_model(), tokenizer=tiny_tokenizer(), records=records
    ):
        pass


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no noise to diagnose"):
        _refused(privacy={"private": False, "noise_multiplier": None, "delta": None})
    with pytest.raises(DataError, match="no records"):
        _refused(records=[])


def _contender(bench: Workbench, space: str, gauge: float = 1.0) -> Contender:
    pairs = bench.rescaled(gauge)
    return bench.factor_contender(pairs) if space == "factors" else bench.tangent_contender(pairs)


def _dense(contender: Contender) -> list[torch.Tensor]:
    return [(a.double() @ b.double().mT).clone() for a, b in contender.coordinates.factors()]
