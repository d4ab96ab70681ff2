"""Arguments of a call in Python, as settings and as records; and what is said of names that other trainers have. All of
it without torch, so that mistakes are told before it is loaded."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeGuard, TypeVar

from privlora.config import IN_MEMORY, Settings, adapter_settings, settings_from
from privlora.config.in_calls import as_in_python
from privlora.config.mistakes import neutral_privacy
from privlora.config.nearby import whereabouts
from privlora.data.records import GIVE_RECORDS, as_records
from privlora.errors import ConfigError, DataError, PrivloraError, RunError, Together, in_one, named, nearest
from privlora.names import UNNAMED
from privlora.training.sources import check_sources

if TYPE_CHECKING:
    import torch

Source = str | Path | Iterable[Path] | Iterable[Mapping[str, Any]] | Iterable[str]
"""A file or several, or records."""


EXAMPLES = {
    "federation": "dict(rule='tan', rounds=20, local_steps=4)",
    "adapter": "dict(r=16, lora_alpha=16, target_modules='all-linear')",
    "peft_config": "a peft.LoraConfig, or dict(r=16, lora_alpha=16, target_modules='all-linear')",
    "method": "a method's name, or dict(name='prism', learning_rate=1e-3)",
    "privacy": "dict(target_epsilon=3, delta=1e-5, steps=200, ...)",
    "run": "dict(seed=0, label='notes')",
    "auto": "True, or dict(passes=5, file='public.jsonl')",
    "columns": "dict(text='note', max_length=256)",
    "loading": "dict(dtype='bfloat16')",
    "synthesis": "dict(generator='model', preset='clinical-note')",
}
"""Of each argument that holds settings."""

OTHER_NAMES: Final = {
    "eval_dataset": "it is called evaluation here; its records are PUBLIC, since their loss is published",
    "train_dataset": "it is called data here",
    "processing_class": "it is called tokenizer here",
    "peft_config": "it is called adapter here",
    "output_dir": "it is called output here",
    "args": "give privacy, method, columns and run; or use PrivateTrainer, which takes args",
}
"""Arguments of other trainers, and how to mend them in a call that begins a run."""


class _NotGiven:
    """Stands for an argument that a call needs and was not given, so that this is told beside what else is wrong."""


NOT_GIVEN: Final = _NotGiven()
_TOLD_BESIDE: Final = ("model", "data", "train_dataset")
"""Arguments of which the calls themselves say that they are not given."""

IN_GROUPS: Final = "{here}"
AS_BEGUN: Final = "leave it out: a run goes on with the settings that it began with"
TO_RESUME: Final = {
    **dict.fromkeys(("data", "train_dataset"), "it is called records here: this run's own, as they are now"),
    "eval_dataset": "it is called evaluation here",
    "processing_class": "it is called tokenizer here",
    **dict.fromkeys(("output", "output_dir"), "the run's folder is the first argument, root"),
    **dict.fromkeys(("args", "peft_config", *EXAMPLES), AS_BEGUN),
}
"""The same in a call that goes on with a run."""

IN_MEMORY_GENERATOR = "in_memory:generator"
"""In settings, as the place of a generator that was handed over."""


def no_privacy(*, steps: bool = True) -> ConfigError:
    """Of a call without it. steps: whether they are given, and do not follow."""
    return ConfigError(
        "privacy is not given, and has no default: what is promised, about how many records, is yours to say",
        fix=f"pass privacy=dict(target_epsilon=3, delta=1e-5, {'steps=200, ' * steps}expected_batch_size=64, "
        "public_dataset_size=10_000)",
    )


class NoArgument(ConfigError, TypeError):
    """A call was given an argument that means nothing here."""


def not_a_mapping(name: str, group: Any) -> ConfigError | None:
    """Of an argument that holds settings and is no mapping; what it is instead is not shown. None for others."""
    if group is None or isinstance(group, Mapping):
        return None
    return ConfigError(
        f"{name} is of type {type(group).__name__}, not a mapping of settings",
        fix=f"pass {EXAMPLES[name]} as {name}",
    )


def other_names(
    call: Callable[..., Any], others: Mapping[str, Any], known: Mapping[str, str], of_settings: str
) -> list[ConfigError]:
    """What is wrong with arguments that ``call`` has not: a ConfigError for one that means something here by another
    name, NoArgument for others.

    known: how to mend each such name. of_settings: how to mend the name of a setting, which is at home {here}.
    """
    found = list[ConfigError]()
    own = [name for name in inspect.signature(call).parameters if name != "others"]
    for name in others:
        fix = known.get(name)
        if fix is None and (here := whereabouts(name)) is not None:
            fix = of_settings.format(here=here)
        if fix is None:
            what = f"{call.__name__}() has no argument {named(name)}"
            called = name if named(name) == repr(name) else "it"
            found.append(NoArgument(what, fix=f"{called}: {nearest(name, own)}"))
        else:
            found.append(ConfigError(f"{call.__name__} has no argument {name}", fix=f"{name}: {fix}"))
    return found


def refuse_other_names(
    call: Callable[..., Any], others: Mapping[str, Any], known: Mapping[str, str], of_settings: str
) -> None:
    """Raise what `other_names` finds."""
    if others:
        raise in_one(other_names(call, others, known, of_settings))


_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def once_each(call: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """The same function; what it needs and is not given is told beside what else is wrong, or raises NoArgument. What
    errors advise is said as in Python where a run begins."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    known = {one.name: one for one in inspect.signature(call).parameters.values() if one.kind in kinds}
    of_class = next(iter(known), "") == "self"
    who = call.__qualname__.removesuffix(".__init__") if of_class else call.__name__
    places, named_ones = ([name for name, one in known.items() if one.kind is kind] for kind in kinds)
    needed = [name for name, one in known.items() if one.default is inspect.Parameter.empty]

    @functools.wraps(call)
    def checked(*args: _Given.args, **options: _Given.kwargs) -> _Found:
        for name in needed:
            if name not in (*places[: len(args)], *options):
                if name not in _TOLD_BESIDE:
                    raise not_given(name, who)
                options[name] = NOT_GIVEN
        try:
            return call(*args, **options)
        except PrivloraError as error:
            # What goes on with a run is mended in its own file of settings; a class says it in names of its own.
            if "privacy" in named_ones and not of_class:
                as_in_python(error)
            raise

    return checked


