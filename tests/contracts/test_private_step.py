"""The private step by itself: its order, its state given and taken, and batches that are spread over several places."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from method_cases import (
    NAN_TOKEN,
    Case,
    CountingLedger,
    by_any_variant,
    by_space,
    by_variant,
    flat,
    make_case,
    share_projections,
    with_token,
)
from tiny_models import uneven_examples

from privlora.coordinates import ProjectedCoordinates
from privlora.data.examples import Examples
from privlora.data.sampling import CyclicPoissonSampler, PoissonSampler
from privlora.errors import ConfigError, ModelError, PrivacyError
from privlora.mechanisms import AdaptiveClipNorm, GaussianMechanism, MeanMechanism, PrivateSum
from privlora.optimizers import IterateAverage
from privlora.training.gradients import micro_batch_gradients
from privlora.training.state import TrainState
from privlora.training.step import Step

RATE = 0.05


def step_of(case: Case, *, seed: int = 0, average: bool = False, **options: Any) -> Step:
    examples = uneven_examples()
    drawn = iter(range(100))
    given = {
        "mechanism": case.mechanism(seed=seed),
        # Another batch each time, every third of them empty.
        "draw": lambda: [k for k in range(len(examples)) if (n := next(drawn)) % 3 and k % 3 != n % 3],
        "learning_rate": lambda number: RATE / number,
        **options,
    }
    average = average and not isinstance(case.coordinates, ProjectedCoordinates)
    averaged = IterateAverage(case.coordinates, 0.9) if average else None
    state = TrainState(coordinates=case.coordinates, optimizer=case.optimizer, average=averaged)
    return Step(state=state, examples=Examples(examples, pad_token_id=0), **given)


def same(found: dict[str, Any], expected: dict[str, Any], off: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for part, tensors in expected.items():
        assert found[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[part][name], tensor, rtol=off, atol=off, msg=f"{part}/{name}")


@by_variant
def test_its_order_is_draw_sum_charge_noise_move_advance(
    variant: tuple[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(variant, tmp_path)
    seen: list[str] = []

    def noted(owner: object, name: str, label: str) -> None:
        do = getattr(owner, name)

        def told(*args: Any, **options: Any) -> Any:
            if not (seen and seen[-1] == label):
                seen.append(label)
            return do(*args, **options)

        monkeypatch.setattr(owner, name, told)

    class Ledger:
        def charge(self, event: object) -> int:
            return 1

    step = step_of(case, mechanism=case.mechanism(ledger=(ledger := Ledger())), average=True)
    assert isinstance(step.mechanism, GaussianMechanism)
    noted(step, "draw", "draw")
    noted(step.mechanism, "accumulate", "sum")
    noted(ledger, "charge", "charge")
    noted(step.mechanism.noising.noise, "standard_normal", "noise")
    noted(case.optimizer, "step", "move")
    if step.state.average is not None:
        noted(step.state.average, "update", "average")
    noted(case.coordinates, "advance", "advance")
    step.draw()  # the second batch is not empty
    seen.clear()
    step.take()
    assert [label for label in seen if label != "average"] == [
        "draw", "sum", "charge", "noise", "move", "advance",
    ]  # fmt: skip
    assert step.state.average is None or seen[-2] == "average"


@by_any_variant
def test_a_state_that_was_given_out_leads_to_the_same_end(variant: tuple[str, str], tmp_path: Any) -> None:
    first = make_case(variant, tmp_path)
    one = step_of(first, average=True)
    one.take_many(3)
    states, examples, ends, projections = one.state.states(), uneven_examples(3), [], copy(first.coordinates)
    for case in (first, make_case(variant, tmp_path)):
        again = step_of(case, seed=5, average=True, learning_rate=lambda _: RATE)
        again.state.take_states(states)
        share_projections(projections, case.coordinates)
        again.examples = Examples(examples, pad_token_id=0)
        again.take(range(len(examples)))
        ends.append(again.state.states())
    same(ends[1], ends[0])


@by_any_variant
def test_given_states_are_copies(variant: tuple[str, str], tmp_path: Any) -> None:
    step = step_of(make_case(variant, tmp_path))
    step.take_many(1)
    states = step.state.states()
    kept = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in states.items()}
    step.take_many(2)
    same(states, kept)


@by_any_variant
def test_reset_memory_is_that_of_a_new_optimizer(variant: tuple[str, str], tmp_path: Any) -> None:
    moved, fresh = (make_case(variant, tmp_path, "factors") for _ in range(2))
    walked = step_of(moved, average=True)
    walked.take_many(3)
    point = fresh.coordinates.state_dict()
    walked.state.move_to({name: t.clone() for name, t in point.items()}, memory="reset")
    examples = uneven_examples(4)
    weights, projections = [], copy(fresh.coordinates)
    for case in (moved, fresh):
        mechanism = case.mechanism(seed=6)
        case.coordinates.load_state_dict(point)
        share_projections(projections, case.coordinates)
        Step(
            state=TrainState(coordinates=case.coordinates, optimizer=case.optimizer),
            mechanism=mechanism,
            examples=Examples(examples, pad_token_id=0),
            learning_rate=lambda _: RATE,
        ).take(range(len(examples)))
        weights.append(case.weights())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


@by_variant
def test_memory_that_is_transported_to_where_it_is_stays(variant: tuple[str, str], tmp_path: Any) -> None:
    step = step_of(make_case(variant, tmp_path, "moved"), average=True)
    step.take_many(2)
    before = step.state.states()
    step.state.move_to(before["coordinates"], noise_std=step.mechanism.noise_std)  # type: ignore[attr-defined]
    same(step.state.states(), before, off=1e-4)  # projected again in float32


def test_transported_momentum_is_tangent_where_it_arrives(tmp_path: Any) -> None:
    step = step_of(case := make_case(("prism", "rank"), tmp_path, "moved", beta1=0.9))
    step.take_many(1)
    other = make_case(("prism", "rank"), tmp_path, "factors").coordinates
    step.state.move_to(other.state_dict(), noise_std=0.1)
    for point, momentum in zip(case.coordinates.points, case.optimizer._momentum, strict=True):  # type: ignore[attr-defined]
        assert float((point.U.mT @ momentum.Up).abs().max()) < 1e-5
        assert float((point.V.mT @ momentum.Vp).abs().max()) < 1e-5


@pytest.mark.parametrize("clipping", ["flat", "spectral", "per-module"])
@by_space
def test_a_batch_in_parts_is_the_batch(variant: tuple[str, str], clipping: str, tmp_path: Any) -> None:
    case = make_case(variant, tmp_path)
    if clipping not in case.row.clippings:
        pytest.skip("the row does not clip like that")
    examples = uneven_examples()
    whole = case.clipped_sum(examples, clipping=clipping)
    first, second = (case.mechanism(sigma=0.0, batch=1.0, clipping=clipping) for _ in range(2))
    case.feed(first, examples, range(3))
    case.feed(second, examples, range(3, len(examples)))
    total = first.take() + second.take() + PrivateSum(None)
    # In float32 a unit's gradient is rounded by what shares its micro-batch.
    assert float((flat(first.release(total).vector) - whole).norm()) < 1e-4 * float(whole.norm())
    # Nothing is left at either.
    assert first.take().vector is None
    assert second.take().vector is None


def test_a_sum_from_elsewhere_is_refused_where_units_stand(tmp_path: Any) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    mechanism = case.mechanism()
    case.feed(mechanism, uneven_examples())
    with pytest.raises(PrivacyError, match="while units stand here"):
        mechanism.release(PrivateSum(None))


def test_counts_of_parts_add_up_and_are_noised_once(tmp_path: Any) -> None:
    case, examples = make_case(("dp-adamw", "adamw"), tmp_path), uneven_examples()
    values = []
    for parts in ([range(len(examples))], [range(2), range(2, len(examples))]):
        adaptive = AdaptiveClipNorm(1e-3, 0.5)
        mechanisms = [case.mechanism(seed=3, adaptive=adaptive) for _ in parts]
        for mechanism, units in zip(mechanisms, parts, strict=True):
            case.feed(mechanism, examples, units)
        total = sum((m.take() for m in mechanisms), PrivateSum(None))
        mechanisms[0].release(total)
        values.append(adaptive.value)
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert values[0] != 1e-3


def test_an_error_in_the_middle_leaves_no_unit_behind(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    step = step_of(case, max_tokens=8)
    accumulate = step.mechanism.accumulate

    def broken(captured: Any) -> None:
        accumulate(captured)
        raise KeyboardInterrupt

    monkeypatch.setattr(step.mechanism, "accumulate", broken)
    with pytest.raises(KeyboardInterrupt):
        step.take(range(4))
    assert step.mechanism.take().vector is None


def short_of_memory(monkeypatch: pytest.MonkeyPatch, fails: Any) -> list[tuple[int, int]]:
    """Passes raise where ``fails`` says so of the units and tokens of all that were begun; gives these."""
    begun = list[tuple[int, int]]()

    def limited(adapter: Any, batch: Any, **options: Any) -> Any:
        begun.append((batch.unit_count, batch.input_ids.numel()))
        assert len(begun) < 100, "the same batch is taken for ever"
        if fails(begun):
            raise torch.OutOfMemoryError("tried to allocate too much")
        return micro_batch_gradients(adapter, batch, **options)

    monkeypatch.setattr("privlora.training.step.micro_batch_gradients", limited)
    return begun


@by_space
def test_where_memory_is_short_the_same_batch_is_taken_again_and_no_unit_twice(
    variant: tuple[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(variant, tmp_path)
    step, units = step_of(case, max_tokens=24), range(len(uneven_examples()))
    expected_losses = step.accumulate(units)
    expected = flat(step.mechanism.clipped_sum())
    step.mechanism.discard()
    failed = list[bool]()

    def once(begun: list[tuple[int, int]]) -> bool:
        """Where one micro-batch stands in the sum already, and the next one can be made smaller."""
        failed.append(not any(failed) and len(begun) > 1 and begun[-1][0] > 1)
        return failed[-1]

    begun = short_of_memory(monkeypatch, once)
    losses = step.accumulate(units)
    torch.testing.assert_close(flat(step.mechanism.clipped_sum()), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses.sort().values, expected_losses.sort().values, rtol=1e-4, atol=1e-6)
    again = failed.index(True) + 1
    assert sum(count for count, _ in begun[again:]) == len(units)
    assert max(tokens for count, tokens in begun[again:] if count > 1) < begun[again - 1][1]
    assert step.halved == step.max_tokens < 24
    assert isinstance(step.release().step, int)


def test_later_batches_are_cut_as_small(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(make_case(("dp-adamw", "adamw"), tmp_path), max_tokens=64)
    begun = short_of_memory(monkeypatch, lambda begun: begun[-1][1] > 21)
    step.take(range(6))
    first = len(begun)
    step.take(range(6))
    assert max(tokens for _, tokens in begun[first:]) <= 21


def test_a_unit_that_does_not_fit_by_itself_ends_the_step_uncharged(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    ledger = CountingLedger()
    step = step_of(case, max_tokens=64, mechanism=case.mechanism(ledger=ledger))
    begun = short_of_memory(monkeypatch, lambda begun: begun[-1][1] > 20)  # the longest has 21
    with pytest.raises(torch.OutOfMemoryError):
        step.take(range(6))
    assert begun[-1] == (1, 21)
    assert not step.mechanism.pending
    assert step.mechanism.take().vector is None
    assert ledger.events == []


@by_space
def test_where_one_unit_spoils_a_batch_it_is_taken_again_and_no_unit_twice(
    variant: tuple[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which is asked once a batch: a kernel spreads one unit's NaN over its micro-batch."""
    case = make_case(variant, tmp_path)
    hard = with_token(uneven_examples()[0], NAN_TOKEN)
    step = step_of(case, max_tokens=64)
    step.examples = Examples([*uneven_examples(), hard], pad_token_id=0)
    others = range(len(uneven_examples()))
    expected_losses = step.accumulate(others)
    expected = flat(step.mechanism.clipped_sum())
    step.mechanism.discard()
    monkeypatch.setattr("privlora.training.step._asks_late", lambda _: True)
    norm = case.adapter.model.model.norm
    # From one row into the next alone, so that some stay finite.
    norm.register_forward_hook(lambda _, __, out: out + 0 * out.roll(1, dims=0).sum(dim=(1, 2), keepdim=True))

    def late(*given: Any, sound: Any, **options: Any) -> Any:
        """The first time no loss of units that go together can be trusted."""
        asked = len(sound or ())
        captured, losses = micro_batch_gradients(*given, sound=sound, **options)
        return captured, losses if sound is None or len(sound) == asked else losses * float("nan")

    monkeypatch.setattr("privlora.training.step.micro_batch_gradients", late)
    losses = step.accumulate([*others, len(others)])
    torch.testing.assert_close(flat(step.mechanism.clipped_sum()), expected, rtol=1e-4, atol=1e-6)
    finite = losses[losses.isfinite()]
    torch.testing.assert_close(finite.sort().values, expected_losses.sort().values, rtol=1e-4, atol=1e-6)


