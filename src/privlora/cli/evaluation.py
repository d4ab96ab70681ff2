"""``privlora evaluate``: what a trained adapter, or a model, is worth on records that may be shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from privlora.cli.console import JsonOption, argument, option, quiet_libraries, show
from privlora.cli.training import load_run_settings
from privlora.config import IN_MEMORY, DataSettings, ModelSettings, checked
from privlora.config.groups import named_twice
from privlora.consoles import err, loading, saying
from privlora.data.records import refuse_missing
from privlora.data.tasks import find_task, scoring_of
from privlora.errors import ConfigError, ModelError, RunError, Together, in_one_line
from privlora.names import ADAPTER_FILES, HUB_NAME
from privlora.training.files import RunFolder, near_run
from privlora.training.preflight import check_columns, refuse_unknown_model

if TYPE_CHECKING:
    import torch

    from privlora.data.formats import Format
    from privlora.data.records import Record
    from privlora.training.classifier import Head


_SEEN, _LARGE = 0.0005, 50.0  # nats

_FORM = ("task", "text", "prompt", "completion", "messages")
_REPLACED = (*_FORM, "label", "labels", "text_pair", "chosen", "rejected", "dpo_beta", "loss_on", "template")
"""Settings of a run's records that another form of records replaces."""


def evaluate(
    target: Annotated[str, argument("TARGET", "A run, an adapter's folder, or a model.")],
    data: Annotated[
        list[str] | None, option("Records, else a run's data.evaluation; may be repeated.")
    ] = None,
    base: Annotated[str | None, option("Base model, if the adapter's own note of it is wrong.")] = None,
    task: Annotated[str | None, option("A benchmark, as data.task: its score.")] = None,
    scoring: Annotated[str | None, option("How a task is scored: likelihood or generation.")] = None,
    max_new_tokens: Annotated[int | None, option("Of a generated answer.", min=1)] = None,
    beams: Annotated[int | None, option("Of a generated answer; 1 is greedy.", min=1)] = None,
    per_example: Annotated[bool, option("With --json: every answer of a task.", "--per-example")] = False,
    format: Annotated[str | None, option("As data.format.")] = None,
    text: Annotated[str | None, option("Column or format of whole texts.")] = None,
    prompt: Annotated[str | None, option("Column or format of prompts.")] = None,
    completion: Annotated[str | None, option("Column of completions.")] = None,
    messages: Annotated[str | None, option("Column of chat messages.")] = None,
    label: Annotated[str | None, option("Column of the class of a text, as data.label.")] = None,
    labels: Annotated[str | None, option("All labels, as a,b,c; how many; or score. As data.labels.")] = None,
    text_pair: Annotated[str | None, option("Column of a pair's second text.")] = None,
    loss_on: Annotated[str | None, option("all or completion.")] = None,
    max_length: Annotated[int | None, option("In tokens.")] = None,
    limit: Annotated[int | None, option("Use only this many records, from the first on.", min=1)] = None,
    dtype: Annotated[str | None, option("auto, float32 or bfloat16.")] = None,
    device: Annotated[str | None, option("auto, cpu, cuda, …")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score of TARGET on a task, else its next-token loss; a run's own task or columns are used unless given.

    Several --data of a task are parts: each is scored, and the score is their mean.
    """
    problems = Together()  # one that hides none of the others
    resolved = problems.of(None, _resolve, target, base)
    stored, adapter, run_data, seed = resolved or ({"name": target}, None, {}, 0)
    if not data and resolved is not None:
        data = problems.of(None, _own_records, target)
    form: dict[str, Any] = dict(zip(_FORM, (task, text, prompt, completion, messages), strict=True))
    form |= {} if label is None else {"label": label, "labels": _labels(labels), "text_pair": text_pair}
    if any(form.values()):
        run_data = {name: value for name, value in run_data.items() if name not in _REPLACED}
    reading = {"format": format, "loss_on": loss_on, "max_length": max_length}
    if data and named_twice(data) is not None:
        problems.found.append(ConfigError("--data names a file twice", fix="give each file once"))
        data = data[:1]
    of_data = {**run_data, **_given(form | reading), "path": data or "records.jsonl"}
    settings = problems.of(None, checked, DataSettings, of_data, "evaluate")
    of_model = {**stored, **_given({"dtype": dtype, "device": device})}
    model_settings = problems.of(None, checked, ModelSettings, of_model, "evaluate")
    asked = _given({"scoring": scoring, "max_new_tokens": max_new_tokens, "num_beams": beams})
    before = len(problems.found)
    if settings is not None and (asked or per_example) and settings.label is not None:
        what, fix = (
            "a classifier is not asked, it gives a number a class",
            "remove the options of asked tasks",
        )
        problems.found.append(ConfigError(what, fix=fix))
    elif settings is not None and (asked or per_example) and settings.task is None:
        problems.found.append(
            ConfigError("how to ask is set, but there is no task to ask", fix="give --task")
        )
    if per_example and not as_json:
        problems.found.append(ConfigError("--per-example is printed with --json only", fix="add --json"))
    if settings is not None and data:
        # Of a target that is not there, the columns that it was trained on are not known.
        columns = (resolved is not None or any(form.values())) and len(problems.found) == before
        alone = resolved is not None and adapter is None
        _refuse_early(settings, scoring, problems, alone=alone, columns=columns)
    problems.tell()
    assert settings is not None
    assert model_settings is not None
    assert data is not None
    own = _private_of_the_run(adapter, data)
    if own:
        err().print(
            f"PRIVATE: {_listed(own)} {'is' if len(own) == 1 else 'are'} what this run was trained on. These numbers "
            "come from its private records without any noise, so no epsilon covers them: keep them where the records "
            "are, and give public records (--data) for numbers that you may show"
        )
    with quiet_libraries(told=True):
        with loading():
            import privlora.training.models  # noqa: F401 - what takes seconds of all that is imported below
        from privlora.reporting.wording import faults, spoken

        if settings.task is None or settings.label is not None:
            result = _held_out(model_settings, adapter, settings, seed, limit, shows=not own)
            classes = settings.label is not None or settings.chosen is not None
            lines = _class_lines(result) if classes else _loss_lines(result)
        else:
            from privlora.evaluation import evaluate_suite, evaluate_task

            parts = {path: _read(path, settings.format, limit) for path in _paths(settings.path)}
            records = parts if len(parts) > 1 else next(iter(parts.values()))
            model, tokenizer = _load(model_settings, adapter)
            asked["max_length"] = settings.max_length
            if find_task(settings.task).kind == "mixture":
                suite = evaluate_suite(model, tokenizer, list(chain(*parts.values())), **asked)
                of_tasks = [scored.to_dict(per_example=per_example) for scored in suite.values()]
                mean = sum(one["metric"] for one in of_tasks) / len(of_tasks)
                result = {"task": settings.task, "metric": mean, "tasks": of_tasks}
                lines = chain(*map(_task_lines, of_tasks), [f"mean of {len(of_tasks)} tasks {mean:.4f}"])
            else:
                scored = evaluate_task(model, tokenizer, settings.task, records, **asked)
                result = scored.to_dict(per_example=per_example)
                lines = _task_lines(result)
    said = result.get("answers")
    last = "If these records are private, keep these numbers private."
    if own:
        last = f"PRIVATE: computed without noise on {_listed(own)}, which this run was trained on. Do not publish them."
    warned = (f"WARNING: {words}" for words in faults(said))
    show({"target": target, "data": data, **result}, (*lines, *spoken(said), *warned, last), as_json)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _private_of_the_run(adapter: Path | None, data: list[str]) -> list[str]:
    """Of the files to evaluate on those that hold the private records of the target's run, where its settings are."""
    run = None if adapter is None else _run_of(adapter)
    if run is None:
        return []
    settings = load_run_settings(run)
    own = _paths(settings.data.path)
    if settings.federation is not None and not isinstance(settings.federation.clients, int):
        own += [path for client in settings.federation.clients for path in _paths(client.path)]
    return [path for path in data if any(_same(path, one) for one in own)]


def _run_of(adapter: Path) -> RunFolder | None:
    """The run that released it, where its settings are."""
    for run in (RunFolder(adapter.parent), RunFolder(adapter.resolve().parent)):
        if run.settings.exists() and run.release.resolve() == adapter.resolve():
            return run
    return None


def _paths(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _same(path: str, other: str) -> bool:
    """Whether two names are of one file, by whatever way, or of one data set of a hub."""
    try:
        return path == other or Path(path).expanduser().samefile(Path(other).expanduser())
    except (OSError, ValueError):
        return False


def _listed(paths: list[str]) -> str:
    return ", ".join(in_one_line(path, 200) for path in paths)


def _refuse_early(
    data: DataSettings, scoring: str | None, problems: Together, *, alone: bool, columns: bool
) -> None:
    """Add to ``problems``, before slow imports, what needs neither a tokenizer nor a model. alone: whether the target
    is a base model. columns: whether those of the records are known; else files are looked for and not read."""
    if data.chosen is not None and alone:
        what = "preferences are measured against the base model, and the target is one"
        fix = "give a run or an adapter, or a form of records, as --text"
        problems.found.append(ConfigError(what, fix=fix))
    task = data.task
    if task is not None and data.label is None:
        columns = not problems.fails(lambda: scoring_of(find_task(task), scoring)) and columns
    if not columns:
        for path in _paths(data.path):
            problems.of(None, lambda path=path: refuse_missing(path, format=data.format))
        return
    problems.of(None, lambda: check_columns(data, options=True))


def _labels(told: str | None) -> str | list[str] | int | None:
    if told is None or told == "score":
        return told
    return int(told) if told.isdigit() else [name.strip() for name in told.split(",")]


def _loss_lines(result: dict[str, Any]) -> Iterator[str]:
    spread = f"± {result['standard_error']:.4f}"
    yield f"loss             {result['loss_per_example']:.4f} {spread} nats per token (mean over records)"
    if (without := result.get("base")) is not None:
        gained = without["loss_per_example"] - result["loss_per_example"]
        yield f"base model       {without['loss_per_example']:.4f} on the same records, without the adapter"
        yield f"gained           {gained:.4f}: {_more_probable(gained)}"
    yield f"loss by tokens   {result['loss_per_token']:.4f} nats per token (mean over tokens)"
    yield f"accuracy         {result['accuracy']:.2%}"
    yield f"measured on      {result['tokens']} tokens of {result['examples']} records"


def _more_probable(gained: float) -> str:
    """What a difference of two losses is.

    >>> _more_probable(0.1), _more_probable(-0.1)
    ('a token is 11 % more probable than before', 'a token is 9.5 % less probable than before')
    >>> _more_probable(2.0), _more_probable(0.0001)
    ('a token is 7.4 times as probable as before', 'nothing that can be seen')
    """
    if not abs(gained) >= _SEEN:
        return "nothing that can be seen"
    if gained > math.log(2):
        return f"a token is {math.exp(min(gained, _LARGE)):.2g} times as probable as before"
    change = f"{100 * abs(math.expm1(gained)):.2g} %"
    return f"a token is {change} {'more' if gained > 0 else 'less'} probable than before"


def _class_lines(result: dict[str, Any]) -> Iterator[str]:
    spread = f"± {result['standard_error']:.4f}"
    yield f"loss             {result['loss_per_example']:.4f} {spread} (mean over records)"
    figures = {name for name, value in result.items() if isinstance(value, float)}
    for name in sorted(figures - {"loss_per_example", "standard_error"}):
        yield f"{name.replace('_', ' '):<20} {result[name]:.4f}"
    yield f"measured on      {result['examples']} records"


def _task_lines(result: dict[str, Any]) -> Iterator[str]:
    low, high = result["interval"]
    spread = f"; {result['confidence']:.0%} interval {low:.4f} to {high:.4f}" if low is not None else ""
    yield f"{result['task']:<16} {result['metric']:.4f} {result['metric_name']}{spread}"
    if len(result["scores"]) > 1:
        yield from (f"{name:<16} {value:.4f}" for name, value in result["scores"].items())
    for part, scores in result.get("parts", {}).items():
        shown = ", ".join(f"{scores[name]:.4f} {name}" for name in result["scores"])
        yield f"of {part}: {shown}, {scores['examples']} records"
    if (theirs := result.get("as_read_by_llm_adapters")) is not None:
        yield f"by their reader  {theirs:.4f} accuracy, as LLM-Adapters read the same answers"
    yield f"measured on      {result['examples']} records by {result['scoring']}"
    if result["scoring"] == "generation":
        yield f"unreadable       {result['unparsable']} answers, counted as wrong"


def _resolve(target: str, base: str | None) -> tuple[dict[str, Any], Path | None, dict[str, Any], int]:
    """Model settings, the adapter's folder if there is one, and the data settings and the public seed of a run."""
    folder = Path(target).expanduser()
    run = RunFolder(folder)
    if run.settings.exists():
        settings = load_run_settings(run)
        require_adapter(run)
        model = settings.model.model_dump()
        # Where the run read says nothing about other records.
        data = settings.data.model_dump(exclude={"path", "evaluation"})
        return {**model, **({"name": base} if base else {})}, run.release, data, settings.run.seed
    if (folder / ADAPTER_FILES[0]).exists():
        return {"name": base or _base_of(folder)}, folder, _form_in(folder), 0
    if (near := near_run(folder)) is not None:
        raise RunError(f"there is no run in {target!r}", fix=f"did you mean the run {near!r}?")
    if folder.suffix.lower() in (".yaml", ".yml") and folder.is_file():
        raise RunError(
            f"{target!r} is a YAML of settings, and what is evaluated is a run's folder, an adapter's or a model",
            fix="give the folder of its run, which run.output names",
        )
    if base is not None:
        raise ModelError(
            f"there is no adapter in {target!r}", fix="leave out --base to evaluate a model itself"
        )
    try:
        refuse_unknown_model(target, owner=True)
    except ModelError as error:
        ways = [f"of a run give its folder, which run.output names; of a model: {error.fix}"]
        raise ModelError(error.what, why=error.why, fix=ways) from None
    return {"name": target}, None, {}, 0


def _form_in(release: Path) -> dict[str, Any]:
    """Data settings of what a release was trained on, as its report states them; nothing where it states none."""
    try:
        method = json.loads((release / "privacy_report.json").read_text(encoding="utf-8"))["method"]
        told = {name: method["form"][name] for name in ("prompt", "completion")} | {
            "loss_on": method["loss_on"],
            "template": method["form"].get("template", "none"),
        }
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return told if all(isinstance(value, str) for value in told.values()) else {}


def _own_records(target: str) -> list[str]:
    """The public records that a run was evaluated on. Raises ConfigError where it has none."""
    run = RunFolder(Path(target).expanduser())
    own = load_run_settings(run).data.evaluation if run.settings.exists() else None
    found = _paths(own)
    if not found or IN_MEMORY in found:
        what = "no records are given" + ("" if own is None else ", and those of the run were in memory")
        raise ConfigError(what, fix=f"`privlora evaluate {target} --data public.jsonl`")
    return found


def _base_of(adapter: Path) -> str:
    """The base model that an adapter names. What is published has no local path; next to it the run's settings do."""
    if (run := _run_of(adapter)) is not None:
        return load_run_settings(run).model.name
    file = adapter / ADAPTER_FILES[0]
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{str(file)!r} cannot be read ({type(error).__name__})", fix="give --base"
        ) from None
    if not isinstance(name, str) or not name:
        raise ModelError(f"{str(file)!r} names no base model", fix="give --base")
    if HUB_NAME.fullmatch(name) is None and not Path(name).is_dir():
        raise ModelError(
            f"the base model {name!r} seems to be a folder of the machine that trained the adapter",
            why="of a local folder its name alone is published",
            fix="give that model with --base",
        )
    return name


def require_adapter(run: RunFolder) -> None:
    """Raise RunError for a run that is not finished, or whose release is texts."""
    if run.texts.exists():
        fix = f"train on them: `privlora train` with data.path={run.texts}"
        raise RunError(f"the run in {str(run.root)!r} released texts, and no adapter", fix=fix)
    if run.is_audit:
        fix = "train a run with `privlora train`; what the audit found is in its private/audit.html"
        raise RunError(f"{str(run.root)!r} holds an audit, whose adapter is not kept", fix=fix)
    if not (run.release / ADAPTER_FILES[1]).exists():
        fix = f"finish it with `privlora resume {run.root}`"
        raise RunError(f"the run in {str(run.root)!r} is not finished: it has no adapter", fix=fix)


def _held_out(
    model_settings: ModelSettings,
    adapter: Path | None,
    data: DataSettings,
    seed: int,
    limit: int | None,
    *,
    shows: bool,
) -> dict[str, Any]:
    """Of classes, preferences or texts. shows: whether answers may be shown with the records' prompts."""
    from privlora.evaluation import evaluate_held_out
    from privlora.reporting.answers import answers
    from privlora.training.classifier import Head, padded_as
    from privlora.training.inputs import tokenise

    classes, records = data.classes, _read(data.path, data.format, limit)
    head = None if classes is None else Head(classes.outputs, classes.names, seed)
    model, tokenizer = _load(model_settings, adapter, head)
    if head is not None:
        padded_as(model, tokenizer)
    examples = tokenise(records, data, tokenizer)
    bare: Any = nullcontext if adapter is None else model.disable_adapter
    found: dict[str, Any] = evaluate_held_out(model, examples, bare).to_dict()
    if adapter is None or classes is not None:
        return found
    if data.chosen is None:
        with saying("measuring the base model on the same records", piped=True), bare():
            found["base"] = evaluate_held_out(model, examples).to_dict()
    return found | ({"answers": answers(model, tokenizer, data, records)} if shows else {})


def _read(path: str | list[str], form: Format, limit: int | None) -> list[Record]:
    from privlora.data.records import load_records

    with saying("reading the records", piped=True):
        return load_records(path, format=form, limit=limit)


def _load(
    settings: ModelSettings, adapter: Path | None, head: Head | None = None
) -> tuple[torch.nn.Module, Any]:
    from privlora.training.base_weights import with_adapter
    from privlora.training.models import load_model

    with saying("loading the model", piped=True):
        model, tokenizer = load_model(settings, head)
        return (model if adapter is None else with_adapter(model, adapter, head)), tokenizer
