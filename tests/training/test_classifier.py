"""Classifiers: the gradient of each record, what leaves when it leaves, what is released, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from classifier_cases import (
    COMMON,
    ENDS,
    FAMILIES,
    NAMES,
    RECORDS,
    adapted,
    classifier,
    examples_of,
    labelled,
    settings_of,
    started,
)
from counting_ledger import CountingLedger
from gradient_cases import CLIPPINGS, check_gradients, logits_of, mechanism_on, moves, spoiled, summed
from promises import promise
from rank_cases import found_together
from run_cases import StopAt
from tiny_models import VOCAB, everything_in_double, tiny_tokenizer

from privlora import fine_tune
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, write_adapter
from privlora.api import resume_run
from privlora.coordinates.headed import HeadedCoordinates
from privlora.data.batching import collate
from privlora.errors import ConfigError, DataError, ModelError, PrivacyError
from privlora.losses import class_logits, class_losses
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.optimizers import HeadedAverage
from privlora.training.classifier import head_name, padded_as
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import tokenise
from privlora.training.loop import Interrupted
from privlora.training.model_checks import refuse_coupled_texts, refuse_too_short
from privlora.training.models import unchanged_afterwards
from privlora.training.ranks import Ranks
from privlora.training.shared_step import SharedStep
from privlora.training.state import TrainState
from privlora.training.step import Step

every_family = pytest.mark.parametrize("family", FAMILIES)
TRIED = [*product(("prism", "dp-adamw"), CLIPPINGS), ("ffa", "flat"), ("lora-rite", "per-module")]


@every_family
def test_gradients_of_each_record_are_those_of_autograd(family: str) -> None:
    """P and Q of every layer and the whole gradient of the last one, for rows of several lengths in one micro-batch."""
    with everything_in_double():
        model = classifier(family, torch.float64)
        adapter, _, _ = started(model, "dp-adamw")

        def loss_of(weights: dict[str, torch.Tensor], record: Any) -> torch.Tensor:
            return class_losses(logits_of(model, weights, record), record.answers).sum()

        check_gradients(model, adapter, examples_of(RECORDS), loss_of)


@pytest.mark.parametrize(("method", "clipping"), TRIED)
def test_nobody_moves_the_sum_by_more_than_the_clip_norm(method: str, clipping: str) -> None:
    """Adapter and last layer together, in one norm; a record that is not finite moves nothing."""
    model = classifier("bert")
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCAB - 1] = float("nan")
    adapter, coordinates, _ = started(model, method)
    examples = examples_of([*RECORDS, *({**r, "text": 2 * r["text"]} for r in RECORDS)])
    changes = moves(adapter, coordinates, clipping, examples.like([*examples, spoiled(examples[2])]))
    assert max(changes) <= 1 + 1e-5
    assert changes[-1] < 1e-3  # it is not finite
    assert max(changes) > 0.9  # so the bound is met by some, and is one of both parts together


def test_noise_lies_on_the_last_layer_as_on_the_adapter() -> None:
    """Of an empty batch: every coordinate, of the same standard deviation, with a law of its own."""
    adapter, coordinates, _ = started(classifier(), "prism")
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=2.0,
        event=StepEvent(PoissonSampling(0.01), 1.5),
        expected_batch_size=4.0,
        ledger=CountingLedger(),
        noise=NoiseSource(3),
    )
    releases = [mechanism.release() for _ in range(40)]
    tau = 1.5 * 2.0 / 4.0
    heads = torch.stack([release.vector[-1][0].flatten() for release in releases])
    bodies = torch.stack([release.vector[0][0].flatten() for release in releases])
    for found in (heads, bodies):
        assert abs(float(found.std()) / tau - 1) < 0.05
    wide = min(heads.shape[1], bodies.shape[1])
    assert abs(float((heads[:, :wide] * bodies[:, :wide]).mean())) < 0.15 * tau**2
    squares = torch.stack(
        [torch.stack([t.square().sum() for p in r.vector for t in p]).sum() for r in releases]
    )
    assert abs(float(squares.mean()) / (coordinates.dimension * tau**2) - 1) < 0.05
    assert adapter.parts == (adapter.body, adapter.head)


@every_family
def test_what_is_released_is_what_peft_loads(family: str, tmp_path: Path) -> None:
    """The same logits, from a base model whose last layer began otherwise."""
    from peft import PeftModel

    model = classifier(family)
    adapter, coordinates, _ = started(model, "prism")
    examples = examples_of(RECORDS)
    batch = collate([np.array([k]) for k in range(len(examples))], examples)
    with adapter, torch.no_grad():
        expected = class_logits(model, batch.input_ids, batch.attention_mask)
    write_adapter(tmp_path, adapter, coordinates.named_factors(), base_model="org/base", lora_alpha=16.0)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    base = classifier(family)
    with torch.no_grad():
        base.get_submodule(head_name(base, len(NAMES))).weight.normal_()
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        found = loaded(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    assert torch.allclose(found, expected, atol=1e-4)


@every_family
def test_models_of_these_families_do_not_couple_rows(family: str) -> None:
    model, tokenizer = classifier(family), tiny_tokenizer()
    with unchanged_afterwards(model):
        padded_as(model, tokenizer)
        refuse_coupled_texts(adapted(model), tokenizer)
    assert model.config.pad_token_id == 0  # as it was


def test_a_model_that_reads_padding_is_refused() -> None:
    """One that pools the last column, whatever stands there: how far a row is filled up depends on its neighbours."""
    model = classifier()
    model.config.pad_token_id = VOCAB - 1
    with pytest.raises(ModelError, match="couples the rows"):
        refuse_coupled_texts(adapted(model), tiny_tokenizer())


MANY = [{**RECORDS[k % 4], "text": f"{RECORDS[k % 4]['text']} {k}"} for k in range(40)]


def run(tmp_path: Path, **more: Any) -> Any:
    options: dict[str, Any] = {
        "privacy": promise(steps=3, batch=10, records=40, target_epsilon=8),
        "data": {"text": "text", "label": "label", "labels": NAMES, "max_length": 24},
        "adapter": {"r": 3},
        "output": tmp_path / "run",
    }
    every = more.pop("every", {})
    records = [{**each, **every} for each in MANY]
    given = more.pop("model", None) or classifier("roberta")
    return fine_tune(given, records, tokenizer=tiny_tokenizer(), **(options | more))


@pytest.mark.slow
def test_a_run_leaves_a_classifier(tmp_path: Path) -> None:
    """Held-out figures, a card that loads it as one, and a model that is given back as it was."""
    model = classifier("roberta")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    evaluation = [{"text": "other words", "label": "yes"}, {"text": "more of them", "label": "no"}]
    result = run(tmp_path, model=model, evaluation=evaluation)
    assert result.epsilon <= 8
    report = json.loads((result.release / "privacy_report.json").read_text())
    assert {"accuracy", "f1", "matthews_correlation"} <= set(report["evaluation"][-1])
    assert report["classes"] == {"num_labels": 3, "names": NAMES}
    assert "AutoModelForSequenceClassification" in (result.release / "README.md").read_text()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert model.config.pad_token_id == 0


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, observer=StopAt(2))
    given = {"model": classifier("roberta"), "tokenizer": tiny_tokenizer(), "records": MANY}
    assert resume_run(tmp_path / "run", **given).steps == 3


def test_a_users_loss_is_the_mean_of_its_records() -> None:
    model = classifier()
    adapter, _, _ = started(model, "dp-adamw")
    examples = examples_of(RECORDS)
    with adapter:
        _, each = micro_batch_gradients(adapter, collate([np.array([k]) for k in range(3)], examples))
        _, both = micro_batch_gradients(adapter, collate([np.arange(3)], examples))
    assert torch.allclose(both, each.mean(dim=0, keepdim=True), atol=1e-5)


def test_scores_are_learned_by_squared_error() -> None:
    examples = tokenise(
        [{"text": "a", "label": 1.5}, {"text": "b", "label": "3"}],
        labelled(labels="score", max_length=16).data,
        tiny_tokenizer(),
    )
    assert examples.answers.outputs == 1
    losses = class_losses(torch.tensor([[1.0], [5.0]]), torch.from_numpy(examples.answers.values))
    assert losses.tolist() == [0.25, 4.0]


def test_a_label_is_a_part_of_a_record() -> None:
    """So a resumed run sees that one has changed, and records of two labels do not count as repeated."""
    one, other = (examples_of([{"text": "a", "label": name}])[0] for name in NAMES[:2])
    assert one.digest != other.digest


def test_pairs_are_read_as_the_tokenizer_reads_them() -> None:
    tokenizer = tiny_tokenizer()
    records = [
        {"text": "abc", "second": "defg", "label": "no"},
        {"text": "a" * 30, "second": "b" * 30, "label": "no"},
    ]
    found = tokenise(records, labelled(text_pair="second", max_length=20).data, tokenizer)
    for example, record in zip(found, records, strict=True):
        expected = tokenizer(record["text"], record["second"], truncation=True, max_length=20)["input_ids"]
        assert example.input_ids.tolist() == expected
    assert found[1].dropped > 0


@pytest.mark.parametrize(
    ("value", "names"),
    [
        *[
            ("other", NAMES),
            (3, 3),
            (-1, 3),
            (1.5, 3),
            (None, NAMES),
            ("nan", "score"),
            (float("inf"), "score"),
        ],
        *[(10**400, 3), (10**400, "score"), (10**5000, NAMES)],
    ],
    ids=lambda value: "huge" if isinstance(value, int) and value > 9 else str(value),
)
def test_a_label_that_is_none_is_refused_and_not_shown(value: Any, names: Any) -> None:
    with pytest.raises(DataError, match="record 1") as error:
        examples_of([{"text": "a", "label": value}], labels=names)
    assert "other" not in error.value.what
    assert "nan" not in str(error.value)


@pytest.mark.parametrize(
    ("labels", "values", "places"),
    [
        ({0: "no", 1: "yes"}, [0, "1", 1.0, True], [0, 1, 1, 1]),
        ({-1: "no", 1: "yes"}, [-1, 1, -1.0, "1"], [0, 1, 0, 1]),
        (["0", "1"], [0, "1", 1.0], [0, 1, 1]),
        (["1.0", "2.0"], [1.0, "2.0"], [0, 1]),
        (["false", "true"], [True, "false"], [1, 0]),
        (3, [0, "1", True, 2.0], [0, 1, 1, 2]),
    ],
)
def test_numbers_with_names(labels: Any, values: list[Any], places: list[int]) -> None:
    found = examples_of([{"text": "a", "label": value} for value in values], labels=labels)
    assert found.answers.values.tolist() == places


def test_a_model_that_is_not_told_how_texts_are_filled_up_is_refused() -> None:
    """It would take the last token of a short text to be where the longest text beside it ends."""
    model = classifier()
    adapter, _, _ = started(model, "dp-adamw")
    batch = collate([np.array([0]), np.array([1])], examples_of(RECORDS))
    model.config.pad_token_id = 5
    with (
        adapter,
        pytest.raises(PrivacyError, match="filled up with token 0, and the classifier's padding token is 5"),
    ):
        micro_batch_gradients(adapter, batch)


@pytest.mark.slow
def test_a_run_tells_the_model_how_texts_are_filled_up(tmp_path: Path) -> None:
    model = classifier()
    model.config.pad_token_id = 5
    assert run(tmp_path, model=model).steps > 0
    assert model.config.pad_token_id == 5


def test_padding_that_the_model_counts_as_text_is_found_before_the_run() -> None:
    """RoBERTa counts positions of all tokens but its own padding: a long text would fail once it is padded."""
    config = hf.RobertaConfig(**{**COMMON, "pad_token_id": 1, "max_position_embeddings": 66}, **ENDS)
    for dtype, fails in ((torch.float32, False), (torch.bfloat16, True)):
        torch.manual_seed(0)
        adapter = adapted(hf.RobertaForSequenceClassification(config).to(dtype).eval())
        if not fails:
            refuse_too_short(adapter, tiny_tokenizer(), max_length=64)
            continue
        with pytest.raises(ModelError, match="the model's padding token"):
            refuse_too_short(adapter, tiny_tokenizer(), max_length=64)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": {"text": "t", "label": "l"}}, "all that there can be"),
    ({"data": {"text": "t", "labels": NAMES}}, "read with label only"),
    ({"data": {"text": "t", "text_pair": "s"}}, "read with label only"),
    ({"data": {"text": "t", "label": "l", "labels": ["a"]}}, "two different classes"),
    ({"data": {"text": "t", "label": "l", "labels": ["a", "a"]}}, "two different classes"),
    ({"data": {"text": "t", "label": "l", "labels": 1}}, "two different classes"),
    ({"data": {"prompt": "p", "completion": "c", "label": "l", "labels": 2}}, "class of a text"),
    ({"data": {"messages": "m", "label": "l", "labels": 2}}, "class of a text"),
    ({"data": {"task": "gsm8k", "label": "label"}}, "no labels to classify"),
    ({"data": {"task": "sst2", "label": "gold"}}, "write label: label"),
    ({"data": {"task": "sst2", "label": "label", "labels": 2}}, "write label: label"),
]


@pytest.mark.parametrize(("groups", "words"), WRONG)
def test_settings_that_do_not_go_together(groups: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(data={"path": "x.jsonl", **groups["data"]})


@pytest.mark.parametrize("method", ["pe-sgd", "projected", "wishart-m2"])
def test_rows_that_labels_do_not_go_with(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not go with"):
        run(tmp_path, method=method)
    assert not (tmp_path / "run").exists()


def test_a_model_of_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no linear layer with 2 outputs"):
        run(tmp_path, data={"text": "text", "label": "label", "labels": 2}, every={"label": 1})
    assert not (tmp_path / "run").exists()


def test_a_resumed_last_layer_is_where_it_was() -> None:
    """Coordinates, average and optimizer: what is saved of the head is what another one takes up."""
    _, one, optimizer = started(classifier(), "dp-adamw")
    average = HeadedAverage(one, 0.5)
    for _ in range(3):
        average.update()
        one.head.right[0].add_(1.0)
    _, other, _ = started(classifier(), "dp-adamw")
    other.load_state_dict({name: t.clone() for name, t in one.state_dict().items()})
    assert torch.equal(other.head.right[0], one.head.right[0])
    again = HeadedAverage(other, 0.5)
    again.load_state_dict({name: t.clone() for name, t in average.state_dict().items()})
    assert torch.equal(again.factors()[-1][1], average.factors()[-1][1])
    assert not torch.equal(again.factors()[-1][1], one.head.right[0])  # an average, and no copy
    told = list[dict[str, torch.Tensor]]()
    optimizer.head.transport = lambda before, noise_std: told.append(dict(before))
    optimizer.transport(one.state_dict(), 1.0)
    assert told[0].keys() == one.head.state_dict().keys()


def step_on(coordinates: HeadedCoordinates, optimizer: object) -> Step:
    """On all records, in the same order each time."""
    examples = examples_of(RECORDS)
    return Step(
        state=TrainState(coordinates=coordinates, optimizer=optimizer),  # type: ignore[arg-type]
        mechanism=mechanism_on(coordinates),
        examples=examples,
        learning_rate=0.1,
        draw=lambda: list(range(len(examples))),
    )


def gradients(coordinates: HeadedCoordinates, units: Sequence[int] = range(len(RECORDS))) -> Captured:
    batch = collate([np.array([k]) for k in units], examples_of(RECORDS))
    with coordinates.adapter:
        return micro_batch_gradients(coordinates.adapter, batch)[0]


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("part", ["body", "head"])
def test_a_unit_that_is_not_finite_in_one_part_moves_nothing(part: str, clipping: str) -> None:
    """Not by what is finite of it, and 0 times what is not finite is not 0."""
    _, coordinates, _ = started(classifier(), "dp-adamw")
    mechanism = mechanism_on(coordinates, clipping)
    whole = gradients(coordinates)
    sides = [[t.clone() for t in side] for side in (whole.p, whole.q)]
    site = {"body": 0, "head": -1}[part]
    for side in sides:
        assert side[site][2].any()
        side[site][2] = float("nan")
    found = summed(mechanism, Captured(*sides, whole.dense_squares))
    assert found.isfinite().all()
    # Weak modules are scaled by more, and so is what company rounds in them.
    atol = 1e-5 if clipping == "per-module" else 1e-6
    others = summed(mechanism, gradients(coordinates, [0, 1, 3, 4]))
    torch.testing.assert_close(found, others, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", ["dp-adamw", "prism"])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-6, 1e-8])
def test_a_unit_whose_body_is_far_below_its_last_layer_moves_no_more_than_c(
    size: float, clipping: str, method: str
) -> None:
    """Whatever brings weak modules up: below 1e-4 of the last layer's it brings the body up by less."""
    _, coordinates, _ = started(classifier(), method)
    mechanism = mechanism_on(coordinates, clipping)
    whole = gradients(coordinates, [2])
    sides = ([*(t * size for t in side[:-1]), side[-1]] for side in (whole.p, whole.q))
    norm = summed(mechanism, Captured(*sides, whole.dense_squares)).norm()
    assert norm <= 0.7
    assert norm > 0.6 or clipping == "per-module"  # where the body's part of C is lost with it