def test_without_a_ledger_a_gradient_that_is_no_number_ends_the_run(tmp_path: Any) -> None:
    case = make_case(("adamw", "adamw"), tmp_path)
    mechanism = case.mechanism()
    assert isinstance(mechanism, MeanMechanism)
    with pytest.raises(ModelError, match="not a number"):
        case.step(mechanism, [with_token(uneven_examples()[0], NAN_TOKEN)])


ELSEWHERE = "made at another point, clipping norm or projection"


def parted(tmp_path: Any, name: tuple[str, str] = ("prism", "rank")) -> tuple[Case, Any, PrivateSum]:
    """A case, its mechanism, and the sum of a batch."""
    case = make_case(name, tmp_path, "factors")
    mechanism = case.mechanism(seed=1)
    case.feed(mechanism, uneven_examples())
    return case, mechanism, mechanism.take()


@by_space
def test_a_sum_is_released_where_it_was_made(variant: tuple[str, str], tmp_path: Any) -> None:
    """Noise of the present point leaves out directions that gradients of another point have."""
    case, mechanism, total = parted(tmp_path, variant)
    late = mechanism.take()
    mechanism.release(total)
    for t in case.coordinates.state_dict().values():
        if t.is_floating_point():
            t.mul_(1.0 + 1e-6)
    with pytest.raises(PrivacyError, match=ELSEWHERE):
        mechanism.release(late)
    with pytest.raises(PrivacyError, match=ELSEWHERE):
        mechanism.take() + late


