"""Everything that one run needs, built from its settings: the model, the data, and the parts of the method."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from privlora.accounting.calibration import Calibration, calibrate_noise_multiplier
from privlora.accounting.events import StepEvent
from privlora.accounting.ledger import Plan
from privlora.adapters import LowRankAdapter
from privlora.config import DataSettings, ModelSettings, PrivacySettings, Settings
from privlora.coordinates import Coordinates
from privlora.coordinates.starts import PUBLIC_GRADIENT, Subspaces
from privlora.data.batching import pad_token
from privlora.data.examples import Examples, Template, build_examples, token_hashes
from privlora.data.records import as_records, content_hashes, load_records, refuse_missing
from privlora.data.sampling import PoissonSampler
from privlora.data.summary import DataSummary, refuse_implausible, summarise
from privlora.data.tasks import find_task, task_records
from privlora.data.units import Units, group_units
from privlora.errors import ConfigError, ModelError, PrivacyError, named
from privlora.mechanisms import AdaptiveClipNorm
from privlora.methods import Hyperparameters, Method, build, find_method
from privlora.optimizers import IterateAverage, Optimizer, learning_rate_at
from privlora.training.model_checks import (
    positions_of,
    refuse_adapted,
    refuse_coupled,
    refuse_float16,
    refuse_out_of_reach,
    refuse_too_short,
    refuse_unknown_tokens,
)
from privlora.training.model_names import model_source
from privlora.training.public_start import mean_gradient_subspaces

ADJACENCY: Final = "add-or-remove-one"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Data:
    """Tokenised private records, their units, and the public evaluation records (empty if none)."""

    examples: Examples
    units: Units
    evaluation: Examples

    @cached_property
    def summary(self) -> DataSummary:
        """Of the private records; private itself."""
        return summarise(self.examples, len(self.units))


@dataclass
class Parts:
    """A method on a model: what the loop drives and a checkpoint holds."""

    method: Method
    adapter: LowRankAdapter
    coordinates: Coordinates
    optimizer: Optimizer
    average: IterateAverage | None
    settings: Settings
    hyper: Hyperparameters
    adaptive: AdaptiveClipNorm | None = None
    """Where privacy.clip_quantile is set."""

    def learning_rate(self, step: int) -> float:
        """Of step 1, 2, …; a function of public numbers."""
        hyper = self.hyper
        return learning_rate_at(
            step, self.settings.privacy.steps, hyper.learning_rate, hyper.schedule, hyper.warmup_steps
        )

    def named_factors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What is exported, relative to W0: the averaged update where averaging is on, else the last iterate."""
        trained = self.average or self.coordinates
        return self.adapter.relative_to_w0(trained.named_factors())

    def install_result(self) -> None:
        """Let the model compute with what would be exported; ``coordinates.install`` goes back to training."""
        if self.average is not None:
            for group, (a, b) in zip(self.adapter.groups, self.average.factors(), strict=True):
                self.adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)


def load_model(settings: ModelSettings) -> tuple[Any, Any]:
    """The base model and its tokenizer. Raises ModelError in one line for whatever cannot be loaded."""
    source, dtype = model_source(settings), _DTYPES.get(settings.dtype, "auto")
    tokenizer = load_tokenizer(settings)
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause, not a traceback
        raise ModelError(
            f"cannot load model {settings.name!r}: {_reason(error)}",
            fix="give a local folder with config.json and safetensors, or a hub name that can be reached",
        ) from None
    refuse_float16(model)
    return model.to(_device(settings.device)), tokenizer


def load_tokenizer(settings: ModelSettings) -> Any:
    """The base model's tokenizer alone. Raises ModelError in one line."""
    source = model_source(settings)
    try:
        return AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause, not a traceback
        raise ModelError(
            f"cannot load model {settings.name!r}, its tokenizer: {_reason(error)}",
            fix="give a local folder with config.json, safetensors and the tokenizer's files, or a hub name that "
            "can be reached",
        ) from None


