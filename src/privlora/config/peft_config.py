"""A peft.LoraConfig instead of the group adapter: what means the same is carried over, the rest is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from privlora.errors import ConfigError, Together, named

_CARRIED: Final = ("r", "lora_alpha", "lora_dropout", "use_rslora")
# peft writes the first ones itself; how a layer stores its weight is seen from its class.
_WITHOUT_EFFECT: Final = (
    "peft_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
)
_READ: Final = (
    *_CARRIED,
    *("target_modules", "exclude_modules", "layers_to_transform", "init_lora_weights", "task_type"),
    *_WITHOUT_EFFECT,
)
_INITS: Final[Mapping[str, str | None]] = {"True": None, "pissa": "spectral-split"}
"""init_lora_weights -> adapter.init; None: the method's own start."""


def adapter_settings(given: Any, *, classifies: bool = False, problems: Together | None = None) -> Any:
    """The group adapter from a peft.LoraConfig, as a mapping; anything else is given back as it is. classifies: whether
    labels are to be predicted. problems: keeps what is wrong, of which else all is raised; the rest is given back.

    Sets of a mapping become sorted lists, so that a run's settings are the same in every process.

    Raises ConfigError for another adapter than LoRA's, and for a field that is not at its default and means nothing
    here.
    """
    if isinstance(given, Mapping):
        return {name: sorted(v) if _is_set_of_text(v) else v for name, v in given.items()}
    peft = sys.modules.get("peft")  # who has such an object has imported it
    if peft is None or not isinstance(given, peft.PeftConfig):
        return given
    if given.peft_type != peft.PeftType.LORA:
        fix = "give a peft.LoraConfig, or dict(r=16, target_modules='all-linear')"
        raise ConfigError(f"adapter is a peft.{type(given).__name__}, and adapters are LoRA's here", fix=fix)
    kept, problems = problems, Together()
    problems.found += _others(given, type(given)(), "SEQ_CLS" if classifies else "CAUSAL_LM")
    settings = {name: getattr(given, name) for name in _CARRIED}
    if (targets := problems.of(None, _targets, given.target_modules)) is not None:
        settings["target_modules"] = targets
    if isinstance(given.exclude_modules, str):
        fix = "give name endings, as exclude_modules=[...]"
        problems.found.append(ConfigError("LoraConfig.exclude_modules is no list of name endings", fix=fix))
    elif given.exclude_modules is not None:
        settings["exclude_modules"] = sorted(given.exclude_modules)
    layers = given.layers_to_transform
    if layers is not None:
        settings["layers_to_transform"] = [layers] if isinstance(layers, int) else list(layers)
    init = str(given.init_lora_weights)
    if init not in _INITS:
        what = f"LoraConfig.init_lora_weights={named(given.init_lora_weights)} has no equal here"
        fix = "leave it out for the method's own start, or give a mapping, as dict(r=16, init='w0-subspace')"
        problems.found.append(ConfigError(what, fix=fix))
    elif _INITS[init] is not None:
        settings["init"] = _INITS[init]
    if kept is None:
        problems.tell()
    else:
        kept.found += problems.found
    return settings


def _others(given: Any, default: Any, kind: str) -> list[ConfigError]:
    """Of each field that means nothing here and is set."""
    found = list[ConfigError]()
    task = getattr(given.task_type, "value", given.task_type)
    if task not in (None, kind):
        fix = f"set it to {kind}, or leave it out" + "; to classify, name the column of the label" * (
            task == "SEQ_CLS"
        )
        found.append(ConfigError(f"LoraConfig.task_type={named(task)} is of another kind of model", fix=fix))
    found += [
        ConfigError(
            f"LoraConfig.{name} is set",
            why="nothing here means the same, and it would be ignored",
            fix=f"leave {name} out",
        )
        for name, value in vars(given).items()
        if name not in _READ and value != getattr(default, name, None)
    ]
    return found


def _targets(given: Any) -> str | list[str]:
    if given is None:
        fix = "set target_modules='all-linear', or a list such as ['q_proj', 'v_proj']"
        raise ConfigError("LoraConfig.target_modules is not set", fix=fix)
    return given if isinstance(given, str) else sorted(given)


def _is_set_of_text(value: Any) -> bool:
    return isinstance(value, set | frozenset) and all(isinstance(item, str) for item in value)
