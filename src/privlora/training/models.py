"""The base model: loaded, checked, given back as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from privlora.adapters import LowRankAdapter
from privlora.adapters.headed import NEW_MODULES
from privlora.adapters.peft_files import refuse_unloadable
from privlora.adapters.quantised import bits, hold, let_go
from privlora.adapters.targets import settled_targets
from privlora.config import ModelSettings, Settings
from privlora.errors import (
    ConfigError,
    ModelError,
    PrivacyError,
    PrivloraError,
    Together,
    in_one_line,
    reason_of,
)
from privlora.training import model_checks as checks
from privlora.training import preflight
from privlora.training.base_weights import refuse_other_weights
from privlora.training.classifier import Head, fill_new_weights, head_name, head_of, headed, padded_as
from privlora.training.inputs import fitted
from privlora.training.ranks import Ranks
from privlora.training.reach import inputs_of_layers, left_out

_FINE, _COARSE = 1e-4, 0.03  # by how much logits of like processes may differ, in float32 and below
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(settings: ModelSettings, head: Head | None = None, tokenizer: Any = None) -> tuple[Any, Any]:
    """The base model and its tokenizer, or the one that is given; with ``head`` as a classifier. Raises ModelError in
    one line for whatever cannot be loaded."""
    refuse_missing(settings)
    source, dtype = (
        preflight.model_source(settings.name, settings.revision),
        _DTYPES.get(settings.dtype, "auto"),
    )
    options, device = dict[str, Any](), preflight.device_of(settings.device)
    if settings.attn_implementation is not None:
        options["attn_implementation"] = settings.attn_implementation
    if settings.packing is not None:
        options["quantization_config"] = BitsAndBytesConfig(**settings.packing)
    if settings.quantization is not None or settings.device_map is not None:
        # Packed as they are read, where they are to lie: weights are never whole in memory.
        options["device_map"] = settings.device_map or {"": device}
    preflight.refuse_damaged_weights(settings.name)
    tokenizer = load_tokenizer(settings) if tokenizer is None else tokenizer
    _read_config(source, head)
    asked = [f"check model.{name}, or " for name in _ASKED if getattr(settings, name) is not None]
    with _explained(source, f"{''.join(asked)}{_GIVE}"):
        model = _from_files(source | {"dtype": dtype} | options, head)
    checks.refuse_float16(model)
    hold(model)
    return model if "device_map" in options else model.to(device), tokenizer


def _from_files(options: Mapping[str, Any], head: Head | None) -> Any:
    if head is None:
        return AutoModelForCausalLM.from_pretrained(**options, trust_remote_code=False)
    options = {**options, **head.options(), "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, told = AutoModelForSequenceClassification.from_pretrained(**options, trust_remote_code=False)
    # A head of another number of classes is as good as none.
    missing = {*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])}
    setattr(model, NEW_MODULES, fill_new_weights(model, missing, head.seed))
    return model


def _refuse_other_loading(settings: ModelSettings, model: Any) -> None:
    """Raise ConfigError for settings of how a model is loaded that a caller's model does not follow."""
    packed = {bits(module) for module in model.modules()} - {None}
    attends = getattr(getattr(model, "config", None), "_attn_implementation", None)
    asked, attention = settings.quantization, settings.attn_implementation
    others = ["model.quantization"] * (asked is not None and packed != {int(asked[0])})
    others += ["model.attn_implementation"] * (attention not in (None, attends))
    for name in others:
        fix = "load the model that way yourself, or give its folder or name instead of the model"
        raise ConfigError(f"{name} is set, and the model does not follow it", fix=fix)


_ASKED = ("attn_implementation", "device_map", "quantization")
_GIVE = "give a local folder with config.json and safetensors, or a hub name that can be reached"


def _refuse_offloaded(model: torch.nn.Module) -> None:
    """Raise ModelError for a model of which a part lies elsewhere between passes, or can have no gradients."""
    away = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if away is not None:
        raise ModelError(
            f"parameter {away!r} lies on a disk or in another memory between passes",
            fix="use more or larger devices, model.quantization, or a device_map without cpu and disk beside others",
        )
    if any(p.is_inference() for p in model.parameters()):
        what = "the model was made inside torch.inference_mode, and has no gradients"
        raise ModelError(what, fix="load it outside of torch.inference_mode, or give its folder or name")