def test_a_sum_is_released_by_the_norm_that_it_was_clipped_to(tmp_path: Any) -> None:
    case, mechanism, total = parted(tmp_path)
    other = case.mechanism(seed=2, clip_norm=2.0)
    with pytest.raises(PrivacyError, match=ELSEWHERE):
        other.release(total)
    with pytest.raises(PrivacyError, match=ELSEWHERE):
        other.take() + total
    assert mechanism.release(total).step == 1


def test_a_sum_is_used_once(tmp_path: Any) -> None:
    _, _, total = parted(tmp_path)
    with pytest.raises(PrivacyError, match="a second time"):
        total + total
    _, mechanism, total = parted(tmp_path)
    mechanism.release(total)
    for again in (lambda: mechanism.release(total), lambda: mechanism.take() + total):
        with pytest.raises(PrivacyError, match="a second time"):
            again()


def test_one_charge_is_one_release(tmp_path: Any) -> None:
    charged = make_case(("prism", "rank"), tmp_path).mechanism().noising.charge(None)  # type: ignore[attr-defined]
    one = {"scale": 1.0, "divisor": 1.0, "dtype": torch.float64}
    charged.tensor(torch.zeros(3), **one)
    with pytest.raises(PrivacyError, match="charged once"):
        charged.tensor(torch.zeros(3), **one)


