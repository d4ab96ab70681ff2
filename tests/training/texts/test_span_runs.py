"""Runs that lean on public texts: which texts a step is given, how they go on where they stopped, what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from promises import small_settings
from tiny_models import PUBLIC_TEXTS, tiny_model, uneven_examples
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.config import settings_from
from privlora.data.examples import Examples
from privlora.errors import ConfigError, RunError
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.mechanisms.charges import Uncharged
from privlora.methods import METHODS
from privlora.training.assembly import build_parts
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint
from privlora.training.promise import plan_privacy
from privlora.training.step import Step
from privlora.training.texts.public_gradients import Room, public_gradients

PRIVACY = {"steps": 4, "expected_batch_size": 6, "public_dataset_size": 30}
PRIVACY = {**PRIVACY, "noise_multiplier": 1.0, "delta": 1e-3}
NAMES = [name for name, row in METHODS.items() if row.public_texts]
N = len(PUBLIC_TEXTS)
by_name = pytest.mark.parametrize("name", NAMES)


def settings(name: str, method: dict[str, Any] | None = None, **privacy: Any) -> Any:
    return small_settings(
        data={"path": "(in memory)"},
        adapter={"r": 2},
        privacy={**PRIVACY, **privacy},
        method={"name": name, **(method or {})},
    )


class Texts:
    """Public texts that evolve: those with the largest scores come first, and the last one is a new one."""

    def __init__(self) -> None:
        self.given: list[Tensor | None] = []
        self.order = list(range(N))

    def __call__(self, scores: Tensor | None) -> Examples:
        self.given.append(scores)
        if scores is not None:
            kept = [self.order[i] for i in scores.argsort(descending=True).tolist()]
            self.order = [*kept[:-1], N + len(self.given)]
        pool = [PUBLIC_TEXTS[i] for i in range(N)] + uneven_examples(8)[:6] * 4
        return Examples([pool[i] for i in self.order], pad_token_id=0)


def step_of(parts: Any, sigma: float, *, rate: float = 0.05, seed: int = 3) -> Step:
    mechanism = GaussianMechanism(
        parts.coordinates,
        clip_norm=1.0,
        event=StepEvent(PoissonSampling(0.2), sigma),
        expected_batch_size=7.0,
        ledger=Uncharged(),
        noise=NoiseSource(seed),
        clipping=parts.method.clipping,
    )
    return Step(
        state=parts,
        mechanism=mechanism,
        examples=Examples(uneven_examples(), pad_token_id=0),
        learning_rate=rate,
    )


@by_name
def test_each_step_asks_once_with_what_the_last_one_released(name: str) -> None:
    texts = Texts()
    parts = build_parts(settings(name), tiny_model(), texts=texts)
    step = step_of(parts, 1.0)
    releases = [step.take(batch).release for batch in ([0, 1], [], [2, 3, 4])]
    assert [scores is None for scores in texts.given] == [True, False, False]  # and none after the last
    assert all(
        scores is not None and scores.shape == (N,) and bool((scores >= 0).all())
        for scores in texts.given[1:]
    )
    step.accumulate([0])
    step.mechanism.discard()
    step.accumulate([0])  # a batch that is tried again has the texts that it had
    assert [scores is None for scores in texts.given[3:]] == [False, True]
    assert [release.step for release in releases] == [1, 2, 3]


def test_scores_are_the_released_coefficients_of_the_texts() -> None:
    texts = Texts()
    parts = build_parts(settings("pe-sgd"), tiny_model(), texts=texts)
    step = step_of(parts, 1.0)
    release = step.take([0, 1]).release
    coefficients = parts.coordinates.span.vectors @ release.vector[0][0].double()
    step.take([2])
    assert texts.given[1] is not None
    torch.testing.assert_close(texts.given[1].double(), coefficients.abs(), rtol=1e-5, atol=1e-8)


def test_a_step_takes_public_texts_together_and_private_units_alone() -> None:
    model = tiny_model()
    step = step_of(build_parts(settings("pe-sgd"), model, texts=lambda _: PUBLIC_TEXTS), 1.0)
    rows: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    step.take([0, 1, 2])
    assert rows == [N, N, 1, 1, 1]  # a model's first pass finds out what follows its output layer


def test_units_are_held_a_few_at_a_time_and_it_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short records many fit in a micro-batch, with more gradients than the public texts have."""
    seen = []
    for rows in (100, 2):
        parts = build_parts(settings("pe-sgd"), tiny_model(), texts=lambda _: PUBLIC_TEXTS)
        entries = parts.coordinates.inner.entries()
        monkeypatch.setattr("privlora.coordinates.span._BYTES", rows * 4 * entries)
        step = step_of(parts, 0.0)
        found: list[int] = []
        accumulate = step.mechanism.accumulate

        def counted(captured: Any, accumulate: Any = accumulate, found: list[int] = found) -> None:
            found.append(captured.units)
            accumulate(captured)

        monkeypatch.setattr(step.mechanism, "accumulate", counted)
        seen.append((step.take([0, 1, 2, 3, 4]).release.vector[0][0], found))
    assert [(sum(found), max(found)) for _, found in seen] == [(5, 5), (5, 2)]
    torch.testing.assert_close(seen[0][0], seen[1][0], rtol=1e-4, atol=1e-6)