def given_or_loaded(
    settings: ModelSettings, model: torch.nn.Module | None, tokenizer: Any
) -> tuple[torch.nn.Module, Any]:
    """A caller's model and its tokenizer, or those of the settings.

    Raises ConfigError if the tokenizer is missing, ModelError for a model that cannot be loaded, holds an adapter or is
    in float16.
    """
    if model is None:
        model, tokenizer = load_model(settings)
    if tokenizer is None:
        raise ConfigError("a loaded model needs its tokenizer", fix="pass tokenizer=...")
    refuse_adapted(model)  # a folder with an adapter is loaded with it
    refuse_float16(model)
    return model, tokenizer


def _reason(error: Exception) -> str:
    """The first line of what a library says, not too long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def fitted(settings: Settings, model: torch.nn.Module) -> Settings:
    """The settings with data.max_length lowered to what the model reads, unless it was set."""
    data, positions = settings.data, positions_of(model)
    if positions is None or positions >= data.max_length or "max_length" in data.model_fields_set:
        return settings
    return settings.model_copy(update={"data": data.model_copy(update={"max_length": positions})})


def check_model(settings: Settings, model: torch.nn.Module, tokenizer: Any) -> None:
    """Refuse a model that cannot be trained as ``settings`` say, before a record is read; it stays as it was.

    Raises ModelError or PrivacyError: targets or rank that do not fit, records longer than its positions, token ids
    beyond its vocabulary, rows that are coupled, or predictions from later tokens.
    """
    refuse_out_of_reach(model, tokenizer, max_length=settings.data.max_length)
    adapter = _adapter(settings, model, dropout=0.0)
    with unchanged_afterwards(model):
        model.eval()
        refuse_coupled(adapter, tokenizer, pad_token_id=pad_token(tokenizer))
        refuse_too_short(adapter, tokenizer, max_length=settings.data.max_length)


def check_sources(settings: Settings, records: Any = None, evaluation: Any = None) -> None:
    """Refuse settings that name a file which is not there, before a model is loaded. Raises DataError.

    records, evaluation: what stands for the files, in memory.
    """
    data = settings.data
    read = [settings.adapter.public_text, data.path if records is None else None]
    read.append(data.evaluation if evaluation is None else None)
    for path in read:
        if path is not None:
            refuse_missing(path, format=data.format)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"model.device={named(name)} is not available here", fix="use auto or cpu"
        ) from None
    return name


def load_data(
    settings: Settings,
    tokenizer: Any,
    records: Any = None,
    evaluation: Any = None,
    *,
    model: torch.nn.Module | None = None,
    all_public: bool = False,
) -> Data:
    """Read, check, tokenise and group the records.

    records, evaluation: what stands for data.path and data.evaluation (Python callers), see ``as_records``. model: the
    one that is to read them, so that tokens that it does not know are refused. all_public: of studies, whose records
    are public all, so that any of them may be evaluated on.

    Raises DataError for records that cannot be used or cannot be what was said of them (data.unchecked), PrivacyError
    for public ones among the private.
    """
    data, privacy = settings.data, settings.privacy
    if records is None:
        records = load_records(data.path, format=data.format, limit=data.limit)
    if evaluation is None and data.evaluation is not None:
        evaluation = load_records(data.evaluation, format=data.format)
    records = as_records(records)
    evaluation = [] if evaluation is None else as_records(evaluation)
    units = group_units(
        records,
        privacy.user_column,
        max_records_per_unit=privacy.max_records_per_user if privacy.unit == "user" else None,
    )
    if privacy.private and privacy.delta is not None and privacy.delta >= 1 / max(1, len(units)):
        raise PrivacyError(
            f"privacy.delta={privacy.delta:g} is not below 1 / number of units",
            why="publishing one whole unit would satisfy it",
            fix="set it to a tenth of 1 / number of units, or less",
        )
    sampler(privacy, len(units))  # refuses more units than the cap was accounted for, before the run exists
    public = _public(settings, evaluation) if privacy.private and not all_public else {}
    columns = Template(**data.columns).used
    _refuse_shared(
        content_hashes(_of_task(records, data), columns),
        {name: content_hashes(_of_task(given, data), columns) for name, given in public.items()},
        f"in {', '.join(sorted(columns))}",
    )
    loaded = Data(
        tokenise(records, data, tokenizer),
        units,
        tokenise(evaluation, data, tokenizer) if evaluation else Examples([]),
    )
    # What is written otherwise may be the same to the model: other keys, another boundary, an end that is cut off.
    _refuse_shared(
        token_hashes(loaded.examples),
        {name: token_hashes(tokenise(given, data, tokenizer)) for name, given in public.items()},
        "once they are tokenised",
    )
    if model is not None:
        refuse_unknown_tokens(model, chain(loaded.examples, loaded.evaluation))
    if not data.unchecked:
        refuse_implausible(
            loaded.summary, public_units=privacy.n, unit=privacy.unit, max_length=data.max_length
        )
    return loaded


_REVEALED: Final = {
    "data.evaluation": "their held-out loss would be published",
    "adapter.public_text": "the start of the training would reveal them",
}


def _public(
    settings: Settings, evaluation: Sequence[Mapping[str, Any]]
) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The records that count as public, by the setting that names them."""
    lora = settings.adapter
    public: dict[str, Sequence[Mapping[str, Any]]] = {}
    if evaluation:
        public["data.evaluation"] = evaluation
    if lora.public_text is not None:
        texts = load_records(lora.public_text, format=settings.data.format, limit=lora.public_texts)
        public["adapter.public_text"] = texts
    return public