def test_a_sum_is_never_broadcast(tmp_path: Any) -> None:
    _, mechanism, total = parted(tmp_path)
    total.vector = [tuple(t[:, :1] for t in parts) for parts in total.vector or []]
    with pytest.raises(PrivacyError, match="meets noise of shape"):
        mechanism.release(total)


def test_one_draw_is_one_batch(tmp_path: Any) -> None:
    step = step_of(make_case(("prism", "rank"), tmp_path))
    step.accumulate([0])
    for again in (lambda: step.accumulate([0]), step.take):
        with pytest.raises(PrivacyError, match="units of another batch"):
            again()
    step.release()
    step.take([0])


@pytest.mark.parametrize(
    "wrong", [[-1], [7], [0.0], [[True, False]], [torch.tensor(1.0).numpy()]], ids=lambda wrong: str(wrong)
)
def test_what_is_no_number_of_a_record_is_refused(wrong: Any, tmp_path: Any) -> None:
    step = step_of(make_case(("prism", "rank"), tmp_path))
    assert len(step.examples) == 7
    with pytest.raises(PrivacyError, match="no number of a record"):
        step.take(wrong)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Any) -> None:
    case, other = (make_case(("prism", "rank"), tmp_path) for _ in range(2))
    with pytest.raises(ConfigError, match="other coordinates"):
        TrainState(coordinates=case.coordinates, optimizer=other.optimizer)
    with pytest.raises(ConfigError, match="the mechanism of a step"):
        step_of(case, mechanism=other.mechanism())
    with pytest.raises(ConfigError, match="draw of a step"):
        step_of(case, draw=PoissonSampler(7, 0.01))
    with pytest.raises(PrivacyError, match="the sampler draws by"):
        step_of(case, draw=PoissonSampler(7, 0.9).draw)
    with pytest.raises(PrivacyError, match="the sampler draws by"):  # each unit in a quarter of the steps
        step_of(case, draw=CyclicPoissonSampler(7, 0.01, 4, key=1, charged=lambda: 0).draw)
    state = TrainState(coordinates=case.coordinates, optimizer=case.optimizer)
    with pytest.raises(ConfigError, match="examples of a step"):
        Step(state=state, mechanism=case.mechanism(), examples=[], learning_rate=1.0)  # type: ignore[arg-type]
    step_of(case, draw=PoissonSampler(7, 0.01).draw)


