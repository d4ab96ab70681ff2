"""PrivateTrainer: arguments of SFTTrainer where they mean the same, refusals by name where they do not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from run_cases import PRIVACY, PUBLIC, RECORDS
from tiny_models import tiny_model, tiny_tokenizer
from transformers import TrainingArguments

import privlora.trainer
from privlora import PrivateConfig, PrivateTrainer
from privlora.calling import settings_of_call
from privlora.config import Settings
from privlora.config.auto import run_sizes
from privlora.demo import model_path
from privlora.errors import ConfigError, DataError, ModelError, PrivacyError, PrivloraError, RunError
from privlora.result import Result
from privlora.trainer.arguments import RENAMED, TRANSLATED, WHY, WITHOUT_EFFECT, groups_of
from privlora.training.callbacks import PublicEvent
from privlora.training.loop import Interrupted

PROMISE: dict[str, Any] = {name: value for name, value in PRIVACY.items() if name != "steps"}
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def config(folder: Path, **more: Any) -> PrivateConfig:
    return PrivateConfig(**{"output_dir": str(folder), "max_steps": 4, "max_length": 40, **PROMISE, **more})


def trainer(args: Any, **more: Any) -> PrivateTrainer:
    given = {"train_dataset": RECORDS, "eval_dataset": PUBLIC, "peft_config": LORA, **more}
    return PrivateTrainer(tiny_model(), args, processing_class=tiny_tokenizer(), **given)


@pytest.mark.parametrize("kind", [PrivateConfig, TrainingArguments])
@pytest.mark.parametrize("auto", [True, {"all": True, "passes": 2}])
def test_what_nobody_gives_is_auto(
    kind: Any, auto: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[Settings]()

    def look(*given: Any, **named: Any) -> Settings:
        found.append(settings_of_call(*given, **named))
        return found[-1]

    monkeypatch.setattr(privlora.trainer, "settings_of_call", look)
    promise = {"target_epsilon": 3.0, "delta": 1e-4, "public_dataset_size": 1000}
    more = {"privacy": promise, "data": {"unchecked": True}}
    used = {"output_dir": str(tmp_path / "run"), **({} if kind is PrivateConfig else {"use_cpu": True})}
    trainer(kind(**used), auto=auto, **more)
    (settings,) = found
    assert (settings.privacy.steps, settings.privacy.b) == run_sizes(1000, 5 if auto is True else 2)
    assert set(settings.auto.choose) == {"clip_norm", "right_weight", "learning_rate"}
    trainer(kind(max_steps=7, **used), auto=auto, **more)
    assert found[-1].privacy.steps == 7
    for given in (None, False, {"passes": 2}):
        with pytest.raises(ConfigError, match=r"steps is missing|counts steps"):
            trainer(kind(**used), auto=given, **more)
    with pytest.raises(ConfigError, match=r"counts steps.*set auto=dict\(all=True, passes=7\)"):
        trainer(kind(num_train_epochs=7, **used), auto=auto, **more)


def test_a_run_behind_the_methods_of_a_trainer(tmp_path: Path) -> None:
    steps = list[int]()

    def listen(event: PublicEvent) -> None:
        if event.kind == "step":
            steps.append(event.step)
            if event.step == 2 and steps == [1, 2]:
                event.stop()

    one = trainer(config(tmp_path / "run", learning_rate=1e-3, warmup_steps=1), callbacks=[listen])
    with pytest.raises(RunError, match=r"Fix: call train\(\)"):
        one.evaluate()
    with pytest.raises(Interrupted):
        one.train()
    found = one.train(resume_from_checkpoint=True)
    assert steps == [1, 2, 3, 4]
    assert found.global_step == 4
    assert found._fields == ("global_step", "metrics")
    assert found.metrics.keys() == {"epsilon", "delta", "eval_loss"}
    assert found.metrics["epsilon"] == one.result.epsilon
    assert one.evaluate() == {"eval_loss": one.result.history[-1]["held_out_loss"]}
    assert [row["learning_rate"] for row in one.result.history[1:]] == [5e-4, 1e-3]
    assert one.save_model() == one.result.release
    saved = one.save_model(tmp_path / "saved")
    assert (saved / "adapter_model.safetensors").exists()
    assert {p.name for p in saved.iterdir()} == {p.name for p in one.result.release.iterdir()}
    with pytest.raises(RunError, match="holds something already"):
        one.save_model(tmp_path / "saved")
    with pytest.raises(ConfigError, match="--base-model"):
        one.push_to_hub("me/notes")
    with pytest.raises(
        RunError, match=r"holds a run already.*Fix: .*train\(resume_from_checkpoint=True\).*output_dir"
    ):
        one.train()
    with pytest.raises(AttributeError, match=r"no 'predict': .*trainer\.model\.generate"):
        _ = one.predict
    assert not hasattr(one, "evil")


def arguments(**more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="runs/x", use_cpu=True, max_steps=4, **more)


def test_what_means_the_same_is_taken_over() -> None:
    given = arguments(
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        seed=7,
        run_name="notes",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        adam_beta1=0.8,
        dataloader_num_workers=2,
    )
    privacy = {name: value for name, value in PROMISE.items() if name != "expected_batch_size"}
    found = groups_of(given, privacy, "dp-adamw")
    assert found.output == "runs/x"
    assert found.privacy == {**privacy, "expected_batch_size": 8.0, "steps": 4}
    optimizer = {"learning_rate": 1e-3, "relative_rate": False, "weight_decay": 0.1, "beta1": 0.8}
    assert found.method == {"name": "dp-adamw", **optimizer, "schedule": "cosine", "warmup_steps": 2}
    every = {"log_every": 5, "checkpoint_every": 3, "evaluate_every": 2}
    assert found.run == {"seed": 7, "label": "notes", **every}
    assert found.loading == {"device": "cpu"}


def test_a_rate_from_elsewhere_is_in_entries_unless_the_method_says_otherwise() -> None:
    for given in (arguments(learning_rate=1e-3), PrivateConfig(max_steps=4, learning_rate=1e-3)):
        assert groups_of(given, PROMISE, None).method == {"learning_rate": 1e-3, "relative_rate": False}
        own = {"name": "prism", "relative_rate": True}
        assert groups_of(given, PROMISE, own).method == {**own, "learning_rate": 1e-3}
    own = {"name": "prism", "learning_rate": 0.02}
    assert groups_of(arguments(), PROMISE, own).method == own


def test_defaults_of_others_count_as_not_given() -> None:
    found = groups_of(arguments(), PROMISE, None)
    assert (found.method, found.run, found.privacy) == ({}, {}, {**PROMISE, "steps": 4})


def test_forms_that_differ_are_translated() -> None:
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    loading = {"model_init_kwargs": {"dtype": torch.bfloat16, "attn_implementation": "eager"}}
    own = PrivateConfig(max_steps=10, warmup_steps=0.2, **again, **loading, **PROMISE)
    found = groups_of(own, None, None)
    assert found.method == {"warmup_steps": 2}
    reentrant = {"gradient_checkpointing": "reentrant", "dtype": "bfloat16"}
    assert found.loading == {**reentrant, "attn_implementation": "eager"}
    found = groups_of(PrivateConfig(max_steps=10, activation_checkpointing=True, bf16=True), PROMISE, None)
    assert found.loading == {"gradient_checkpointing": "non-reentrant"}
    assert found.bf16


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"num_train_epochs": 2, "max_steps": -1}, r"num_train_epochs=2.*set max_steps=10 and leave"),
        ({"max_steps": None}, r"has no max_steps.*set max_steps=15"),
        ({"packing": True}, "packing is set.*could not be separated"),
        ({"group_by_length": True}, "one probability"),
        ({"fp16": True}, "overflow in float16"),
        ({"optim": "adafactor"}, "brings its optimizer"),
        ({"max_grad_norm": 0.5}, "clip_norm bounds each record"),
        ({"weight_decey": 0.1}, "did you mean 'weight_decay'"),
        ({"steps": 3}, "did you mean 'max_steps'"),
        ({"perturbation": 1e-3}, r"write method=dict\(name=\.\.\., perturbation=\.\.\.\)"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial' is unknown"),
        ({"eval_strategy": "epoch"}, "eval_strategy='epoch'"),
        ({"eval_steps": 0.1}, "is a share of all steps"),
        ({"per_device_train_batch_size": 4}, "and so is how many records"),
        ({"trust_remote_code": True}, "could read private batches"),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "could read private batches"),
        ({"completion_only_loss": True}, "loss_on=completion needs"),
        ({"max_steps": "100"}, r"max_steps is of type str. Fix: give a number"),
        ({"per_device_train_batch_size": True, "expected_batch_size": None}, "is of type bool"),
        ({"bf16": True}, "weights are of another dtype"),
    ],
)
def test_the_rest_is_refused_by_name(args: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        trainer(config(tmp_path / "run", **args))
    assert "Fix:" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_devices_batch_says_nothing_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"per_device_train_batch_size": 4, "expected_batch_size": None}
    trainer(config(tmp_path / "run", **args))
    joined = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in joined.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"over all processes\. Of one.*per_device_train_batch_size.*Fix: "):
        trainer(config(tmp_path / "run", **args))


def test_preferences_take_the_place_of_a_dpo_trainer(tmp_path: Path) -> None:
    """As docs/trl.md says it."""
    rows = [{"prompt": f"q {i} ", "chosen": "yes", "rejected": "no"} for i in range(len(RECORDS))]
    columns = {name: name for name in rows[0]}
    one = trainer(config(tmp_path / "run", max_steps=1), train_dataset=rows, eval_dataset=None, data=columns)
    one.train()
    assert one.result.report["preferences"]["loss"] == "dpo"


@pytest.mark.parametrize(
    "name", ["data_collator", "compute_metrics", "formatting_func", "optimizers", "compute_loss_func"]
)
def test_arguments_of_the_trainer_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is given"):
        trainer(config(tmp_path / "run"), **{name: print})
    trainer(config(tmp_path / "run"), **{name: None})


def test_privacy_has_to_be_said() -> None:
    with pytest.raises(ConfigError, match=r"how private.*privacy=dict\(target_epsilon=3"):
        trainer(arguments())
    with pytest.raises(ConfigError, match="delta is given twice"):
        trainer(config(Path("x")), privacy={"delta": 1e-5})
    with pytest.raises(ConfigError, match="privacy is of type int"):
        trainer(config(Path("x")), privacy=3)
    with pytest.raises(TypeError, match="keyword argument 'evil'"):
        trainer(config(Path("x")), evil=3)


def test_batch_arguments_that_say_what_privacy_says_are_taken() -> None:
    promise = {name: value for name, value in PROMISE.items() if name != "expected_batch_size"}
    given = TrainingArguments(output_dir="x", use_cpu=True, max_steps=4, gradient_accumulation_steps=2)
    assert groups_of(given, {**promise, "expected_batch_size": 16}, None).privacy["expected_batch_size"] == 16
    given.per_device_train_batch_size = 4
    assert groups_of(given, {**promise, "expected_batch_size": 8}, None).privacy["expected_batch_size"] == 8
    with pytest.raises(ConfigError, match="is set, and so is how many records"):
        groups_of(given, {**promise, "expected_batch_size": 9}, None)
    plain = TrainingArguments(output_dir="x", use_cpu=True, max_steps=4)
    with pytest.raises(ConfigError, match=r"how many records a step takes.*default counts as not given"):
        groups_of(plain, promise, None)


def test_steps_count_above_epochs_as_in_transformers() -> None:
    for given in (arguments(num_train_epochs=2), PrivateConfig(num_train_epochs=2, max_steps=4)):
        assert groups_of(given, PROMISE, None).privacy["steps"] == 4
    assert groups_of(arguments(num_train_epochs=2), {**PROMISE, "steps": 4}, None).privacy["steps"] == 4
    with pytest.raises(ConfigError, match=r"TrainingArguments\.max_steps=4, and privacy has steps=5"):
        groups_of(arguments(), {**PROMISE, "steps": 5}, None)


def test_what_goes_wrong_later_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a patient")
    theirs = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to="none")
    for args, more in ((theirs, {"privacy": PROMISE}), (config(tmp_path), {})):
        with pytest.raises(RunError, match=r"Fix: set run.output to a new folder$"):
            trainer(args, **more).train()
    with pytest.raises(ModelError, match=r"Fix: set data.max_length to at most "):
        trainer(config(tmp_path / "run", max_length=100_000)).train()


def whole() -> datasets.Dataset:
    return datasets.Dataset.from_list([*RECORDS, *PUBLIC])


@pytest.mark.parametrize("cut", ["same", "select", "split"])
def test_public_records_are_no_part_of_the_private_ones(cut: str, tmp_path: Path) -> None:
    table = whole()
    parts = {
        "same": lambda: (RECORDS, RECORDS),
        "select": lambda: (table.select(range(30)), table.select(range(30, 34))),
        "split": lambda: tuple(table.train_test_split(test_size=4, seed=0).values()),
    }
    train, evaluation = parts[cut]()
    with pytest.raises(PrivacyError, match="held out of private records is as private as they are"):
        trainer(config(tmp_path / "run"), train_dataset=train, eval_dataset=evaluation)


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PLAIN = {"prompt": "prompt", "completion": "completion", "template": "none"}


@pytest.mark.parametrize(
    ("record", "more", "columns"),
    [
        ({"text": "a"}, {}, {}),
        ({"note": "a"}, {"dataset_text_field": "note"}, {"text": "note"}),
        ({"prompt": "a", "completion": "b"}, {}, {**PLAIN, "loss_on": "completion"}),
        ({"prompt": "a", "completion": "b"}, {"completion_only_loss": False}, {**PLAIN, "loss_on": "all"}),
        (
            {"prompt": TALK[:1], "completion": TALK[1:]},
            {"truncation_mode": "keep_end"},
            {
                **{"prompt": "prompt", "completion": "completion", "loss_on": "completion"},
                "truncation_mode": "keep_end",
            },
        ),
        ({"messages": TALK}, {}, {"messages": "messages", "loss_on": "all"}),
        (
            {"messages": TALK},
            {"assistant_only_loss": True},
            {"messages": "messages", "loss_on": "completion"},
        ),
    ],
)
def test_columns_are_seen_from_the_first_record(
    record: dict[str, Any], more: dict[str, Any], columns: dict[str, Any], tmp_path: Path
) -> None:
    found = trainer(config(tmp_path / "run", **more), train_dataset=[record] * 30, eval_dataset=None)
    assert found._groups["data"] == {"max_length": 40, **columns}


def test_files_and_splits(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)))
    one = trainer(config(tmp_path / "run"), train_dataset=file, eval_dataset=None)
    assert (one._records, one._given("records", None)) == (None, str(file))
    both = datasets.DatasetDict(test=whole(), train=whole())
    for given in (both, datasets.IterableDatasetDict(train=whole().to_iterable_dataset())):
        with pytest.raises(DataError, match=r"train_dataset: the data are a .*DatasetDict .*data\['train'\]"):
            trainer(config(tmp_path / "run"), train_dataset=given)


def test_what_is_not_there_is_told_together(tmp_path: Path) -> None:
    """And lines of a file when they are read."""
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": 3 of them}\n')
    with pytest.raises(ConfigError) as caught:
        PrivateTrainer(
            str(tmp_path / "none"),
            config(tmp_path / "broken.jsonl"),
            train_dataset=tmp_path / "broken.jsonl",
            eval_dataset=tmp_path / "lost.jsonl",
        ).train()
    for words in ("cannot load model", "there is no file", "Not a directory"):
        assert words in str(caught.value)
    own = {"train_dataset": tmp_path / "broken.jsonl"}
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2: this is not JSON"):
        PrivateTrainer(model_path(), config(tmp_path / "run"), **own).train()
    assert not (tmp_path / "run").exists()


def test_a_loaded_model_needs_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass processing_class="):
        PrivateTrainer(tiny_model(), config(tmp_path / "run"), train_dataset=RECORDS)


def test_models_that_are_no_base_models(tmp_path: Path) -> None:
    from peft import get_peft_model

    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    for model, says in ((adapted, "holds an adapter already"), (tiny_model().half(), "stored in float16")):
        given = {"train_dataset": RECORDS, "processing_class": tiny_tokenizer()}
        with pytest.raises(PrivloraError, match=says):
            PrivateTrainer(model, config(tmp_path / "run"), **given).train()
    assert not (tmp_path / "run").exists()


def test_each_field_of_sft_config_has_one_answer() -> None:
    """Taken, refused with the reason, or without effect; never two of these."""
    assert not WITHOUT_EFFECT & WHY.keys()
    assert not (RENAMED.keys() | set(TRANSLATED)) & (WITHOUT_EFFECT | WHY.keys())
    trl = pytest.importorskip("trl", reason="the names of SFTConfig are trl's")
    fields = set(trl.SFTConfig.__dataclass_fields__)
    older = {"group_by_length", "logging_dir", "overwrite_output_dir", "gradient_checkpointing_kwargs"}
    assert (RENAMED.keys() | set(TRANSLATED) | WHY.keys() | WITHOUT_EFFECT) - fields - older == set()


def test_sft_config_is_read_as_it_is() -> None:
    trl = pytest.importorskip("trl", reason="an SFTConfig is trl's")
    given = trl.SFTConfig(output_dir="runs/x", use_cpu=True, bf16=False, max_steps=4, max_length=64)
    found = groups_of(given, PROMISE, None)
    assert found.data == {"max_length": 64}
    assert found.loading == {"device": "cpu"}
    packed = trl.SFTConfig(output_dir="runs/x", use_cpu=True, bf16=False, max_steps=4, packing=True)
    with pytest.raises(ConfigError, match=r"SFTConfig\.packing is set"):
        groups_of(packed, PROMISE, None)


def test_no_single_record_decides_how_all_are_read(tmp_path: Path) -> None:
    """The form of the records is published; a first record of another form would tell that it was there."""
    pairs = [{"text": f"t {i}", "prompt": f"p {i}", "completion": "c"} for i in range(30)]
    found = trainer(config(tmp_path / "a"), train_dataset=pairs, eval_dataset=None)
    assert found._groups["data"]["loss_on"] == "completion"
    for at in (0, 15, 30):
        mixed = [*pairs[:at], {"text": "hello"}, *pairs[at:]]
        with pytest.raises(
            DataError, match="some records have messages, or prompt and completion"
        ) as refused:
            trainer(config(tmp_path / "b"), train_dataset=mixed)
        assert "hello" not in str(refused.value)


def test_the_model_of_a_run_that_is_over_is_the_trained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(config(tmp_path / "run"))
    given = one.model
    for loaded_here, expected in ((False, "that with the adapter"), (True, given)):
        result = Result(tmp_path, 4, 1.0, 1e-3, base_was_given=loaded_here)
        monkeypatch.setattr(Result, "model", "that with the adapter")
        monkeypatch.setattr(one, "_result", result)
        assert one.model is expected


def test_what_was_altered_is_not_saved_and_pages_are_made_anew(tmp_path: Path) -> None:
    one = trainer(config(tmp_path / "run", max_steps=1))
    one.train()
    weights = one.result.release / "adapter_model.safetensors"
    one.result.card.write_text("a patient")
    saved = one.save_model(tmp_path / "saved")
    assert "a patient" not in (saved / "README.md").read_text()
    assert (saved / weights.name).read_bytes() == weights.read_bytes()
    weights.write_bytes(weights.read_bytes() + b"a patient")
    with pytest.raises(PrivacyError, match="is not as the run wrote it"):
        one.save_model(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("given", "own", "said"),
    [
        ({"num_train_epochs": 3}, {}, "expected_batch_size=8)"),
        ({"gradient_accumulation_steps": 2}, {}, "expected_batch_size=16)"),
        ({"num_train_epochs": 2, "per_device_train_batch_size": 4}, {}, "set max_steps=200"),
        ({}, {"expected_batch_size": 16}, "set max_steps=75"),
        ({"gradient_accumulation_steps": 2}, {"sample_rate": 0.08}, "set max_steps=38"),
    ],
)
def test_epochs_are_counted_in_batches_of_their_own_size(
    given: dict[str, Any], own: dict[str, Any], said: str
) -> None:
    """At its default, too, as whoever leaves it out knows it; and of the privacy's own size where that is given."""
    promise = {name: value for name, value in PROMISE.items() if name != "expected_batch_size"}
    args = TrainingArguments(output_dir="x", use_cpu=True, **given)
    with pytest.raises(ConfigError, match=re.escape(said)):
        groups_of(args, {**promise, "public_dataset_size": 400, **own}, None)
