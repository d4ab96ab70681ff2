"""Adapters trained side by side are those that ordinary runs train, one after the other, with the same draws."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import random_example, uneven_examples
from tiny_models import tiny_model as any_model
from torch import Tensor

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import CyclicPoissonSampling, PoissonSampling, Sampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.auditing.text_canaries import record_losses
from privlora.config import Settings, settings_from
from privlora.data.examples import Examples
from privlora.data.sampling import CyclicPoissonSampler, PoissonSampler
from privlora.data.units import Units
from privlora.errors import ConfigError, ModelError, PrivacyError, PrivloraError
from privlora.mechanisms import (
    CorrelatedNoise,
    GaussianMechanism,
    MeanMechanism,
    Mechanism,
    NoiseSource,
    Release,
    band_coefficients,
)
from privlora.mechanisms.charges import Uncharged
from privlora.mechanisms.noising import grid_width
from privlora.optimizers import Optimizer
from privlora.stacked import TrainedAdapters, train_adapters
from privlora.stacked.adapter import StackedAdapter
from privlora.training.assembly import build_parts
from privlora.training.step import Step

SIGMA, SEEDS = 0.3, (5, 6, 7)
# Name of the method, and what is set otherwise than by its row.
METHODS: dict[str, dict[str, Any]] = {
    "dp-adamw": {"name": "dp-adamw"},
    "dp-sgd": {"name": "dp-sgd", "beta1": 0.5},
    "lora-fa": {"name": "lora-fa", "clipping": "automatic"},
    "lora-rite": {"name": "lora-rite", "clipping": "spectral"},
    "lamb": {"name": "lamb", "schedule": "cosine"},
    "prism": {"name": "prism"},
    "prism sgd": {"name": "prism", "optimizer": "sgd", "clipping": "flat", "averaging": 0.9},
    "not private": {"name": "adamw"},
}


def tiny_model() -> Any:
    """In float64: rounding is not what is compared, and PRISM's roots of small singular values magnify it."""
    return any_model(dtype=torch.float64)


def settings(method: dict[str, Any], *, init: str | None = None, **privacy: Any) -> Settings:
    chosen: dict[str, Any] = {"steps": 3, "expected_batch_size": 3, "sample_rate": 0.5, "clip_norm": 0.05}
    noise = {"private": False} if method["name"] == "adamw" else {"noise_multiplier": SIGMA, "delta": 1e-5}
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": "(in memory)"},
            "adapter": {"r": 2, "target_modules": ["q_proj", "v_proj", "up_proj"], "init": init},
            "privacy": {**chosen, **noise, **privacy},
            "method": method,
            "run": {"tokens_per_micro_batch": 50},
        },
        source="test",
    )


def records() -> Examples:
    return Examples(uneven_examples(), pad_token_id=0)


def some(adapters: int, units: int) -> Tensor:
    return torch.rand(adapters, units, generator=torch.Generator().manual_seed(1)) < 0.8


def trained(chosen: Settings, **options: Any) -> TrainedAdapters:
    examples = options.pop("examples", records())
    model = options.pop("model", None)
    given = {"members": some(3, len(examples)), "seeds": SEEDS, **options}
    return train_adapters(chosen, tiny_model() if model is None else model, examples, **given)


def ordinary(
    chosen: Settings, own: np.ndarray, seed: int, units: Units, examples: Examples
) -> dict[str, tuple[Tensor, Tensor]]:
    """The engine's own loop for one adapter, without files, on the draws of ``seed``."""
    privacy, model = chosen.privacy, tiny_model()
    parts = build_parts(chosen, model)
    sampling: Sampling = PoissonSampling(privacy.q)
    correlated = None
    sampler: Any = PoissonSampler(len(own), privacy.q, insecure_seed=2 * seed)
    if privacy.bands != 1:
        assert isinstance(privacy.bands, int)
        turns = count()
        sampler = CyclicPoissonSampler(
            len(own),
            privacy.q * privacy.bands,
            privacy.bands,
            key=2 * seed,
            charged=lambda: next(turns),
            insecure_seed=2 * seed,
        )
        sampling = sampler.sampling
        correlated = CorrelatedNoise(band_coefficients(privacy.bands, privacy.steps), parts.coordinates)
    mechanism: Mechanism = MeanMechanism(
        parts.coordinates, expected_batch_size=privacy.b, steps=privacy.steps
    )
    if privacy.private:
        mechanism = GaussianMechanism(
            parts.coordinates,
            clip_norm=privacy.clip_norm,
            event=StepEvent(sampling, SIGMA),
            expected_batch_size=privacy.b,
            ledger=Uncharged(),
            noise=NoiseSource(2 * seed + 1),
            clipping=parts.hyper.clipping,
            correlated=correlated,
        )
    step = Step(
        state=parts,
        mechanism=mechanism,
        examples=examples,
        learning_rate=parts.learning_rate,
        draw=lambda: units.draw_records(own[sampler.draw()], sampler.generator),
        max_tokens=50,
    )
    step.take_many(privacy.steps)
    return parts.named_factors()


