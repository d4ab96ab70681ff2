"""The spaces in which clients train, and which no row of the table has, keep the contracts of those that have one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import method_cases
import pytest
import test_clipping
import test_noise_law
import test_private_step
import test_sensitivity
import test_space_check
import test_spaces
import test_state
import test_steps
import torch
from method_cases import label

from privlora.adapters import LowRankAdapter
from privlora.coordinates import Coordinates, FixedTangentCoordinates, OneFactorCoordinates
from privlora.coordinates.starts import factor_start, tangent_start
from privlora.geometry.fixed_rank import Point, Tangent, standard_normal_tangent
from privlora.methods import METHODS, SPACES, Method, Space
from privlora.optimizers import TANGENT_OPTIMIZERS, FactorAdamW

RANK = 4  # of the adapter, twice that of a fixed base
RIGHT, FIXED = ("right", "adamw"), ("fixed", "rank")
by_variant = pytest.mark.parametrize(
    "variant", [RIGHT, FIXED, ("fixed", "sgd"), ("fixed", "scalar")], ids=label
)
by_space = pytest.mark.parametrize("variant", [RIGHT, FIXED], ids=label)


def right_start(adapter: LowRankAdapter, init: str, **options: Any) -> Coordinates:
    """At zero with a random left factor, which is the frozen one."""
    start = factor_start(adapter, init, **options)
    pairs = list(zip(start.left, start.right, strict=True))
    if init == "random":
        pairs = [(torch.linalg.qr(torch.randn(a.shape)).Q.to(a), torch.zeros_like(b)) for a, b in pairs]
    return OneFactorCoordinates(adapter, pairs, start.scale, start.dtype, side="right")


def fixed_start(adapter: LowRankAdapter, init: str, *, dtype: torch.dtype, **options: Any) -> Coordinates:
    """At the leading half of an ordinary start, and away from it where that is not zero."""
    start = tangent_start(adapter, init, dtype=dtype, **options)
    base = [point.split(adapter.rank // 2)[0] for point in start.points]
    coordinates = FixedTangentCoordinates(
        adapter, [Point(*(t.contiguous() for t in (p.U, p.S, p.V))) for p in base], dtype
    )
    if init != "random":
        coordinates.move([_small(point) for point in base], 1.0)
    return coordinates


def _small(point: Point) -> Tangent:
    generator = torch.Generator().manual_seed(1)
    return standard_normal_tangent(
        point, lambda shape: 0.1 * torch.randn(shape, generator=generator, dtype=point.S.dtype)
    )


@pytest.fixture(autouse=True)
def _in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = {
        "right": Space(OneFactorCoordinates, right_start, {"adamw": FactorAdamW}),
        "fixed": Space(FixedTangentCoordinates, fixed_start, TANGENT_OPTIMIZERS),
    }
    row = partial(Method, summary="a client's", reference="this test")
    for name, space in spaces.items():
        monkeypatch.setitem(SPACES, name, space)
        monkeypatch.setitem(METHODS, name, row(name=name, space=name, optimizers=tuple(space.optimizers)))
    monkeypatch.setattr(method_cases, "RANK", RANK)


OF_A_SPACE_AND_STATE = [
    test_sensitivity.test_one_record,
    test_sensitivity.test_micro_batches_do_not_matter,
    test_noise_law.test_it_is_white_wherever_data_can_reach,
    test_noise_law.test_data_and_noise_span_the_same_space,
    test_space_check.test_every_space_of_the_table_keeps_its_word,
]
OF_A_SPACE = [
    test_sensitivity.test_one_record_of_a_bfloat16_model,
    test_sensitivity.test_one_user,
    test_sensitivity.test_one_record_where_a_module_is_used_twice,
    test_sensitivity.test_a_kernel_that_spreads_nan_costs_nobody_else_a_gradient,
    test_sensitivity.test_a_non_finite_unit_is_a_unit_that_is_not_there,
    test_noise_law.test_it_is_drawn_once_however_many_micro_batches,
    test_noise_law.test_public_seeds_do_not_fix_it,
    test_spaces.test_the_noise_on_weights_is_what_the_closed_form_says,
    test_spaces.test_the_effect_of_a_vector_goes_with_the_gradient,
    test_spaces.test_the_nearest_vector_of_what_noise_has_on_all_entries_is_the_spaces_own_noise,
    test_spaces.test_the_nearest_vector_of_a_gradient_is_itself,
    test_spaces.test_iterates_are_averaged_unless_they_are_dense,
    test_spaces.test_states_are_stacked_or_refused_with_the_reason,
    test_spaces.test_advancing_says_whether_gradients_are_seen_otherwise,
    test_private_step.test_a_sum_is_released_where_it_was_made,
]
OF_A_CLIPPING = [test_clipping.test_one_user, test_clipping.test_micro_batches_do_not_matter]
OF_AN_OPTIMIZER = [
    test_steps.test_an_empty_batch_is_a_full_step,
    test_state.test_loading_sets_the_operands_of_the_model,
    test_state.test_the_installed_operands_are_the_state,
    test_state.test_two_steps_from_one_release_are_deterministic,
    test_private_step.test_a_state_that_was_given_out_leads_to_the_same_end,
    test_private_step.test_given_states_are_copies,
    test_private_step.test_reset_memory_is_that_of_a_new_optimizer,
    test_private_step.test_memory_that_is_transported_to_where_it_is_stays,
]

Contract = Callable[..., None]
STATES = ["zero", pytest.param("factors", marks=pytest.mark.long), "moved"]


def named(contract: Contract) -> str:
    return contract.__name__.removeprefix("test_")


@by_space
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("contract", OF_A_SPACE_AND_STATE, ids=named)
def test_of_a_space_and_state(
    contract: Contract, variant: tuple[str, str], state: str, tmp_path: Path
) -> None:
    contract(variant, state, tmp_path)


@by_space
@pytest.mark.parametrize("contract", OF_A_SPACE, ids=named)
def test_of_a_space(contract: Contract, variant: tuple[str, str], tmp_path: Path) -> None:
    names = contract.__code__.co_varnames[: contract.__code__.co_argcount]
    contract(**{"variant": variant, **({"tmp_path": tmp_path} if "tmp_path" in names else {})})


def test_modules_of_one_shape_have_noise_of_their_own(tmp_path: Path) -> None:
    test_noise_law.test_modules_of_one_shape_have_noise_of_their_own(RIGHT, tmp_path)


@by_space
@pytest.mark.parametrize("clipping", ["automatic", "spectral"])
@pytest.mark.parametrize("contract", OF_A_CLIPPING, ids=named)
def test_of_a_clipping(contract: Contract, variant: tuple[str, str], clipping: str, tmp_path: Path) -> None:
    contract(variant, clipping, tmp_path)


@by_variant
@pytest.mark.parametrize("contract", OF_AN_OPTIMIZER, ids=named)
def test_of_an_optimizer(contract: Contract, variant: tuple[str, str], tmp_path: Path) -> None:
    contract(variant, tmp_path)


@by_variant
@pytest.mark.parametrize("done", [1, 3])
def test_a_loaded_checkpoint_continues_identically(
    variant: tuple[str, str], done: int, tmp_path: Path
) -> None:
    test_state.test_a_loaded_checkpoint_continues_identically(variant, "factors", done, tmp_path)
