"""DP-ZO: differences of losses along one direction, in the place of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting_ledger import CountingLedger
from method_cases import NAN_TOKEN, Case, flat, make_case, poisoned_model, with_token
from scipy.stats import kstest
from test_sensitivity import hard_batch
from tiny_models import one_batch, random_example, tiny_model, uneven_examples
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.cli.memory import estimate_memory
from privlora.cli.planning import _memory_line
from privlora.config import Settings, settings_from
from privlora.coordinates import DirectionCoordinates, FactorCoordinates
from privlora.errors import ConfigError, PrivacyError
from privlora.lab.audits.spaces import check_space
from privlora.losses import label_logits
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.methods import METHODS, build
from privlora.training.assembly import build_parts
from privlora.training.footprint import gradient_bytes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.misfits import refuse_misfits
from privlora.training.promise import plan_privacy

C = 0.5
NO_BUDGET = {"private": False, "steps": 3, "sample_rate": 0.2, "public_dataset_size": 20}


def case_of(folder: Path, optimizer: str = "sgd", **options: Any) -> tuple[Case, DirectionCoordinates]:
    case = make_case(("dp-zo", optimizer), folder, **options)
    assert isinstance(case.coordinates, DirectionCoordinates)
    return case, case.coordinates


def trained(coordinates: DirectionCoordinates) -> list[Tensor]:
    return [t for pair in coordinates.trained for t in pair]


def loss_at(case: Case, coordinates: DirectionCoordinates, example: Any, steps: float) -> float:
    """A record's loss at theta + steps lambda z, by the plain model with W written out, in float64."""
    pairs = zip(coordinates.left, coordinates.right, coordinates.direction, case.adapter.groups, strict=True)
    far, scale = steps * coordinates.perturbation, coordinates.scale
    before = {site.name: site.weight.detach().clone() for site in case.adapter.sites}
    case.adapter.detach()
    try:
        with torch.no_grad():
            for left, right, (u, v), group in pairs:
                for k, site in enumerate(group.sites):
                    moved = (left[k] + far * u[k]) @ (right[k] + far * v[k]).mT
                    site.weight.add_(scale * moved.to(site.weight))
            batch = one_batch([example])
            found = label_logits(case.adapter.model, batch.input_ids, batch.attention_mask, batch.labels)
            return float(torch.nn.functional.cross_entropy(found.logits, found.targets))
    finally:
        with torch.no_grad():
            for site in case.adapter.sites:
                site.weight.copy_(before[site.name])
        case.adapter.attach()


def test_a_unit_is_told_by_how_its_losses_differ(tmp_path: Path) -> None:
    """(L(theta + lambda z) - L(theta - lambda z)) / (2 lambda), of the plain model; and of several records the mean."""
    model = tiny_model(dtype=torch.float64)
    case, coordinates = case_of(tmp_path, model=model, dtype=torch.float64)
    examples = uneven_examples()[:4]
    expected = [
        (loss_at(case, coordinates, e, 1.0) - loss_at(case, coordinates, e, -1.0))
        / (2 * coordinates.perturbation)
        for e in examples
    ]
    for k, example in enumerate(examples):
        captured, losses = micro_batch_gradients(case.adapter, one_batch([example], double=True))
        assert captured.columns is not None
        assert captured.columns[:, 0].tolist() == pytest.approx([expected[k]], rel=1e-6)
        assert losses.tolist() == pytest.approx([loss_at(case, coordinates, example, 0.0)], rel=1e-3)
    together, _ = micro_batch_gradients(case.adapter, one_batch(examples, double=True))
    assert together.columns is not None
    assert sorted(together.columns[:, 0].tolist()) == pytest.approx(sorted(expected), rel=1e-6)
    user, _ = micro_batch_gradients(case.adapter, one_batch(examples, [np.array([0, 1, 3])]))
    assert user.columns is not None
    assert float(user.columns[0, 0]) == pytest.approx(sum(expected[k] for k in (0, 1, 3)) / 3, rel=1e-6)


