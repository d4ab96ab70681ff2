"""Names of other tools: each is answered with what it is called here, or why nothing here means it."""

from __future__ import annotations

import copy
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from privlora.config import PrivacySettings, load_settings, settings_from
from privlora.config.foreign_names import EVERYWHERE, GROUPS_ELSEWHERE, RATES, Here, Refused
from privlora.config.nearby import whereabouts
from privlora.config.other_names import OTHER_NAMES
from privlora.config.reference import find_settings, groups
from privlora.errors import ConfigError
from privlora.methods import RATE_STEPS, find_row

GOOD: dict[str, dict[str, Any]] = {
    "model": {"name": "org/model"},
    "data": {"path": "notes.txt"},
    "privacy": {
        "target_epsilon": 3,
        "delta": 1e-5,
        "steps": 100,
        "expected_batch_size": 64,
        "public_dataset_size": 10_000,
    },
}
GROUPS = ("model", "data", "adapter", "privacy", "method", "run")
OWN = {setting.place for setting in find_settings()}
COMING = {"run.report_to"}  # of another room, which settings of other tools are pointed to


def refused(place: str, value: Any = 1) -> str:
    """What settings with this name, in a group or outside of all, are answered."""
    content: dict[str, Any] = copy.deepcopy(GOOD)
    group, _, name = place.rpartition(".")
    if group:
        content.setdefault(group, {})[name] = value
    else:
        content[name] = value
    with pytest.raises(ConfigError) as error:
        settings_from(content)
    said = str(error.value)
    assert "\n" not in said
    assert said.count("Fix: ") == 1
    return said.partition("Fix: ")[2]


def test_there_are_many_and_they_lead_somewhere() -> None:
    assert len(EVERYWHERE) > 150
    for name, found in EVERYWHERE.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        if isinstance(found, Here):
            assert found.setting in OWN | COMING, name


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_name_from_elsewhere_is_answered_in_every_group(name: str) -> None:
    found = EVERYWHERE[name]
    for group in ("", *GROUPS):
        place = f"{group}.{name}" if group else name
        if place in OWN or name in groups():
            continue
        if name in OTHER_NAMES.get(group, {}):  # means something of its own there
            continue
        said = refused(place)
        if isinstance(found, Refused):
            assert said.startswith(f"remove it: {found.why}") or name in GROUPS_ELSEWHERE, place
        elif "it is written inside" not in said and f"it is called {found.setting} here" not in said:
            assert "model.quantization" in said, place  # packed weights have a table of their own


ANSWERS = {
    "privacy.max_grad_norm": "privacy.clip_norm",
    "method.epochs": "privacy.steps",
    "privacy.target_delta": "privacy.delta",
    "privacy.secure_mode": "it always is so",
    "adapter.rank": "adapter.r",
    "adapter.lora_r": "adapter.r",
    "method.lr": "method.learning_rate",
    "run.batch_size": "privacy.expected_batch_size",
    "privacy.batch_size": "privacy.expected_batch_size",
    "per_device_train_batch_size": "privacy.expected_batch_size",
    "gradient_accumulation_steps": "privacy.expected_batch_size",
    "adapter.load_in_4bit": "model.quantization",
    "bf16": "bfloat16",
    "fp16": "gradients overflow",
    "run.eval_steps": "run.evaluate_every",
    "run.save_steps": "run.checkpoint_every",
    "output_dir": "run.output",
    "model.model_name_or_path": "model.name",
    "dataset_name": "data.path",
    "adapter.init_lora_weights": "adapter.init",
    "adapter.use_dora": "magnitudes",
    "adapter.rank_pattern": "one rank",
    "adapter.modules_to_save": "only low-rank terms",
    "adapter.bias": "only low-rank terms",
    "method.max_steps": "privacy.steps",
    "method.lr_scheduler_type": "method.schedule",
    "privacy.weight_decay": "write method.weight_decay",
    "privacy.learning_rate": "write method.learning_rate",
    "target_epsilon": "write privacy.target_epsilon",
    "privacy.seed": "noise and sampling never use it",
    "privacy.noise_seed": "can be subtracted",
    "data.packing": "several people's records",
    "run.early_stopping_patience": "no epsilon is paid",
    "run.load_best_model_at_end": "no epsilon is paid",
    "data.validation_split": "PUBLIC file",
    "data.test_size": "PUBLIC file",
    "report_to": "public numbers alone",
    "data.group_by_length": "Poisson",
    "data.shuffle": "Poisson",
    "data.drop_last": "Poisson",
    "model.trust_remote_code": "could read private batches",
    "privacy.max-grad-norm": "privacy.clip_norm",
    "privacy.MAX_GRAD_NORM": "privacy.clip_norm",
    "privacy.num_bands": "privacy.bands",
    "privacy.band_mf": "privacy.bands",
    "privacy.correlated_noise": "privacy.bands",
    "privacy.mechanism": "privacy.bands",
    "method.zo_eps": "method.perturbation",
    "method.smoothing": "method.perturbation",
    "method.mu": "method.perturbation",
    "method.eps": "method.perturbation here: of the method dp-zo",
    "privacy.eps": "privacy.target_epsilon",
    "auto.path": "auto.file here: PUBLIC records",
    "auto.public": "auto.file here: PUBLIC records",
    "auto.public_file": "auto.file here: PUBLIC records",
    "auto.records": "auto.file here: PUBLIC records",
    "auto.Public-Records": "auto.file here: PUBLIC records",
}


@pytest.mark.parametrize("place", ANSWERS)
def test_what_people_write(place: str) -> None:
    assert ANSWERS[place] in refused(place)


@pytest.mark.parametrize("name", sorted(GROUPS_ELSEWHERE))
def test_groups_of_other_tools(name: str) -> None:
    said = refused(name, {"a": 1})
    assert "group" in said or "data.evaluation" in said


