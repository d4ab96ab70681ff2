"""Arguments of TRL's SFTConfig and transformers' TrainingArguments as groups of settings, or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn

from privlora.config import PrivacySettings
from privlora.config.names import meant
from privlora.errors import ConfigError, Together, close, named
from privlora.training.ranks import several_processes

_PRIVACY: Final = tuple(name for name in PrivacySettings.model_fields if name != "steps")

_PROMISE: Final = "privacy=dict(target_epsilon=3, delta=1e-5, public_dataset_size=10_000)"

RENAMED: Final[Mapping[str, tuple[str, str]]] = {
    "max_steps": ("privacy", "steps"),
    "learning_rate": ("method", "learning_rate"),
    "weight_decay": ("method", "weight_decay"),
    "adam_beta1": ("method", "beta1"),
    "adam_beta2": ("method", "beta2"),
    "max_length": ("data", "max_length"),
    "truncation_mode": ("data", "truncation_mode"),
    "dataset_text_field": ("data", "text"),
    "chat_template_path": ("data", "chat_template"),
    "seed": ("run", "seed"),
    "run_name": ("run", "label"),
    "logging_steps": ("run", "log_every"),
    "save_steps": ("run", "checkpoint_every"),
    "report_to": ("run", "report_to"),
}
"""Of these the value is taken as it is."""

_TRANSLATED_NAMES = """output_dir lr_scheduler_type warmup_steps completion_only_loss assistant_only_loss eval_strategy
eval_steps gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
activation_checkpointing_kwargs bf16 use_cpu model_init_kwargs per_device_train_batch_size
gradient_accumulation_steps disable_tqdm"""
TRANSLATED: Final = tuple(_TRANSLATED_NAMES.split())

_WITHOUT_EFFECT_NAMES = """per_device_eval_batch_size dataloader_num_workers dataloader_pin_memory dataset_num_proc
dataloader_persistent_workers dataloader_prefetch_factor log_level log_level_replica log_on_each_node
logging_first_step logging_nan_inf_filter remove_unused_columns skip_memory_metrics save_total_limit
save_only_model local_rank do_train do_eval ddp_find_unused_parameters ddp_bucket_cap_mb ddp_timeout
ddp_broadcast_buffers ddp_backend pad_to_multiple_of torch_empty_cache_steps use_cache logging_dir
prediction_loss_only overwrite_output_dir eval_accumulation_steps"""
WITHOUT_EFFECT: Final = frozenset(_WITHOUT_EFFECT_NAMES.split())
"""They change speed, memory or the screen elsewhere, and nothing that a run leaves."""

_MIXED: Final = (
    "examples of one row could not be separated, and each record's gradient has to be clipped by itself"
)
_ONE_PROBABILITY: Final = (
    "each record joins a step with one probability, whatever its length: epsilon counts on it"
)
_BY_HAND: Final = "when the run is over, call push_to_hub, which looks at what it uploads"
WHY: Final[Mapping[str, str]] = {
    "packing": _MIXED,
    "eval_packing": "the held-out loss is a mean over records",
    "padding_free": _MIXED,
    "train_sampling_strategy": _ONE_PROBABILITY,
    "group_by_length": _ONE_PROBABILITY,
    "load_best_model_at_end": "there is one adapter: the last, or the average of the way there (method.averaging)",
    "metric_for_best_model": "there is one adapter: the last",
    "neftune_noise_alpha": "its noise is of a generator that can be foreseen, and protects nobody",
    "fp16": "gradients of single records overflow in float16; use bfloat16",
    "optim": "the method brings its optimizer: method='dp-adamw', or another of `privlora methods`",
    "max_grad_norm": "it bounds the mean of a batch; clip_norm bounds each record",
    "label_smoothing_factor": "the loss is the log-likelihood of the tokens",
    "push_to_hub": _BY_HAND,
    "hub_model_id": _BY_HAND,
    "trust_remote_code": "a model's own code could read private batches and write them anywhere",
    "deepspeed": "start the script with torchrun, and spread a large base by loading=dict(fully_shard=True)",
    "fsdp": "a large base is spread over processes by loading=dict(fully_shard=True)",
    "resume_from_checkpoint": "call train(resume_from_checkpoint=True)",
    "auto_find_batch_size": "run=dict(tokens_per_micro_batch='auto') finds how much fits; the logical batch is "
    "expected_batch_size",
    "save_strategy": "checkpoints are for resuming a run; save_steps says how many steps lie between them",
    "data_seed": "which records a step draws must not be foreseen",
    "full_determinism": "noise and sampling are keyed by the operating system and never repeat",
}
_IGNORED_ELSE: Final = "nothing here means the same, and it would be ignored"
_BATCH: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")
_NUMBERS: Final = (
    *("max_steps", "num_train_epochs", *_BATCH),
    *("warmup_steps", "eval_steps", "expected_batch_size", "public_dataset_size"),
)
_SCHEDULES: Final = {name: name for name in ("linear", "cosine", "constant")} | {
    "constant_with_warmup": "constant"
}
_LOADING: Final = ("dtype", "attn_implementation", "revision", "device_map")


class PrivateConfig:
    """What a private run takes instead of SFTConfig: its names where they mean the same, and those of privacy.

        PrivateConfig(output_dir="runs/notes", target_epsilon=3, delta=1e-5, public_dataset_size=10_000,
                      expected_batch_size=64, max_steps=200)

    Fields of the group privacy by their own names (target_epsilon or noise_multiplier, delta, public_dataset_size,
    expected_batch_size or sample_rate, clip_norm, unit, user_column, ...), method (a method's name or a mapping), and
    those of SFTConfig that ``arguments.RENAMED`` and ``TRANSLATED`` list. Others are refused by name, with the reason.

    Raises ConfigError.
    """

    def __init__(self, **given: Any) -> None:
        known = sorted({*_PRIVACY, "method", "num_train_epochs", *RENAMED, *TRANSLATED})
        problems = Together()
        for name in given:
            problems.of(None, _refuse_unknown, name, known)
        problems.tell()
        self.given: Mapping[str, Any] = dict(given)

    def __repr__(self) -> str:
        return f"PrivateConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


@dataclass
class Groups:
    """Arguments of `fine_tune`. completion_only: None where nobody said."""

    output: str | None = None
    privacy: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    completion_only: bool | None = None
    assistant_only: bool = False
    bf16: bool = False
    show_progress: bool | None = None


_OF_TRAINERS: Final = {
    "output_dir": ("run", "output"),
    "train_dataset": ("data", "path"),
    "eval_dataset": ("data", "evaluation"),
}
"""Arguments, of the trainer or of its args, that stand for settings."""


def names_for(args: Any) -> dict[tuple[Any, ...], str]:
    """Which fields of args stand for settings, by (group, name)."""
    own: dict[tuple[Any, ...], str] = {place: name for name, place in {**RENAMED, **_OF_TRAINERS}.items()}
    if isinstance(args, PrivateConfig):
        own |= {("privacy", name): name for name in _PRIVACY}
    return own


def groups_of(args: Any, privacy: Mapping[str, Any] | None, method: Any, *, sized: bool = False) -> Groups:
    """From a `PrivateConfig`, an SFTConfig or TrainingArguments, with what else the trainer was given. sized:
    whether sizes follow from other numbers where none is given.

    Of the latter two, a field at its default counts as not given: the defaults here are those of the settings.

    Raises ConfigError, which names the argument.
    """
    problems, source = Together(), type(args).__name__
    if privacy is not None and not isinstance(privacy, Mapping):
        what = f"privacy is of type {type(privacy).__name__}"
        problems.found.append(ConfigError(what, fix=f"pass {_PROMISE}"))
    if isinstance(args, PrivateConfig):
        given = {name: value for name, value in args.given.items() if value is not None}
    else:
        given = problems.of(dict[str, Any](), _changed, args)
    problems.found += [
        ConfigError(f"{source}.{name} is of type {type(given[name]).__name__}", fix="give a number")
        for name in _NUMBERS
        if name in given and (isinstance(given[name], bool) or not isinstance(given[name], int | float))
    ]
    own = given.pop("method", None)
    if own is not None and method is not None:
        problems.found.append(ConfigError("method is given twice", fix="leave it out of PrivateConfig"))
    chosen = method if method is not None else own
    if chosen is not None and not isinstance(chosen, str | Mapping):
        what = f"method is of type {type(chosen).__name__}"
        problems.found.append(ConfigError(what, fix="give a method's name or a mapping"))
    beside = privacy if isinstance(privacy, Mapping) else {}
    promise = {name: given.pop(name) for name in _PRIVACY if name in given}
    problems.found += [
        ConfigError(f"{name} is given twice", fix=f"leave {name} out of {source}, or of privacy")
        for name in sorted(promise.keys() & beside.keys())
    ]
    if not problems.found and not {**promise, **beside}:
        fix = f"give the trainer {_PROMISE}"
        problems.found.append(ConfigError("nothing says how private the run is", fix=fix))
    problems.tell()
    found = Groups(method={"name": chosen} if isinstance(chosen, str) else dict(chosen or {}))
    found.privacy = {**promise, **beside}
    untold = {name: getattr(args, name) for name in _BATCH if name not in given and hasattr(args, name)}
    batch, steps = partial(_add_batch, untold=untold, sized=sized), partial(_add_steps, sized=sized)
    for step in (batch, steps, _add_others):
        problems.of(None, step, found, given, source)
    problems.tell()
    return found


def _add_others(found: Groups, given: dict[str, Any], source: str) -> None:
    """What is left, and what is refused of it."""
    if given.get("learning_rate") is not None and "learning_rate" not in found.method:
        found.method.setdefault("relative_rate", False)  # transformers' rates are in entries
    for name in list(given):
        if name in RENAMED:
            group, here = RENAMED[name]
            getattr(found, group).setdefault(here, given.pop(name))
    if "disable_tqdm" in given:
        found.show_progress = not given.pop("disable_tqdm")
    problems = Together()
    problems.of(None, _translate, found, given, source)
    for name in given:
        if name not in WITHOUT_EFFECT and name not in TRANSLATED:
            problems.of(None, _refuse, name, source)
    problems.tell()


def _changed(args: Any) -> dict[str, Any]:
    """Fields of TrainingArguments, or of a class made of it, that are not at their defaults."""
    kind = getattr(sys.modules.get("transformers.training_args"), "TrainingArguments", None)
    if kind is None or not isinstance(args, kind):
        fix = "give a PrivateConfig, or an SFTConfig together with privacy=dict(target_epsilon=3, ...)"
        raise ConfigError(f"args is of type {type(args).__name__}", fix=fix)
    default = vars(type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu))
    fields = type(args).__dataclass_fields__
    changed = {k: v for k, v in vars(args).items() if k in fields and v != default.get(k)}
    for name in _follows(changed):
        del changed[name]
    return {"output_dir": args.output_dir, **changed, **({"use_cpu": True} if args.use_cpu else {})}


def _follows(changed: Mapping[str, Any]) -> list[str]:
    """Of fields that are not at their defaults, those that transformers sets by itself where another is set, to the
    value that they have."""
    metric = changed.get("metric_for_best_model")
    chooses = (
        changed.get("load_best_model_at_end") or changed.get("lr_scheduler_type") == "reduce_lr_on_plateau"
    )
    found = ["metric_for_best_model"] if chooses and metric == "loss" else []
    greater = changed.get("greater_is_better")
    if isinstance(metric, str) and greater is (not metric.endswith("loss")):
        found.append("greater_is_better")
    return found


def _add_batch(
    found: Groups, given: dict[str, Any], source: str, *, untold: Mapping[str, Any], sized: bool
) -> None:
    """per_device_train_batch_size x gradient_accumulation_steps, as the mean of a drawn batch. untold: those of them
    that stand at their defaults."""
    names, told = [n for n in _BATCH if n in given], "expected_batch_size" in found.privacy
    told = told or "sample_rate" in found.privacy
    size, times = given.pop(_BATCH[0], None), given.pop(_BATCH[1], None)
    whole = (size or untold.get(_BATCH[0], 1)) * (times or untold.get(_BATCH[1], 1))
    known = size is not None or _BATCH[0] in untold
    meant = f"{whole:g}" if known and not several_processes() else "..."
    if size is None and (told or (not names and (sized or source == "PrivateConfig"))):
        return  # a part of a size that nobody set says nothing
    if size is None or several_processes():
        raise ConfigError(
            f"nothing in {source} says how many records a step takes on average, over all processes",
            why=f"of one process it is {' x '.join(_BATCH)}, and what stands at its default counts as not given",
            fix=f"give privacy=dict(expected_batch_size={meant})",
        )
    if told and found.privacy.get("expected_batch_size") != whole:
        raise ConfigError(
            f"{source}.{names[0]} is set, and so is how many records a step takes on average",
            why="each record joins a step by chance, so one number says it",
            fix=f"leave {' and '.join(names)} out; memory is bounded by run=dict(tokens_per_micro_batch=...)",
        )
    found.privacy["expected_batch_size"] = float(whole)


def _add_steps(found: Groups, given: dict[str, Any], source: str, *, sized: bool) -> None:
    """max_steps, which counts above epochs as in transformers; epochs alone are refused with the number of steps that
    they would be."""
    epochs, steps = given.pop("num_train_epochs", None), given.get("max_steps")
    if steps is not None and steps > 0:
        if found.privacy.get("steps", steps) != steps:
            raise ConfigError(
                f"{source}.max_steps={steps:g}, and privacy has steps={found.privacy['steps']!r}",
                why="epsilon counts on one number of steps",
                fix="leave one of them out",
            )
        return
    if (sized or "steps" in found.privacy) and epochs is None:
        given.pop("max_steps", None)
        return
    n, b = (found.privacy.get(name) for name in ("public_dataset_size", "expected_batch_size"))
    rate = found.privacy.get("sample_rate")
    if b is None and n and isinstance(rate, int | float):
        b = rate * n
    wanted = 3.0 if epochs is None else epochs
    number = (
        max(1, round(wanted * n / b)) if n and b else "epochs x public_dataset_size / expected_batch_size"
    )
    leave = "" if epochs is None else " and leave num_train_epochs out"
    fix = f"set max_steps={number}{leave}, or give the trainer auto=True, which finds what is not given"
    if sized:
        fix = f"leave num_train_epochs out, and set auto=dict(all=True, passes={wanted:g})"
    said = "no max_steps" if epochs is None else f"num_train_epochs={wanted:g}"
    raise ConfigError(
        f"{source} has {said}, and private training counts steps",
        why="each step is a noisy release that epsilon pays for, and an epoch's number of them would be private",
        fix=fix,
    )


def _translate(found: Groups, given: dict[str, Any], source: str) -> None:
    """What has another form here; what is read leaves ``given``."""
    found.output = given.pop("output_dir", None)
    schedule = given.pop("lr_scheduler_type", None)
    if schedule is not None:
        word = str(getattr(schedule, "value", schedule))
        if word not in _SCHEDULES:
            what = f"{source}.lr_scheduler_type={named(word)} is unknown here"
            raise ConfigError(what, fix=f"one of {', '.join(_SCHEDULES)}")
        found.method.setdefault("schedule", _SCHEDULES[word])
    warmup = given.pop("warmup_steps", None)
    if warmup is not None:
        share = isinstance(warmup, float) and 0 < warmup < 1  # transformers takes it for a part of all steps
        steps = found.privacy.get("steps", 0)
        found.method.setdefault("warmup_steps", round(warmup * steps) if share else warmup)
    found.completion_only = given.pop("completion_only_loss", None)
    found.assistant_only = bool(given.pop("assistant_only_loss", False))
    _add_evaluation(found, given, source)
    for kind in ("gradient", "activation"):  # transformers renames the first into the second
        again, how = given.pop(f"{kind}_checkpointing", None), given.pop(f"{kind}_checkpointing_kwargs", None)
        if again:
            reentrant = bool((how or {}).get("use_reentrant", False))
            found.loading["gradient_checkpointing"] = "reentrant" if reentrant else "non-reentrant"
    found.bf16 = bool(given.pop("bf16", False))
    if given.pop("use_cpu", False):
        found.loading["device"] = "cpu"
    for name, value in (given.pop("model_init_kwargs", None) or {}).items():
        if name not in _LOADING:
            raise ConfigError(
                f"{source}.model_init_kwargs holds {named(name)}",
                why=WHY.get(name, _IGNORED_ELSE),
                fix=f"leave it out; what is read is {', '.join(_LOADING)}",
            )
        found.loading[name] = str(value).removeprefix("torch.") if name == "dtype" else value


def _add_evaluation(found: Groups, given: dict[str, Any], source: str) -> None:
    strategy, every = given.pop("eval_strategy", None), given.pop("eval_steps", None)
    word = str(getattr(strategy, "value", strategy))
    if strategy is not None and word not in ("no", "steps"):
        fix = "use eval_strategy='steps' and eval_steps, or leave it out: the start and the end are evaluated"
        raise ConfigError(f"{source}.eval_strategy={named(word)} counts what a private run does not", fix=fix)
    if every is not None and word != "no":
        if not isinstance(every, int) and not float(every).is_integer():
            raise ConfigError(f"{source}.eval_steps is a share of all steps", fix="give a number of steps")
        found.run["evaluate_every"] = int(every)
    elif word == "steps":
        found.run["evaluate_every"] = found.run.get("log_every", 10)


def _refuse_unknown(name: str, known: Collection[str]) -> None:
    """Raise ConfigError for an argument of `PrivateConfig` that is none of ``known``, with the nearest one."""
    if name in known:
        return
    group, _, here = (meant(name).place or "").partition(".")
    renamed = {place: other for other, place in RENAMED.items()}
    near = renamed.get((group, here)) or close(name, known, 0.75)
    fix = f"write method=dict(name=..., {here}=...)" if group == "method" else None
    if near and name not in WHY:
        fix = f"{name}: did you mean {near!r}?"
    _refuse(name, "PrivateConfig", None if name in WHY else fix)


def _refuse(name: str, source: str, fix: str | None = None) -> NoReturn:
    known = source != "PrivateConfig" or name in WHY
    raise ConfigError(
        f"{source}.{name} is set" if known else f"{source} has no {named(name)}",
        why=WHY.get(name, _IGNORED_ELSE),
        fix=fix or f"leave {name} out",
    )