def test_for_small_steps_it_is_the_derivative(tmp_path: Path) -> None:
    """What audits take of gradients that they are given; and what the estimate has in common with a gradient."""
    model = tiny_model(dtype=torch.float64)
    case, coordinates = case_of(tmp_path, model=model, dtype=torch.float64)
    examples = uneven_examples()[:4]
    found, _ = micro_batch_gradients(case.adapter, one_batch(examples, double=True))
    case.adapter.compared = None
    gradients, _ = micro_batch_gradients(case.adapter, one_batch(examples, double=True))
    derivative = coordinates.encode(gradients).columns
    assert derivative is not None
    assert found.columns is not None
    # The model's norms are float32 even so, and lambda is 1e-3.
    torch.testing.assert_close(found.columns, derivative, rtol=2e-3, atol=1e-2)
    factors = FactorCoordinates(case.adapter, coordinates.trained, coordinates.scale, torch.float64)  # type: ignore[arg-type]
    weights = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    gradient = flat(factors.to_vector(factors.weighted_sum(gradients, weights)))
    ((c,),) = coordinates.to_vector(coordinates.weighted_sum(gradients, weights))
    z = torch.cat([t.flatten() for pair in coordinates.direction for t in pair])
    assert float(c) == pytest.approx(float(gradient @ z), rel=1e-9)
    ((summed,),) = coordinates.partial_sum(gradients, weights)
    assert float(summed) == pytest.approx(float(c), rel=1e-9)
    torch.testing.assert_close(flat(coordinates.estimate([(c,)])), float(c) * z)
    left_right = zip(
        coordinates.pull_back([(torch.ones(1, dtype=torch.float64),)]), coordinates.direction, strict=True
    )
    for pulled, direction in left_right:
        for x, t in zip(pulled, direction, strict=True):
            torch.testing.assert_close(x, coordinates.scale * t)


def test_check_space_finds_nothing() -> None:
    adapter = LowRankAdapter(tiny_model(), rank=1, target_modules=["q_proj", "down_proj"])
    coordinates, _ = build(METHODS["dp-zo"], adapter)
    check_space(coordinates)


def test_nobody_moves_the_sum_by_more_than_c(tmp_path: Path) -> None:
    """Add or remove: C; replace: 2 C, which is reached where two differences have other signs. Alone and in company."""
    case, _ = case_of(tmp_path)
    examples = hard_batch()

    def total(units: Sequence[int]) -> float:
        """In float64, as it is summed, in units of C."""
        mechanism = case.mechanism(clip_norm=1e-3)
        case.feed(mechanism, examples, units, max_tokens=30)
        return float(flat(mechanism.clipped_sum() or [])) / 1e-3

    alone = [total([k]) for k in range(len(examples))]
    assert all(abs(c) <= 1 for c in alone)
    assert [abs(c) for c in alone[:6]] == pytest.approx([1 - 3e-4] * 6, rel=1e-6)
    assert alone[-3:] == [0.0] * 3  # empty, NaN, infinite
    whole = total(range(len(examples)))
    for k, own in enumerate(alone):
        rest = [*range(k), *range(k + 1, len(examples))]
        assert whole - total(rest) == pytest.approx(own, abs=1e-12)  # nobody else's part changed by a bit
    mechanism = case.mechanism(clip_norm=1e-3)
    assert (mechanism.sensitivity(), mechanism.sensitivity("replace-one")) == (1e-3, 2e-3)
    most, least = max(alone), min(alone)
    assert most > 0.9 > -0.9 > least
    assert most - least <= 2


def test_what_others_round_moves_nobody(tmp_path: Path) -> None:
    """Bit by bit: beside 200 copies, a long record, another order and in other micro-batches."""
    case, coordinates = case_of(tmp_path)
    sizes = list[int]()  # a processor whose sums do not depend on the batch would hide it
    case.adapter.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    rng = np.random.default_rng(2)
    examples = [random_example(rng, 60), *[random_example(rng, 7)] * 200, random_example(rng, 3)]
    together, _ = micro_batch_gradients(case.adapter, one_batch(examples))
    assert together.columns is not None
    assert len(set(together.columns[1:201, 0].tolist())) == 1
    for k in (0, 1, 201):
        own, _ = micro_batch_gradients(case.adapter, one_batch([examples[k]]))
        assert own.columns is not None
        assert torch.equal(own.columns[0], together.columns[k])
    assert set(sizes) == {1}
    assert coordinates.adapter.one_by_one


