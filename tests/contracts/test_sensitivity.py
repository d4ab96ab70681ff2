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
    by_space_and_state,
    flat,
    label,
    lean_once,
    make_case,
    measure_whole_gradients_alone,
    poisoned_model,
    with_token,
)
from tiny_models import one_batch, random_example, tiny_model, uneven_examples
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import DirectionCoordinates, OneFactorCoordinates, ProjectedCoordinates
from privlora.coordinates.span import EncodedSpace
from privlora.data.examples import Example
from privlora.errors import ConfigError
from privlora.mechanisms import AdaptiveClipNorm
from privlora.mechanisms.noising import grid_width
from privlora.methods import METHODS, build
from privlora.training import gradients
from privlora.training.gradients import micro_batch_gradients, steadied
from privlora.training.model_checks import steady_width


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
    **more: Any,
) -> list[float]:
    """Norms of the change of the sum when each unit leaves, in units of C.

    Beside a unit that is not finite each of a micro-batch is computed by itself, which takes ten times as long: such
    units, and the first one, leave each other and the second one, and the finite ones leave each other.
    """
    options: dict[str, Any] = {"clip_norm": clip_norm, "clipping": clipping, **more}
    bad = [k for k, unit in enumerate(units) if not is_finite(examples, unit)]
    finite = [k for k in range(len(units)) if k not in bad]
    changes: dict[int, float] = {}
    for present, leaving in ((finite, finite), ([*finite[:2], *bad], [0, *bad] if bad else [])):
        if not leaving:
            continue
        whole = case.clipped_sum(examples, [units[k] for k in present], **options)
        assert torch.isfinite(whole).all()
        for left_out in leaving:
            rest = case.clipped_sum(examples, [units[k] for k in present if k != left_out], **options)
            changes[left_out] = float((whole - rest).norm()) / clip_norm
            assert changes[left_out] <= 1 + tolerance, (left_out, present)
    return [changes[k] for k in range(len(units))]


def is_finite(examples: list[Example], unit: Any) -> bool:
    """Whether none of the unit's records holds a token whose embedding is not."""
    return not any(np.isin(examples[k].input_ids, (NAN_TOKEN, INF_TOKEN)).any() for k in np.atleast_1d(unit))


@by_case
def test_one_record(variant: tuple[str, str], state: str, tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, state)
    examples = hard_batch()
    changes = check_remove_one(case, examples, list(range(len(examples))), clip_norm=1e-3)
    assert min(changes[:6]) > case.reached(0.9996)  # every ordinary row is clipped to C: the bound is reached
    assert max(changes[6:]) < 1e-6  # no label, one token, empty, NaN, inf: nothing but rounding
    check_remove_one(case, examples, list(range(6)), clip_norm=1.0)


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
    assert min(changes[:6]) > 0.95