def test_numbers_are_worked_out() -> None:
    assert refused("num_train_epochs", 3).endswith("here steps = 469")
    assert refused("privacy.epochs", "3").endswith("here steps = 469")
    assert refused("method.warmup_ratio", 0.03).endswith("here warmup_steps = 3")
    for value in (0, -1, True, "many", None, float("inf"), [3]):
        assert "steps = " not in refused("epochs", value).partition("size")[2]


def test_no_privacy_setting_is_guessed_for_another() -> None:
    """Words of these names, put together in another way, are never taken for a slip of the pen."""
    fields = list(PrivacySettings.model_fields)
    words = sorted({word for name in fields for word in name.split("_")})
    for name in (f"{first}_{second}" for first, second in product(words, words)):
        if name in fields:
            continue
        guess = re.search(r"did you mean '(\w+)'", refused(f"privacy.{name}"))
        assert guess is None or sorted(guess[1].replace("_", "")) == sorted(name.replace("_", "")), name
    assert "did you mean" not in refused("privacy.secure_noise_seeds")


def test_slips_of_the_pen_are_still_seen() -> None:
    for wrong, right in {
        "privacy.target_epsilonn": "target_epsilon",
        "privacy.clipnorm": "clip_norm",
        "privacy.stepps": "steps",
        "privacy.noise_multipler": "noise_multiplier",
        "method.learning-rat": "learning_rate",
        "model.Revison": "revision",
    }.items():
        assert f"did you mean '{right}'?" in refused(wrong)


VALUES = {
    "model.gradient_checkpointing=true": "write non-reentrant",
    "model.gradient_checkpointing=false": "none for false",
    "model.quantization=true": "write 4bit or 8bit",
    "model.dtype=float16": "gradients overflow",
    "model.dtype=fp16": "gradients overflow",
    "model.dtype=bf16": "write bfloat16",
    "method.schedule=cosin": "did you mean 'cosine'?",
    "method.schedule=constant_with_warmup": "method.warmup_steps",
    "method.clipping=per_layer": "write per-module",
    "method.clipping=global": "write flat",
    "method.clipping=adaptive": "privacy.clip_quantile",
    "privacy.unit=patient": "privacy.user_column",
    "privacy.unit=example": "write record",
    "data.loss_on=assistant": "write completion",
    "run.tokens_per_micro_batch=true": "write auto",
    "adapter.init=true": "write random",
    "steps=3": "write privacy.steps",
    "--learning_rate=1e-4": "write method.learning_rate",
    "max_grad_norm=1": "privacy.clip_norm",
    "lora_r=8": "adapter.r",
}


@pytest.mark.parametrize("override", VALUES)
def test_values_of_other_tools(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_from(GOOD, [override])
    assert VALUES[override] in str(error.value).partition("Fix: ")[2]


def test_where_a_name_belongs() -> None:
    assert whereabouts("privacy.steps") == "write privacy.steps=…"
    assert whereabouts("learning-rate") == f"it belongs elsewhere: write method.learning_rate; {RATES}"
    assert whereabouts("nothing_of_the_kind") is None
    assert "privacy.bands" in (whereabouts("correlated") or "")
    assert "dp-zo" in (whereabouts("zo") or "")


@pytest.mark.parametrize("name", ["learning_rate", "lr"])
def test_rates_of_other_tools_are_told_to_be_of_other_rules(name: str) -> None:
    """With what is usual here, which is the table's."""
    with pytest.raises(ConfigError) as caught:
        settings_from({**GOOD, name: 2e-4})
    row = find_row("prism")
    told = str(caught.value)
    assert "method.learning_rate" in told
    assert f"its own is {row.rate_of(RATE_STEPS)} at {RATE_STEPS} steps" in told
    assert (
        f"with relative_rate: false, and in most other rows, it is in entries (dp-adamw's is {row.learning_rate})"
        in told
    )
    assert "to leave it out, or to write auto, is the safe choice" in told
    assert find_row("dp-adamw").learning_rate == row.learning_rate


def test_a_file_of_another_tool_is_told_in_one_sentence(tmp_path: Path) -> None:
    foreign = {
        "axolotl": "base_model: a/b\nsequence_len: 9\nadapter: lora\nlearning_rate: 1\n",
        "TRL": "model_name_or_path: a/b\nlearning_rate: 1\n",
        "litgpt": "checkpoint_dir: a/b\nout_dir: c\ndata:\n  class_path: x\n",
    }
    for tool, text in foreign.items():
        path = tmp_path / f"{tool}.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_settings(path, ["privacy.steps=3"])
        assert not caught.value.parts
        assert (
            f"holds settings of {tool}, and not of privlora. Fix: `privlora init records.jsonl --model NAME`"
            in str(caught.value)
        )
    own = tmp_path / "own.yaml"
    for beside in ({"privacy": {}}, {"model": {}, "adapter": {}}):
        own.write_text(yaml.safe_dump({"base_model": "a/b", "flash_attention": True, **beside}))
        with pytest.raises(ConfigError, match="unknown group 'base_model'"):
            load_settings(own)


def test_a_record_in_the_place_of_a_name_is_not_shown() -> None:
    secret = "John Smith has HIV"
    for place in (secret, f"privacy.{secret}"):
        assert secret not in refused(place)
    assert yaml.safe_load("1e-5") == "1e-5"  # why numbers that are worked out take texts


@pytest.mark.parametrize("name", ["count", "num_samples", "n", "n-samples", "num_texts"])
def test_how_many_texts_has_many_names(name: str) -> None:
    said = refused(f"synthesis.{name}", 10)
    assert said.startswith("it is called synthesis.samples here: how many texts are released")
