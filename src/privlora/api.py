"""One call in Python: ``fine_tune``, ``federate``; and what is behind the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from privlora.accounting import LedgerSummary, Plan, read_ledger
from privlora.config import IN_MEMORY, Settings, adapter_settings, load_settings, settings_from
from privlora.config.reading import whereabouts
from privlora.data.records import as_records
from privlora.data.summary import DataSummary
from privlora.errors import ConfigError, DataError, RunError, named
from privlora.methods import CHOICES
from privlora.names import UNNAMED
from privlora.profiling.run import profiled, refuse_without_steps, told_peak
from privlora.rehearsals.choosing import Chosen, choose, plan_run
from privlora.rehearsals.kept import because, keep_choice, leaves_a_choice, read_choice
from privlora.rehearsals.settling import settle
from privlora.reporting import publish
from privlora.reporting.facts import gather
from privlora.reporting.finished import texts_of_finished_run
from privlora.reporting.texts import publish_texts
from privlora.result import Result
from privlora.screen import shown
from privlora.synthesis.embeddings import base_alone
from privlora.training.assembly import Parts, PublicStart, build_parts, plan_privacy
from privlora.training.callbacks import checked_callbacks, refuse_no_observer, watching
from privlora.training.checkpoint import NO_RUN
from privlora.training.classifier import head_of, padded_as
from privlora.training.files import AUDITED, RunFolder, no_run, read_lines, write_atomically
from privlora.training.fitting import Fitted, with_micro_batches
from privlora.training.identity import (
    Identity,
    identify,
    keep_identity,
    refuse_others,
    refuse_unlike_processes,
)
from privlora.training.inputs import Data, check_sources, fitted, load_data
from privlora.training.loggers import Service, loggers, refuse_missing_loggers
from privlora.training.loop import Interrupted, Observer, finish_training, train_beside
from privlora.training.models import (
    check_model,
    given_or_loaded,
    refuse_other_logits,
    unchanged_afterwards,
)
from privlora.training.public_rows import public_rows, steps_shown
from privlora.training.ranks import Ranks, refuse_several
from privlora.training.sharding import load_sharded, refuse_in_several
from privlora.training.sources import check_columns
from privlora.training.takeover import make_room, refuse_if_spent
from privlora.training.texts.final_texts import Progress, final_texts
from privlora.training.torch_ranks import joined

if TYPE_CHECKING:
    from privlora.federated.rounds import RoundObserver
    from privlora.federated.run import Federated


Source = str | Path | Iterable[Path] | Iterable[Mapping[str, Any]] | Iterable[str]
"""A file or several, or records."""


def fine_tune(
    model: str | Path | torch.nn.Module,
    data: Source,
    *,
    privacy: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    evaluation: Source | None = None,
    columns: Mapping[str, Any] | None = None,
    adapter: Any = None,
    loading: Mapping[str, Any] | None = None,
    method: str | Mapping[str, Any] = "prism",
    synthesis: Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
    generator: Any = None,
    output: str | Path = "runs/run",
    run: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    callbacks: Sequence[Any] = (),
    profile: bool = False,
    show_progress: bool | None = None,
    **others: Any,
) -> Result:
    """Fine-tune a causal LM privately; the result is a plain peft adapter in ``output/release``, or in
    ``output/not-private`` where nothing protects the records.

    model: a local folder, a hub name, or a loaded transformers model. The module is not wrapped; when this returns,
        also by an exception, it is exactly as before. tokenizer: of a loaded model; of others, in the place of theirs.
    data: a file as a string or a ``Path``, a list of ``Path``, or ``hf://name:split``; or records: any iterable of
        mappings (a ``datasets.Dataset`` or a streaming one, too), a ``pandas.DataFrame``, or a list of strings, which
        are texts and never names of files. evaluation: PUBLIC records of the same form.
    privacy: the fields of PrivacySettings, for example ``dict(target_epsilon=3, delta=1e-5, steps=200,
        expected_batch_size=64, public_dataset_size=10_000)``.
    columns: further fields of DataSettings (text, prompt, completion, messages, loss_on, max_length, …).
    adapter: fields of AdapterSettings, or a ``peft.LoraConfig`` of which nothing is set that means nothing here. run:
        fields of RunSettings. method: a row's name or fields of MethodSettings.
    synthesis: fields of SynthesisSettings, for methods that lean on public texts, or for a warm start. generator: what
        writes the texts, in the place of ``synthesis["callable"]``: a function from a list of prompts to a list of
        answers, or an object with ``random`` and ``vary``. It is never given anything private.
    auto: fields of AutoSettings, for settings that are "auto", as ``privacy["steps"]`` or ``method["learning_rate"]``.
    loading: further fields of ModelSettings (dtype, device, quantization, device_map, attn_implementation, revision,
        gradient_checkpointing); of a loaded model only gradient_checkpointing has an effect.
    callbacks: functions that are called with a `PublicEvent`, or objects of ``transformers.TrainerCallback``. They are
        told public numbers alone, and may end the run as Ctrl-C does, to be resumed. observer: see `Observer`.
    profile: leave a page in ``output/private/profile`` that shows where the time of a step goes. The run is the same.
    show_progress: show the run on standard error. None: unless there is an observer, or PRIVLORA_PROGRESS=0 in the
        environment. A terminal shows all that ``privlora train`` shows; a notebook or a log, which may be passed on,
        gets public numbers alone, and the place of the private ones.

    Raises PrivloraError subclasses that say what to mend; for a name that other trainers have, which it is here.
    """
    _refuse_other_names("fine_tune", others, _OTHER_NAMES, _IN_GROUPS)
    if privacy is None:
        raise ConfigError(
            "privacy is not given, and has no default: what is promised, about how many records, is yours to say",
            fix="pass privacy=dict(target_epsilon=3, delta=1e-5, steps=200, expected_batch_size=64, "
            "public_dataset_size=10_000)",
        )
    path, records = given_records(data, "data")
    public, evaluation_records = (
        (None, None) if evaluation is None else given_records(evaluation, "evaluation")
    )
    groups = {
        "privacy": privacy,
        "columns": columns,
        "adapter": adapter,
        "loading": loading,
        "method": {"name": method} if isinstance(method, str) else method,
        "synthesis": with_generator(synthesis, generator),
        "auto": auto,
        "run": run,
    }
    settings = settings_of_call(
        model, {"path": path, "evaluation": public}, groups, output, source="fine_tune"
    )
    with shown(show_progress, observer) as told:
        return train_run(
            settings,
            model=model if isinstance(model, torch.nn.Module) else None,
            tokenizer=tokenizer,
            records=records,
            evaluation=evaluation_records,
            generator=generator,
            callbacks=callbacks,
            on_profile=_unheard if profile else None,
            **told,
        )


def _refuse_other_names(
    function: str, others: Mapping[str, Any], known: Mapping[str, str], of_settings: str
) -> None:
    """Raise ConfigError for an argument that means something here by another name, TypeError for others.

    known: how to mend each such name. of_settings: how to mend the name of a setting, which is at home {here}.
    """
    for name in others:
        fix = known.get(name)
        if fix is None and (here := whereabouts(name)) is not None:
            fix = of_settings.format(here=here)
        if fix is None:
            raise TypeError(f"{function}() has no argument {name!r}")
        raise ConfigError(f"{function} has no argument {name}", fix=fix)


_EXAMPLES = {
    "federation": "dict(rule='tan', rounds=20, local_steps=4)",
    "adapter": "dict(r=16, lora_alpha=16, target_modules='all-linear')",
    "method": "a method's name, or dict(name='prism', learning_rate=1e-3)",
    "privacy": "dict(target_epsilon=3, delta=1e-5, steps=200, ...)",
    "run": "dict(seed=0, label='notes')",
    "auto": "dict(passes=5, file='public.jsonl')",
    "columns": "dict(text='note', max_length=256)",
    "loading": "dict(dtype='bfloat16')",
    "synthesis": "dict(generator='model', preset='clinical-note')",
}

_OTHER_NAMES: Final = {
    "eval_dataset": "it is called evaluation here; its records are PUBLIC, since their loss is published",
    "train_dataset": "it is called data here",
    "processing_class": "it is called tokenizer here",
    "peft_config": "it is called adapter here",
    "output_dir": "it is called output here",
    "args": "give privacy, method, columns and run; or use PrivateTrainer, which takes args",
}


_IN_GROUPS: Final = (
    "{here}. In Python groups are arguments, as privacy=dict(target_epsilon=3, …); columns is the group data, loading "
    "the group model"
)
_AS_BEGUN: Final = "leave it out: a run goes on with the settings that it began with"
_TO_RESUME: Final = {
    **dict.fromkeys(("data", "train_dataset"), "it is called records here: this run's own, as they are now"),
    "eval_dataset": "it is called evaluation here",
    "processing_class": "it is called tokenizer here",
    **dict.fromkeys(("output", "output_dir"), "the run's folder is the first argument, root"),
    **dict.fromkeys(("args", "peft_config", *_EXAMPLES), _AS_BEGUN),
}


def _unheard(page: Path) -> None:
    """Of a profile that only `Result` has to tell of."""


def with_generator(synthesis: Any, generator: Any) -> Any:
    """The group ``synthesis`` of a call that may hand over a generator. Raises ConfigError for one of another kind."""
    if generator is None:
        return synthesis
    given = {} if synthesis is None else synthesis
    refuse_no_mapping("synthesis", given)
    if given.get("generator", "callable") != "callable" or "callable" in given:
        raise ConfigError(
            "generator is given, and synthesis names another one",
            fix="remove synthesis['generator'] and synthesis['callable'], or the argument generator",
        )
    return {**given, "generator": "callable", "callable": _IN_MEMORY_GENERATOR}


def settings_of_call(
    model: str | Path | torch.nn.Module,
    data: Mapping[str, Any],
    groups: Mapping[str, Any],
    output: str | Path,
    *,
    source: str,
) -> Settings:
    """Settings from the arguments of a call. data: where the records are. Raises ConfigError."""
    if not isinstance(model, str | Path | torch.nn.Module):
        raise ConfigError(
            f"the model is of type {type(model).__name__}", fix="give a folder, a hub name or a loaded model"
        )
    if isinstance(model, torch.nn.Module) and not hasattr(model, "config"):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and no language model of transformers",
            fix="give what AutoModelForCausalLM.from_pretrained returns, a folder or a hub name",
        )
    if not isinstance(output, str | Path) or not str(output):
        raise ConfigError(
            f"output is {'empty' if output == '' else f'of type {type(output).__name__}'}",
            fix="give the folder of the run, or leave it out for runs/run",
        )
    groups = {**groups, "adapter": _adapter(groups)}
    for name, group in groups.items():
        refuse_no_mapping(name, group)
    columns = groups["columns"] or {}
    for name in ("path", "evaluation"):
        if name in columns:
            raise ConfigError(
                f"columns holds {name!r}", fix=f"give {'data' if name == 'path' else name} as an argument"
            )
    name = _name_of(model) if isinstance(model, torch.nn.Module) else str(model)
    content = {
        "model": {"name": name, **{key: _plain(value) for key, value in (groups["loading"] or {}).items()}},
        "data": {**data, **columns},
        "run": {"output": str(output), **(groups["run"] or {})},
    }
    more = {
        name: groups.get(name) for name in ("privacy", "adapter", "method", "synthesis", "federation", "auto")
    }
    return settings_from(
        content | {name: dict(group) for name, group in more.items() if group is not None}, source=source
    )


def _plain(value: Any) -> Any:
    """A dtype by its name, which is what settings hold."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _adapter(groups: Mapping[str, Any]) -> Any:
    columns = groups.get("columns")
    labelled = isinstance(columns, Mapping) and columns.get("label") is not None
    return adapter_settings(groups.get("adapter"), classifies=labelled)