def refuse_missing(settings: ModelSettings, model: Any = None) -> None:
    """Raise ConfigError for a device, a package or a kernel that the model needs and this machine lacks.

    Nothing is loaded. model: its skeleton, if there is one, whose configuration may say that its folder is packed.
    """
    device = torch.device(preflight.device_of(settings.device))
    packed = settings.quantization is not None or bool(
        model is not None and packing_of(settings.packing, model)
    )
    if packed and find_spec("bitsandbytes") is None:
        asked = settings.quantization is not None
        raise ConfigError(
            f"{'model.quantization' if asked else 'this packed model'} needs the package bitsandbytes",
            fix=f"pip install 'privlora[quant]'{', or remove model.quantization' * asked}",
        )
    if settings.attn_implementation == "flex_attention" and device.type == "cpu":
        raise ConfigError(
            "model.attn_implementation=flex_attention does not train here: on a CPU it has no backward pass",
            fix="set model.attn_implementation to sdpa or eager, or model.device to a GPU",
        )


def packing_of(asked: Mapping[str, Any] | None, model: Any) -> Mapping[str, Any]:
    """How linear layers are packed, in the names of BitsAndBytesConfig; empty where they are not.

    asked: by model.quantization. model: the base model, or its skeleton.
    """
    own = getattr(getattr(model, "config", None), "quantization_config", None) or {}
    own = own if isinstance(own, Mapping) else own.to_dict()
    if own.get("load_in_4bit") or own.get("load_in_8bit"):  # a folder that is packed already stays as it is
        return own
    return asked or {}


