"""axolotl's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from privlora.starting.foreign import common
from privlora.starting.foreign.taken import Taken, attention, method_of, whole, word

_HARMLESS: Final[Mapping[str, str]] = {
    **common.HARMLESS,
    "model_type": "it is known from the model",
    "tokenizer_type": "it is known from the model",
    "base_model_config": "it is that of the model",
    "is_llama_derived_model": "it is known from the model",
    "xformers_attention": "set model.attn_implementation: sdpa",
    "debug": "`privlora plan` shows what will happen",
    "saves_per_epoch": "set run.checkpoint_every, in steps",
    "evals_per_epoch": "set run.evaluate_every, in steps, once data.evaluation names PUBLIC records",
    "resize_token_embeddings_to_32x": "embeddings stay as they are",
    "lora_model_dir": "set adapter.init to the folder of an adapter that was trained on other data",
    "lora_mlp_kernel": "per-example gradients need the layers as they are",
    "lora_qkv_kernel": "per-example gradients need the layers as they are",
    "lora_o_kernel": "per-example gradients need the layers as they are",
    "plugins": "nothing of other packages runs with the records",
    "unfrozen_parameters": "only low-rank terms are clipped and noised",
    "chat_template": "the tokenizer's own is used; data.chat_template takes the text of another, or its file",
    "default_system_message": "messages are rendered as they stand in the records",
}


def read(content: Mapping[str, Any]) -> Taken:
    """What of it means the same here."""
    taken = Taken("axolotl", dict(content))
    taken.take("base_model", "model.name", word)
    taken.take("revision_of_model", "model.revision", word)
    kind = taken.pop("adapter")
    if kind not in (None, "lora", "qlora"):
        taken.kept_out["adapter"] = "adapters are low-rank terms (LoRA)"
    elif kind is None:
        taken.kept_out["adapter"] = (
            "it names none, and there is always one here: whole models are not trained"
        )
    elif kind == "qlora" and taken.left.get("load_in_4bit") is None:
        taken.left["load_in_4bit"] = True
    for key in ("tf32", "sample_packing", "pad_to_sequence_len", "group_by_length", "eval_sample_packing"):
        if taken.left.get(key) is False:  # as it is here
            taken.pop(key)
    common.weights(taken)
    if taken.pop("flash_attention") is True:
        taken.put("model.attn_implementation", "flash_attention_2", "flash_attention there")
    elif taken.pop("sdp_attention") is True:
        taken.put("model.attn_implementation", "sdpa", "sdp_attention there")
    taken.take("attn_implementation", "model.attn_implementation", attention)
    common.adapter(taken)
    if taken.pop("lora_target_linear") is True:
        taken.put("adapter.target_modules", "all-linear", "lora_target_linear there")
    common.flag(taken, "peft_use_rslora", "adapter.use_rslora")
    for key in ("peft_use_dora", "lora_use_dora"):
        if taken.left.get(key) is False:
            taken.pop(key)
    optimizer = taken.pop("optimizer")
    try:
        taken.put("method.name", method_of(optimizer or "adamw"), "its optimizer with private gradients")
    except ValueError as error:
        taken.kept_out["optimizer"] = str(error)
        taken.put("method.name", "dp-adamw", "the usual method, since it has not the optimizer from there")
    common.rates(taken)
    common.batches(taken, "micro_batch_size", "gradient_accumulation_steps", 1, 1)
    common.lengths(taken, "num_epochs")
    taken.take("sequence_len", "data.max_length", whole)
    on_inputs = taken.pop("train_on_inputs")
    if on_inputs is True:
        taken.put("data.loss_on", "all", "train_on_inputs there")
    if taken.left.get("val_set_size") in (0, 0.0):
        taken.pop("val_set_size")
    _datasets(taken)
    common.run(taken)
    taken.finish(_HARMLESS)
    return taken


def _datasets(taken: Taken) -> None:
    """Files, and how the first names its columns."""
    given = taken.pop("datasets")
    given = [given] if isinstance(given, Mapping) else given
    if not isinstance(given, list):
        return
    sets = [each for each in given if isinstance(each, Mapping)]
    for each in sets:
        files = each.get("data_files", each.get("path"))
        taken.data += [
            file for file in ([files] if isinstance(files, str) else files or []) if isinstance(file, str)
        ]
    first = sets[0] if sets else {}
    for key, place in (("field_messages", "data.messages"), ("field", "data.text")):
        if isinstance(first.get(key), str):
            taken.put(place, first[key], f"{key} there")
    if len(sets) > 1:
        taken.kept_out["datasets"] = "all files are read with the columns of the first"
    if "type" in first:
        taken.kept_out["datasets.type"] = (
            "columns are proposed from the records; compare the form of the prompt"
        )
