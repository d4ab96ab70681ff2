"""Checkpoints of every method continue as if nothing had happened, and hold no noise and no sampler."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest
import torch
from method_cases import Case, by_any_variant, flat, make_case, share_projections
from tiny_models import uneven_examples
from torch import Tensor

from privlora.optimizers import IterateAverage
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint


def some_steps(case: Case, average: IterateAverage, count: int, seed: int) -> None:
    mechanism = case.mechanism(seed=seed)
    for i in range(count):
        case.step(mechanism, uneven_examples(i)[:3])
        average.update()


def everything(case: Case, average: IterateAverage) -> dict[str, dict[str, Tensor]]:
    return {
        "coordinates": case.coordinates.state_dict(),
        "optimizer": case.optimizer.state_dict(),
        "average": average.state_dict(),
    }


@by_any_variant
@pytest.mark.parametrize(("start", "done"), [("zero", 1), ("factors", 3)])
def test_a_loaded_checkpoint_continues_identically(
    variant: tuple[str, str], start: str, done: int, tmp_path: Path
) -> None:
    first = make_case(variant, tmp_path, start)
    first_average = IterateAverage(first.coordinates, 0.9)
    some_steps(first, first_average, done, seed=1)
    save_checkpoint(tmp_path / "c.safetensors", everything(first, first_average), Mark(done, "x", None))
    first.adapter.detach()

    second = make_case(variant, tmp_path, start)
    second_average = IterateAverage(second.coordinates, 0.9)
    step, states = load_checkpoint(tmp_path / "c.safetensors", run_id="x")
    assert step == done
    second.coordinates.load_state_dict(states["coordinates"])
    share_projections(first.coordinates, second.coordinates)
    second.optimizer.load_state_dict(states["optimizer"])
    second_average.load_state_dict(states["average"])

    second.adapter.detach()
    first.adapter.attach()
    some_steps(first, first_average, 3, seed=2)
    first.adapter.detach()
    second.adapter.attach()
    some_steps(second, second_average, 3, seed=2)
    one, two = everything(first, first_average), everything(second, second_average)
    for part in one:
        assert one[part].keys() == two[part].keys()
        for name in one[part]:
            assert torch.equal(one[part][name], two[part][name]), (part, name)
    moved = first.weights() - make_case(variant, tmp_path, start).weights()
    assert float(moved.norm()) > 1e-3


@by_any_variant
def test_loading_sets_the_operands_of_the_model(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, "moved")
    saved = {name: t.clone() for name, t in case.coordinates.state_dict().items()}
    start = copy(case.coordinates)
    before = case.clipped_sum(uneven_examples())
    case.step(case.mechanism(), uneven_examples())
    assert not torch.allclose(case.clipped_sum(uneven_examples()), before)
    case.coordinates.load_state_dict(saved)
    share_projections(start, case.coordinates)
    assert torch.equal(case.clipped_sum(uneven_examples()), before)


@by_any_variant
def test_the_installed_operands_are_the_state(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, "moved")
    for name, (a, b) in case.coordinates.named_factors().items():
        (site,) = (site for site in case.adapter.sites if site.name == name)
        installed = (site.left * site.mid) @ site.right.T
        if site.update is not None:
            assert not installed.any()
            installed = site.module.weight - site.weight
        torch.testing.assert_close(installed.detach(), a @ b.T, rtol=1e-5, atol=1e-6)


@by_any_variant
def test_two_steps_from_one_release_are_deterministic(variant: tuple[str, str], tmp_path: Path) -> None:
    ends = []
    for _ in range(2):
        case = make_case(variant, tmp_path)
        mechanism = case.mechanism(seed=4)
        for _ in range(3):
            case.step(mechanism, uneven_examples())
        ends.append(flat([tuple(pair) for pair in case.coordinates.factors()]))
    assert torch.equal(*ends)
