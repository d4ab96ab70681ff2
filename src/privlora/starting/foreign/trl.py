"""TRL: the flat YAML of `trl sft --config`, of its scripts, and of whatever takes transformers' TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from privlora.starting.foreign import common
from privlora.starting.foreign.taken import Taken, attention, method_of, whole, word

_HARMLESS: Final[Mapping[str, str]] = {
    **common.HARMLESS,
    "use_peft": "there is always an adapter",
    "lora_task_type": "models are causal language models",
    "dataset_config": "write data.path as hf://name@config:split for a data set of the hub",
    "dataset_train_split": "write data.path as hf://name:split for a data set of the hub",
    "dataset_streaming": "records are read once, and their tokens kept in little memory",
    "stage": "runs fine-tune on texts",
    "finetuning_type": "there is always an adapter",
    "template": "messages are rendered by the tokenizer's own chat template",
}


def read(content: Mapping[str, Any]) -> Taken:
    """What of it means the same here."""
    taken = Taken("TRL", dict(content))
    taken.take("model_name_or_path", "model.name", word)
    if taken.left.get("model_revision") == "main":  # the hub's own default
        taken.pop("model_revision")
    taken.take("model_revision", "model.revision", word)
    common.weights(taken)
    taken.take("attn_implementation", "model.attn_implementation", attention)
    common.adapter(taken)
    common.flag(taken, "use_rslora", "adapter.use_rslora")
    if taken.left.get("use_dora") is False:
        taken.pop("use_dora")
    for key in (
        "packing",
        "trust_remote_code",
        "group_by_length",
        "load_best_model_at_end",
        "push_to_hub",
        "fp16",
    ):
        if taken.left.get(key) is False:  # as it is here
            taken.pop(key)
    # AdamW in another spelling unless they say otherwise.
    optimizer = taken.pop("optim")
    try:
        taken.put("method.name", method_of(optimizer or "adamw"), "its optimizer with private gradients")
    except ValueError as error:
        taken.kept_out["optim"] = str(error)
        taken.put("method.name", "dp-adamw", "the usual method, since it has not the optimizer from there")
    common.rates(taken)
    common.batches(taken, "per_device_train_batch_size", "gradient_accumulation_steps", 1, 8)
    common.lengths(taken, "num_train_epochs")
    for key in ("max_length", "max_seq_length", "cutoff_len"):
        taken.take(key, "data.max_length", whole)
    taken.take("truncation_mode", "data.truncation_mode", word)
    taken.take("dataset_text_field", "data.text", word)
    for key in ("completion_only_loss", "assistant_only_loss"):
        value = taken.pop(key)
        if value is True:
            taken.put("data.loss_on", "completion", f"{key} there")
        elif value is False:
            taken.put("data.loss_on", "all", f"{key} there")
    name = taken.pop("dataset_name")
    name = taken.pop("train_file") if name is None else name
    if isinstance(name, str):
        taken.data = [name]
    common.run(taken)
    taken.finish(_HARMLESS)
    return taken