def federate(
    model: str | Path | torch.nn.Module,
    data: Source | Mapping[str, Source],
    *,
    federation: Mapping[str, Any],
    privacy: Mapping[str, Any],
    tokenizer: Any = None,
    evaluation: Source | None = None,
    columns: Mapping[str, Any] | None = None,
    adapter: Any = None,
    loading: Mapping[str, Any] | None = None,
    method: str | Mapping[str, Any] | None = None,
    output: str | Path = "runs/run",
    run: Mapping[str, Any] | None = None,
    observer: RoundObserver | None = None,
) -> Federated:
    """A federation whose clients are all in this process; what ``privlora federate`` does. The result is a plain peft
    adapter and each client's ledger in ``output/release``, or in ``output/not-private`` where nothing protects them.

    data: a mapping from each client's public name to its records, each as in `fine_tune`; or one source that is cut
        into ``federation["clients"]`` parts, for studies and rehearsals.
    federation: fields of FederationSettings, for example ``dict(rule="tan", rounds=20, local_steps=4)``; without
        ``clients`` where ``data`` names them. Rounds of several kinds: ``phases=[dict(rounds=4, local_steps=3), …]``.
    privacy: as in `fine_tune`, without steps, which follow; public_dataset_size and expected_batch_size are of all
        clients together.
    method: a row's name or fields of MethodSettings; None takes what goes with the rule.
    For the rest see `fine_tune`.

    Raises PrivloraError subclasses that say what to mend.
    """
    from privlora.federated.run import federate as run_federation

    refuse_several("a federation")
    public, evaluation_records = (
        (None, None) if evaluation is None else given_records(evaluation, "evaluation")
    )
    sources: dict[str, Any] = {"evaluation": public}
    if federation is None:
        raise ConfigError(
            "federation is None, so nothing says how the clients train together",
            fix=f"pass federation={_EXAMPLES['federation']}",
        )
    refuse_no_mapping("federation", federation)
    terms: dict[str, Any] = dict(federation)
    records: Any = None
    if isinstance(data, Mapping):
        if "clients" in terms:
            raise ConfigError(
                "data names the clients, and so does federation", fix="remove federation['clients']"
            )
        given = {name: given_records(source, f"data[{named(name)}]") for name, source in data.items()}
        terms["clients"] = [
            {"name": name, "path": None if path == IN_MEMORY else path} for name, (path, _) in given.items()
        ]
        records = {name: found for name, (_, found) in given.items() if found is not None}
    else:
        sources["path"], records = given_records(data, "data")
    groups = {
        "privacy": privacy,
        "columns": columns,
        "adapter": adapter,
        "loading": loading,
        "method": {"name": method} if isinstance(method, str) else method,
        "run": run,
        "federation": terms,
    }
    return run_federation(
        settings_of_call(model, sources, groups, output, source="federate"),
        model=model if isinstance(model, torch.nn.Module) else None,
        tokenizer=tokenizer,
        records=records,
        evaluation=evaluation_records,
        observer=observer,
    )


