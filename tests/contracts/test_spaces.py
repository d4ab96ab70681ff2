"""What every space of the table answers: the noise on W, its numbers, averages, stacks, the next release."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import ONE_A_SPACE, by_space, make_case, share_projections
from tiny_models import PUBLIC_TEXTS, tiny_model, tiny_tokenizer, uneven_examples
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.api import fine_tune
from privlora.cli.memory import estimate_memory
from privlora.config import settings_from
from privlora.coordinates import (
    Coordinates,
    DirectionCoordinates,
    ProjectedCoordinates,
    PublicGradients,
    SpanSpace,
)
from privlora.errors import ConfigError
from privlora.mechanisms import Release
from privlora.methods import METHODS, SPACES, build, find_method, uses_lora_alpha
from privlora.optimizers import IterateAverage, Optimizer
from privlora.reporting.noise import noise_on_weights
from privlora.stacked.parts import stack_parts
from privlora.training.assembly import build_parts

PRIVACY = {"steps": 3, "expected_batch_size": 6, "public_dataset_size": 30}
PRIVACY = {**PRIVACY, "noise_multiplier": 1.0, "delta": 1e-3}
RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(30)]


def settings(name: str, **method: Any) -> Any:
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": "(in memory)"},
            "adapter": {"r": 2},
            "privacy": PRIVACY,
            "method": {"name": name, **method},
        },
        source="test",
    )


def operands(coordinates: Coordinates) -> list[tuple[Tensor, Tensor]]:
    """left (L, m, r) and right (L, n, r) by which P and Q are taken now."""
    return [coordinates.adapter.met(group) for group in coordinates.adapter.groups]


def test_every_space_of_the_table_is_among_the_cases() -> None:
    assert {METHODS[name].space for name, _ in ONE_A_SPACE} == set(SPACES)


@by_space
def test_the_noise_on_weights_is_what_the_closed_form_says(variant: tuple[str, str], tmp_path: Path) -> None:
    coordinates = make_case(variant, tmp_path).coordinates
    for module in noise_on_weights(coordinates, 0.25)["modules"].values():
        if coordinates.expected_squares() is None:
            assert module["closed_form"] is None
        else:
            assert module["measured"] == pytest.approx(module["closed_form"], rel=0.25)


@by_space
def test_the_effect_of_a_vector_goes_with_the_gradient(variant: tuple[str, str], tmp_path: Path) -> None:
    """<coordinates of G, v> = <G, effect of v>, times the n / r by which M2's coordinates fall short of G."""
    model = tiny_model(dtype=torch.float64)
    coordinates = make_case(variant, tmp_path, model=model, dtype=torch.float64).coordinates
    if isinstance(coordinates, SpanSpace | DirectionCoordinates):
        pytest.skip("no part of a vector is one group's: tests/coordinates/test_span.py, test_direction.py")
    groups = coordinates.adapter.groups
    gradients = [torch.randn(len(g.sites), g.m, g.n, dtype=torch.float64) for g in groups]
    pairs = zip(gradients, operands(coordinates), strict=True)
    there = coordinates.to_vector([(g @ right, g.mT @ left) for g, (left, right) in pairs])
    vector = coordinates.standard_normal(lambda shape: torch.randn(shape, dtype=torch.float64))
    for group, gradient, xs, vs, (left, right) in zip(
        groups, gradients, there, vector, coordinates.weight_effect(vector), strict=True
    ):
        inner = sum(float((x * v).sum()) for x, v in zip(xs, vs, strict=True))
        widened = group.n / coordinates.adapter.rank if coordinates.event_layers else 1.0
        assert float((gradient * (left @ right.mT)).sum()) == pytest.approx(widened * inner, rel=1e-6)


