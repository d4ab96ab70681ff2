"""One call in Python: ``fine_tune``, ``federate``, ``synthesize``; and what is behind the command line.

Slow imports are inside of functions, so that what is wrong with the arguments is reported before torch is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privlora.accounting import Plan, read_ledger
from privlora.calling import (
    Given,
    Source,
    all_auto,
    is_loaded,
    naming_the_nearest,
    records_of,
    refuse_moved,
    refuse_no_folder,
    refuse_no_tokenizer,
    refuse_what_was_in_memory,
    settings_of_call,
    with_generator,
)
from privlora.config import IN_MEMORY, Settings, kept_settings, load_settings
from privlora.consoles import loading_for_a_call
from privlora.errors import ConfigError, RunError, Together, named
from privlora.result import Result
from privlora.training.files import AUDITED, RunFolder, no_run
from privlora.training.loggers import refuse_missing_loggers
from privlora.training.observer import Observer, refuse_no_observer
from privlora.training.preflight import preflight
from privlora.training.ranks import refuse_several, several_processes

if TYPE_CHECKING:
    import torch

    from privlora.federated.history import RoundObserver
    from privlora.federated.run import Federated


@naming_the_nearest
def fine_tune(
    model: str | Path | torch.nn.Module,
    records: Source,
    *,
    privacy: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    evaluation: Source | None = None,
    data: Mapping[str, Any] | None = None,
    adapter: Any = None,
    loading: Mapping[str, Any] | None = None,
    method: str | Mapping[str, Any] = "prism",
    synthesis: Mapping[str, Any] | None = None,
    auto: bool | Mapping[str, Any] | None = None,
    generator: Any = None,
    output: str | Path = "runs/run",
    run: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    callbacks: Sequence[Any] = (),
    profile: bool = False,
    show_progress: bool | None = None,
) -> Result:
    """Fine-tune a causal LM privately; the result is a plain peft adapter in ``output/release``, or in
    ``output/not-private`` where nothing protects the records.

    model: a local folder, a hub name, or a loaded transformers model. The module is not wrapped; when this returns,
        also by an exception, it is exactly as before. tokenizer: of a loaded model; of others, instead of theirs.
    records: a file as a string or a ``Path``, a list of ``Path``, or ``hf://name:split``; or themselves: any iterable
        of mappings (a ``datasets.Dataset`` or a streaming one, too), a ``pandas.DataFrame``, or a list of strings,
        which are texts and never names of files. evaluation: PUBLIC records of the same form.
    privacy: the fields of PrivacySettings, for example ``dict(target_epsilon=3, delta=1e-5, steps=200,
        expected_batch_size=64, public_dataset_size=10_000)``.
    data: further fields of DataSettings (text, prompt, completion, messages, loss_on, max_length, …).
    adapter: fields of AdapterSettings, or a ``peft.LoraConfig`` of which nothing is set that means nothing here. run:
        fields of RunSettings. method: a method's name or fields of MethodSettings.
    synthesis: fields of SynthesisSettings, for methods that lean on public texts, or for a warm start. generator: what
        writes the texts, instead of ``synthesis["callable"]``: a function from a list of prompts to a list of
        answers, or an object with ``random`` and ``vary``. It is never given anything private.
    auto: True: what is not given of sizes, learning rate, clip norm, metric, rank and layers is what ``privlora init``
        writes. Or fields of AutoSettings, for settings that are "auto", as ``privacy["steps"]``.
    loading: further fields of ModelSettings (dtype, device, quantization, device_map, attn_implementation, revision,
        gradient_checkpointing); of a loaded model only gradient_checkpointing has an effect.
    callbacks: functions that are called with a `PublicEvent`, or objects of ``transformers.TrainerCallback``. They are
        given public numbers alone, and may end the run as Ctrl-C does, to be resumed. observer: see `Observer`.
    profile: leave a trace in ``output/private/profile`` that shows where the time of a step goes. The run is the same.
    show_progress: show the run on standard error. None: unless there is an observer, or PRIVLORA_PROGRESS=0 in the
        environment. A terminal shows all that ``privlora train`` shows; a notebook or a log, which may be passed on,
        gets public numbers alone, and the place of the private ones.

    Raises PrivloraError subclasses that say what to mend; TypeError for an argument that there is not.
    """
    problems = Together()
    problems.of(None, refuse_no_tokenizer, tokenizer)
    problems.of(None, refuse_no_observer, observer)
    callbacks = problems.of([], callbacks_of, callbacks)
    path, given = records_of(problems, records, "records", needed=True)
    public, held_out = records_of(problems, evaluation, "evaluation")
    groups = {"privacy": privacy, "data": data, "adapter": adapter, "loading": loading, "method": method}
    groups |= {"synthesis": problems.of(None, with_generator, synthesis, generator)}
    groups |= {"auto": all_auto(auto), "run": run}
    files = {"path": path, "evaluation": public}
    settings = settings_of_call(model, files, groups, output, source="fine_tune", problems=problems)
    loaded = model if is_loaded(model) else None
    handed = Given(loaded, tokenizer, given, held_out, generator, callbacks=callbacks, profile=profile)
    return start_run(settings, lambda: _watched(show_progress, observer), handed)


@contextmanager
def _watched(asked: bool | None, observer: Observer | None) -> Iterator[Observer | None]:
    """`privlora.running.shown`, after the slow imports of a run."""
    with loading_for_a_call(asked, observer):
        from privlora.running import shown
    with shown(asked, observer) as told:
        yield told


@naming_the_nearest
def federate(
    model: str | Path | torch.nn.Module,
    records: Source | Mapping[str, Source],
    *,
    federation: Mapping[str, Any] | None = None,
    privacy: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    evaluation: Source | None = None,
    data: Mapping[str, Any] | None = None,
    adapter: Any = None,
    loading: Mapping[str, Any] | None = None,
    method: str | Mapping[str, Any] | None = None,
    output: str | Path = "runs/run",
    run: Mapping[str, Any] | None = None,
    observer: RoundObserver | None = None,
) -> Federated:
    """A federation whose clients are all in this process, as ``privlora train`` trains it. The result is a plain
    peft adapter and each client's ledger in ``output/release``, or in ``output/not-private`` where nothing protects
    them.

    records: a mapping from each client's public name to its records, each as in `fine_tune`; or one source that is cut
        into ``federation["clients"]`` parts, for studies and rehearsals.
    federation: fields of FederationSettings, for example ``dict(rule="tan", rounds=20, local_steps=4)``; without
        ``clients`` where ``records`` names them. Rounds of several kinds: ``phases=[dict(rounds=4), …]``.
    privacy: as in `fine_tune`, without steps, which follow; public_dataset_size and expected_batch_size are of all
        clients together.
    method: a method's name or fields of MethodSettings; None takes what goes with the rule.
    For the rest see `fine_tune`.

    Raises PrivloraError subclasses that say what to mend.
    """
    refuse_several("a federation")
    problems = Together()
    problems.of(None, refuse_no_tokenizer, tokenizer)
    public, evaluation_records = records_of(problems, evaluation, "evaluation")
    sources: dict[str, Any] = {"evaluation": public}
    if not isinstance(federation, Mapping):
        what = f"federation is of type {type(federation).__name__}, not a mapping of settings"
        fix = "pass federation=dict(rule='tan', rounds=20, local_steps=4)"
        problems.found.append(ConfigError(what, fix=fix))
    terms = dict(federation) if isinstance(federation, Mapping) else None
    found: Any = None
    if isinstance(records, Mapping):
        if terms is not None and "clients" in terms:
            what = "records names the clients, and so does federation"
            problems.found.append(ConfigError(what, fix="remove federation['clients']"))
        given = {name: records_of(problems, own, f"records[{named(name)}]") for name, own in records.items()}
        places = {name: None if path == IN_MEMORY else path for name, (path, _) in given.items()}
        if terms is not None:
            terms["clients"] = [{"name": name, "path": path} for name, path in places.items()]
        found = {name: own for name, (_, own) in given.items() if own is not None}
    else:
        sources["path"], found = records_of(problems, records, "records", needed=True)
    if terms is None:  # nothing is said of clients that nobody knows
        sources["path"] = IN_MEMORY
    groups = {"privacy": privacy, "data": data, "adapter": adapter, "loading": loading, "method": method}
    groups |= {"run": run, "federation": terms}
    loaded = model if is_loaded(model) else None
    settings = settings_of_call(model, sources, groups, output, source="federate", problems=problems)
    preflight(settings, found, evaluation_records, given=loaded is not None, begins=False)
    from privlora.federated.run import federate as run_federation

    return run_federation(
        settings,
        model=loaded,
        tokenizer=tokenizer,
        records=found,
        evaluation=evaluation_records,
        observer=observer,
    )


@naming_the_nearest
def resume_federation(
    root: str | Path,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Any = None,
    evaluation: Any = None,
    observer: RoundObserver | None = None,
) -> Federated:
    """Continue a federation after an interruption or a crash. A round that had not ended is void: what its clients
    were charged for it stays charged, and they are not asked again.

    records: in memory, a list that is cut anew or a mapping from each client's name. For the rest see `resume_run`.
    """
    refuse_no_tokenizer(tokenizer)
    refuse_several("a federation")
    from privlora.federated.run import federate as run_federation

    return run_federation(
        _settings_of(RunFolder(Path(root)), {} if evaluation is None else {"evaluation": IN_MEMORY}),
        model=model,
        tokenizer=tokenizer,
        records=records,
        evaluation=evaluation,
        observer=observer,
        fresh=False,
    )


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
    profile: bool = False,
) -> Result:
    """Start a run. Everything that can be refused is refused before the run folder exists. An earlier start that failed
    there before anything was charged is replaced.

    records, evaluation: in memory, instead of data.path and data.evaluation. For the rest see `fine_tune`.
    """
    refuse_no_observer(observer)
    given = Given(model, tokenizer, records, evaluation, generator, callbacks=callbacks, profile=profile)
    return start_run(settings, lambda: nullcontext(observer), given)


def start_run(
    settings: Settings, watched: Callable[[], AbstractContextManager[Observer | None]], given: Given
) -> Result:
    """`train_run`, which looks at all that needs neither torch nor the model before it enters ``watched``: that may
    import both, and gives the observer."""

    def look() -> None:
        settings.refuse_a_federation()
        if settings.synthesis is not None and settings.synthesis.source is not None:
            raise ConfigError(
                "synthesis.source names a finished run, and this run would train on records of its own",
                why="its release would be taken for that of the finished run, and what it cost forgotten",
                fix="remove synthesis.source, or ask that run with `privlora synthesize CONFIG --from RUN`",
            )
        refuse_what_was_in_memory(settings, given)
        problems = Together()
        problems.of(None, refuse_missing_loggers, settings.run.report_to)
        loaded = given.model is not None
        problems.of(None, lambda: preflight(settings, given.records, given.evaluation, given=loaded))
        problems.tell()

    if not several_processes():  # of which the first one looks, once they have joined
        look()
    with watched() as observer:
        from privlora.methods import far_rate, find_row
        from privlora.profiling import refuse_without_steps
        from privlora.running import train_and_publish
        from privlora.training.assembly import plan_run
        from privlora.training.callbacks import checked_callbacks
        from privlora.training.promise import bands_of
        from privlora.training.texts.synthetic_texts import refuse_unusable_texts
        from privlora.training.torch_ranks import joined

        heard = Observer() if observer is None else observer
        handed = replace(given, observer=heard, callbacks=checked_callbacks(given.callbacks))

        def begin() -> tuple[Settings, Plan | None]:
            if several_processes():
                look()
            if given.profile:
                refuse_without_steps(settings)
            located = settings.located()
            plan = plan_run(located, given.model)
            heard.on_plan(plan, located)
            if located.synthesis is not None and given.generator is None:
                refuse_unusable_texts(located, find_row(located.method.name))
            bands = 1 if plan is None else bands_of(plan)
            for odd in (far_rate(located, bands), located.privacy.mostly_empty):
                if odd is not None:
                    heard.on_warning(odd)
            return located, plan

        with joined() as ranks:
            return train_and_publish(*ranks.same(begin), handed, ranks, fresh=True)


@naming_the_nearest
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
    profile: bool = False,
    show_progress: bool | None = None,
) -> Result:
    """Continue a run after an interruption or a crash, with fresh noise; nothing charged is forgotten.

    records, evaluation: those that the run began with, where they were in memory; or where their files lie now, if they
        have moved. model, tokenizer, generator: those that were in memory.
    profile: profile the steps that are left. callbacks, show_progress: see ``fine_tune``.

    Raises RunError if there is no run in ``root``, if the model differs from the run's, or for evaluation records where
    the run has none; PrivacyError if the private records differ. A finished run is only reported again.
    """
    problems = Together()
    problems.of(None, refuse_no_tokenizer, tokenizer)
    problems.of(None, refuse_no_observer, observer)
    problems.of(None, refuse_no_folder, "root", root)
    places = dict[str, Any]()
    if records is not None:
        places["path"], records = records_of(problems, records, "records")
    if evaluation is not None:
        places["evaluation"], evaluation = records_of(problems, evaluation, "evaluation")
    heard: Sequence[Any] = problems.of([], callbacks_of, callbacks)
    problems.tell()
    folder = RunFolder(Path(root))
    if not (several_processes() or folder.settings.exists()):
        raise no_run(folder.root)
    with loading_for_a_call(show_progress, observer):
        from privlora.profiling import refuse_without_steps
        from privlora.running import ask_finished_run, shown, train_and_publish
        from privlora.training.promise import plan_privacy
        from privlora.training.torch_ranks import joined

    handed = Given(model, tokenizer, records, evaluation, generator, callbacks=heard, profile=profile)

    def begin() -> tuple[Settings, Plan | None]:
        settings = _settings_of(folder, places)
        if settings.federation is not None:
            raise RunError(f"{str(root)!r} holds a federation", fix="use resume_federation")
        refuse_missing_loggers(settings.run.report_to)
        if profile:
            refuse_without_steps(settings)
        if settings.synthesis is not None and settings.synthesis.source is not None:
            return settings, None
        _refuse_edited(folder, settings)
        refuse_what_was_in_memory(settings, handed)
        refuse_moved(folder.root, settings, records, evaluation)
        plan = None
        if settings.privacy.private and not folder.has_plan:  # crashed before anything was released
            plan = plan_privacy(settings, model)
        kept = plan if plan is not None or not settings.privacy.private else read_ledger(folder.ledger).plan
        (told or Observer()).on_plan(kept, settings)
        return settings, plan

    with joined() as ranks, shown(show_progress, observer) as told:
        settings, plan = ranks.same(begin)
        if settings.synthesis is not None and settings.synthesis.source is not None:
            options: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "observer": told}
            return ranks.same(lambda: ask_finished_run(settings, fresh=False, **options))
        given = replace(handed, observer=told or Observer())
        return train_and_publish(settings, plan, given, ranks, fresh=False)


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
    settings = kept_settings(folder.settings)
    if "evaluation" in places and settings.data.evaluation is None:
        raise RunError(
            "this run has no evaluation records, so it takes none when it is resumed",
            why="their loss would be published, and the run's settings say that there is none",
            fix="leave evaluation out; `privlora evaluate` measures a finished run",
        )
    return settings.changed(run={"output": str(folder.root)}, data=places)


def _refuse_edited(folder: RunFolder, settings: Settings) -> None:
    """Before the model is loaded."""
    from privlora.methods import find_row
    from privlora.rehearsals.kept import read_choice
    from privlora.training.identity import fixed, refuse_other_settings
    from privlora.training.promise import bands_to_come

    method, privacy = settings.method, settings.privacy
    of_noise: dict[str, Any] = {"private": privacy.private, "bands": bands_to_come(privacy)}
    hyper = find_row(method.name).resolve(method, settings.adapter.init, privacy.steps, **of_noise)
    refuse_other_settings(folder, fixed(settings, hyper.to_dict()))
    read_choice(folder)  # which refuses another one than the run's


def callbacks_of(callbacks: Any) -> Sequence[Any]:
    """`checked_callbacks` of a call; without any, nothing slow is imported."""
    if callbacks is None or (isinstance(callbacks, list | tuple) and not callbacks):
        return ()
    from privlora.training.callbacks import checked_callbacks

    return checked_callbacks(callbacks)


@dataclass(frozen=True)
class SynthesisResult(Result):
    """What a run leaves whose release is texts. All of it is public, but for what lies in ``folder``/private.

    texts: those of ``release``/synthetic.jsonl, in order. folder: of the run. report: privacy_report.json, where
    "quality" has the figures. For the rest see ``Result``.
    """

    texts: tuple[str, ...]
    folder: Path


@naming_the_nearest
def synthesize(
    model: str | Path | torch.nn.Module,
    records: Source | None = None,
    *,
    synthesis: Mapping[str, Any],
    privacy: Mapping[str, Any] | None = None,
    source: str | Path | None = None,
    tokenizer: Any = None,
    evaluation: Source | None = None,
    data: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    loading: Mapping[str, Any] | None = None,
    method: str | Mapping[str, Any] | None = None,
    generator: Any = None,
    output: str | Path = "runs/texts",
    run: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> SynthesisResult:
    """Make a private data set of texts that stand for ``records``; what ``privlora synthesize`` does.

    records: the private ones, as in ``fine_tune``. Or source: the folder of a finished run of ``fine_tune``, whose
        adapter is asked at no further cost; what it was trained on and how is known from there, so of the rest
        ``data``, ``loading``, ``tokenizer``, ``run`` and ``observer`` may be given.
    synthesis: fields of SynthesisSettings, for example ``dict(preset="clinical-note", seeds=100, samples=500)``.
    method: a method's name or fields of MethodSettings; None: aug-pe.
    generator: see ``fine_tune``. It is never given anything private.
    For the rest see ``fine_tune``.

    Raises PrivloraError subclasses that say what to mend.
    """
    problems = Together()
    problems.of(None, refuse_no_tokenizer, tokenizer)
    if (records is None) == (source is None):
        what = "texts stand for records, or come of a finished run"
        problems.found.append(ConfigError(what, fix="give records, or source, and not both"))
        problems.tell()
    loaded = model if is_loaded(model) else None
    groups: dict[str, Any] = {"data": data, "loading": loading, "run": run}
    if source is not None:
        refused = {"privacy": privacy, "evaluation": evaluation, "adapter": adapter, "method": method}
        problems.found += [
            ConfigError(f"{name} is given, and the run in source is trained already", fix=f"leave out {name}")
            for name, value in {**refused, "generator": generator}.items()
            if value is not None
        ]
        problems.tell()
        groups |= {"synthesis": synthesis}
        settings = _of_source(source, model, groups, output)
        return start_synthesis(settings, lambda: nullcontext(observer), model=loaded, tokenizer=tokenizer)
    path, given = records_of(problems, records, "records")
    public, held = records_of(problems, evaluation, "evaluation")
    groups |= {"privacy": privacy, "adapter": adapter, "method": "aug-pe" if method is None else method}
    groups |= {"synthesis": problems.of(None, with_generator, synthesis, generator)}
    files = {"path": path, "evaluation": public}
    settings = settings_of_call(model, files, groups, output, source="synthesize", problems=problems)
    handed = {"model": loaded, "tokenizer": tokenizer, "generator": generator, "records": given}
    return start_synthesis(settings, lambda: nullcontext(observer), evaluation=held, **handed)


def start_synthesis(
    settings: Settings, watched: Callable[[], AbstractContextManager[Observer | None]], **given: Any
) -> SynthesisResult:
    """Start a run whose release is a data set of generated texts. ``watched``: as of `start_run`.

    With synthesis.source the adapter of that finished run is asked, at no further cost; given: then model and tokenizer
    alone, else as of `train_run`. Raises what `train_run` does.
    """
    if settings.synthesis is None:
        raise ConfigError("nothing says who writes the texts", fix="add the group synthesis")
    own = settings.synthesis.source is None
    settings = settings.changed(synthesis={"publish": True})
    if own:
        result = start_run(settings, watched, Given(**given))
    else:
        with watched() as observer:
            from privlora.running import ask_finished_run

            result = ask_finished_run(settings.located(), observer=observer, **given)
    from privlora.reporting.publication import read_report

    folder = RunFolder(Path(settings.run.output))
    report = read_report(folder.report)
    rows = map(json.loads, folder.texts.read_text(encoding="utf-8").splitlines())
    texts = tuple(row[report["texts"]["column"]] for row in rows)
    return SynthesisResult(**vars(result), texts=texts, folder=folder.root)


def _of_source(
    source: str | Path, model: str | Path | torch.nn.Module, groups: Mapping[str, Any], output: str | Path
) -> Settings:
    """The settings of the finished run, with what is asked of its adapter. Raises RunError without such a run."""
    folder = RunFolder(Path(source).expanduser())
    if not folder.settings.exists():
        raise no_run(folder.root)
    trained = load_settings(folder.settings)
    asked = groups["synthesis"]
    if isinstance(asked, Mapping):
        asked = {**asked, "publish": True, "source": str(folder.root.resolve())}
    known = {
        "privacy": trained.privacy.model_dump(exclude_unset=True),
        "data": trained.data.model_dump(exclude_unset=True, exclude={"path", "evaluation"}),
        "loading": trained.model.model_dump(exclude_unset=True, exclude={"name"}),
    }
    given = {name: group for name, group in groups.items() if group is not None}
    return settings_of_call(
        trained.model.name if is_loaded(model) else model,
        {"path": trained.data.path},
        {**dict.fromkeys(groups), **known, **given, "synthesis": asked},
        output,
        source="synthesize",
    )