def resume_federation(
    root: str | Path,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Any = None,
    evaluation: Any = None,
    observer: RoundObserver | None = None,
    **others: Any,
) -> Federated:
    """Continue a federation after an interruption or a crash. A round that had not ended is void: what its clients
    were charged for it stays charged, and they are not asked again.

    records: in memory, a list that is cut anew or a mapping from each client's name. For the rest see `resume_run`.
    """
    from privlora.federated.run import federate as run_federation

    _refuse_other_names("resume_federation", others, _TO_RESUME, _AS_BEGUN)
    refuse_several("a federation")
    return run_federation(
        _settings_of(RunFolder(Path(root)), {} if evaluation is None else {"evaluation": IN_MEMORY}),
        model=model,
        tokenizer=tokenizer,
        records=records,
        evaluation=evaluation,
        observer=observer,
        fresh=False,
    )


# In settings, as the place of a generator that was handed over.
_IN_MEMORY_GENERATOR = "in_memory:generator"


def refuse_no_mapping(name: str, group: Any) -> None:
    """Raise ConfigError for an argument that holds settings and is no mapping; what it is instead is not shown."""
    if group is not None and not isinstance(group, Mapping):
        raise ConfigError(
            f"{name} is of type {type(group).__name__}, not a mapping of settings",
            fix=f"pass {_EXAMPLES[name]}",
        )