def test_a_learning_rate_is_a_number_or_gives_one(tmp_path: Any) -> None:
    step_of(make_case(("prism", "rank"), tmp_path), learning_rate=1e-3).take([0])
    for wrong in (float("nan"), -1.0, None, lambda _: None):
        with pytest.raises(ConfigError, match="the learning rate of step 1"):
            step_of(make_case(("prism", "rank"), tmp_path), learning_rate=wrong).take([0])


def test_states_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Any) -> None:
    step = step_of(make_case(("prism", "rank"), tmp_path, "moved"))
    own = step.state.states()
    point = own["coordinates"]
    broken = {**point, "0.U": point["0.U"] * float("nan")}
    short = {name: t[..., :2] for name, t in point.items()}
    factors = make_case(("dp-adamw", "adamw"), tmp_path).coordinates.state_dict()
    for wrong in (broken, short, factors, own):
        with pytest.raises(ConfigError, match="the point's"):
            step.state.move_to(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not orthonormal"):
        step.state.move_to({**point, "0.U": 1.5 * point["0.U"]})
    tilt = torch.eye(point["0.U"].shape[-1]) + 4.5e-5  # no entry of U^T U is far off; all together are
    with pytest.raises(ConfigError, match="not orthonormal"):
        step.state.move_to({**point, "0.U": point["0.U"] @ tilt.to(point["0.U"])})
    with pytest.raises(ConfigError, match="memory='keep' is unknown"):
        step.state.move_to(point, memory="keep")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="holds no 'coordinates'"):
        step.state.take_states({})
    same(step.state.states(), own)


def test_a_mechanism_does_what_its_ledger_says(tmp_path: Any) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    book = CountingLedger()
    book.plan = SimpleNamespace(clip_norm=1.0, expected_batch_size=4.0)  # type: ignore[attr-defined]
    case.mechanism(ledger=book)
    for wrong in ({"clip_norm": 2.0}, {"batch": 8.0}):
        with pytest.raises(PrivacyError, match="are not the ledger's plan"):
            case.mechanism(ledger=book, **wrong)


def test_an_adapter_that_is_not_attached_is_named(tmp_path: Any) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    case.adapter.detach()
    with pytest.raises(PrivacyError, match="not attached"):
        step_of(case).take([0])
