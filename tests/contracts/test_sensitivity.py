"""Nobody moves the released sum by more than C, whoever else is in the batch (brute force)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import (
    INF_TOKEN,
    NAN_TOKEN,
    Case,
    by_case,
    by_space,
    flat,
    make_case,
    poisoned_model,
    with_token,
)
from tiny_models import random_example, uneven_examples
from torch import Tensor

from privlora.adapters import Captured
from privlora.coordinates import OneFactorCoordinates, ProjectedCoordinates
from privlora.data.examples import Example
from privlora.errors import ConfigError
from privlora.methods import METHODS


def hard_batch() -> list[Example]:
    """Uneven rows, one without labels, one of one token, one empty, one NaN, one infinite."""
    rng = np.random.default_rng(5)
    nothing = Example(np.zeros(0, np.int32), np.zeros(0, np.int32))
    bad = [with_token(random_example(rng, 8), token) for token in (NAN_TOKEN, INF_TOKEN)]
    return [*uneven_examples(), random_example(rng, 1), nothing, *bad]


def check_remove_one(
    case: Case,
    examples: list[Example],
    units: list[Any],
    clip_norm: float,
    clipping: str = "flat",
    tolerance: float = 1e-6,
) -> list[float]:
    """Norms of the change of the sum when each unit leaves, in units of C."""
    options: dict[str, Any] = {"clip_norm": clip_norm, "clipping": clipping}
    whole = case.clipped_sum(examples, units, **options)
    assert torch.isfinite(whole).all()
    changes = []
    for left_out in range(len(units)):
        rest = units[:left_out] + units[left_out + 1 :]
        changes.append(float((whole - case.clipped_sum(examples, rest, **options)).norm()) / clip_norm)
    assert max(changes) <= 1 + tolerance
    return changes


@by_case
def test_one_record(variant: tuple[str, str], state: str, tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, state)
    examples = hard_batch()
    changes = check_remove_one(case, examples, list(range(len(examples))), clip_norm=1e-3)
    assert min(changes[:6]) > case.reached(0.9999)  # every ordinary row is clipped to C: the bound is reached
    assert max(changes[6:]) < 1e-6  # no label, one token, empty, NaN, inf: nothing but rounding
    check_remove_one(case, examples, list(range(len(examples))), clip_norm=1.0)


@by_space
def test_one_record_of_a_bfloat16_model(variant: tuple[str, str], tmp_path: Path) -> None:
    model = poisoned_model(torch.bfloat16)
    if METHODS[variant[0]].space == "wishart":
        with pytest.raises(ConfigError, match="needs float32 layers"):
            make_case(variant, tmp_path, model=model)
        return
    case = make_case(variant, tmp_path, model=model)
    examples = hard_batch()
    # The longest row takes the padding with it, which changes how bfloat16 kernels round the other rows.
    changes = check_remove_one(case, examples, list(range(len(examples))), clip_norm=1e-3, tolerance=0.0)
    assert min(changes[:6]) > 0.98


@by_space
def test_one_user(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    units = [np.array(u) for u in ([0, 3, 5], [1, 2], [4], [6, 7, 8], [9])]
    changes = check_remove_one(case, hard_batch(), units, clip_norm=1e-3)
    assert min(changes[:3]) > case.reached(0.9999)
    # A user with a NaN record contributes nothing at all.
    assert changes[4] < 1e-6


@by_space
def test_one_record_where_a_module_is_used_twice(variant: tuple[str, str], tmp_path: Path) -> None:
    model = poisoned_model()
    model.model.layers[1] = model.model.layers[0]
    case = make_case(variant, tmp_path, model=model)
    changes = check_remove_one(case, uneven_examples(), list(range(6)), clip_norm=1e-3)
    assert min(changes) > case.reached(0.9999)


@by_space
def test_a_non_finite_unit_is_a_unit_that_is_not_there(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    examples = hard_batch()
    torch.testing.assert_close(case.clipped_sum(examples), case.clipped_sum(examples[:-2]), rtol=0, atol=5e-7)


@by_space
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e25])
def test_one_bad_entry_anywhere_removes_its_unit(
    variant: tuple[str, str], value: float, tmp_path: Path
) -> None:
    case = make_case(variant, tmp_path)
    sizes = [(site.m, site.n) for site in case.adapter.sites]
    clean = case.gradients([torch.randn(4, m, 3) for m, _ in sizes], [torch.randn(4, n, 3) for _, n in sizes])
    clean.zero(torch.tensor([False, True, False, False]))
    one_sided = isinstance(case.coordinates, OneFactorCoordinates | ProjectedCoordinates)  # Q enters nothing
    for side, place in (("p", 0),) if one_sided else (("p", 0), ("q", -1)):
        bad = Captured([t.clone() for t in clean.p], [t.clone() for t in clean.q], clean.dense_squares)
        getattr(bad, side)[place][1, 2, 1] = value
        torch.testing.assert_close(_released(case, bad), _released(case, clean), rtol=0, atol=0)


def _released(case: Case, captured: Captured) -> Tensor:
    mechanism = case.mechanism(seed=1)
    mechanism.accumulate(captured)
    return flat(mechanism.release().vector)


@by_case
def test_micro_batches_do_not_matter(variant: tuple[str, str], state: str, tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, state)
    releases = []
    for tokens, chunks in ((10**6, 1), (45, 2), (1, 7)):
        mechanism = case.mechanism(seed=11, clip_norm=0.1, batch=1.0)
        assert case.feed(mechanism, uneven_examples(), max_tokens=tokens) == chunks
        releases.append(flat(mechanism.release().vector))
    assert releases[0].norm() > 0
    for other in releases[1:]:
        torch.testing.assert_close(other, releases[0], rtol=1e-6, atol=1e-6)


@by_space
def test_sensitivity_is_stated(variant: tuple[str, str], tmp_path: Path) -> None:
    mechanism = make_case(variant, tmp_path).mechanism(clip_norm=0.7)
    assert mechanism.sensitivity() == 0.7
    assert mechanism.sensitivity("replace-one") == 1.4