def test_where_memory_is_short_public_gradients_lie_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a step is the same, to the bit."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    given = settings("pe-sgd").model_dump(exclude_unset=True)
    seen = []
    for free in (float("inf"), 0.0):
        monkeypatch.setattr("privlora.training.texts.public_gradients.free_bytes", lambda _, free=free: free)
        parts = build_parts(settings_from(given, source="test"), tiny_model(), texts=lambda _: PUBLIC_TEXTS)
        seen.append(step_of(parts, 0.0).take([0, 1, 2]).release.vector[0][0])
    assert torch.equal(*seen)
    # The file ends with the process, whatever ends that. Torch may leave an empty folder of its own.
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    parts = build_parts(settings_from(given, source="test"), tiny_model(), texts=lambda _: PUBLIC_TEXTS)
    with pytest.raises(RunError, match=r"public texts take .* GiB.*take fewer texts"):
        step_of(parts, 0.0).take([0])


def test_public_gradients_of_all_steps_lie_in_one_place() -> None:
    """Where fewer texts are left their rows lie in a part of it, and what is there is what a fresh place would hold."""
    parts = build_parts(settings("pe-sgd"), tiny_model(), texts=lambda _: PUBLIC_TEXTS)
    space, room = parts.coordinates.inner, Room()
    whole = public_gradients(space, PUBLIC_TEXTS, max_tokens=10**6, room=room).matrix
    whole.fill_(float("nan"))
    few = Examples([PUBLIC_TEXTS[i] for i in (2, 0)], pad_token_id=0)
    again = public_gradients(space, few, max_tokens=10**6, room=room).matrix
    assert again.data_ptr() == whole.data_ptr()
    assert torch.equal(again, public_gradients(space, few, max_tokens=10**6).matrix)


@by_name
def test_without_texts_nothing_is_built(name: str) -> None:
    model = tiny_model()
    with pytest.raises(
        ConfigError, match=f"{name!r} releases along the gradients of public texts.*add the group synthesis"
    ):
        build_parts(settings(name), model)
    assert all(p.requires_grad for p in model.parameters())


@by_name
def test_the_gradients_are_those_of_the_present_state(name: str) -> None:
    parts = build_parts(settings(name), tiny_model(), texts=lambda _: PUBLIC_TEXTS)
    step = step_of(parts, 0.5)
    step.take([0, 1])
    before = parts.coordinates.span.gradients.matrix.clone()  # the next step's lie in its place
    step.take([0, 1])
    assert not torch.allclose(parts.coordinates.span.gradients.matrix, before, rtol=1e-3)