def test_a_sum_is_of_the_last_layer_that_it_was_taken_at() -> None:
    _, coordinates, _ = started(classifier(), "dp-adamw")
    mechanism, totals = mechanism_on(coordinates), []
    for _ in range(2):
        mechanism.accumulate(gradients(coordinates))
        totals.append(mechanism.take())
    coordinates.head.right[0].add_(1e-6)
    coordinates.install()
    with pytest.raises(PrivacyError, match="another point"):
        mechanism.release(totals[0])
    with pytest.raises(PrivacyError, match="another point"):
        mechanism.take() + totals[1]


def test_what_the_optimizer_remembers_of_the_last_layer_is_taken_up() -> None:
    _, one, optimizer = started(classifier(), "dp-adamw")
    step = step_on(one, optimizer)
    with one.adapter:
        step.take_many(2)
    _, two, other = started(classifier(), "dp-adamw")
    again = TrainState(coordinates=two, optimizer=other)
    states = {
        name: {key: t.clone() for key, t in state.items()} for name, state in step.state.states().items()
    }
    again.take_states(states)
    kept, taken = step.state.states(), again.states()
    assert any(name.startswith("head.") for name in kept["optimizer"])
    for name, state in kept.items():
        assert state.keys() == taken[name].keys()
        assert all(torch.equal(t, taken[name][key]) for key, t in state.items()), name


def test_several_processes_take_gradients_at_one_last_layer(tmp_path: Path) -> None:
    """Three steps give what one process gives; noise has a public seed here."""

    def walked(ranks: Ranks) -> list[torch.Tensor]:
        _, coordinates, optimizer = started(classifier(), "dp-adamw")
        step = SharedStep(step_on(coordinates, optimizer), ranks)
        for _ in range(3):
            with coordinates.adapter:
                step.take()
        return [t.clone() for t in coordinates.state_dict().values()]

    alone = walked(Ranks())
    first, _ = found_together(2, tmp_path, walked)
    for one, both in zip(alone, first, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(both, one, rtol=1e-3, atol=1e-5)
