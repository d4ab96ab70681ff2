"""Names and values that other tools have, and the settings that are meant by them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from privlora.config.base import group_in
from privlora.config.groups import Settings
from privlora.config.methods import known_methods
from privlora.errors import ConfigError, close, echoed, nearest

_RATE: Final = "rates of other tools are of other optimizers; auto, or nothing, is the safe choice"
_STEPS: Final = "private training counts steps: epochs x public_dataset_size / expected_batch_size"
_PUBLIC: Final = "a PUBLIC file: its loss is published, so no private record may be in it"

_CALLED: Final = {
    "model.name": "model_name_or_path model_name base_model pretrained_model_name_or_path model_id",
    "model.dtype": "torch_dtype precision bf16 fp16",
    "model.quantization": "quantization_config bnb_config load_in_4bit load_in_8bit",
    "model.attn_implementation": "flash_attention use_flash_attention_2",
    "adapter.r": "rank lora_r lora_rank",
    "adapter.lora_alpha": "alpha",
    "adapter.lora_dropout": "dropout",
    "adapter.target_modules": "lora_target_modules",
    "data.path": "dataset dataset_name datasets train_file data_path",
    "data.text": "dataset_text_field text_column",
    "data.max_length": "max_seq_length sequence_len max_seq_len cutoff_len model_max_length",
    "data.evaluation": "eval_dataset eval_file validation_file val_set_size test_size",
    "data.loss_on": "completion_only_loss assistant_only_loss train_on_inputs",
    "privacy.target_epsilon": "epsilon eps privacy_budget",
    "privacy.delta": "target_delta",
    "privacy.clip_norm": "max_grad_norm per_sample_max_grad_norm l2_norm_clip",
    "privacy.noise_multiplier": "sigma noise_scale",
    "privacy.public_dataset_size": "dataset_size num_samples num_examples",
    "privacy.steps": "epochs num_train_epochs num_epochs max_steps num_steps",
    "privacy.expected_batch_size": "batch_size per_device_train_batch_size gradient_accumulation_steps",
    "privacy.user_column": "user_id_column user_id group_column",
    "run.tokens_per_micro_batch": "micro_batch_size max_physical_batch_size per_device_eval_batch_size",
    "method.learning_rate": "lr peak_lr",
    "method.schedule": "lr_scheduler_type lr_scheduler",
    "method.warmup_steps": "warmup_ratio num_warmup_steps",
    "method.name": "optim optimizer_name",
    "method.averaging": "ema_decay",
    "run.output": "output_dir out_dir",
    "run.seed": "random_seed random_state",
    "run.checkpoint_every": "save_steps",
    "run.evaluate_every": "eval_steps",
    "run.report_to": "wandb tensorboard",
    "run.label": "run_name",
    "synthesis.samples": "num_texts n_samples",
    "federation.clients": "num_clients",
    "federation.clients_per_round": "fraction_fit min_fit_clients",
    "federation.rounds": "num_rounds",
    "federation.local_steps": "local_epochs",
    "federation.proximal": "proximal_mu",
    "federation.survivors": "threshold",
}
_HERE: Final = {name: place for place, names in _CALLED.items() for name in names.split()}
_NOTES: Final = {
    "method.learning_rate": _RATE,
    "privacy.steps": _STEPS,
    "federation.local_steps": "optimizer steps, each of which epsilon pays for",
    "data.evaluation": _PUBLIC,
    "privacy.clip_norm": "it bounds each unit's own gradient, before any sum",
    "privacy.expected_batch_size": "how many units a step takes, in expectation",
    "federation.clients_per_round": "a number of clients, not a share",
    "run.seed": "PUBLIC, of the adapter's start alone",
}
"""What is different about a setting here."""
_NOTHING: Final = {
    "packing": "a packed sequence holds several people's records, so that clipping it protects none of them",
    "sample_packing": "a packed sequence holds several people's records, so that clipping it protects none of them",
    "group_by_length": "each unit joins a step with one probability, on which epsilon counts",
    "shuffle": "each unit joins a step with one probability, on which epsilon counts",
    "early_stopping": "a choice by private records is one more query of them, which no epsilon pays for",
    "load_best_model_at_end": "a choice by private records is one more query of them, which no epsilon pays for",
    "trust_remote_code": "a model's own code could read private batches and write them anywhere",
    "noise_seed": "noise that can be repeated can be subtracted",
    "deepspeed": "several processes need no setting but torchrun; model.fully_shard spreads the frozen weights",
    "fsdp": "several processes need no setting but torchrun; model.fully_shard spreads the frozen weights",
    "push_to_hub": "a run publishes nothing by itself; `privlora push` does",
    "limits": "each client's owner sets them in the node config, where the client runs",
}
"""What no setting here means, and why."""

VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "model.dtype": {
        **dict.fromkeys(("float16", "fp16", "half"), "write bfloat16 or float32: float16 overflows"),
        **dict.fromkeys(("bf16", "torch.bfloat16"), "write bfloat16"),
        **dict.fromkeys(("fp32", "torch.float32"), "write float32"),
    },
    "model.gradient_checkpointing": {"true": "write non-reentrant", "false": "write none"},
    "method.name": {
        **dict.fromkeys(("dp-bandmf", "bandmf", "dp-ftrl"), "set privacy.bands: auto, and write dp-sgd"),
        **dict.fromkeys(("lora", "dp-lora"), "plain DP-LoRA is dp-adamw or dp-sgd"),
        "adam": "write dp-adamw, or prism",
        "sgd": "write dp-sgd",
        "mezo": "write dp-zo",
    },
    "method.clipping": {
        **dict.fromkeys(("ghost", "global"), "write flat"),
        **dict.fromkeys(("per_layer", "per-layer", "layerwise"), "write per-module"),
        **dict.fromkeys(("adaptive", "quantile"), "set privacy.clip_quantile: 0.5"),
    },
    "privacy.unit": {
        **dict.fromkeys(("example", "sample", "document", "row"), "write record"),
        **dict.fromkeys(("person", "patient", "client", "author"), "write user, with user_column"),
    },
    "data.loss_on": {
        **dict.fromkeys(("assistant", "response", "answer"), "write completion"),
        "full": "write all",
    },
    "federation.privacy_model": {
        "user": "set privacy.unit: user with privacy.user_column; privacy_model: record goes with it"
    },
}
"""Setting -> a value of another tool -> how to write what is meant."""
_NEVER: Final = "insecure_noise_seed"  # nobody is advised to switch privacy off


class Meant(NamedTuple):
    """fix: what to write instead of a wrong name. place: the setting that is meant, as group.name, if one is."""

    fix: str
    place: str | None = None


@cache
def settings_by_group() -> dict[str, list[str]]:
    """Of each group, and of each group that a setting holds, as federation.clients, the names of its settings."""
    found = dict[str, list[str]]()

    def add(place: str, kind: object) -> None:
        group = group_in(kind)
        if group is not None:
            found[place] = list(group.model_fields)
            for name, field in group.model_fields.items():
                add(f"{place}.{name}", field.annotation)

    for name, field in Settings.model_fields.items():
        add(name, field.annotation)
    return found


def meant(name: object, group: str = "") -> Meant:
    """What a name means that ``group`` has no setting of, or that stands outside of all groups.

    >>> meant("max_grad_norm").place, meant("stepz", "privacy").fix
    ('privacy.clip_norm', "did you mean 'steps'?")
    """
    plain, groups = name.lower().replace("-", "_") if isinstance(name, str) else "", settings_by_group()
    own = [each for each in groups.get(group, ()) if each != _NEVER]
    if plain in _NOTHING:
        return Meant(f"remove it: {_NOTHING[plain]}")
    place = _HERE.get(plain)
    if place is not None and (place != f"{group}.{plain}"):
        return Meant(f"it is called {place} here" + (f": {_NOTES[place]}" if place in _NOTES else ""), place)
    if (found := close(plain, own, 0.75)) is not None:
        return Meant(f"did you mean {found!r}?", f"{group}.{found}")
    places = {
        f"{at}.{each}": each
        for at, names in groups.items()
        for each in names
        if "." not in at and each != _NEVER
    }
    homes = [at for at, each in places.items() if plain in (at, each)]
    if homes:
        note = f": {_NOTES[homes[0]]}" if homes[0] in _NOTES else ""
        return Meant(f"it belongs elsewhere: write {' or '.join(homes)}{note}", homes[0])
    known = own if group else list(Settings.model_fields)
    if (found := close(plain, [*(known if not group else ()), *places], 0.75)) is not None:
        return Meant(f"did you mean {found!r}?", found if "." in found else None)
    if (found := close(plain, places.values(), 0.8)) is not None:
        at = next(at for at, each in places.items() if each == found)
        return Meant(f"did you mean {at!r}?", at)
    return Meant(f"known: {', '.join(known)}")


def unknown_method(name: str) -> ConfigError:
    """The error for a name that is not among `known_methods`."""
    others = VALUES["method.name"]
    fix = others.get(name.lower().replace("_", "-"))
    return ConfigError(
        f"unknown method {echoed(name, [*known_methods(), *others])}",
        fix=fix or f"{nearest(name, known_methods())} (privlora methods)",
    )
