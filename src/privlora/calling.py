"""Arguments of a call in Python, as settings and as records. All of it without torch, so that mistakes are reported
before it is loaded."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeGuard, TypeVar

from privlora.config import IN_MEMORY, Settings, adapter_settings, settings_from
from privlora.config.mistakes import Place
from privlora.config.names import meant
from privlora.data.records import GIVE_RECORDS, as_records
from privlora.errors import ConfigError, DataError, RunError, Together, close, in_one, named
from privlora.names import UNNAMED
from privlora.training.observer import Observer
from privlora.training.preflight import missing_files

if TYPE_CHECKING:
    import torch

Source = str | Path | Iterable[Path] | Iterable[Mapping[str, Any]] | Iterable[str]
"""A file or several, or records."""

IN_MEMORY_GENERATOR = "in_memory:generator"
"""In settings, as the place of a generator that was handed over."""

_ELSEWHERE: Final = {
    "columns": "data",
    "train_dataset": "records",
    "eval_dataset": "evaluation",
    "processing_class": "tokenizer",
    "peft_config": "adapter",
    "output_dir": "output",
}
"""Other names of arguments -> what they are called in `fine_tune`."""

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def naming_the_nearest(call: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """The same function; its TypeError for an argument that it has not names the one that is meant."""
    known = [name for name in inspect.signature(call).parameters if name != "self"]
    who = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def checked(*args: _Given.args, **options: _Given.kwargs) -> _Found:
        for name in options:
            if name not in known:
                other, place = _ELSEWHERE.get(name), meant(name).place
                near = other if other in known else close(name, known, 0.75)
                if near is None and place is not None:
                    group, _, setting = place.partition(".")
                    argument = {"model": "loading"}.get(group, group)
                    near = f"{argument}=dict({setting}=...)" if argument in known else None
                hint = f"; did you mean {near}?" if near else ""
                raise TypeError(f"{who}() got an unexpected keyword argument {named(name)}{hint}")
        return call(*args, **options)

    return checked


def refuse_no_folder(name: str, folder: Any, otherwise: str = "as a text or a Path") -> None:
    """Raise ConfigError for an argument that names a run's folder and cannot."""
    if not isinstance(folder, str | Path) or not str(folder):
        what = "empty" if folder == "" else f"of type {type(folder).__name__}"
        raise ConfigError(f"{name} is {what}", fix=f"give the folder of the run, {otherwise}")


def _given_records(data: Any, name: str) -> tuple[str | list[str], list[Mapping[str, Any]] | None]:
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


def with_generator(synthesis: Any, generator: Any) -> Any:
    """The group ``synthesis`` of a call that may hand over a generator. Raises ConfigError where both name one."""
    given = {} if synthesis is None else synthesis
    if generator is None or not isinstance(given, Mapping):
        return synthesis
    named = next((name for name in ("file", "endpoint", "callable") if given.get(name) is not None), None)
    if named is not None:
        fix = f"remove synthesis[{named!r}], or the argument generator"
        raise ConfigError("generator is given, and synthesis names another one", fix=fix)
    return {**given, "callable": IN_MEMORY_GENERATOR}


def is_loaded(model: Any) -> TypeGuard[torch.nn.Module]:
    """Whether it is a module of torch, which whoever has one has imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def refuse_no_tokenizer(tokenizer: Any, name: str = "tokenizer") -> None:
    """Raise ConfigError for what stands for a loaded tokenizer and is none, as its folder. name: of the argument."""
    if tokenizer is not None and not hasattr(tokenizer, "bos_token_id"):
        raise ConfigError(
            f"{name} is of type {type(tokenizer).__name__}, and no tokenizer of transformers",
            fix=f"give the loaded one, {name}=AutoTokenizer.from_pretrained(...), or leave it out for the model's own",
        )


def records_of(
    problems: Together, data: Any, name: str, *, needed: bool = False
) -> tuple[str | list[str] | None, list[Mapping[str, Any]] | None]:
    """`_given_records` of an argument, or nothing for None, unless it is needed; what is wrong with it is kept with
    other problems."""
    instead: tuple[str | list[str], list[Mapping[str, Any]] | None] = (IN_MEMORY, None)
    if data is None and needed:
        problems.found.append(DataError(f"{name} is None, so there are no records", fix=GIVE_RECORDS))
        return instead
    return (None, None) if data is None else problems.of(instead, _given_records, data, name)


def all_auto(auto: bool | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The group that the argument stands for: True says that all is auto that is not given."""
    return {"all": auto} if isinstance(auto, bool) else auto