def _refuse_shared(private: Set[bytes], public: Mapping[str, Set[bytes]], how: str) -> None:
    """Raise PrivacyError if a public hash is that of a private record; which and how many is not told."""
    for name, hashes in public.items():
        if not private.isdisjoint(hashes):
            raise PrivacyError(
                f"some records of {name} are the same as private ones {how}",
                why=_REVEALED[name],
                fix="remove them from the public records; give others, or none",
            )


def tokenise(records: Sequence[Mapping[str, Any]], data: DataSettings, tokenizer: Any) -> Examples:
    """The records as examples; ``data`` says which columns and how long."""
    return build_examples(
        _of_task(records, data),
        Template(**data.columns),
        tokenizer,
        max_length=data.max_length,
        loss_on=data.loss_on,
        add_eos=data.add_eos,
    )


def _of_task(records: Sequence[Mapping[str, Any]], data: DataSettings) -> Sequence[Mapping[str, Any]]:
    return records if data.task is None else task_records(find_task(data.task), records)


def sampler(privacy: PrivacySettings, units: int) -> PoissonSampler:
    """The sampler of a run, with operating-system randomness unless the run is a stamped test."""
    return PoissonSampler(
        units,
        privacy.q,
        max_batch_size=privacy.max_batch_size,
        dataset_size=privacy.public_dataset_size,
        insecure_seed=privacy.insecure_noise_seed,
    )


def load_skeleton(settings: ModelSettings) -> Any:
    """The base model without weights, from its configuration alone. Raises ModelError in one line."""
    source = model_source(settings)
    try:
        config = AutoConfig.from_pretrained(**source)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause, not a traceback
        raise ModelError(
            f"cannot read the configuration of model {settings.name!r}: {_reason(error)}",
            fix="check its config.json",
        ) from None