def assert_same(found: dict[str, tuple[Tensor, Tensor]], expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, (a, b) in expected.items():
        update = a @ b.mT
        assert float(update.norm()) > 0
        torch.testing.assert_close(
            found[name][0] @ found[name][1].mT, update, rtol=1e-5, atol=1e-5 * float(update.norm())
        )


@pytest.mark.parametrize("name", METHODS)
def test_each_adapter_is_that_of_an_ordinary_run(name: str) -> None:
    chosen, examples = settings(METHODS[name]), records()
    found = trained(chosen, together=2)  # turns of two and of one
    for n, own in enumerate(some(3, len(examples))):
        expected = ordinary(
            chosen, np.flatnonzero(own.numpy()), SEEDS[n], Units(np.arange(len(examples))), examples
        )
        assert_same(found.named_factors(n), expected)


@pytest.mark.parametrize("name", ["dp-adamw", "prism"])
def test_noise_takes_back_each_adapters_own_earlier_noise(name: str) -> None:
    chosen, examples = settings(METHODS[name], bands=2, steps=4, sample_rate=0.4), records()
    found = trained(chosen, together=2)
    assert found.event.sampling == CyclicPoissonSampling(0.8, 2)
    assert found.epsilon(1e-5) == epsilon([(StepEvent(PoissonSampling(0.8), SIGMA), 2)], 1e-5)
    for n, own in enumerate(some(3, len(examples))):
        units = Units(np.arange(len(examples)))
        expected = ordinary(chosen, np.flatnonzero(own.numpy()), SEEDS[n], units, examples)
        assert_same(found.named_factors(n), expected)


def test_units_of_several_records_and_a_part_of_the_frozen_weights() -> None:
    chosen, examples = settings(METHODS["prism"], init="spectral-split"), records()
    units = Units(np.array([0, 1, 0, 2, 2, 0, 3]), max_records_per_unit=2)
    members = some(2, 4)
    found = trained(chosen, units=units, members=members, seeds=(3, 4))
    for n, own in enumerate(members):
        expected = ordinary(chosen, np.flatnonzero(own.numpy()), 3 + n, units, examples)
        assert_same(found.named_factors(n), expected)


def test_losses_are_those_of_the_model_with_each_adapter() -> None:
    chosen, examples = settings(METHODS["dp-adamw"]), records()
    found = trained(chosen)
    losses = found.losses(examples, together=2)
    assert losses.shape == (3, len(examples))
    model = tiny_model()
    adapter = LowRankAdapter(model, rank=2, target_modules=["q_proj", "v_proj", "up_proj"])
    for n in range(3):
        for group in adapter.groups:
            a, b = (
                torch.stack([found.named_factors(n)[site.name][side] for site in group.sites])
                for side in (0, 1)
            )
            adapter.install(group, a, torch.ones(len(a), 2), b)
        with adapter:
            expected = record_losses(model, examples)
        np.testing.assert_allclose(losses[n].numpy(), expected, rtol=1e-5)


def test_a_record_that_is_not_finite_spoils_nothing() -> None:
    chosen, examples = settings(METHODS["dp-adamw"], sample_rate=1.0, expected_batch_size=8), records()
    poison = random_example(np.random.default_rng(0), 8)
    poison.input_ids[3] = 60
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = torch.nan
    both = torch.ones(2, len(examples) + 1, dtype=torch.bool)
    alone = both.clone()
    alone[0, -1] = False
    with_it, without = (
        trained(
            chosen, model=model, examples=examples.like([*examples, poison]), members=members, seeds=(1, 2)
        )
        for members in (both, alone)
    )
    for n in (0, 1):
        assert_same(with_it.named_factors(n), without.named_factors(n))
    with pytest.raises(ModelError, match="not a number"):
        trained(
            settings(METHODS["not private"], sample_rate=1.0),
            model=model,
            examples=examples.like([poison]),
            members=both[:, -1:],
            seeds=(1, 2),
        )


@pytest.mark.parametrize("seeds", [None, range(40)])
def test_noise_is_standard_normal_and_each_adapters_own(seeds: range | None) -> None:
    """Without a record, DP-SGD's first step is minus the noise over tau."""
    chosen = settings({"name": "dp-sgd", "learning_rate": 1.0}, steps=1)
    found = trained(chosen, members=torch.zeros(40, 7, dtype=torch.bool), seeds=seeds)
    assert found.insecure == (seeds is not None)
    left = torch.cat([a.flatten(1) for a, _ in found.factors], dim=1) / (16 / 2)  # lora_alpha / r
    numbers = left.shape[1]
    assert float(left.var()) == pytest.approx(1, abs=5 * (2 / left.numel()) ** 0.5)
    correlations = torch.corrcoef(left) - torch.eye(40)
    assert float(correlations.abs().max()) < 5.5 / numbers**0.5


@pytest.mark.parametrize("name", ["dp-adamw", "prism"])
def test_releases_lie_on_the_grid_of_their_noise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Tensor] = []
    step = Optimizer.step

    def noted(self: Optimizer, release: Release, learning_rate: float) -> None:
        width = grid_width(release.noise_std)
        released.extend(t / width for parts in release.vector for t in parts)
        step(self, release, learning_rate)

    monkeypatch.setattr(Optimizer, "step", noted)
    trained(settings(METHODS[name]))
    assert released
    assert all(torch.equal(steps, steps.round()) for steps in released)