@by_space
def test_one_user(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    units = [np.array(u) for u in ([0, 3, 5], [1, 2], [4], [6, 7, 8], [9])]
    changes = check_remove_one(case, hard_batch(), units, clip_norm=1e-3)
    assert min(changes[:3]) > case.reached(0.9996)
    # A user with a NaN record contributes nothing at all.
    assert changes[4] < 1e-6


@by_space
def test_one_record_where_a_module_is_used_twice(variant: tuple[str, str], tmp_path: Path) -> None:
    model = poisoned_model(layers=2)
    model.model.layers[1] = model.model.layers[0]
    case = make_case(variant, tmp_path, model=model)
    changes = check_remove_one(case, uneven_examples(), list(range(6)), clip_norm=1e-3)
    assert min(changes) > case.reached(0.9996)


@pytest.mark.parametrize("clipping", ["flat", "spectral", "per-module"])
@pytest.mark.parametrize("right_weight", [10.0, 3e4])
def test_one_record_where_nothing_is_left_beside_v(
    clipping: str, right_weight: float, tmp_path: Path
) -> None:
    # r = n: all of Q is in span(V), and what rounding leaves of it is multiplied by the weight.
    case = square_case("prism")
    case.coordinates.right_weight = right_weight  # the larger one is refused where coordinates are made
    check_remove_one(case, uneven_examples(), list(range(7)), clip_norm=1e-3, clipping=clipping, tolerance=0)


@pytest.mark.parametrize("twice", [False, True])
def test_whole_gradients_are_bounded_before_they_are_projected(
    twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # r = n, where a projection leaves all of a gradient: else units at 0.47 C would hide norms of half their size.
    measure_whole_gradients_alone(monkeypatch)
    model = poisoned_model(layers=2)
    if twice:
        block = model.model.layers[1] = model.model.layers[0]
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.weight.data *= (
                0.01  # a block that changes little, so that both uses have nearly one gradient
            )
    units = [np.array([0, 3]), 1, 2, 4, 5]
    changes = check_remove_one(square_case("wishart-m2", model), uneven_examples(), units, clip_norm=1e-3)
    assert min(changes) > 0.5  # the norms of a user's records are added up
    assert min(changes[1:]) > 0.98


def square_case(name: str, model: Any = None) -> Case:
    """Modules of 16 by 16 at rank 16."""
    adapter = LowRankAdapter(
        poisoned_model() if model is None else model, rank=16, target_modules=r".*(q|o)_proj"
    )
    return Case(METHODS[name], adapter, *build(METHODS[name], adapter.attach(), init="random"))


@pytest.mark.parametrize("clipping", ["flat", "spectral", "per-module"])
@pytest.mark.parametrize("ratio", [1e-5, 5e3])
@pytest.mark.parametrize("variant", [("prism", "rank"), ("dp-adamw", "adamw"), ("ffa", "adamw")], ids=label)
def test_one_record_where_the_clipping_norm_has_moved_far(
    variant: tuple[str, str], ratio: float, clipping: str, tmp_path: Path
) -> None:
    case = make_case(variant, tmp_path)
    adaptive = AdaptiveClipNorm(1e-5, 0.5)
    adaptive.value = 1e-5 * ratio  # still below all norms, so that everybody is clipped
    units = list(range(6))
    changes = check_remove_one(
        case, uneven_examples(), units, clip_norm=1e-5, clipping=clipping, adaptive=adaptive
    )
    assert min(changes) > {"flat": 0.9996, "spectral": 0.9899, "per-module": 0.83}[clipping]


@by_space
def test_a_kernel_that_spreads_nan_costs_nobody_else_a_gradient(
    variant: tuple[str, str], tmp_path: Path
) -> None:
    case = make_case(variant, tmp_path)

    def spread(_: torch.nn.Module, __: Any, out: Tensor) -> Tensor:
        return out + 0 * out.sum()

    handle = case.adapter.model.model.norm.register_forward_hook(spread)
    examples = hard_batch()
    with_bad, without = case.clipped_sum(examples), case.clipped_sum(examples[:-2])
    handle.remove()
    assert float(without.norm()) > 0.1
    torch.testing.assert_close(with_bad, without, rtol=0, atol=5e-7)


@pytest.mark.parametrize("length", [17, 64])  # 64 is all that the models read: no room for padding
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_copies_of_a_record_do_not_add_up_what_bfloat16_rounds(family: str, length: int) -> None:
    # The long one leaves, and the padding with it. Were each copy then rounded otherwise, by 0.7 % of C and alike, all
    # 63 of them together would move by half of C.
    rng = np.random.default_rng(64)
    copy = random_example(rng, length)
    adapter = LowRankAdapter(tiny_model(family, dtype=torch.bfloat16), rank=3).attach()
    case = Case(METHODS["prism"], adapter, *build(METHODS["prism"], adapter, init="random"))
    examples = [random_example(rng, 60), *[copy] * 63]
    whole, copies = (case.clipped_sum(e, clip_norm=1e-3) / 1e-3 for e in (examples, examples[1:]))
    assert 0.95 < float((whole - copies).norm()) <= 1
    own = case.clipped_sum(examples[:1], clip_norm=1e-3) / 1e-3
    assert float((whole - copies - own).norm()) < 0.1


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_spectral_clipping_does_not_blow_up_what_copies_round(family: str) -> None:
    # Of two tokens, some modules' gradients cancel but for rounding, which follows the width of the micro-batch.
    rng = np.random.default_rng(1)
    adapter = LowRankAdapter(tiny_model(family), rank=4).attach()
    case = Case(METHODS["prism"], adapter, *build(METHODS["prism"], adapter, init="random"))
    examples = [random_example(rng, 40), *[random_example(rng, 2)] * 512]
    whole, copies, own = (
        case.clipped_sum(e, clip_norm=1e-3, clipping="spectral") / 1e-3
        for e in (examples, examples[1:], examples[:1])
    )
    assert float((whole - copies).norm()) <= 1
    assert float((whole - copies - own).norm()) < 0.01


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (7, 8), (8, 16), (32, 40), (63, 64), (64, 64)])
def test_below_float32_there_is_padding_but_no_position_that_the_model_lacks(tokens: int, width: int) -> None:
    batch = one_batch([random_example(np.random.default_rng(0), tokens)])
    for dtype, expected in ((torch.bfloat16, width), (torch.float32, tokens)):
        model = tiny_model("gpt2", dtype=dtype)  # of 64 positions
        assert steadied(LowRankAdapter(model, rank=3), batch).input_ids.shape[1] == expected


