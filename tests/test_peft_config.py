"""A peft.LoraConfig in the place of the group adapter."""

from __future__ import annotations

from typing import Any

import pytest
from peft import AdaLoraConfig, IA3Config, LoraConfig, TaskType

from privlora.config import AdapterSettings, adapter_settings
from privlora.errors import ConfigError


def test_fields_that_mean_the_same_are_carried_over() -> None:
    given = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=["v_proj", "q_proj"],
        exclude_modules=["lm_head"],
        layers_to_transform=1,
        use_rslora=True,
        task_type="CAUSAL_LM",
    )
    assert AdapterSettings(**adapter_settings(given)) == AdapterSettings(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
        exclude_modules=["lm_head"],
        layers_to_transform=[1],
        use_rslora=True,
    )


def test_words_and_starts_are_carried_over() -> None:
    given = LoraConfig(target_modules="all-linear", init_lora_weights="pissa", task_type=TaskType.CAUSAL_LM)
    settings = adapter_settings(given)
    assert settings["target_modules"] == "all-linear"
    assert settings["init"] == "spectral-split"
    assert settings["r"] == 8  # peft's default, not the one here
    assert "init" not in adapter_settings(LoraConfig(target_modules="all-linear"))
    used = LoraConfig(target_modules=["q_proj"], base_model_name_or_path="/home/me/base", fan_in_fan_out=True)
    assert adapter_settings(used)["target_modules"] == ["q_proj"]


def test_a_classifier_has_a_kind_of_its_own() -> None:
    given = LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")
    assert adapter_settings(given, classifies=True)["target_modules"] == ["q_proj"]
    with pytest.raises(ConfigError, match="to classify, name the column of the label"):
        adapter_settings(given)
    given.task_type = "CAUSAL_LM"
    with pytest.raises(ConfigError, match="set it to SEQ_CLS"):
        adapter_settings(given, classifies=True)


def test_sets_become_sorted_lists() -> None:
    assert adapter_settings({"target_modules": {"v_proj", "q_proj"}}) == {
        "target_modules": ["q_proj", "v_proj"]
    }


@pytest.mark.parametrize("given", [None, {"r": 2}, 3, ["r"]])
def test_anything_else_is_given_back(given: Any) -> None:
    assert adapter_settings(given) == given


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("use_dora", True, "would be ignored"),
        ("modules_to_save", ["lm_head"], "would be ignored"),
        ("bias", "all", "would be ignored"),
        ("task_type", "SEQ_CLS", "another kind of model"),
        ("init_lora_weights", False, "no equal here"),
        ("init_lora_weights", "gaussian", "no equal here"),
        ("exclude_modules", ".*head", "list of name endings"),
    ],
)
def test_what_means_nothing_here_is_refused_by_name(field: str, value: Any, says: str) -> None:
    given = LoraConfig(target_modules=["q_proj"])
    setattr(given, field, value)
    with pytest.raises(ConfigError, match=says) as refused:
        adapter_settings(given)
    assert f"LoraConfig.{field}" in str(refused.value)
    assert "Fix:" in str(refused.value)


def test_every_field_of_peft_is_carried_or_refused() -> None:
    """Also one that a later version adds: nothing is ignored."""
    given = LoraConfig(target_modules=["q_proj"])
    given.brand_new = 1
    with pytest.raises(ConfigError, match=r"LoraConfig\.brand_new is set"):
        adapter_settings(given)


def test_target_modules_have_to_be_said() -> None:
    with pytest.raises(ConfigError, match="target_modules is not set"):
        adapter_settings(LoraConfig())


@pytest.mark.parametrize("kind", [IA3Config, lambda: AdaLoraConfig(total_step=9)])
def test_other_adapters_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"adapter is a peft\."):
        adapter_settings(kind())