@pytest.mark.parametrize("fails", [False, True])
def test_theta_is_the_same_to_the_bit_whoever_was_in_the_batch(fails: bool, tmp_path: Path) -> None:
    """Adding and subtracting lambda z would round theta anew with every micro-batch, and tell how many there were."""
    case, coordinates = case_of(tmp_path, state="moved")
    before = [t.clone() for t in trained(coordinates)]
    met = [site.left.clone() for site in case.adapter.sites if site.left is not None]
    mechanism = case.mechanism()
    if fails:
        handle = case.adapter.model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.feed(mechanism, uneven_examples())
        handle.remove()
    else:
        for _ in range(20):
            case.feed(mechanism, uneven_examples(), max_tokens=20)
    for t, old in zip(trained(coordinates), before, strict=True):
        assert torch.equal(t, old)
    assert all(torch.equal(s.left, old) for s, old in zip(case.adapter.sites, met, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_moves_is_a_function_of_one_released_number(optimizer: str, tmp_path: Path) -> None:
    """Two batches with the same release lead to the same state, bit by bit."""
    ends = []
    for number in range(2):
        case, coordinates = case_of(tmp_path, optimizer)
        mechanism = case.mechanism(seed=3, clip_norm=1e-9)  # so that only noise is seen
        case.feed(mechanism, [uneven_examples(), hard_batch()][number])
        release = mechanism.release()
        assert [t.numel() for parts in release.vector for t in parts] == [1]
        (c,) = release.vector[0]
        case.optimizer.step(type(release)([(torch.full_like(c, 0.25),)], 0.5, 1, C), 0.01)
        ends.append([t.clone() for t in trained(coordinates)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_sgd_steps_along_the_direction_in_units_of_the_noise(tmp_path: Path) -> None:
    case, coordinates = case_of(tmp_path)
    before = [t.clone() for t in trained(coordinates)]
    direction = [t.clone() for pair in coordinates.direction for t in pair]
    release = case.mechanism(seed=3).release()
    ((c,),) = release.vector
    case.optimizer.step(release, 0.01)
    for t, old, z in zip(trained(coordinates), before, direction, strict=True):
        torch.testing.assert_close(t, old - 0.01 * float(c) / release.noise_std * z)


def test_the_noise_is_one_gaussian_number(tmp_path: Path) -> None:
    """Of standard deviation sigma C / b, charged before it is drawn, whatever the direction and the batch."""
    case, _ = case_of(tmp_path)
    ledger = CountingLedger()
    mechanism = case.mechanism(sigma=1.3, clip_norm=C, batch=4.0, ledger=ledger)
    drawn = case.releases(mechanism, 4000)[:, 0].numpy() / (1.3 * C / 4.0)
    assert len(ledger.events) == 4000
    assert {event.noise_multiplier for event in ledger.events} == {1.3}
    assert kstest(drawn, "norm").pvalue > 1e-4
    for wrong in (0.8, 1.25):
        assert kstest(wrong * drawn, "norm").pvalue < 1e-4
    assert abs(float(np.corrcoef(drawn[1:], drawn[:-1])[0, 1])) < 5 / 4000**0.5


def test_directions_are_normal_and_new_each_time(tmp_path: Path) -> None:
    _, coordinates = case_of(tmp_path)
    coordinates.begin()
    drawn = []
    for _ in range(6):
        drawn.append(direction(coordinates))
        assert coordinates.advance()
    assert kstest(torch.cat(drawn).numpy(), "norm").pvalue > 1e-4
    between = torch.corrcoef(torch.stack(drawn))
    assert float((between - torch.eye(6)).abs().max()) < 6 / len(drawn[0]) ** 0.5


def test_a_resumed_run_repeats_no_direction(tmp_path: Path) -> None:
    """One that was used before a crash would be used again with another batch; states alone, as replays, repeat all."""
    _, coordinates = case_of(tmp_path)
    coordinates.begin()
    used = []
    for _ in range(3):
        used.append(direction(coordinates))
        coordinates.advance()
    state = {name: t.clone() for name, t in coordinates.state_dict().items()}
    used.append(direction(coordinates))
    _, resumed = case_of(tmp_path)
    resumed.load_state_dict(state)
    assert torch.equal(direction(resumed), used[-1])
    GaussianMechanism(
        resumed,
        clip_norm=C,
        event=StepEvent(PoissonSampling(0.1), 1.0),
        expected_batch_size=1.0,
        ledger=CountingLedger(),
    )
    for _ in range(4):
        between = torch.corrcoef(torch.stack([direction(resumed), *used]))
        assert float((between - torch.eye(5)).abs().max()) < 6 / len(used[0]) ** 0.5
        resumed.advance()


def direction(coordinates: DirectionCoordinates) -> Tensor:
    return torch.cat([t.flatten() for pair in coordinates.direction for t in pair])


def test_no_gradient_and_no_activation_is_kept(tmp_path: Path) -> None:
    case, coordinates = case_of(tmp_path)
    seen: list[bool] = []
    handle = case.adapter.model.lm_head.register_forward_hook(
        lambda _, args, out: seen.append(torch.is_grad_enabled() or out.requires_grad)
    )
    captured, losses = micro_batch_gradients(case.adapter, one_batch(uneven_examples()))
    handle.remove()
    assert seen
    assert not any(seen)
    assert not losses.requires_grad
    assert (captured.p, captured.q, captured.stacks) == ([], [], None)
    assert not case.adapter.gathering
    assert gradient_bytes(coordinates.adapter) == 0


def test_a_pass_of_an_unattached_adapter_is_refused(tmp_path: Path) -> None:
    case, _ = case_of(tmp_path)
    case.adapter.detach()
    with pytest.raises(PrivacyError, match="not attached"):
        micro_batch_gradients(case.adapter, one_batch(uneven_examples()))


def test_a_loss_that_is_not_finite_counts_as_nothing(tmp_path: Path) -> None:
    model = poisoned_model()
    case, _ = case_of(tmp_path, model=model)
    examples = uneven_examples()
    spoiled = [*examples, with_token(examples[0], NAN_TOKEN)]
    assert torch.equal(case.clipped_sum(spoiled), case.clipped_sum(examples))


def settings(**groups: Any) -> Settings:
    given: dict[str, Any] = {
        "model": {"name": "tiny"},
        "data": {"path": "(in memory)"},
        "adapter": {"r": 2},
        "method": {"name": "dp-zo"},
        "privacy": {
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            "steps": 3,
            "expected_batch_size": 4,
            "public_dataset_size": 20,
        },
    }
    return settings_from({**given, **groups}, source="test")


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ({"model": {"name": "tiny", "dropout": True}}, "model.dropout does not go with method 'dp-zo'"),
        ({"adapter": {"r": 2, "lora_dropout": 0.1}}, "lora_dropout does not go with differences of losses"),
        ({"method": {"name": "dp-zo", "clipping": "per-module"}}, "cannot clip as clipping='per-module'"),
        ({"method": {"name": "dp-zo", "clipping": "automatic"}}, "cannot clip as clipping='automatic'"),
        ({"method": {"name": "dp-sgd", "perturbation": 1e-2}}, "has no setting 'perturbation'"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(groups: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        build_parts(settings(**groups), tiny_model())


def test_dropout_is_refused_before_a_record_is_read_where_a_row_cannot_have_it() -> None:
    """By the plan, of exactly the rows whose coordinates cannot be built with it."""
    refused = set()
    for name, row in METHODS.items():
        budget = {} if row.private else {"privacy": NO_BUDGET}
        given = settings(adapter={"r": 2, "lora_dropout": 0.1}, method={"name": name}, **budget)
        try:
            refuse_misfits(given, row)
        except ConfigError as error:
            assert f"adapter.lora_dropout does not go with method {name!r}" in str(error)  # noqa: PT017
            refused.add(name)
    built = set()
    for name, row in METHODS.items():
        if not row.public_texts:  # which are refused without texts; those on spans refuse it by themselves
            try:
                build(row, LowRankAdapter(tiny_model(), rank=2, dropout=0.1))
            except ConfigError as error:
                assert "lora_dropout" in str(error)  # noqa: PT017
                built.add(name)
    assert refused == built | {name for name, row in METHODS.items() if row.public_texts}
    with pytest.raises(ConfigError, match="lora_dropout does not go with method 'dp-zo'"):
        plan_privacy(settings(adapter={"r": 2, "lora_dropout": 0.1}))


def test_public_texts_are_no_warm_start() -> None:
    texts = {"publish": True, "warm_start_epochs": 1}
    with pytest.raises(ConfigError, match="warm_start_epochs does not go with method 'dp-zo'"):
        plan_privacy(settings(synthesis=texts))


def test_it_costs_what_any_gaussian_mechanism_of_its_noise_costs() -> None:
    plans = []
    for name in ("dp-zo", "dp-sgd"):
        privacy = {**settings().privacy.model_dump(), "noise_multiplier": None, "target_epsilon": 2.0}
        plans.append(plan_privacy(settings(method={"name": name}, privacy=privacy)).phases)
    assert plans[0] == plans[1]
    ((event, _),) = plans[0]
    assert isinstance(event, StepEvent)
    assert isinstance(event.sampling, PoissonSampling)
    assert event.projections == ()


def test_a_plan_counts_no_gradients() -> None:
    memory = estimate_memory(settings(), METHODS["dp-zo"], tiny_model())
    assert (memory["trained_numbers"], memory["gradient_bytes"], memory["gradient_bytes_at_most"]) == (
        1,
        0,
        0,
    )
    line = _memory_line(memory)
    assert f"{memory['adapter_bytes'] // 4:,} trained numbers, moved by one a step, in" in line
    assert "no per-example gradients" in line


def test_the_settings_reach_the_space() -> None:
    parts = build_parts(settings(method={"name": "dp-zo", "perturbation": 0.01}), tiny_model())
    assert isinstance(parts.coordinates, DirectionCoordinates)
    assert parts.coordinates.perturbation == 0.01
    assert math.isclose(parts.coordinates.dimension, 1)
    with pytest.raises(ConfigError, match="not positive"):
        DirectionCoordinates(parts.adapter, [], 1.0, perturbation=0.0)
    assert NoiseSource(1).secure is False