def test_below_float32_the_width_that_a_unit_is_computed_in_follows_from_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = LowRankAdapter(tiny_model("llama", dtype=torch.bfloat16), rank=3).attach()
    case = Case(METHODS["prism"], adapter, *build(METHODS["prism"], adapter, init="random"))
    lengths = [2, 7, 8, 9, 15, 15, 16, 23, 30, 30, 31, 60]
    run, widths = gradients._run, dict[int, int]()

    def kept(adapter: LowRankAdapter, batch: Any, summed: bool) -> Any:
        width = steadied(adapter, batch).input_ids.shape[1]
        widths.update(dict.fromkeys(batch.attention_mask.sum(1).tolist(), width))
        return run(adapter, batch, summed)

    monkeypatch.setattr(gradients, "_run", kept)
    examples = [random_example(np.random.default_rng(n), n) for n in lengths]
    for some in (examples, examples[:-1], examples[3:]):
        widths.clear()
        case.step(case.mechanism(), some)
        assert widths == {n: (n // 8 + 1) * 8 for n in (len(one.input_ids) for one in some)}
    monkeypatch.setattr("privlora.training.model_checks.positions_of", lambda _: None)
    assert [steady_width(adapter, n) for n in (100, 128, 250, 256, 511)] == [104, 144, 256, 288, 512]


@pytest.mark.parametrize(("dtype", "widths"), [(torch.float32, [9, 4]), (torch.bfloat16, [16, 8])])
def test_where_tokens_are_routed_a_units_gradient_is_bit_by_bit_its_own(
    dtype: torch.dtype, widths: list[int]
) -> None:
    # Else who else is there decides how scores are rounded, and where they tie, which expert all copies of a record go
    # to: copies that add up have moved the sum by 11.8 C.
    model = tiny_model("mixtral", dtype=dtype)
    adapter = LowRankAdapter(model, rank=3, target_modules=r".*self_attn\..*").attach()
    build(METHODS["prism"], adapter, init="random")
    rng = np.random.default_rng(3)
    examples = [random_example(rng, n) for n in (60, 9, 5, 4)]
    units = [np.array([1, 2]), np.array([3])]  # one of two records
    shapes: list[tuple[int, ...]] = []

    def keep(_: torch.nn.Module, args: Any, named: dict[str, Tensor]) -> None:
        shapes.append(tuple(named["input_ids"].shape))

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    together = micro_batch_gradients(adapter, one_batch(examples, [np.array([0]), *units]))
    alone = [micro_batch_gradients(adapter, one_batch(examples, [unit])) for unit in units]
    handle.remove()
    # The first unit goes through once more: a model's first pass finds out what follows its output layer.
    assert shapes[2:] == [(2, widths[0]), (1, widths[1])] * 2
    for number, (captured, losses) in enumerate(alone, start=1):
        assert torch.equal(losses[0], together[1][number])
        for one, of_all in zip((*captured.p, *captured.q), (*together[0].p, *together[0].q), strict=True):
            assert float(one.abs().max()) > 0
            assert torch.equal(one[0], of_all[number])


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        ("prism", "automatic"),
        ("guided-prism", "normalized"),
        ("pdp-sgd", "normalized"),
        ("dp-sgd", "automatic"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_that_enlarges_small_gradients_takes_each_unit_by_itself(
    name: str, clipping: str, dtype: torch.dtype
) -> None:
    # Users whose two records cancel have a gradient that is rounding, which company changed: by 2.4 C in all.
    adapter = LowRankAdapter(tiny_model(dtype=dtype), rank=3).attach()
    case = Case(METHODS[name], adapter, *build(METHODS[name], adapter, init="random"))
    lean_once(case.coordinates, case.optimizer)
    case.mechanism(clipping=clipping)
    examples = [random_example(np.random.default_rng(n), n) for n in (18, 17, 16, 9)]
    together, _ = micro_batch_gradients(adapter, one_batch(examples))
    for number, example in enumerate(examples):
        alone, _ = micro_batch_gradients(adapter, one_batch([example]))
        for one, of_all in zip((*alone.p, *alone.q), (*together.p, *together.q), strict=True):
            assert torch.equal(one[0], of_all[number])


@by_space
def test_a_non_finite_unit_is_a_unit_that_is_not_there(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    examples = hard_batch()
    torch.testing.assert_close(case.clipped_sum(examples), case.clipped_sum(examples[:-2]), rtol=0, atol=5e-7)


@by_space
@pytest.mark.parametrize("clipping", ["flat", "spectral", "per-module"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e25])
def test_one_bad_entry_anywhere_removes_its_unit(
    variant: tuple[str, str], value: float, clipping: str, tmp_path: Path
) -> None:
    case = make_case(variant, tmp_path)
    in_double = clipping == "spectral" or isinstance(case.coordinates, EncodedSpace | DirectionCoordinates)
    if clipping not in case.row.clippings or (in_double and value == 1e25):
        return  # a square that overflows is no bad entry where roots are taken, or all is float64
    sizes = [(site.m, site.n) for site in case.adapter.sites]
    clean = case.gradients([torch.randn(4, m, 3) for m, _ in sizes], [torch.randn(4, n, 3) for _, n in sizes])
    clean.zero(torch.tensor([False, True, False, False]))
    one_sided = isinstance(case.coordinates, OneFactorCoordinates | ProjectedCoordinates)  # Q enters nothing
    for side, place in (("p", 0),) if one_sided else (("p", 0), ("q", -1)):
        bad = Captured([t.clone() for t in clean.p], [t.clone() for t in clean.q], clean.dense_squares)
        getattr(bad, side)[place][1, 2, 1] = value
        torch.testing.assert_close(
            _released(case, bad, clipping), _released(case, clean, clipping), rtol=0, atol=0
        )


def _released(case: Case, captured: Captured, clipping: str) -> Tensor:
    mechanism = case.mechanism(seed=1, clipping=clipping)
    mechanism.accumulate(captured)
    return flat(mechanism.release().vector)


@by_space_and_state
def test_micro_batches_do_not_matter(variant: tuple[str, str], state: str, tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, state)
    releases = []
    for tokens, chunks in ((10**6, 1), (45, 2), (1, 7)):
        mechanism = case.mechanism(seed=11, clip_norm=0.1, batch=1.0)
        assert case.feed(mechanism, uneven_examples(), max_tokens=tokens) == chunks
        releases.append(flat(mechanism.release().vector))
    assert releases[0].norm() > 0
    for other in releases[1:]:
        # Rounding may take an entry to the next point of the grid.
        torch.testing.assert_close(other, releases[0], rtol=1e-6, atol=1.01 * grid_width(0.1))


@by_space
def test_sensitivity_is_stated(variant: tuple[str, str], tmp_path: Path) -> None:
    mechanism = make_case(variant, tmp_path).mechanism(clip_norm=0.7)
    assert mechanism.sensitivity() == 0.7
    assert mechanism.sensitivity("replace-one") == 1.4
