"""litgpt's YAML for `litgpt finetune_lora`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from privlora.starting.foreign import common
from privlora.starting.foreign.taken import Taken, dtype, method_of, not_negative, number, share, whole, word

_LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
}
_ON: Final = ("lora_query", "lora_value")  # unless it says otherwise
_QUANTIZED: Final = {
    "bnb.nf4": "nf4",
    "bnb.nf4-dq": "4bit",
    "bnb.fp4": "fp4",
    "bnb.fp4-dq": "fp4",
    "bnb.int8": "8bit",
    "bnb.int8-training": "8bit",
}
_HARMLESS: Final[Mapping[str, str]] = {
    **common.HARMLESS,
    "devices": "several devices of one run start with torchrun (docs/many-devices.md)",
    "num_nodes": "several machines of one run start with torchrun (docs/many-devices.md)",
    "logger_name": "each step has its line on the screen, with public numbers alone; see run.report_to",
    "data.class_path": "columns are proposed from the records; compare the form of the prompt",
    "data.init_args.prompt_style": "columns are proposed from the records; compare the form of the prompt",
    "data.init_args.ignore_index": "it is -100 here, too",
    "data.init_args.seed": "noise and sampling are keyed by the operating system alone; run.seed is public",
    "data.init_args.num_workers": "records are tokenised once and lie in memory",
    "train.max_norm": common.HARMLESS["max_grad_norm"],
    "train.max_tokens": "set privacy.steps",
    "train.tie_embeddings": "embeddings stay as they are",
    "train.min_lr": "schedules end at 0",
    "train.log_interval": "each step has its line on the screen",
    "eval.*": "evaluation is on PUBLIC records alone: data.evaluation and run.evaluate_every",
    "optimizer.init_args.*": "the method has its own",
    "access_token": "give it to the hub's client by the environment; settings are written to disk",
    "lora_head": "the output layer stays frozen",
}


def read(content: Mapping[str, Any]) -> Taken:
    """What of it means the same here."""
    taken = Taken("litgpt", dict(_flat(content)))
    taken.take("checkpoint_dir", "model.name", _model)
    taken.take("precision", "model.dtype", dtype)
    packed = taken.pop("quantize")
    if packed in _QUANTIZED:
        taken.put("model.quantization", _QUANTIZED[packed], "quantize there; pip install 'privlora[quant]'")
    elif packed is not None:
        taken.kept_out["quantize"] = "no packing of bitsandbytes is called so"
    common.adapter(taken)
    layers: list[str] = []
    for key, modules in _LAYERS.items():
        value = taken.pop(key)
        layers += modules if value is True or (value is None and key in _ON) else ()
    if layers:
        taken.put("adapter.target_modules", layers, "lora_query and the like there, by the names of Llama")
    if taken.left.get("lora_head") is False:
        taken.pop("lora_head")
    _optimizer(taken)
    batch, devices = taken.pop("train.global_batch_size"), taken.left.get("devices")
    try:
        taken.batch = 16 if batch is None else whole(batch)
    except (ValueError, TypeError) as error:
        taken.kept_out["train.global_batch_size"] = str(error)
    if devices in (1, "auto"):
        taken.pop("devices")
    if taken.left.get("num_nodes") == 1:
        taken.pop("num_nodes")
    for key, name in (("train.epochs", "epochs"), ("train.max_steps", "max_steps")):
        value = taken.pop(key)
        if value is not None:
            try:
                setattr(taken, name, number(value) if name == "epochs" else whole(value))
            except (ValueError, TypeError) as error:
                taken.kept_out[key] = str(error)
    taken.batch_from = "train.global_batch_size there"
    taken.take("train.max_seq_length", "data.max_length", whole)
    taken.take("train.lr_warmup_steps", "method.warmup_steps", whole)
    taken.take("train.save_interval", "run.checkpoint_every", whole)
    masked = taken.pop("data.init_args.mask_prompt")
    if masked is not None:
        taken.put("data.loss_on", "completion" if masked is True else "all", "mask_prompt there")
    for key in ("data.init_args.json_path", "data.init_args.train_path"):
        file = taken.pop(key)
        taken.data += [file] if isinstance(file, str) else []
    taken.take("out_dir", "run.output", word)
    taken.take("seed", "run.seed", lambda value: int(not_negative(value)))
    taken.finish(_HARMLESS)
    return taken


def _optimizer(taken: Taken) -> None:
    name = taken.pop("optimizer.class_path") or taken.pop("optimizer") or "AdamW"
    try:
        taken.put("method.name", method_of(name), "its optimizer with private gradients")
    except ValueError as error:
        taken.kept_out["optimizer"] = str(error)
        taken.put("method.name", "dp-adamw", "the usual method, since it has not the optimizer from there")
    for key in ("optimizer.init_args.lr", "train.learning_rate"):
        taken.take(key, "method.learning_rate", number)
    for key in ("optimizer.init_args.weight_decay", "train.weight_decay"):
        taken.take(key, "method.weight_decay", not_negative)
    betas = taken.pop("optimizer.init_args.betas")
    if isinstance(betas, list) and len(betas) == 2:
        try:
            for place, value in zip(("method.beta1", "method.beta2"), betas, strict=True):
                taken.put(place, share(value), "betas there")
        except (ValueError, TypeError) as error:
            taken.kept_out["optimizer.init_args.betas"] = str(error)


def _model(value: Any) -> str:
    """checkpoints/owner/name holds litgpt's own format of the hub's owner/name."""
    name = word(value)
    parts = Path(name).parts
    if not (Path(name).expanduser() / "config.json").is_file() and len(parts) >= 2:
        return "/".join(parts[-2:])
    return name


def _flat(content: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Nested keys as one with dots between."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{above}{key}.")
        else:
            found.append((f"{above}{key}", value))
    return found
