"""What TRL and axolotl share: the names of transformers' TrainingArguments and of peft's LoraConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from privlora.starting.foreign.taken import (
    Taken,
    dtype,
    names,
    not_negative,
    number,
    schedule,
    share,
    truth,
    whole,
    word,
)

REENTRANT: Final = "gradient_checkpointing_kwargs"

HARMLESS: Final[Mapping[str, str]] = {
    "max_grad_norm": "it bounds the mean gradient of a batch there; here each record's own gradient is clipped, to "
    "privacy.clip_norm",
    "gradient_clipping": "it bounds the mean gradient of a batch there; here each record's own gradient is clipped, to "
    "privacy.clip_norm",
    "eval_steps": "set run.evaluate_every once data.evaluation names PUBLIC records",
    "dataloader_*": "records are tokenised once and lie in memory",
    "dataset_num_proc": "records are tokenised once, in one process",
    "dataset_processes": "records are tokenised once, in one process",
    "dataset_prepared_path": "tokens are made anew in each run, and none are kept",
    "remove_unused_columns": "columns that data does not name are never read",
    "ddp_*": "several processes need no setting but torchrun",
    "fsdp_*": "several processes need no setting but torchrun; model.fully_shard spreads frozen weights",
    "wandb_*": "public numbers alone leave a run: see run.report_to",
    "mlflow_*": "public numbers alone leave a run: see run.report_to",
    "comet_*": "public numbers alone leave a run: see run.report_to",
    "hub_*": "a run publishes nothing by itself; upload RUN/release/ alone",
    "logging_*": "each step has its line on the screen, with public numbers alone",
    "eval_*": "evaluation is on PUBLIC records alone: data.evaluation and run.evaluate_every",
    "tf32": "sums, clipping and noise are float32 or better in any case",
    "torch_compile": "models are not compiled here",
    "use_liger_kernel": "per-example gradients need the layers as they are",
    "liger_*": "per-example gradients need the layers as they are",
    "do_train": "`privlora train` does",
    "overwrite_output_dir": "a run is never written over: its ledger must not be forgotten",
    "disable_tqdm": "`--json` is quiet",
    "log_level": "`--json` is quiet",
    "eos_token": "records are tokenised with the model's own tokenizer",
    "pad_token": "records are tokenised with the model's own tokenizer",
    "special_tokens": "records are tokenised with the model's own tokenizer; new tokens would need embeddings to train",
    "strict": "unknown settings are always refused here",
    "use_cache": "training keeps no cache in any case",
    "ignore_data_skip": "sampling remembers nothing of earlier steps",
}


def adapter(taken: Taken, prefix: str = "lora_") -> None:
    """peft's LoraConfig."""
    for key in (f"{prefix}r", f"{prefix}rank"):
        taken.take(key, "adapter.r", whole)
    taken.take(f"{prefix}alpha", "adapter.lora_alpha", number)
    taken.take(f"{prefix}dropout", "adapter.lora_dropout", share)
    taken.take(f"{prefix}target_modules", "adapter.target_modules", names)


def weights(taken: Taken) -> None:
    """How the frozen weights are kept."""
    for key in ("dtype", "torch_dtype"):
        taken.take(key, "model.dtype", dtype)
    half, sixteen = taken.pop("bf16"), taken.pop("fp16")
    if half in (True, "auto", "full", "true") and "model.dtype" not in taken.settings:
        taken.put("model.dtype", "bfloat16", "bf16 there; clipping, sums and noise stay float32")
    if sixteen not in (None, False):
        taken.kept_out["fp16"] = "float16 gradients overflow; bfloat16 does not"
    four, eight = taken.pop("load_in_4bit"), taken.pop("load_in_8bit")
    kind, nested = taken.pop("bnb_4bit_quant_type"), taken.pop("use_bnb_nested_quant")
    nested = taken.pop("bnb_4bit_use_double_quant") if nested is None else nested
    compute = taken.pop("bnb_4bit_compute_dtype")
    if four is True:
        packed: dict[str, Any] = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": kind if kind in ("nf4", "fp4") else "nf4",
            "bnb_4bit_compute_dtype": "float32" if compute in ("float32", "fp32") else "bfloat16",
        }
        packed |= {"bnb_4bit_use_double_quant": True} if nested is True else {}
        taken.put("model.quantization", packed, "load_in_4bit there; pip install 'privlora[quant]'")
    elif eight is True:
        taken.put("model.quantization", "8bit", "load_in_8bit there; pip install 'privlora[quant]'")
    wanted, how = taken.pop("gradient_checkpointing"), taken.pop(REENTRANT)
    if wanted in (True, "true"):
        reentrant = isinstance(how, Mapping) and how.get("use_reentrant") is True
        taken.put(
            "model.gradient_checkpointing",
            "reentrant" if reentrant else "non-reentrant",
            "gradient_checkpointing there",
        )


def rates(taken: Taken) -> None:
    """Of the optimizer."""
    taken.take("learning_rate", "method.learning_rate", number)
    for key in ("lr_scheduler_type", "lr_scheduler"):
        taken.take(key, "method.schedule", schedule)
    taken.take("weight_decay", "method.weight_decay", not_negative)
    taken.take("adam_beta1", "method.beta1", share)
    taken.take("adam_beta2", "method.beta2", share)
    ratio = taken.pop("warmup_ratio")
    if ratio not in (None, 0, 0.0):
        try:
            taken.warmup_share = share(ratio)
        except (ValueError, TypeError) as error:
            taken.kept_out["warmup_ratio"] = str(error)
    steps = taken.pop("warmup_steps")
    if steps not in (None, 0):
        try:
            taken.put("method.warmup_steps", whole(steps), "warmup_steps there")
        except (ValueError, TypeError) as error:
            taken.kept_out["warmup_steps"] = str(error)


def batches(taken: Taken, a_device: str, accumulated: str, devices: int, default: int) -> None:
    """The logical batch: what one optimizer step there is made of."""
    each, times = taken.pop(a_device), taken.pop(accumulated)
    try:
        each, times = default if each is None else whole(each), 1 if times is None else whole(times)
    except (ValueError, TypeError):
        taken.kept_out[a_device] = "it or the accumulation is no whole number above 0"
        return
    taken.batch = each * times * devices


def lengths(taken: Taken, epochs: str) -> None:
    """Of the training."""
    for key, kind in ((epochs, number), ("max_steps", whole)):
        value = taken.pop(key)
        if value is None or (key == "max_steps" and value in (-1, 0)):  # which means none
            continue
        try:
            if kind is whole:
                taken.max_steps = whole(value)
            else:
                taken.epochs = number(value)
        except (ValueError, TypeError) as error:
            taken.kept_out[key] = str(error)


def run(taken: Taken, output: str = "output_dir") -> None:
    """Where the run lies."""
    taken.take(output, "run.output", word)
    taken.take("seed", "run.seed", lambda value: int(not_negative(value)))
    taken.take("save_steps", "run.checkpoint_every", whole)


def flag(taken: Taken, key: str, place: str) -> None:
    """A switch that is off here, too, unless it is on there."""
    value = taken.pop(key)
    if value is None or value is False:
        return
    try:
        taken.put(place, truth(value), f"{key} there")
    except ValueError as error:
        taken.kept_out[key] = str(error)