_NEEDED: Final = {
    "model": "give a folder, a hub name or a loaded model",
    "data": GIVE_RECORDS,
    "train_dataset": GIVE_RECORDS,
    "root": "give the folder of the run, which was output when it began",
    "synthesis": f"pass {EXAMPLES['synthesis']} as synthesis",
}
"""How to mend an argument that is needed and not given."""


def not_given(name: str, who: str = "") -> NoArgument:
    """Of an argument that a call, ``who``, needs."""
    whose = f", which {who} needs" if who else ""
    return NoArgument(f"{name} is not given{whose}", fix=_NEEDED.get(name, f"give {name}=…"))


def not_truths(*given: Mapping[str, Any]) -> list[ConfigError]:
    """Of arguments that are True or False, and of those in the second mapping, which may be None too."""
    return [
        ConfigError(
            f"{name} is of type {type(value).__name__}, and neither True nor False",
            fix=f"give {name}=True or {name}=False" + (", or leave it out" if at else ""),
        )
        for at, group in enumerate(given)
        for name, value in group.items()
        if not (isinstance(value, bool) or (at and value is None))
    ]


def refuse_no_folder(name: str, folder: Any) -> None:
    """Raise ConfigError for an argument that names a run's folder and cannot."""
    if not isinstance(folder, str | Path) or not str(folder):
        what = "empty" if folder == "" else f"of type {type(folder).__name__}"
        raise ConfigError(f"{name} is {what}", fix="give the folder of the run, as a text or a Path")


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


def with_generator(synthesis: Any, generator: Any) -> Any:
    """The group ``synthesis`` of a call that may hand over a generator. Raises ConfigError where both name one."""
    given = {} if synthesis is None else synthesis
    if generator is None or not isinstance(given, Mapping):
        return synthesis
    if given.get("generator", "callable") != "callable" or "callable" in given:
        raise ConfigError(
            "generator is given, and synthesis names another one",
            fix="remove synthesis['generator'] and synthesis['callable'], or the argument generator",
        )
    return {**given, "generator": "callable", "callable": IN_MEMORY_GENERATOR}


def is_loaded(model: Any) -> TypeGuard[torch.nn.Module]:
    """Whether it is a module of torch, which whoever has one has imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def not_a_tokenizer(name: str, tokenizer: Any) -> ConfigError | None:
    """Of an argument that stands for a loaded tokenizer and is none, as its folder is. None for others, and for None.

    name: of the argument.
    """
    if tokenizer is None or hasattr(tokenizer, "bos_token_id"):
        return None
    return ConfigError(
        f"{name} is of type {type(tokenizer).__name__}, and no tokenizer of transformers",
        fix=f"give the loaded one, {name}=AutoTokenizer.from_pretrained(...), or leave it out for the model's own",
    )


def records_of(
    problems: Together, data: Any, name: str, *, needed: bool = False
) -> tuple[str | list[str] | None, list[Mapping[str, Any]] | None]:
    """`given_records` of an argument, or nothing for None, unless it is needed; what is wrong with it is kept beside
    other problems."""
    instead: tuple[str | list[str], list[Mapping[str, Any]] | None] = (IN_MEMORY, None)
    if data is NOT_GIVEN:
        problems.found.append(not_given(name))
        return instead
    if data is None and needed:
        problems.found.append(DataError(f"{name} is None, so there are no records", fix=GIVE_RECORDS))
        return instead
    return (None, None) if data is None else problems.of(instead, given_records, data, name)


def all_auto(auto: bool | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The group that the argument stands for: True says that all is auto that is not given."""
    return {"all": auto} if isinstance(auto, bool) else auto