@pytest.mark.parametrize("name", ["pe-sgd", "span-prism", "pdp-sgd", "gep"])
def test_the_entries_of_public_gradients_are_known_before_they_are_taken(name: str) -> None:
    coordinates, _ = build(METHODS[name], LowRankAdapter(tiny_model(), rank=2))
    assert isinstance(coordinates, SpanSpace)
    assert coordinates.inner.entries() == coordinates.inner_kind.entries_of(coordinates.adapter)


@by_space
def test_the_plan_counts_the_numbers_that_are_noised(variant: tuple[str, str]) -> None:
    memory = estimate_memory(settings(variant[0]), find_method(variant[0]), tiny_model())
    if variant[0] in ("pe-sgd", "span-prism", "gep"):  # one a public text, which a plan does not know
        both = estimate_memory(settings("dp-adamw"), find_method("dp-adamw"), tiny_model())["trained_numbers"]
        assert memory["trained_numbers"] == (both if variant[0] == "gep" else 0)
        return
    adapter = LowRankAdapter(tiny_model(), rank=2)
    coordinates, _ = build(METHODS[variant[0]], adapter)
    if isinstance(coordinates, SpanSpace):
        adapter.attach()
        coordinates.refresh = lambda: PublicGradients(torch.randn(3, coordinates.inner.entries()))
    energies = [
        sum(float(t.square().sum()) for parts in coordinates.standard_normal(torch.randn) for t in parts)
        for _ in range(20)
    ]
    spread = (2 / memory["trained_numbers"] / len(energies)) ** 0.5  # of a chi-square's mean, relatively
    assert sum(energies) / len(energies) == pytest.approx(memory["trained_numbers"], rel=5 * spread)
    whole = sum(site.m * site.n for site in adapter.sites)
    assert memory["update_bytes"] == (8 * whole if any(s.update is not None for s in adapter.sites) else 0)


