"""Flat names of settings in TRL, transformers, peft, Opacus, axolotl, litgpt and others, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Here(NamedTuple):
    """setting: in full, as ``group.name``. but: what is different about it here."""

    setting: str
    but: str | None = None


class Refused(NamedTuple):
    """A setting that nothing here means. why: not; instead: what serves the same end, if anything does."""

    why: str
    instead: str | None = None


RATES: Final = (
    "to leave it out, or to write auto, is the safe choice: rates of other tools are of other rules. prism's is the "
    "share of each frozen matrix's norm by which a step's noise moves it (its own is 0.02 at 24 steps, and less for "
    "more); with relative_rate: false, and in most other rows, it is in entries (dp-adamw's is 0.004)"
)
"""What a learning rate is here, wherever one is given by another name or in another place."""
_BATCH = (
    "b, the expected number of units in a step: there it is per_device_train_batch_size x "
    "gradient_accumulation_steps x devices. How much of it goes through the model at once is run.tokens_per_micro_batch"
)
_EPOCHS = (
    "private training counts steps: steps = epochs x public_dataset_size / expected_batch_size; with steps: auto, "
    "auto.passes says how many"
)
_EVALUATION = (
    "a PUBLIC file. A part of the private records must not be evaluated on: its loss would be published and nobody "
    "accounts for it"
)
_CHOICE = Refused(
    "stopping or choosing by a loss on private records is one more query of them, for which no epsilon is paid",
    "choose privacy.steps beforehand, and look at the public loss with data.evaluation and run.evaluate_every",
)
_POISSON = Refused(
    "batches are drawn by Poisson sampling, each unit independently, which is what epsilon is computed for; another "
    "order or grouping would make the statement untrue"
)
_PACKING = Refused(
    "a packed sequence holds several people's records, so that clipping it would protect none of them",
    "short records cost little: run.tokens_per_micro_batch puts records of one length together",
)
_ALWAYS = Refused(
    "it always is so: noise and sampling come from a cryptographic generator keyed by the operating system"
)
_NO_SEED = Refused(
    "noise that can be repeated can be subtracted; noise and sampling are keyed by the operating system alone",
    "run.seed is the public seed of the adapter's start",
)
_REPORTS = Here("run.report_to", "public numbers alone: training loss and gradient norms are private data")
_TRUSTED = Refused(
    "a model's own code could read private batches and write them anywhere",
    "an architecture that transformers has; in Python, load a model that you trust and pass it",
)
_FLOAT16 = Here(
    "model.dtype", "bfloat16 or float32: float16 gradients overflow, and clipping would bound the wrong norm"
)
_NO_NAMES = Refused(
    "records are tokenised with the model's own tokenizer",
    "in Python, fine_tune(tokenizer=...)",
)
_PATTERN = Refused(
    "all layers have one rank and one scale", "adapter.r, and adapter.target_modules for which layers"
)
_TRAINED_TOO = Refused(
    "only low-rank terms are clipped and noised; whole layers, embeddings and biases stay frozen"
)
_SHARDED = Refused(
    "several processes need no setting but torchrun", "model.fully_shard spreads the frozen weights"
)

_FLAT: Final[tuple[tuple[str, Here | Refused], ...]] = (
    # What is trained.
    (
        "model_name_or_path model_name base_model pretrained_model_name_or_path checkpoint_dir model_id",
        Here("model.name"),
    ),
    ("model_revision", Here("model.revision")),
    ("flash_attention", Here("model.attn_implementation", "its value flash_attention_2")),
    ("fp16 half float16", _FLOAT16),
    ("bf16", Here("model.dtype", "its value bfloat16")),
    ("precision", Here("model.dtype", "float32 or bfloat16")),
    ("use_gradient_checkpointing", Here("model.gradient_checkpointing", "reentrant or non-reentrant")),
    ("gradient_checkpointing_kwargs", Here("model.gradient_checkpointing", "reentrant or non-reentrant")),
    ("trust_remote_code trust_remote_code_model", _TRUSTED),
    ("fsdp fsdp_config deepspeed ddp ddp_find_unused_parameters", _SHARDED),
    ("tokenizer tokenizer_name tokenizer_name_or_path", _NO_NAMES),
    ("chat_template_path", Here("data.chat_template", "a template, or its file")),
    # The adapter, by peft and those who built on it.
    ("rank lora_r lora_rank lora_dim", Here("adapter.r")),
    ("alpha lora_scaling", Here("adapter.lora_alpha")),
    ("dropout", Here("adapter.lora_dropout", "the base model's own dropout is model.dropout: true or false")),
    ("lora_target_modules", Here("adapter.target_modules")),
    ("lora_target_linear", Here("adapter.target_modules", "its value all-linear")),
    ("lora_modules", Here("adapter.target_modules")),
    ("target_module", Here("adapter.target_modules")),
    ("layers_pattern", Here("adapter.layers_to_transform", "a list of numbers")),
    ("rslora", Here("adapter.use_rslora")),
    (
        "init_lora_weights",
        Here("adapter.init", "random, w0-subspace, spectral-split, public-gradient or a folder"),
    ),
    ("use_peft", Refused("there is always an adapter")),
    ("use_lora", Refused("there is always an adapter")),
    ("peft_type", Refused("adapters are low-rank terms (LoRA)")),
    (
        "task_type",
        Refused("models are causal language models; what is trained on follows from data and its columns"),
    ),
    (
        "use_dora lora_use_dora peft_use_dora",
        Refused(
            "DoRA's magnitudes, one for each row, need gradients of their own, which would have to be clipped, too"
        ),
    ),
    ("rank_pattern alpha_pattern", _PATTERN),
    ("modules_to_save lora_modules_to_save bias lora_bias trainable_token_indices", _TRAINED_TOO),
    ("fan_in_fan_out", Refused("it is known from the kind of layer")),
    # The records.
    (
        "dataset_name dataset datasets train_file dataset_path data_path data_files file files",
        Here("data.path"),
    ),
    ("dataset_split split train_split dataset_train_split", Here("data.path", "write hf://name:split")),
    ("dataset_config", Here("data.path", "write hf://name@config:split")),
    ("dataset_text_field text_column text_field content_column", Here("data.text")),
    ("field_messages messages_column conversations", Here("data.messages")),
    ("prompt_column field_instruction prompt_field", Here("data.prompt")),
    ("completion_column response_column field_output", Here("data.completion")),
    (
        "label_column num_labels id2label",
        Here("data.label", "with data.labels, all labels that there can be"),
    ),
    ("completion_only_loss", Here("data.loss_on", "its value completion")),
    ("assistant_only_loss", Here("data.loss_on", "its value completion, with data.messages")),
    ("train_on_inputs", Here("data.loss_on", "completion for false, all for true")),
    (
        "max_seq_length sequence_len max_seq_len block_size cutoff_len model_max_length",
        Here("data.max_length"),
    ),
    ("max_train_samples max_samples", Here("data.limit")),
    ("eval_dataset eval_file validation_file test_datasets", Here("data.evaluation", _EVALUATION)),
    (
        "validation_split val_set_size test_size eval_split dataset_test_split val_split_fraction val_size",
        Here("data.evaluation", _EVALUATION),
    ),
    ("packing sample_packing eval_sample_packing pad_to_sequence_len eval_packing", _PACKING),
    ("group_by_length shuffle shuffle_dataset drop_last dataloader_drop_last data_seed", _POISSON),
    # What is promised.
    ("epsilon eps max_epsilon privacy_budget dp_epsilon", Here("privacy.target_epsilon")),
    ("target_delta dp_delta max_delta", Here("privacy.delta")),
    (
        "max_grad_norm per_sample_max_grad_norm per_example_max_grad_norm l2_norm_clip "
        "clipping_norm max_norm l2_clip_norm clipping_threshold",
        Here("privacy.clip_norm", "the bound on each unit's own gradient, before any sum"),
    ),
    ("sigma noise_scale noise_mult dp_noise_multiplier", Here("privacy.noise_multiplier")),
    ("sampling_rate sampling_probability sample_prob", Here("privacy.sample_rate")),
    (
        "num_samples dataset_size num_examples sample_size n",
        Here("privacy.public_dataset_size", "as you are willing to publish it"),
    ),
    ("epochs num_train_epochs num_epochs n_epochs", Here("privacy.steps", _EPOCHS)),
    ("max_steps num_steps num_training_steps max_iters total_steps", Here("privacy.steps")),
    (
        "batch_size train_batch_size per_device_train_batch_size per_device_batch_size "
        "global_batch_size gradient_accumulation_steps logical_batch_size effective_batch_size total_batch_size",
        Here("privacy.expected_batch_size", _BATCH),
    ),
    (
        "micro_batch_size physical_batch_size max_physical_batch_size auto_find_batch_size microbatch_size",
        Here("run.tokens_per_micro_batch", "a number of tokens, or auto; results do not depend on it"),
    ),
    ("per_device_eval_batch_size eval_batch_size", Here("run.tokens_per_micro_batch", "a number of tokens")),
    ("secure_mode secure_rng secure_noise secure_noise_seed", _ALWAYS),
    (
        "num_bands n_bands band_mf bandmf dp_bandmf correlated correlated_noise noise_correlation",
        Here("privacy.bands", "a number above 1, or auto: noise takes back a part of that of earlier steps"),
    ),
    ("zo zeroth_order mezo", Here("method.name", "its value dp-zo, which takes no gradients")),
    ("poisson_sampling", Refused("it always is so: each unit is drawn independently")),
    ("noise_seed noise_generator dp_seed generator_seed", _NO_SEED),
    (
        "accountant",
        Refused("the statement is by PLD", "`privlora plan --cross-check` shows RDP and PRV beside it"),
    ),
    ("grad_sample_mode", Refused("per-unit gradients are exact in any case", None)),
    ("ghost_clipping", Refused("norms are taken of per-unit factors in any case; no whole gradient is kept")),
    (
        "user_id user_id_column privacy_unit_column group_column",
        Here("privacy.user_column", "with unit: user"),
    ),
    ("privacy_unit", Here("privacy.unit", "record or user")),
    # How it is trained.
    ("lr peak_lr max_lr", Here("method.learning_rate", RATES)),
    (
        "lr_scheduler_type lr_scheduler scheduler lr_schedule",
        Here("method.schedule", "constant, linear or cosine"),
    ),
    (
        "warmup_ratio lr_warmup_ratio lr_warmup_fraction",
        Here("method.warmup_steps", "a number of steps: the share x privacy.steps"),
    ),
    ("lr_warmup_steps num_warmup_steps warmup", Here("method.warmup_steps")),
    (
        "optim optimizer_name optimizer_type",
        Here("method.name", "a method with its optimizer, as prism or dp-adamw (`privlora methods`)"),
    ),
    ("adam_beta1", Here("method.beta1")),
    ("adam_beta2", Here("method.beta2")),
    (
        "adam_epsilon",
        Refused("the methods here have their own, against the noise", "method.floor of dp-adambc"),
    ),
    ("wd", Here("method.weight_decay")),
    (
        "zo_eps zo_epsilon zo_perturbation smoothing",
        Here("method.perturbation", "of the method dp-zo: how far to both sides losses are compared"),
    ),
    ("ema_decay", Here("method.averaging")),
    ("loraplus_lr_ratio", Here("method.learning_rate_ratio", "with method.name: lora+")),
    (
        "early_stopping early_stopping_patience "
        "load_best_model_at_end metric_for_best_model greater_is_better",
        _CHOICE,
    ),
    (
        "neftune_noise_alpha",
        Refused("its noise on embeddings protects nobody, and no method here has it"),
    ),
    ("label_smoothing_factor", Refused("no loss here has it")),
    # The run.
    ("output_dir out_dir save_dir output_path", Here("run.output")),
    (
        "seed random_seed random_state manual_seed",
        Here("run.seed", "PUBLIC, of the adapter's start; noise and sampling never use it"),
    ),
    ("save_steps save_every save_interval checkpointing_steps", Here("run.checkpoint_every")),
    (
        "save_strategy save_total_limit saves_per_epoch",
        Refused("one checkpoint is kept, and the newest is all that resuming needs", "run.checkpoint_every"),
    ),
    ("resume_from_checkpoint", Refused("no setting resumes a run", "`privlora resume RUN`")),
    (
        "eval_steps eval_interval evals_per_epoch",
        Here("run.evaluate_every", "steps between losses on the PUBLIC data.evaluation"),
    ),
    (
        "evaluation_strategy eval_strategy do_eval",
        Here("run.evaluate_every", "a number of steps, and data.evaluation a PUBLIC file"),
    ),
    ("report_to logger use_wandb wandb_project wandb tensorboard", _REPORTS),
    (
        "logging_steps logging_dir log_interval logging_strategy log_every",
        Refused(
            "each step has its line on the screen, with public numbers alone",
            "run.report_to for public numbers elsewhere; run.show_private_loss for your eyes",
        ),
    ),
    ("run_name", Here("run.label", "it is published")),
    (
        "push_to_hub hub_model_id",
        Refused("a run publishes nothing by itself", "upload RUN/release/ alone, never RUN/private/"),
    ),
)
EVERYWHERE: Final[Mapping[str, Here | Refused]] = {
    name: here for names, here in _FLAT for name in names.split()
}
"""Flat names, in whatever group or outside of all -> what they are here."""

_OF_TRAINING = (
    "its settings are in the groups privacy (steps, expected_batch_size), "
    "method (learning_rate, schedule) and run (output)"
)
_GROUPS: Final = (
    (
        "training trainer train training_args training_arguments trainer_args sft hyperparameters",
        _OF_TRAINING,
    ),
    ("optimizer optim optimization scheduler lr_scheduler", "its settings are in the group method"),
    ("lora peft lora_config peft_config lora_args", "its settings are in the group adapter"),
    ("dataset datasets data_args dataset_args train_dataset", "its settings are in the group data"),
    ("base_model model_args model_config", "its settings are in the group model"),
    ("dp dp_args privacy_args differential_privacy opacus", "its settings are in the group privacy"),
    ("logging output checkpoint checkpointing trainer_config", "its settings are in the group run"),
    (
        "eval evaluation",
        "data.evaluation names PUBLIC records, and run.evaluate_every says how often they are looked at",
    ),
)
GROUPS_ELSEWHERE: Final[Mapping[str, str]] = {
    name: where for names, where in _GROUPS for name in names.split()
}
"""Groups of other tools -> where their settings are."""

TOOLS: Final[Mapping[str, frozenset[str]]] = {
    tool: frozenset(names.split())
    for tool, names in (
        (
            "TRL",
            "model_name_or_path dataset_name per_device_train_batch_size num_train_epochs output_dir "
            "use_peft lora_target_modules dataset_text_field lr_scheduler_type "
            "gradient_accumulation_steps learning_rate",
        ),
        (
            "axolotl",
            "base_model datasets sequence_len micro_batch_size num_epochs sample_packing val_set_size "
            "lora_target_linear adapter flash_attention train_on_inputs",
        ),
        (
            "litgpt",
            "checkpoint_dir out_dir lora_query lora_key lora_value lora_projection lora_mlp lora_head "
            "precision quantize logger_name train eval",
        ),
    )
}
"""Names by which the settings of a tool are known."""

_ENOUGH: Final = 2  # names that only one tool has


def tool_of(content: Mapping[str, Any]) -> str | None:
    """Of whose settings a file's groups and flat names are; None where they are of no tool that is known.

    >>> tool_of({"base_model": "a/b", "sequence_len": 512}), tool_of({"data": {}, "learning_rate": 1e-4})
    ('axolotl', None)
    """
    counts = {tool: len(marks & {str(key) for key in content}) for tool, marks in TOOLS.items()}
    best = max(counts, key=lambda tool: counts[tool])
    return best if counts[best] >= _ENOUGH else None