def settings_of_call(
    model: Any,
    files: Mapping[str, Any],
    groups: Mapping[str, Any],
    output: Any,
    *,
    source: str,
    problems: Together | None = None,
    arguments: Mapping[Place, str] | None = None,
) -> Settings:
    """Settings from the arguments of a call. files: where the records are. problems: what was found wrong before.
    arguments: that stand for a setting by themselves, by (group, name).

    Raises ConfigError for all that is wrong with them, and what was found before.
    """
    problems = Together() if problems is None else problems
    if problems.fails(_checked_model, model):
        model = UNNAMED
    if problems.fails(refuse_no_folder, "output", output, "or leave it out for runs/run"):
        output = "runs/run"
    data = groups.get("data") or {}
    labelled = isinstance(data, Mapping) and data.get("label") is not None
    of_adapter = partial(adapter_settings, classifies=labelled, problems=problems)
    groups = {**groups, "adapter": problems.of(None, of_adapter, groups.get("adapter"))}
    if isinstance(groups.get("method"), str):
        groups["method"] = {"name": groups["method"]}
    for argument, names in _ARGUMENTS.items():
        if isinstance(groups[argument], Mapping):
            problems.found += [
                ConfigError(f"{argument} holds {name!r}", fix=f"give {called} as an argument")
                for name, called in names.items()
                if name in groups[argument]
            ]
    if isinstance(data, Mapping):
        data = {**data, **files}
    name = str(model)
    if is_loaded(model):
        name = getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or UNNAMED
    loading = groups["loading"] or {}
    if isinstance(loading, Mapping):
        loading = {"name": str(name), **{key: _plain(value) for key, value in loading.items()}}
    run = groups["run"] or {}
    content = {
        "model": loading,
        "data": data,
        "run": {"output": str(output), **run} if isinstance(run, Mapping) else run,
    }
    more = ("privacy", "adapter", "method", "synthesis", "federation", "auto")
    content |= {name: group for name in more if (group := groups.get(name)) is not None}
    try:
        settings = settings_from(content, source=source, methods=True, arguments=arguments or {})
    except ConfigError as error:
        raise (in_one([*problems.found, error], source if error.whom else "")) from None
    problems.tell()
    return settings


@dataclass(frozen=True)
class Given:
    """What a caller hands over besides settings, and what it wants to hear of: see ``train_run``."""

    model: torch.nn.Module | None = None
    tokenizer: Any = None
    records: Any = None
    evaluation: Any = None
    generator: Any = None
    observer: Observer = field(default_factory=Observer)
    callbacks: Sequence[Any] = ()
    profile: bool = False


_ARGUMENTS: Final = {
    "data": {"path": "records", "evaluation": "evaluation"},
    "loading": {"name": "model"},
    "run": {"output": "output"},
}
"""Of arguments that hold settings, those that are arguments of their own."""


def _checked_model(model: Any) -> None:
    if not isinstance(model, str | Path) and not is_loaded(model):
        fix = "give a folder, a hub name or a loaded model"
        raise ConfigError(f"the model is of type {type(model).__name__}", fix=fix)
    if is_loaded(model) and not hasattr(model, "config"):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and no language model of transformers",
            fix="give what AutoModelForCausalLM.from_pretrained returns, a folder or a hub name",
        )


def _plain(value: Any) -> Any:
    """A dtype by its name, which is what settings hold."""
    torch = sys.modules.get("torch")
    return str(value).removeprefix("torch.") if torch and isinstance(value, torch.dtype) else value


def of_memory(settings: Settings) -> dict[str, bool]:
    """What a caller handed over that is in no file."""
    synthesis = settings.synthesis
    return {
        "records": settings.data.path == IN_MEMORY,
        "evaluation": settings.data.evaluation == IN_MEMORY,
        "generator": synthesis is not None and synthesis.callable == IN_MEMORY_GENERATOR,
    }


def refuse_what_was_in_memory(settings: Settings, given: Given) -> None:
    """Raise RunError for what is not given of records, evaluation and generator."""
    missing = [name for name, there in of_memory(settings).items() if there and getattr(given, name) is None]
    if missing:
        what = f"this run's {' and '.join(missing)} {'were' if missing != ['generator'] else 'was'} in memory"
        raise RunError(what, fix=f"call resume_run(root, {', '.join(f'{name}=...' for name in missing)})")


def refuse_moved(root: Path, settings: Settings, records: Any, evaluation: Any) -> None:
    """Raise DataError for a file that is no longer there, with the call that says where the records lie now."""
    missing = missing_files(settings, records, evaluation)
    if not missing:
        return
    fix = "resume in the folder in which it was started"
    if missing.keys() <= {"data.path", "data.evaluation"}:  # what a call takes from another place
        held_out = settings.data.evaluation is not None
        command = f"`privlora resume {shlex.quote(str(root))} --data FILE{' --evaluation FILE' * held_out}`"
        python = f"resume_run({str(root)!r}, records=...{', evaluation=...' * held_out})"
        fix += f", or say where they lie now: {command}, or in Python {python}"
    what = "; ".join(error.what for error in missing.values())
    raise DataError(what, why="a run goes on with the records that it began with", fix=fix)