def test_masks_are_drawn_afresh_and_follow_the_seeds() -> None:
    def updates(seeds: tuple[int, ...] | None) -> Tensor:
        torch.manual_seed(0)
        chosen = settings(METHODS["not private"], sample_rate=1.0)  # all that is random are the masks
        chosen = chosen.model_copy(
            update={"adapter": chosen.adapter.model_copy(update={"lora_dropout": 0.5})}
        )
        found = trained(chosen, seeds=seeds)
        return torch.cat([(a @ b.mT).flatten() for a, b in found.factors])

    seeded, again, *afresh = (updates(seeds) for seeds in (SEEDS, SEEDS, None, None))
    assert torch.equal(seeded, again)
    assert not torch.allclose(afresh[0], afresh[1])


def test_batches_are_each_adapters_own_and_cannot_be_foreseen() -> None:
    everyone = torch.ones(2, 7, dtype=torch.bool)  # without noise, equal batches would give equal adapters
    runs = [trained(settings(METHODS["not private"]), members=everyone, seeds=None) for _ in range(2)]
    left = torch.cat([torch.cat([a.flatten(1) for a, _ in run.factors], dim=1) for run in runs])
    assert float(torch.pdist(left).min()) > 1e-6


def training_shapes(model: Any, method: dict[str, Any]) -> list[tuple[int, ...]]:
    """(rows, tokens) of each pass of a run with batches of everybody."""
    shapes: list[tuple[int, ...]] = []

    def keep(_: torch.nn.Module, args: Any, named: dict[str, Tensor]) -> None:
        if not named["input_ids"].is_meta:  # a look at the layers, without values
            shapes.append(tuple(named["input_ids"].shape))

    chosen = settings(method, sample_rate=1.0)
    targets = chosen.adapter.model_copy(update={"target_modules": ["q_proj", "v_proj"]})
    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    trained(chosen.model_copy(update={"adapter": targets}), model=model)
    handle.remove()
    return shapes