@by_space
def test_the_nearest_vector_of_what_noise_has_on_all_entries_is_the_spaces_own_noise(
    variant: tuple[str, str], tmp_path: Path
) -> None:
    coordinates = make_case(variant, tmp_path).coordinates
    drawn: list[Tensor] = []

    def draw(shape: tuple[int, ...]) -> Tensor:
        drawn.append(torch.randn(shape, dtype=torch.float64))
        return drawn[-1]

    noise = coordinates.standard_normal(draw)
    given = iter(drawn)
    entries = [tuple(next(given) for _ in parts) for parts in noise]
    found = coordinates.nearest(entries)
    again = coordinates.nearest(found)
    for parts, own, twice in zip(found, noise, again, strict=True):
        for a, b, c in zip(parts, own, twice, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
            torch.testing.assert_close(c, b, rtol=0, atol=1e-6)
    assert coordinates.entries() == sum(t.numel() for parts in entries for t in parts)
    assert coordinates.entries() >= coordinates.dimension


@by_space
def test_the_nearest_vector_of_a_gradient_is_itself(variant: tuple[str, str], tmp_path: Path) -> None:
    coordinates = make_case(variant, tmp_path).coordinates
    rank = coordinates.adapter.rank
    sums = [
        (torch.randn(len(g.sites), g.m, rank).double(), torch.randn(len(g.sites), g.n, rank).double())
        for g in coordinates.adapter.groups
    ]
    vector = coordinates.to_vector(sums)
    for parts, own in zip(coordinates.nearest(vector), vector, strict=True):
        torch.testing.assert_close(parts, own, rtol=0, atol=1e-5)


@by_space
def test_iterates_are_averaged_unless_they_are_dense(variant: tuple[str, str], tmp_path: Path) -> None:
    row = METHODS[variant[0]]
    if row.coordinates.dense:
        with pytest.raises(ConfigError, match="cannot average its iterates"):
            build_parts(settings(row.name, averaging=0.9), tiny_model())
        return
    case = make_case(variant, tmp_path)
    average = IterateAverage(case.coordinates, 0.9)
    for pair, own in zip(average.factors(), case.coordinates.factors(), strict=True):
        torch.testing.assert_close(pair[0] @ pair[1].mT, own[0] @ own[1].mT, rtol=1e-4, atol=1e-5)
    parts = build_parts(settings(row.name, averaging=0.9), tiny_model(), texts=lambda _: PUBLIC_TEXTS)
    assert parts.average is not None


@by_space
def test_states_are_stacked_or_refused_with_the_reason(variant: tuple[str, str]) -> None:
    parts = build_parts(settings(variant[0]), tiny_model(), texts=lambda _: PUBLIC_TEXTS)
    if parts.coordinates.dense or parts.method.public_texts or parts.coordinates.forward_only:
        with pytest.raises(
            ConfigError, match=r"side by side.*(are dense|does not say how|a direction of its)"
        ):
            stack_parts(parts, 3, torch.arange(3))
        return
    stacked = stack_parts(parts, 3, torch.arange(3)).coordinates
    assert type(stacked) is type(parts.coordinates)
    for (a, b), (one, other) in zip(stacked.factors(), parts.coordinates.factors(), strict=True):
        torch.testing.assert_close(a, one.repeat(3, 1, 1))
        torch.testing.assert_close(b, other.repeat(3, 1, 1))


@by_space
def test_advancing_says_whether_gradients_are_seen_otherwise(
    variant: tuple[str, str], tmp_path: Path
) -> None:
    coordinates = make_case(variant, tmp_path).coordinates
    before = operands(coordinates)
    advanced = coordinates.advance()
    for (left, right), (a, b) in zip(operands(coordinates), before, strict=True):
        assert torch.equal(left, a)
        # A direction is where units are looked at from, and no operand.
        assert torch.equal(right, b) is (not advanced or coordinates.forward_only)


@by_space
def test_a_run_steps_on_fresh_operands_where_the_space_has_them(
    variant: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_reports: None,
    public_texts: None,
) -> None:
    seen: list[Tensor] = []
    step = Optimizer.step

    def noted(self: Any, release: Release, learning_rate: float) -> None:
        if isinstance(self.coordinates, ProjectedCoordinates):
            seen.append(self.coordinates.projections[0].clone())
        step(self, release, learning_rate)

    monkeypatch.setattr(Optimizer, "step", noted)
    fine_tune(
        tiny_model(),
        RECORDS,
        tokenizer=tiny_tokenizer(),
        method=variant[0],
        output=tmp_path / "run",
        privacy=PRIVACY,
        adapter={"r": 2},
        data={"max_length": 40},
    )
    assert len(seen) == (3 if METHODS[variant[0]].coordinates.dense else 0)
    assert not any(torch.allclose(a, b) for i, a in enumerate(seen) for b in seen[:i])


@by_space
def test_m2_alone_lets_a_part_of_a_unit_through(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    rank = case.adapter.rank
    captured = case.gradients(
        [torch.randn(4, site.m, rank) for site in case.adapter.sites],
        [torch.randn(4, site.n, rank) for site in case.adapter.sites],
    )
    share = case.coordinates.released_share(captured)
    # ``gradients`` gives whole gradients twice the energy of their projections.
    assert torch.allclose(share, torch.full((4,), 0.5 if case.coordinates.event_layers else 1.0).double())


@by_space
def test_lora_alpha_is_said_to_have_no_effect_where_it_has_none(
    variant: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = []
    for alpha in (3.0, 30.0):
        monkeypatch.setattr("method_cases.build", partial(build_with, alpha))
        cases.append(make_case(variant, tmp_path, model=tiny_model()))
    share_projections(*(case.coordinates for case in cases))
    for case in cases:
        case.step(case.mechanism(sigma=0.0), uneven_examples())
    moved = [case.weights() for case in cases]
    assert torch.allclose(*moved, rtol=1e-4, atol=1e-7) != uses_lora_alpha(variant[0])


def build_with(alpha: float, *args: Any, **options: Any) -> Any:
    return build(*args, **{**options, "lora_alpha": alpha})