def load_tokenizer(settings: ModelSettings) -> Any:
    """The base model's tokenizer alone. Raises ModelError in one line."""
    source = preflight.model_source(settings.name, settings.revision)
    give = f"{_GIVE}; a folder has the tokenizer's files too"
    with _explained(source, preflight.or_near_folder(settings.name, give), ", its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        what = f"cannot load model {settings.name!r}: it has no tokenizer.json (nor other tokenizer files)"
        raise ModelError(what, fix="copy the tokenizer files of the base model into it")
    return tokenizer


def given_or_loaded(
    settings: ModelSettings, model: torch.nn.Module | None, tokenizer: Any, head: Head | None = None
) -> tuple[torch.nn.Module, Any]:
    """A caller's model and its tokenizer, or those of the settings, before which a tokenizer goes that is given.
    ``head``: of a classifier.

    Raises ConfigError if the tokenizer is missing or the caller's model is not packed as the settings say, ModelError
    for a model that cannot be loaded, holds an adapter, is in float16, is not in memory as a whole or has other weights
    than the files of its name.
    """
    given = model
    if model is None:
        model, tokenizer = load_model(settings, head, tokenizer)
    _refuse_other_loading(settings, model)
    if tokenizer is None:
        raise ConfigError("a loaded model needs its tokenizer", fix="pass tokenizer=...")
    _refuse_kernel(getattr(model, "config", None))
    checks.refuse_adapted(model)  # a folder with an adapter is loaded with it
    checks.refuse_float16(model)
    _refuse_offloaded(model)
    if given is not None:
        refuse_other_weights(settings.name, settings.revision, given, classifies=head is not None)
    return model, tokenizer


def look_at_model(settings: Settings, tokenizer: Any = None) -> tuple[Settings, Any, Any]:
    """The settings with a length that the model reads, the model without weights, and its tokenizer.

    tokenizer: None for that of the settings. Raises together what needs no weights, which take longest to load: files
    that are damaged or cannot be read, lengths, token ids, targets, rank and dtype that its configuration rules out.
    """
    problems = Together()
    problems.of(None, preflight.refuse_damaged_weights, settings.model.name)
    own = tokenizer if tokenizer is not None else problems.of(None, load_tokenizer, settings.model)
    head, skeleton = head_of(settings), None
    if own is not None:
        skeleton = problems.of(None, load_skeleton, settings.model, None, head)
    if skeleton is not None:
        settings = fitted(settings, skeleton)
        length = settings.data.max_length
        problems.of(None, lambda: checks.refuse_out_of_reach(skeleton, own, max_length=length))
        if settings.model.dtype == "auto" and not packing_of(settings.model.packing, skeleton):
            files = preflight.files_of(settings.model.name, settings.model.revision)
            stored = files is not None and preflight.in_float16(files)
            problems.of(None, checks.refuse_float16, skeleton, stored)
        try:
            _loadable_adapter(settings, skeleton)
        except PrivloraError as error:
            problems.found.append(settings.placed(error, "adapter.target_modules"))
    problems.tell()
    return settings, skeleton, own


def check_model(settings: Settings, model: torch.nn.Module, tokenizer: Any) -> LowRankAdapter:
    """Refuse a model that cannot be trained as ``settings`` say, before a record is read; it stays as it was. Gives the
    adapter that it would have, detached.

    Raises ModelError or PrivacyError: targets or rank that do not fit, records longer than its positions, token ids
    beyond its vocabulary, rows that are coupled, or predictions from later tokens.
    """
    checks.refuse_out_of_reach(model, tokenizer, max_length=settings.data.max_length)
    adapter = _loadable_adapter(settings, model)
    with unchanged_afterwards(model):
        model.eval()
        if head_of(settings) is None:
            checks.refuse_coupled(adapter, tokenizer)
        else:
            padded_as(model, tokenizer)
            checks.refuse_coupled_texts(adapter, tokenizer)
        checks.refuse_too_short(adapter, tokenizer, max_length=settings.data.max_length)
    return adapter


def refuse_other_logits(settings: Settings, model: torch.nn.Module, ranks: Ranks) -> None:
    """Raise PrivacyError if the model computes otherwise in another process, whatever the reason: a record's gradient
    must not depend on which of them takes it."""
    if ranks.size == 1:
        return
    adapter = adapter_for(settings, model)
    with unchanged_afterwards(model):
        model.eval()
        told = ranks.gathered(checks.public_logits(adapter))
    allowed = _COARSE if adapter.reduced_precision else _FINE

    def compare() -> None:
        for rank, logits in enumerate(told):
            if float((logits - told[0]).abs().max()) > allowed * float(told[0].abs().max()):
                raise PrivacyError(
                    f"the base model of process {rank} computes other logits than that of process 0",
                    why="a record's gradient would depend on the process that takes it, and so on who else was drawn",
                    fix="give all processes the same files, versions and attention, on machines of one kind",
                )

    ranks.same(compare)


def load_skeleton(settings: ModelSettings, attention: str | None = None, head: Head | None = None) -> Any:
    """The base model without weights, from its configuration alone. attention: as model.attn_implementation. head: of a
    classifier.

    Raises ModelError in one line; with ``attention`` also for one that is not installed or not made for the model.
    """
    source = preflight.model_source(settings.name, settings.revision)
    config = _read_config(source, head)
    auto = AutoModelForCausalLM if head is None else AutoModelForSequenceClassification
    try:
        with torch.device("meta"):
            return auto.from_config(config, attn_implementation=attention, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause, not a traceback
        if attention is None:
            raise _cannot_load(source, error, "check its config.json", ", its configuration") from None
        raise ModelError(
            f"model {settings.name!r} cannot have attn_implementation={attention} here: {reason_of(error)}",
            fix="set model.attn_implementation to sdpa or eager, or install what it needs",
        ) from None


def _read_config(source: Mapping[str, Any], head: Head | None) -> Any:
    """The model's configuration. Raises ModelError for one that cannot be read, is an encoder's with a decoder, or
    whose attention is fetched code."""
    options = {**source, **({} if head is None else head.options())}
    with _explained(source, "check its config.json", ", its configuration"):
        config = AutoConfig.from_pretrained(**options, trust_remote_code=False)
    _refuse_kernel(config)
    if head is None:
        preflight.refuse_encoder_decoder(source["pretrained_model_name_or_path"], config.to_dict())
    return config


def _refuse_kernel(config: Any) -> None:
    """Raise ModelError for a configuration with attention from a repository of kernels, in any of its parts."""
    if "/" in str(getattr(config, "_attn_implementation", None)):
        raise ModelError(
            "the model's attention is code of a hub repository, as its attn_implementation says",
            why="it would see the private records",
            fix="take attn_implementation out of its config.json, or load it with sdpa or eager",
        )
    for part in getattr(config, "sub_configs", ()):
        _refuse_kernel(getattr(config, part, None))


@contextmanager
def _explained(source: Mapping[str, Any], fix: str, part: str = "") -> Iterator[None]:
    """Raises ModelError for what a loader raises inside."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause, not a traceback
        raise _cannot_load(source, error, fix, part) from None


def _cannot_load(source: Mapping[str, Any], error: Exception, fix: str, part: str = "") -> ModelError:
    """The error for what a loader raised; for a model that needs code of its own files, which never runs, that."""
    name, told = source["pretrained_model_name_or_path"], in_one_line(str(error)) or reason_of(error)
    for file in ("config.json", "tokenizer_config.json") if isinstance(error, ValueError) else ():
        place = preflight.kept_file(name, source["revision"], file)
        if place is not None and b'"auto_map"' in place.read_bytes():
            part, told = "", f"it needs the code that its {file} names as auto_map, which is never run"
            fix = "take a model that transformers knows by itself: code of a model's files would see private records"
    return ModelError(f"cannot load model {name!r}{part}: {told}", fix=fix)


# What transformers sets on modules when checkpointing is switched on, and cannot all take back itself.
_CHECKPOINTING = (
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
)


@contextmanager
def unchanged_afterwards(model: torch.nn.Module) -> Iterator[None]:
    """Give a model back as it was: training flags, hooks and gradient checkpointing of every module."""
    # transformers puts hooks on modules at the first pass, and notes that they are there.
    names = ("training", "_output_capturing_hooks_installed", *_CHECKPOINTING)
    before = [
        (module, {n: vars(module)[n] for n in names if n in vars(module)}, dict(module._forward_hooks))
        for module in model.modules()
    ]
    config = checks.text_config(model)
    held, padding = hold(model), getattr(config, "pad_token_id", None)
    try:
        yield
    finally:
        let_go(held)
        if hasattr(config, "pad_token_id"):
            config.pad_token_id = padding
        for module, values, hooks in before:
            for name in names:
                if name in values:
                    setattr(module, name, values[name])
                elif name in vars(module):
                    delattr(module, name)
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


def adapter_for(settings: Settings, model: torch.nn.Module, dropout: float = 0.0) -> LowRankAdapter:
    lora, head = settings.adapter, head_of(settings)
    alone = [*lora.exclude_modules, *([] if head is None else [head_name(model, head.outputs)])]
    without = left_out(lora, model, alone)
    body = LowRankAdapter(
        model,
        rank=lora.r,
        target_modules=settled_targets(model, lora.target_modules, without),
        exclude_modules=[*alone, *without],
        layers_to_transform=lora.layers_to_transform,
        dropout=dropout,
    )
    body.left_out = without
    return body if head is None else headed(body, head.outputs)


def _loadable_adapter(settings: Settings, model: torch.nn.Module) -> LowRankAdapter:
    """`adapter_for` a model with or without weights. Raises ModelError for one that could be trained and not loaded, or
    whose layers are not given the rows of records."""
    if head_of(settings) is None:
        checks.refuse_encoder(model)
    adapter = adapter_for(settings, model)
    refuse_unloadable(adapter)
    inputs = inputs_of_layers(model)
    pooled = frozenset[str]().union(*(part.pooled for part in adapter.parts))
    checks.refuse_places(
        {site.name: inputs[site.name] for site in adapter.sites if site.name in inputs}, pooled
    )
    return adapter


def set_checkpointing(model: Any, kind: str) -> None:
    if kind == "none":
        return
    arguments = {"use_reentrant": kind == "reentrant"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5; both names are supported
        enable = getattr(model, "activation_checkpointing_enable", None)
        if enable is None:
            enable = model.gradient_checkpointing_enable
        try:
            enable(arguments)
        except ValueError as error:
            what = f"this model has no gradient checkpointing ({error})"
            raise ModelError(what, fix="set model.gradient_checkpointing=none") from None