def plan_privacy(settings: Settings, model: torch.nn.Module | None = None) -> tuple[Plan, Calibration | None]:
    """What the run will release and cost, before any record is read.

    model: the base model where it is at hand; else its configuration is read if the cost depends on it.
    """
    privacy = settings.privacy
    assert privacy.private
    assert privacy.delta is not None
    method = find_method(settings.method.name)
    if not method.private:
        raise ConfigError(
            f"method {method.name!r} adds no noise, so it cannot meet a privacy target",
            fix="use dp-adamw or prism, or set privacy.private=false and remove the target",
        )
    sampling = sampler(privacy, 0).sampling

    def skeleton() -> LowRankAdapter:
        return _adapter(settings, load_skeleton(settings.model) if model is None else model, dropout=0.0)

    projections = method.event_layers(skeleton)
    if privacy.clip_quantile is not None and projections:
        raise ConfigError(
            f"privacy.clip_quantile cannot be used with method {method.name!r}",
            why="the count of norms is not projected, so the projection's event would not cover it",
            fix="remove clip_quantile, or use another method",
        )
    calibration = None
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.target_epsilon is not None
        calibration = calibrate_noise_multiplier(
            sampling,
            privacy.steps,
            privacy.target_epsilon,
            privacy.delta,
            adjacency=ADJACENCY,
            projections=projections,
        )
        sigma = calibration.noise_multiplier
    plan = Plan(
        event=StepEvent(sampling, sigma, projections),
        steps=privacy.steps,
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        adjacency=ADJACENCY,
        unit=privacy.unit,
        records_per_user=privacy.max_records_per_user if privacy.unit == "user" else None,
        clip_norm=privacy.clip_norm,
        expected_batch_size=privacy.b,
        method=method.name,
        dataset=settings.run.label or "unnamed",
        insecure_noise=privacy.insecure_noise_seed is not None,
    )
    return plan, calibration


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
    names = ("training", *_CHECKPOINTING)
    before = [
        (module, {n: vars(module)[n] for n in names if n in vars(module)}, dict(module._forward_hooks))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, values, hooks in before:
            for name in names:
                if name in values:
                    setattr(module, name, values[name])
                elif name in vars(module):
                    delattr(module, name)
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


class PublicStart:
    """Finds the subspaces of adapter.init=public-gradient for one model that does not change.

    Keeps those of the last adapter and texts, one for each seed: runs that differ in method, privacy or learning rate
    share them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._key = ""
        self._found: dict[int, Subspaces] = {}

    def subspaces(self, settings: Settings, model: torch.nn.Module) -> Subspaces:
        """A function of the model, the public texts, the adapter's shape and the public seed alone.

        Raises DataError for texts that cannot be read or used.
        """
        lora, data, run = settings.adapter, settings.data, settings.run
        template = data.model_dump_json(exclude={"path", "evaluation", "limit"})
        key = f"{settings.model.model_dump_json()} {lora.model_dump_json()} {template} {run.tokens_per_micro_batch}"
        if key != self._key:
            self._key, self._found = key, {}
        if run.seed not in self._found:
            assert lora.public_text is not None
            records = load_records(lora.public_text, format=data.format, limit=lora.public_texts)
            self._found[run.seed] = mean_gradient_subspaces(
                _adapter(settings, model, dropout=0.0),
                tokenise(records, data, self._tokenizer),
                seed=run.seed,
                max_tokens=run.tokens_per_micro_batch,
                pad_token_id=pad_token(self._tokenizer),
            )
        return self._found[run.seed]


def build_parts(settings: Settings, model: torch.nn.Module, public: PublicStart | None = None) -> Parts:
    """Attach the adapter and start the method's state. public: needed where adapter.init=public-gradient."""
    method = find_method(settings.method.name)
    lora = settings.adapter
    privacy = settings.privacy
    hyper = method.resolve(settings.method, lora.init, privacy.steps, private=privacy.private)
    _set_checkpointing(model, settings.model.gradient_checkpointing)
    subspaces = None
    if hyper.init == PUBLIC_GRADIENT and public is not None:
        subspaces = public.subspaces(settings, model)
    adapter = _adapter(settings, model, dropout=lora.lora_dropout)
    double = next(model.parameters()).dtype == torch.float64
    coordinates, optimizer = build(
        method,
        adapter,
        optimizer=hyper.optimizer,
        init=hyper.init,
        seed=settings.run.seed,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        settings=hyper.settings,
        dtype=torch.float64 if double else torch.float32,
        subspaces=subspaces,
    )
    average = IterateAverage(coordinates, hyper.averaging) if hyper.averaging else None
    quantile = privacy.clip_quantile
    adaptive = None if quantile is None else AdaptiveClipNorm(privacy.clip_norm, quantile)
    adapter.attach()  # last: a setting that is refused leaves the model alone
    return Parts(method, adapter, coordinates, optimizer, average, settings, hyper, adaptive)


def _adapter(settings: Settings, model: torch.nn.Module, *, dropout: float) -> LowRankAdapter:
    lora = settings.adapter
    return LowRankAdapter(
        model,
        rank=lora.r,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        layers_to_transform=lora.layers_to_transform,
        dropout=dropout,
    )


def _set_checkpointing(model: Any, kind: str) -> None:
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
            raise ModelError(
                f"this model has no gradient checkpointing ({error})",
                fix="set model.gradient_checkpointing=none",
            ) from None