def given_records(data: Any, name: str) -> tuple[str | list[str], list[Mapping[str, Any]] | None]:
    """Paths for the settings, or the mark that stands for records in memory and those records.

    Files are a string by itself and whatever is a ``Path``. Strings in a list are records, whatever they say.
    """
    if isinstance(data, str | Path):
        return str(data), None
    items = data if isinstance(data, list | tuple) else ()
    files = [str(item) for item in items if isinstance(item, Path)]
    if files and len(files) < len(items):
        raise ConfigError(f"{name} mixes files and records", fix="give either, not both")
    if files:
        return files, None
    try:
        return IN_MEMORY, as_records(data)
    except DataError as error:
        raise error.of(name) from None


def train_run(
    settings: Settings,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Any = None,
    evaluation: Any = None,
    generator: Any = None,
    observer: Observer | None = None,
    callbacks: Sequence[Any] = (),
    on_data: Callable[[DataSummary, Settings], None] | None = None,
    on_choice: Callable[[str], None] | None = None,
    on_profile: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Start a run. Everything that can be refused is refused before the run folder exists. An earlier start that failed
    there before anything was charged is replaced.

    records, evaluation: in memory, instead of data.path and data.evaluation. generator, callbacks: see `fine_tune`.
    on_data: told what the records are, which is private, once they are found fit. on_choice: told which row the run
    takes and why, where method.name stands for several, and how long micro-batches are, where that is auto.
    on_profile: where it is given, the run's steps are profiled, and it is told of the page, also of a run that stops
    early. progress: told (done, all) while texts are written, where they are the release (synthesis.publish).
    """
    told = checked_callbacks(callbacks)
    given = _Given(
        *(model, tokenizer, records, evaluation, generator, observer, told),
        *(on_data, on_choice, on_profile, progress),
    )

    def begin() -> tuple[Settings, Plan | None]:
        settings.refuse_a_federation()
        _refuse_who_cannot_be_told(settings, observer)
        if settings.synthesis is not None and settings.synthesis.source is not None:
            raise ConfigError(
                "synthesis.source names a finished run, and this run would train on records of its own",
                why="its release would be taken for that of the finished run, and what it cost forgotten",
                fix="remove synthesis.source, or ask that run with `privlora synthesize CONFIG --from RUN`",
            )
        if on_profile is not None:
            refuse_without_steps(settings)
        refuse_if_spent(RunFolder(Path(settings.run.output)))
        located = settings.located()
        _refuse_what_was_in_memory(located, records, evaluation, generator)
        check_sources(located, records, evaluation)
        check_columns(located, records)
        return located, plan_run(located, model)

    with joined() as ranks:
        return _run(*ranks.same(begin), given, ranks, fresh=True)


def ask_finished_run(settings: Settings, *, fresh: bool = True, **given: Any) -> Result:
    """Texts of the adapter of the run in synthesis.source, at no further cost. given: model, tokenizer, progress."""
    folder, summary = texts_of_finished_run(settings, fresh=fresh, **given)
    return _result(folder, summary, 0 if summary is None else summary.charges)


def resume_run(
    root: str | Path,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Any = None,
    evaluation: Any = None,
    generator: Any = None,
    observer: Observer | None = None,
    callbacks: Sequence[Any] = (),
    on_data: Callable[[DataSummary, Settings], None] | None = None,
    profile: bool = False,
    on_profile: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
    show_progress: bool | None = None,
    **others: Any,
) -> Result:
    """Continue a run after an interruption or a crash, with fresh noise; nothing charged is forgotten.

    records, evaluation: those that the run began with, where they were in memory; or where their files lie now, if they
        have moved. model, tokenizer, generator: those that were in memory.
    profile, on_profile: profile the steps that are left, see ``fine_tune`` and ``train_run``. callbacks, show_progress:
        see ``fine_tune``.

    Raises RunError if there is no run in ``root``, if the model differs from the run's, or for evaluation records where
    the run has none; PrivacyError if the private records differ. A finished run is only reported again.
    """
    _refuse_other_names("resume_run", others, _TO_RESUME, _AS_BEGUN)
    on_profile = on_profile or (_unheard if profile else None)
    folder = RunFolder(Path(root))
    heard = checked_callbacks(callbacks)
    places = dict[str, Any]()
    if records is not None:
        places["path"], records = given_records(records, "records")
    if evaluation is not None:
        places["evaluation"], evaluation = given_records(evaluation, "evaluation")

    def begin() -> tuple[Settings, Plan | None]:
        settings = _settings_of(folder, places)
        if settings.federation is not None:
            raise RunError(f"{str(root)!r} holds a federation", fix="use resume_federation")
        _refuse_who_cannot_be_told(settings, observer)
        if on_profile is not None:
            refuse_without_steps(settings)
        if settings.synthesis is not None and settings.synthesis.source is not None:
            return settings, None
        _refuse_what_was_in_memory(settings, records, evaluation, generator)
        _refuse_moved(folder.root, settings, records, evaluation)
        plan = None
        if settings.privacy.private and not folder.has_plan:  # crashed before anything was released
            plan = plan_privacy(settings, model)[0]
        return settings, plan

    with joined() as ranks, shown(show_progress, observer) as told:
        given = _Given(
            *(model, tokenizer, records, evaluation, generator, told["observer"], heard),
            *(on_data or told.get("on_data"), None, on_profile, progress),
        )
        settings, plan = ranks.same(begin)
        if settings.synthesis is not None and settings.synthesis.source is not None:
            options: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "progress": progress}
            return ranks.same(lambda: ask_finished_run(settings, fresh=False, **options))
        return _run(settings, plan, given, ranks, fresh=False)


def _settings_of(folder: RunFolder, places: Mapping[str, Any]) -> Settings:
    """Those that the run was started with. places: where records lie now; the others are where they were.

    Raises RunError without any settings, or for evaluation records where they name none.
    """
    if not folder.settings.exists():
        raise no_run(folder.root)
    if folder.is_audit or (folder.has_plan and read_ledger(folder.ledger).plan.dataset.startswith(AUDITED)):
        raise RunError(
            f"{str(folder.root)!r} holds an audit",
            why="canaries are among its records, and what is trained with them is not for release",
            fix="run the command of the audit again, which goes on where it stopped",
        )
    settings = load_settings(folder.settings)
    if "evaluation" in places and settings.data.evaluation is None:
        raise RunError(
            "this run has no evaluation records, so it takes none when it is resumed",
            why="their loss would be published, and the run's settings say that there is none",
            fix="leave evaluation out; `privlora evaluate` measures a finished run",
        )
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"output": str(folder.root)}),
            "data": settings.data.model_copy(update=dict(places)),
        }
    )


def _refuse_moved(root: Path, settings: Settings, records: Any, evaluation: Any) -> None:
    """Raise DataError for a file that is no longer there, with the call that says where the records lie now."""
    why, place = (
        "a run goes on with the records that it began with",
        "resume in the folder in which it was started",
    )
    try:
        check_sources(settings, [], [])  # what no call takes from another place
    except DataError as error:
        raise DataError(error.what, why=why, fix=place) from None
    try:
        check_sources(settings, records, evaluation)
    except DataError as error:
        of_memory = _of_memory(settings)
        files = {"records": "--data FILE"} | (
            {} if settings.data.evaluation is None else {"evaluation": "--evaluation FILE"}
        )
        given = "".join(f", {name}={'...' if of_memory[name] else 'FILE'}" for name in files)
        ways = [f"resume_run({str(root)!r}{given})"]
        if not any(of_memory.values()):
            ways.insert(0, f"`privlora resume {shlex.quote(str(root))} {' '.join(files.values())}`")
        raise DataError(
            error.what, why=why, fix=f"{place}, or say where they lie now: {', or in Python '.join(ways)}"
        ) from None


def _refuse_what_was_in_memory(settings: Settings, *given: Any) -> None:
    """Raise RunError for what is not given. given: records, evaluation, generator."""
    names = zip(_of_memory(settings).items(), given, strict=True)
    missing = [name for (name, was_there), value in names if was_there and value is None]
    if missing:
        raise RunError(
            f"this run's {' and '.join(missing)} {'were' if missing != ['generator'] else 'was'} in memory",
            fix=f"call resume_run(root, {', '.join(f'{name}=...' for name in missing)})",
        )


def _of_memory(settings: Settings) -> dict[str, bool]:
    """What a caller handed over that is in no file."""
    synthesis = settings.synthesis
    return {
        "records": settings.data.path == IN_MEMORY,
        "evaluation": settings.data.evaluation == IN_MEMORY,
        "generator": synthesis is not None and synthesis.callable == _IN_MEMORY_GENERATOR,
    }


def _refuse_who_cannot_be_told(settings: Settings, observer: Any) -> None:
    """Before anything is charged: an observer without its methods, a logger without its package."""
    refuse_no_observer(observer, settings)
    refuse_missing_loggers(settings.run.report_to)


@dataclass(frozen=True)
class _Given:
    """What a caller hands over beside settings, and what it wants to be told: see ``train_run``."""

    model: torch.nn.Module | None
    tokenizer: Any
    records: Any
    evaluation: Any
    generator: Any
    observer: Observer | None
    callbacks: Sequence[Any]
    on_data: Callable[[DataSummary, Settings], None] | None
    on_choice: Callable[[str], None] | None
    on_profile: Callable[[Path], None] | None
    progress: Progress | None


_ON_PAPER: Final = "steps on paper, for their memory"


def _run(settings: Settings, plan: Plan | None, given: _Given, ranks: Ranks, *, fresh: bool) -> Result:
    """All of a run in its first process; the others of ``ranks`` take their share of every batch."""
    if ranks.size > 1:
        refuse_in_several(settings, given=given.model is not None)
    if settings.model.fully_shard and ranks.size > 1:
        model, own = load_sharded(settings.model, ranks)
        tokenizer = own if given.tokenizer is None else given.tokenizer
    else:
        model, tokenizer = ranks.each(
            lambda: given_or_loaded(settings.model, given.model, given.tokenizer, head_of(settings))
        )
    refuse_unlike_processes(model, ranks)
    settings = fitted(settings, model)
    folder = RunFolder(Path(settings.run.output))
    ranks.each(lambda: check_model(settings, model, tokenizer))
    refuse_other_logits(settings, model, ranks)
    asked = settings.run.tokens_per_micro_batch
    told = getattr(given.observer, "on_public_work", None) or (lambda *_: None)

    def split() -> tuple[Settings, Fitted | None]:
        device = next(model.parameters()).device
        # Without a GPU they share the machine's memory.
        sharing = ranks.size if device.type == "cpu" else 1
        if asked != "auto":
            return settings, None
        told(_ON_PAPER, 0, 1)
        found = with_micro_batches(settings, model, device, sharing=sharing)
        told(_ON_PAPER, 1, 1)
        return found

    # Before the records are read, so that nothing of them is in what is free.
    settings, micro_batches = ranks.same(split)
    if micro_batches is not None and given.on_choice is not None:
        given.on_choice(micro_batches.why)

    def prepare() -> tuple[Settings, Plan | None, Data, Chosen | None, Identity]:
        # A fresh run has no folder yet.
        cache = None if fresh else folder.tokens
        whose = None if fresh else lambda data: refuse_others(folder, identify(data, model))
        sources = given.records, given.evaluation
        data = load_data(settings, tokenizer, *sources, model=model, cache=cache, whose=whose)
        if given.on_data is not None:
            given.on_data(data.summary, settings)
        identity = identify(data, model)
        if not (fresh and plan is not None and leaves_a_choice(settings)):
            return settings, plan, data, None, identity
        if settings.method.name in CHOICES:
            chosen = choose(settings, plan.event.noise_multiplier, model, tokenizer, given.generator, told)
        else:
            chosen = settle(settings, plan, model, tokenizer, told)
        if given.on_choice is not None:
            given.on_choice(because(chosen.facts))
        named = replace(plan, method=chosen.settings.method.name, clip_norm=chosen.settings.privacy.clip_norm)
        return chosen.settings, named, data, chosen, identity

    settings, plan, data, chosen, identity = ranks.same(prepare)
    peak = told_peak(settings, model) if ranks.first and given.on_profile is not None else ""
    with unchanged_afterwards(model):
        if settings.data.label is not None:
            padded_as(model, tokenizer)
        # In all of them before the folder exists.
        parts = ranks.each(lambda: build_parts(settings, model, PublicStart(tokenizer, given.generator)))
        with parts.adapter:
            if not ranks.first:
                train_beside(parts, data, ranks)
                return ranks.same(_by_the_first)
            if fresh:
                make_room(folder)
                folder.create(protects=settings.privacy.protects)
                keep_identity(folder, identity)  # first: whatever can be resumed has it
                keep_choice(folder, chosen)
                kept = _as_asked(settings, asked)
                write_atomically(folder.settings, parts.hyper.in_comments(kept) + kept.to_yaml())
                data.keep_tokens(folder.tokens)
                write_atomically(folder.data_summary, json.dumps(data.summary.to_dict()) + "\n")
            known = plan
            if settings.privacy.private and known is None:
                known = read_ledger(folder.ledger).plan
            reported = loggers(settings.run.report_to, folder, settings.run.label)
            if (begin := getattr(given.observer, "on_run", None)) is not None:
                begin(known, settings)
            with (
                _resumable(settings, given),
                watching(given.observer, given.callbacks, reported, known, settings) as (observer, heard),
                profiled(parts, folder, peak, ranks.size, given.on_profile) as pages,
            ):
                finish_training(parts, data, folder, plan, observer=observer, ranks=ranks)
            rows = _rows(parts, folder, known) if reported else []
            services = [one for one in reported if isinstance(one, Service)]
            for logger in reported:
                if logger not in services:
                    logger.end(rows)
            summary = read_ledger(folder.ledger) if settings.privacy.private else None
            folder.hide_settings()
            if settings.synthesis is not None and settings.synthesis.publish:
                run_id = NO_RUN if summary is None else summary.run_id
                texts = final_texts(parts, folder, run_id, given.progress)
                report = gather(parts, summary, read_lines(folder.evaluations), choice=read_choice(folder))
                with base_alone(model, parts.adapter) as base:
                    publish_texts(folder, report, texts, settings, base, tokenizer, summary)
            else:
                publish(folder, parts, summary)
            for service in services if heard.begun else ():
                service.end(rows)
    was_given = given.model is not None
    found = ranks.same(lambda: _result(folder, summary, settings.privacy.steps, base_was_given=was_given))
    return replace(found, profile=pages[0]) if pages else found


@contextmanager
def _resumable(settings: Settings, given: _Given) -> Iterator[None]:
    """Whoever stops what is inside is told how to go on."""
    try:
        yield
    except Interrupted as stop:
        names = [name for name in ("model", "tokenizer") if getattr(given, name) is not None]
        names += [name for name, was_there in _of_memory(settings).items() if was_there]
        more = "".join(f", {name}=..." for name in names)
        stop.add_note(f"All is saved. Go on with privlora.resume_run({settings.run.output!r}{more})")
        raise


def _rows(parts: Parts, folder: RunFolder, plan: Plan | None) -> list[dict[str, Any]]:
    """Of all of a run that is over."""
    evaluations, run = read_lines(folder.evaluations), parts.settings.run
    steps = parts.settings.privacy.steps
    shown = steps_shown(steps, run.log_every, [row["step"] for row in evaluations])
    return public_rows(plan, shown, (lambda _: None) if parts.ballot else parts.learning_rate, evaluations)


def _by_the_first() -> Result:
    raise AssertionError("only the first process knows")


def _as_asked(settings: Settings, tokens: int | Literal["auto"]) -> Settings:
    """What a resumed run is to read: ``auto`` where it was asked for, since it may be on another machine."""
    return settings.model_copy(
        update={"run": settings.run.model_copy(update={"tokens_per_micro_batch": tokens})}
    )


def _result(
    folder: RunFolder, summary: LedgerSummary | None, steps: int, *, base_was_given: bool = False
) -> Result:
    promise: tuple[float | None, float | None] = (None, None)
    if summary is not None and not summary.plan.insecure_noise:
        promise = summary.epsilon(), summary.plan.delta
    return Result(folder.release, steps, *promise, base_was_given=base_was_given)


def _name_of(model: torch.nn.Module) -> str:
    return str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or UNNAMED)


__all__ = ["Parts", "Result", "federate", "fine_tune", "resume_federation", "resume_run", "train_run"]