def test_below_float32_widths_do_not_follow_who_is_in_the_batch() -> None:
    found = {width for _, width in training_shapes(any_model(dtype=torch.bfloat16), METHODS["dp-adamw"])}
    assert found == {(len(example.input_ids) // 8 + 1) * 8 for example in records()}


def test_where_tokens_are_routed_each_unit_is_computed_by_itself_at_its_own_width() -> None:
    shapes = training_shapes(any_model("mixtral"), METHODS["dp-adamw"])
    assert set(shapes) <= {(1, len(example.input_ids)) for example in records()}
    assert len(set(shapes)) > 3


class Ledger:
    """Counts, and refuses after ``most`` charges."""

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.events = most, list[StepEvent]()

    def charge(self, event: StepEvent) -> int:
        if len(self.events) == self.most:
            raise PrivacyError("spent")
        self.events.append(event)
        return len(self.events)

    @property
    def charges(self) -> int:
        return len(self.events)


def test_ledgers_of_correlated_noise_are_new_and_each_adapters_own() -> None:
    """The price of a cycle holds for one way to deal units to classes: 2 runs of 5 steps are no 10 steps in a row."""
    chosen = settings(METHODS["dp-adamw"], bands=2, steps=4, sample_rate=0.4, noise_multiplier=2.0)
    ledgers = [Ledger() for _ in range(3)]
    found = trained(chosen, seeds=None, ledgers=ledgers, together=2)
    assert [ledger.events for ledger in ledgers] == [[found.event] * 4] * 3
    longer = Ledger()
    longer.plan = SimpleNamespace(steps=8)  # type: ignore[attr-defined]
    one = Ledger()
    for given, said in (
        ([one, one, Ledger()], "have one ledger"),
        ([Ledger(), ledgers[0], Ledger()], "shows charges"),
        ([Ledger(), Ledger(), longer], "plans another number of steps than 4"),
    ):
        before = [ledger.charges for ledger in given]
        with pytest.raises(PrivacyError, match=said):
            trained(chosen, seeds=None, ledgers=given)
        assert [ledger.charges for ledger in given] == before


def test_every_ledger_is_charged_for_each_step_of_its_adapter() -> None:
    chosen = settings(METHODS["dp-adamw"], noise_multiplier=2.0)
    ledgers = [Ledger() for _ in range(3)]
    found = trained(chosen, seeds=None, ledgers=ledgers, together=2)
    event = StepEvent(PoissonSampling(0.5), 2.0)
    assert [ledger.events for ledger in ledgers] == [[event] * 3] * 3
    assert found.event == event
    assert found.epsilon(1e-5) == epsilon([(event, 3)], 1e-5)
    with pytest.raises(PrivacyError, match="spent"):
        trained(chosen, seeds=None, ledgers=[Ledger(), Ledger(2), Ledger()])


def test_the_model_is_left_as_it_was_and_progress_is_told() -> None:
    model, told = tiny_model(), list[int]()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = trained(settings(METHODS["not private"]), model=model, together=2, progress=told.append)
    assert told == [2, 4, 6, 7, 8, 9]
    assert not model.training
    assert all(p.requires_grad and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(PrivacyError, match="no epsilon"):
        found.epsilon(1e-5)


def test_a_pass_that_does_not_say_whose_rows_it_has_is_refused() -> None:
    model = tiny_model()
    adapter = StackedAdapter.like(LowRankAdapter(model, rank=2), 2, torch.arange(2))
    for group in adapter.groups:
        sizes = 2 * len(group.sites)
        adapter.install(
            group, torch.zeros(sizes, group.m, 2), torch.ones(sizes, 2), torch.zeros(sizes, group.n, 2)
        )
    ids = torch.ones(3, 4, dtype=torch.int64)
    with adapter, pytest.raises(PrivacyError, match="which row belongs to which"):
        model(input_ids=ids)
    with adapter, adapter.serving(torch.tensor([0, 1])), pytest.raises(PrivacyError, match="which row"):
        model(input_ids=ids)


@pytest.mark.parametrize(
    ("words", "options", "change"),
    [
        ("members are", {"members": torch.ones(2, 3, dtype=torch.bool)}, {}),
        ("2 seeds for 3", {"seeds": (1, 2)}, {}),
        ("same seed", {"seeds": (1, 1, 2)}, {}),
        ("with seeds cannot be charged", {"ledgers": [Ledger()] * 3}, {}),
        ("together=0", {"together": 0}, {}),
        ("insecure_noise_seed does not go", {}, {"insecure_noise_seed": 1}),
        ("clip_quantile does not go", {}, {"clip_quantile": 0.5}),
    ],
)
def test_refusals(words: str, options: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(PrivloraError, match=words):
        trained(settings(METHODS["dp-adamw"], **change), **options)


def test_dense_updates_are_refused() -> None:
    with pytest.raises(ConfigError, match="dense"):
        trained(settings({"name": "projected"}))