def settings_of_call(
    model: Any,
    data: Mapping[str, Any],
    groups: Mapping[str, Any],
    output: Any,
    *,
    source: str,
    problems: Together | None = None,
) -> Settings:
    """Settings from the arguments of a call. data: where the records are. problems: what was found wrong before.

    Raises ConfigError for all that is wrong with them, and what was found before.
    """
    problems = Together() if problems is None else problems
    if problems.fails(_checked_model, model):
        model = UNNAMED
    if problems.fails(_checked_output, output):
        output = "runs/run"
    groups = {**groups, "adapter": problems.of(None, _adapter, groups, problems)}
    wrong = {name: error for name, group in groups.items() if (error := not_a_mapping(name, group))}
    problems.found += wrong.values()
    groups = {name: None if name in wrong else group for name, group in groups.items()}
    if "privacy" in wrong or groups.get("privacy") is None:  # told already; nothing is to contradict it
        groups["privacy"] = neutral_privacy(federated=groups.get("federation") is not None)
    elif (
        "federation" in groups and groups["federation"] is None
    ):  # told already, and steps would follow from it
        groups["privacy"] = {"steps": 1, **groups["privacy"]}
    columns = dict(groups["columns"] or {})
    for name in ("path", "evaluation"):
        if name in columns:
            del columns[name]
            fix = f"give {'data' if name == 'path' else name} as an argument"
            problems.found.append(ConfigError(f"columns holds {name!r}", fix=fix))
    name = _name_of(model) if is_loaded(model) else str(model)
    content = {
        "model": {"name": name, **{key: _plain(value) for key, value in (groups["loading"] or {}).items()}},
        "data": {**data, **columns},
        "run": {"output": str(output), **(groups["run"] or {})},
    }
    more = ("privacy", "adapter", "method", "synthesis", "federation", "auto")
    content |= {name: dict(group) for name in more if (group := groups.get(name)) is not None}
    try:
        settings = settings_from(content, source=source, rows=True)
    except ConfigError as error:
        raise (in_one([*problems.found, error], source if error.whom else "")) from None
    problems.tell()
    return settings


def _checked_model(model: Any) -> None:
    if model is NOT_GIVEN:
        raise not_given("model")
    if not isinstance(model, str | Path) and not is_loaded(model):
        raise ConfigError(
            f"the model is of type {type(model).__name__}", fix="give a folder, a hub name or a loaded model"
        )
    if is_loaded(model) and not hasattr(model, "config"):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and no language model of transformers",
            fix="give what AutoModelForCausalLM.from_pretrained returns, a folder or a hub name",
        )


def _checked_output(output: Any) -> None:
    if not isinstance(output, str | Path) or not str(output):
        raise ConfigError(
            f"output is {'empty' if output == '' else f'of type {type(output).__name__}'}",
            fix="give the folder of the run, or leave it out for runs/run",
        )


def _plain(value: Any) -> Any:
    """A dtype by its name, which is what settings hold."""
    torch = sys.modules.get("torch")
    return str(value).removeprefix("torch.") if torch and isinstance(value, torch.dtype) else value


def _adapter(groups: Mapping[str, Any], problems: Together) -> Any:
    columns = groups.get("columns")
    labelled = isinstance(columns, Mapping) and columns.get("label") is not None
    return adapter_settings(groups.get("adapter"), classifies=labelled, problems=problems)


def _name_of(model: torch.nn.Module) -> str:
    return str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or UNNAMED)


def of_memory(settings: Settings) -> dict[str, bool]:
    """What a caller handed over that is in no file."""
    synthesis = settings.synthesis
    return {
        "records": settings.data.path == IN_MEMORY,
        "evaluation": settings.data.evaluation == IN_MEMORY,
        "generator": synthesis is not None and synthesis.callable == IN_MEMORY_GENERATOR,
    }


def refuse_what_was_in_memory(settings: Settings, *given: Any) -> None:
    """Raise RunError for what is not given. given: records, evaluation, generator."""
    names = zip(of_memory(settings).items(), given, strict=True)
    missing = [name for (name, was_there), value in names if was_there and value is None]
    if missing:
        raise RunError(
            f"this run's {' and '.join(missing)} {'were' if missing != ['generator'] else 'was'} in memory",
            fix=f"call resume_run(root, {', '.join(f'{name}=...' for name in missing)})",
        )


def refuse_moved(root: Path, settings: Settings, records: Any, evaluation: Any) -> None:
    """Raise DataError for a file that is no longer there, with the call that says where the records lie now."""
    why = "a run goes on with the records that it began with"
    place = "resume in the folder in which it was started"
    try:
        check_sources(settings, [], [])  # what no call takes from another place
    except DataError as error:
        raise DataError(error.what, why=why, fix=place) from None
    try:
        check_sources(settings, records, evaluation)
    except DataError as error:
        held_out = settings.data.evaluation is not None
        command = f"`privlora resume {shlex.quote(str(root))} --data FILE{' --evaluation FILE' * held_out}`"
        python = f"resume_run({str(root)!r}, records=...{', evaluation=...' * held_out})"
        fix = f"{place}, or say where they lie now: {command}, or in Python {python}"
        raise DataError(error.what, why=why, fix=fix) from None
