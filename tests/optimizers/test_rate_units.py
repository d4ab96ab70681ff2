"""Learning rates in the size of the frozen weights: what a step of noise moves, and that nothing else changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from classifier_cases import adapted, classifier
from optimizer_cases import EVERY_OPTIMIZER, coordinates_at, label
from quantised_models import INT8, NF4, packed_model, unpacked_model
from test_methods import PRIVATE, RECORDS, STEPS, tune
from tiny_models import tiny_llama, tiny_model, tiny_tokenizer
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.api import fine_tune, resume_run
from privlora.config import MethodSettings, kept_settings
from privlora.coordinates import Coordinates, FixedTangentCoordinates, TangentCoordinates
from privlora.errors import ConfigError, ModelError
from privlora.geometry.fixed_rank import Point, random_point, tangent_dimension
from privlora.mechanisms import Release
from privlora.methods import METHODS, SPACES, VOTE_METHODS, build, find_method, make_optimizer
from privlora.optimizers import Optimizer, weight_units
from privlora.reporting.tables import method_table
from privlora.training.observer import Observer

RANK, TAU = 4, 0.3
IN_SPAN = "tangent-coefficients"
WITH_UNIT = [
    pair for pair in EVERY_OPTIMIZER if SPACES[pair[0]].weight_unit is not None and pair[0] != IN_SPAN
]
# Rules whose first step on noise alone is as long as the rate says; what the others do with it is theirs.
MOVES_BY_THE_RATE = [
    *(("tangent", name) for name in ("rank", "scalar", "sgd")),
    *(("factors", name) for name in ("adamw", "sgd", "riemannian")),
    *(("one-factor", name) for name in ("adamw", "lora-fa")),
    *((space, name) for space in ("projected", "wishart") for name in ("sgd", "adamw")),
]


class Bench:
    """A rule on modules of two shapes, whose frozen weights differ in size from one to the next.

    size: what all frozen weights and the spectrum of the start are multiplied by.
    """

    def __init__(
        self, pair: tuple[str, str], *, relative: bool = True, size: float = 1.0, targets: Any = None
    ) -> None:
        model = tiny_llama(hidden_size=64, intermediate_size=96).double()
        targets = targets or ["q_proj", "v_proj", "down_proj"]
        self.adapter = LowRankAdapter(model, rank=RANK, target_modules=targets)
        generator = torch.Generator().manual_seed(1)
        self.generator, points = torch.Generator().manual_seed(2), []
        with torch.no_grad():
            for at, site in enumerate(self.adapter.sites):
                site.weight.mul_(size * 3.0**at)
        for g in self.adapter.groups:
            start = random_point(len(g.sites), g.m, g.n, RANK, generator)
            points.append(Point(start.U, size * start.S, start.V))
        self.coordinates = coordinates_at(self.adapter, pair[0], points)
        settings = SPACES[pair[0]].optimizers[pair[1]].settings
        self.optimizer = make_optimizer(*pair, self.coordinates, settings, relative_rate=relative)

    def norms(self) -> list[Tensor]:
        return [
            torch.stack([site.weight.detach().square().sum().sqrt() for site in group.sites])
            for group in self.adapter.groups
        ]

    def release(self) -> Release:
        """Noise of TAU alone."""
        draw = lambda shape: TAU * torch.randn(shape, generator=self.generator, dtype=torch.float64)  # noqa: E731
        return Release(self.coordinates.standard_normal(draw), TAU, step=1)

    def moved(self, rate: float) -> list[list[Tensor]]:
        """By how much one step of noise moves what is trained: Z of spaces of Z, else the factors; float64."""
        before = numbers(self.coordinates)
        self.optimizer.step(self.release(), rate)
        after = numbers(self.coordinates)
        return [[y - x for x, y in zip(*each, strict=True)] for each in zip(before, after, strict=True)]


def numbers(coordinates: Coordinates) -> list[list[Tensor]]:
    """What moves, group by group."""
    if isinstance(coordinates, TangentCoordinates):
        return [[(point.U * point.S[:, None]) @ point.V.mT] for point in coordinates.points]
    trained: Any = coordinates
    return [[t.clone() for t in tensors] for tensors in trained.trained]


def lengths(parts: list[Tensor]) -> Tensor:
    """Of each module, (L,)."""
    return torch.stack([t.flatten(1).square().sum(dim=1) for t in parts]).sum(dim=0).sqrt()


@pytest.mark.parametrize("pair", MOVES_BY_THE_RATE, ids=label)
def test_noise_moves_all_modules_together_by_the_rates_share_of_their_frozen_matrices(
    pair: tuple[str, str],
) -> None:
    # A wishart estimate is wider where there are more inputs, and sgd counts in the widest.
    bench = Bench(pair, targets=["q_proj", "v_proj"] if pair == ("wishart", "sgd") else None)
    rate = 1e-4
    shares = [
        lengths(parts) / (rate * norms) for parts, norms in zip(bench.moved(rate), bench.norms(), strict=True)
    ]
    found = torch.cat(shares)
    assert float(found.square().sum().sqrt()) == pytest.approx(1, abs=0.05)
    for share in found * len(found) ** 0.5:
        assert float(share) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("pair", WITH_UNIT, ids=label)
def test_the_step_is_that_in_entries_times_the_unit_of_each_module(pair: tuple[str, str]) -> None:
    one, other = Bench(pair), Bench(pair, relative=False)
    units = weight_units(one.coordinates)
    assert all(len(set(of_group.tolist())) == len(of_group) for of_group in units)
    rate = 1e-5 / float(torch.cat(units).max())
    for unit, scaled, plain in zip(units, one.moved(rate), other.moved(rate), strict=True):
        for a, b in zip(scaled, plain, strict=True):
            expected = unit[:, None, None] * b
            # Retraction is of second order in the step; the rest is rounding.
            far = (a - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
            assert float(far.max()) < 2e-2


@pytest.mark.parametrize("pair", WITH_UNIT, ids=label)
def test_nothing_that_is_remembered_knows_the_unit(pair: tuple[str, str]) -> None:
    """But for the frames and the cut-off parts of points that have moved elsewhere: so before any has."""
    one, other = Bench(pair), Bench(pair, relative=False)
    for bench in (one, other):
        bench.optimizer.step(bench.release(), 0.0)
    kept, plain = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert kept.keys() == plain.keys()
    assert all(torch.equal(kept[name], plain[name]) for name in kept)


# Riemannian's damping of 0.01 is beside Gram matrices of the factors, which noise makes larger or smaller.
@pytest.mark.parametrize("pair", [p for p in MOVES_BY_THE_RATE if p[1] != "riemannian"], ids=label)
@pytest.mark.parametrize("size", [0.1, 10.0])
def test_the_share_is_the_same_whatever_the_scale_of_the_weights(pair: tuple[str, str], size: float) -> None:
    shares = []
    for bench in (Bench(pair), Bench(pair, size=size)):
        moved = [bench.moved(1e-3) for _ in range(3)][-1]
        shares += [torch.cat([lengths(m) / n for m, n in zip(moved, bench.norms(), strict=True)])]
    torch.testing.assert_close(shares[1], shares[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("pair", WITH_UNIT, ids=label)
@pytest.mark.parametrize("done", [0, 2])
def test_a_checkpoint_continues_to_the_bit(pair: tuple[str, str], done: int) -> None:
    bench, again = Bench(pair), Bench(pair)
    for _ in range(done):
        bench.optimizer.step(bench.release(), 0.01)
    saved = copy.deepcopy([bench.coordinates.state_dict(), bench.optimizer.state_dict()])
    again.optimizer.step(again.release(), 0.1)
    again.optimizer.reset()
    again.coordinates.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    again.generator.set_state(bench.generator.get_state())
    for each in (bench, again):
        for _ in range(2):
            each.optimizer.step(each.release(), 0.01)
    for one, other in (
        (bench.coordinates.state_dict(), again.coordinates.state_dict()),
        (bench.optimizer.state_dict(), again.optimizer.state_dict()),
    ):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_unit_is_the_norm_over_the_root_of_the_numbers_that_move_and_of_the_modules() -> None:
    expected = {
        "tangent": lambda m, n: tangent_dimension(m, n, RANK),
        "factors": lambda m, n: RANK * (m + n),
        "one-factor": lambda m, n: RANK * m,
        "projected": lambda m, n: m * n,
        "wishart": lambda m, n: m * n,
    }
    assert expected.keys() | {IN_SPAN} == {n for n, space in SPACES.items() if space.weight_unit is not None}
    for space, numbers_of in expected.items():
        bench = Bench((space, next(iter(SPACES[space].optimizers))))
        for unit, norm, g in zip(
            weight_units(bench.coordinates), bench.norms(), bench.adapter.groups, strict=True
        ):
            modules = len(bench.adapter.sites)
            torch.testing.assert_close(
                unit, norm / (modules * numbers_of(g.m, g.n)) ** 0.5, rtol=1e-6, atol=0
            )


def test_moves_at_a_fixed_base_count_its_rank_and_not_that_of_the_adapter_that_holds_them() -> None:
    points = Bench(("tangent", "rank")).coordinates.as_points()
    adapter = LowRankAdapter(
        tiny_llama(hidden_size=64, intermediate_size=96),
        rank=2 * RANK,
        target_modules=["q_proj", "v_proj", "down_proj"],
    )
    fixed = FixedTangentCoordinates(adapter, points)
    assert fixed.moved_numbers() == [tangent_dimension(g.m, g.n, RANK) for g in adapter.groups]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_norms_are_those_of_the_weights_that_layers_compute_with(family: str) -> None:
    model = tiny_model(family)
    adapter = LowRankAdapter(model, rank=2)
    found = dict(
        zip([s.name for s in adapter.sites], torch.cat(adapter.weight_norms()).tolist(), strict=True)
    )
    for name, norm in found.items():
        assert norm == pytest.approx(float(model.get_submodule(name).weight.detach().norm()), rel=1e-6)


def test_norms_below_float32_are_summed_in_float32() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    adapter = LowRankAdapter(model, rank=2)
    found = adapter.weight_norms()
    assert {t.dtype for t in found} == {torch.float64}
    for site, norm in zip(adapter.sites, torch.cat(found).tolist(), strict=True):
        assert norm == pytest.approx(float(site.weight.detach().double().norm()), rel=1e-6)


@pytest.mark.parametrize("packing", [NF4, INT8], ids=["nf4", "int8"])
def test_norms_of_packed_weights_are_those_that_they_stand_for(packing: Any) -> None:
    model = packed_model(packing)
    plain = LowRankAdapter(unpacked_model(model), rank=2).weight_norms()
    for one, other in zip(LowRankAdapter(model, rank=2).weight_norms(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


def test_norms_are_those_of_w0_while_another_weight_stands_in_its_place() -> None:
    bench = Bench(("projected", "sgd"))
    before = bench.adapter.weight_norms()
    with bench.adapter:
        bench.moved(1.0)
        assert all(map(torch.equal, bench.adapter.weight_norms(), before))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_weight_without_a_norm_is_refused(value: float) -> None:
    adapter = LowRankAdapter(tiny_model(), rank=2)
    name = adapter.sites[3].name
    with torch.no_grad():
        adapter.sites[3].weight.mul_(0.0)[0, 0] = value
    with pytest.raises(ModelError, match=rf"{name}.*is all zeros, or has entries that are not finite"):
        build(find_method("prism"), adapter, init="random", relative_rate=True)
    build(find_method("prism"), adapter, init="random")


# --- rows ---


ROWS = {**METHODS, **VOTE_METHODS}
WITHOUT = [name for name, row in ROWS.items() if SPACES[row.space].weight_unit is None]


def test_which_rows_have_no_unit() -> None:
    assert [
        *("prism-paper", "dp-zo", "pe-sgd", "pe-sgd-fix", "guided-prism", "pdp-sgd", "gep", "b-gep")
    ] == WITHOUT


@pytest.mark.parametrize("name", WITHOUT)
def test_rows_without_a_unit_refuse_it_before_anything_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"relative_rate=true cannot be used with method '{name}'"):
        ROWS[name].resolve(MethodSettings(name=name, relative_rate=True), None, 24)
    assert not ROWS[name].resolve(MethodSettings(name=name, relative_rate=False), None, 24).relative_rate
    if name in METHODS and not METHODS[name].public_texts:
        with pytest.raises(ConfigError, match="relative_rate=true"):
            tune(tmp_path / "run", {"name": name, "relative_rate": True})
        assert not (tmp_path / "run").exists()
    if name == "dp-zo":
        coordinates, _ = build(METHODS[name], LowRankAdapter(tiny_model(), rank=2))
        with pytest.raises(ConfigError, match="in the size of the frozen weights"):
            weight_units(coordinates)


def test_a_rule_that_does_not_know_units_is_not_given_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SPACES["factors"].optimizers["adamw"], "takes_weight_units", False)
    assert not Optimizer.takes_weight_units
    with pytest.raises(ConfigError, match="'adamw' takes no learning rate in the size"):
        Bench(("factors", "adamw"))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in WITHOUT and name != "prism"])
def test_a_default_is_converted_with_the_usual_unit(name: str) -> None:
    row = ROWS[name]
    unit = SPACES[row.space].weight_unit
    assert unit is not None
    for steps in (24, 96):
        plain = row.resolve(MethodSettings(name=name, relative_rate=False), None, steps)
        found = row.resolve(MethodSettings(name=name, relative_rate=True), None, steps)
        assert found.relative_rate
        assert found.learning_rate == pytest.approx(plain.learning_rate / unit, rel=6e-3)
    given = row.resolve(MethodSettings(name=name, relative_rate=True, learning_rate=0.5), None, 24)
    assert given.learning_rate == 0.5


@pytest.mark.parametrize("method", ["prism", "dp-adamw"])
def test_the_last_layer_of_a_classifier_moves_by_the_usual_unit_of_the_space(method: str) -> None:
    """It has no frozen matrix to be measured by: as far as at the rate in entries that the rate stands for."""
    unit = SPACES[METHODS[method].space].weight_unit
    assert unit is not None
    moved = []
    for relative, rate in ((True, 1e-3), (False, 1e-3 * unit)):
        adapter = adapted(classifier())
        coordinates, optimizer = build(METHODS[method], adapter, relative_rate=relative)
        generator = torch.Generator().manual_seed(0)
        noise = coordinates.standard_normal(lambda shape: torch.randn(shape, generator=generator))  # noqa: B023
        optimizer.step(Release(noise, 1.0, step=1), rate)
        head: Any = coordinates
        moved.append(head.head.right[0].clone())
    assert float(moved[0].abs().max()) == pytest.approx(1e-3 * unit, rel=1e-3)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-5, atol=0)


# --- runs ---


class Stop(Exception):
    pass


class StopAfterTwo(Observer):
    def on_step(self, report: Any) -> None:
        if report.step == 2:
            raise Stop


def begun(folder: Path, method: dict[str, Any], observer: Any = None) -> Any:
    return fine_tune(
        tiny_model(),
        RECORDS,
        tokenizer=tiny_tokenizer(),
        method=method,
        output=folder,
        privacy={**STEPS, **PRIVATE, "steps": 4},
        adapter={"r": 2},
        data={"max_length": 40},
        run={"checkpoint_every": 1},
        observer=observer,
    )


@pytest.mark.parametrize("name", ["prism", "dp-adamw"])
def test_a_run_keeps_its_unit(name: str, tmp_path: Path) -> None:
    method = {"name": name, "learning_rate": 0.02, "relative_rate": True}
    with pytest.raises(Stop):
        begun(tmp_path / "run", method, StopAfterTwo())
    kept = tmp_path / "run/private/config.resolved.yaml"
    assert kept_settings(kept).method.relative_rate is True
    result = resume_run(tmp_path / "run", model=tiny_model(), tokenizer=tiny_tokenizer(), records=RECORDS)
    assert result.steps == 4
    report = json.loads((result.release / "privacy_report.json").read_text(encoding="utf-8"))
    assert (report["method"]["relative_rate"], report["method"]["learning_rate"]) == (True, 0.02)
    assert (
        "Learning rate",
        "0.02 of the frozen weights' norms, constant, 0 steps of warm-up",
    ) in method_table(report)


@pytest.mark.parametrize(
    ("name", "asked", "kept"),
    [
        ("dp-adamw", None, False),
        ("dp-adamw", True, True),
        ("prism", None, True),
        ("prism", False, False),
    ],
)
def test_what_the_rate_is_in_is_written_down_even_where_it_was_not_asked_for(
    name: str, asked: bool | None, kept: bool, tmp_path: Path, quick_reports: None
) -> None:
    """A version with other defaults would otherwise go on in another unit."""
    begun(tmp_path / "run", {"name": name} | ({} if asked is None else {"relative_rate": asked}))
    found = yaml.safe_load((tmp_path / "run/private/config.resolved.yaml").read_text(encoding="utf-8"))
    assert found["method"]["relative_rate"] is kept


def test_which_rows_have_their_rate_in_the_size_of_the_weights() -> None:
    assert [name for name, row in ROWS.items() if row.relative_rate] == ["prism", "span-prism"]
    found = METHODS["prism"].resolve(MethodSettings(), None, 24)
    assert (found.relative_rate, found.learning_rate) == (True, 0.1)
    assert METHODS["prism"].resolve(MethodSettings(), None, 96).learning_rate == 0.05
    old = METHODS["prism"].resolve(MethodSettings(relative_rate=False), None, 24)
    assert (old.relative_rate, old.learning_rate) == (False, 4e-3)
    # What a loop of one's own gives its steps is in entries unless it says otherwise.
    assert build(METHODS["prism"], LowRankAdapter(tiny_model(), rank=2))[1].weight_units is None


def test_epsilon_is_that_of_the_run_in_entries(tmp_path: Path, quick_reports: None) -> None:
    found = [
        tune(tmp_path / str(relative), {"name": "prism", "relative_rate": relative}).epsilon
        for relative in (True, False)
    ]
    assert found[0] == found[1]