@pytest.mark.parametrize("relative", [True, False])
def test_a_relative_rate_is_the_length_of_a_step_over_all_modules(relative: bool) -> None:
    parts = build_parts(
        settings("span-prism", {"relative_rate": relative}),
        tiny_model(),
        texts=lambda _: Examples(uneven_examples(), pad_token_id=0),
    )
    step_of(parts, 0.0, rate=1e-3).take(range(6))
    moved = sum(float((left @ right.mT).square().sum()) for left, right in parts.coordinates.factors()) ** 0.5
    dimension = parts.coordinates.inner.dimension
    assert moved == pytest.approx(
        1e-3 if relative else 1e-3 * dimension**0.5, rel=0.12
    )  # but for what is cut off


@by_name
def test_a_checkpoint_goes_on_to_the_adapter_that_would_have_been(name: str, tmp_path: Path) -> None:
    """Scores that wait for the next texts are in it; the texts themselves are kept by whoever gives them."""
    ends = []
    for stops in (False, True):
        texts = Texts()
        parts = build_parts(settings(name), tiny_model(), texts=texts)
        step = step_of(parts, 1.0, seed=3)
        for batch in ([0, 1], [2, 3]):
            step.take(batch)
        if stops:
            save_checkpoint(tmp_path / "c.safetensors", parts.states(), Mark(2, "x", None))
            parts = build_parts(settings(name), tiny_model(), texts=texts)
            parts.take_states(load_checkpoint(tmp_path / "c.safetensors", run_id="x")[1])
        step = step_of(parts, 1.0, seed=4)
        for batch in ([4, 5], [0, 5]):
            step.take(batch)
        ends.append((parts.states(), texts))
    (one, texts), (other, texts_again) = ends
    assert texts.order == texts_again.order
    for part, tensors in one.items():
        assert tensors.keys() == other[part].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, other[part][key]), (part, key)


def test_the_declared_rate_is_what_counts() -> None:
    """1 / 0.3 is no whole number: a loader of whole batches would be calibrated for another rate."""
    plan = plan_privacy(
        settings(
            "pe-sgd", sample_rate=0.3, expected_batch_size=None, noise_multiplier=None, target_epsilon=1.0
        )
    )
    ((event, _),) = plan.phases
    assert event.sampling == PoissonSampling(0.3)


def test_clipping_that_scales_everybody_has_no_norm_to_adapt() -> None:
    with pytest.raises(ConfigError, match="clip_quantile does nothing beside normalized clipping"):
        plan_privacy(settings("pe-sgd", clip_quantile=0.5))
    plan_privacy(settings("pe-sgd", {"clipping": "flat"}, clip_quantile=0.5))
    with pytest.raises(ConfigError, match=r"clip_quantile does not go with method.hold_out=0.25"):
        plan_privacy(settings("pe-sgd", {"clipping": "flat", "hold_out": 0.25}, clip_quantile=0.5))


@pytest.mark.parametrize("sigma", [0.5, 20.0])
def test_the_setting_is_chosen_by_the_plan_and_by_nobodys_record(sigma: float) -> None:
    taken = []
    for batch in ([], [0], range(6)):
        parts = build_parts(
            settings("pe-sgd", {"hold_out": 0.25}), tiny_model(), texts=lambda _: PUBLIC_TEXTS
        )
        step_of(parts, sigma).take(batch)
        taken.append(parts.coordinates.taken())
    assert len(taken[0]) == 1
    assert taken[0] == taken[1] == taken[2]


@by_name
def test_without_noise_the_loss_falls(name: str) -> None:
    parts = build_parts(
        settings(name), tiny_model(), texts=lambda _: Examples(uneven_examples(), pad_token_id=0)
    )
    step = step_of(parts, 0.0, rate=1.0 if name == "span-prism" else 0.02)
    losses = [float(step.take(range(6)).losses.sum()) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]


@by_name
def test_every_release_costs_one_gaussian_mechanism(name: str) -> None:
    plan = plan_privacy(settings(name))
    assert plan.phases == plan_privacy(settings("dp-adamw")).phases
