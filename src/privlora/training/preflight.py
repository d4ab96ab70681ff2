"""One look before a run begins, without torch: at its folder, the model's, the files that settings name, and the first
record's columns. All that is wrong is raised together. Records are read later, once (`privlora.training.inputs`); where
one cannot be used, all of those are looked for here. Errors name files, lines and columns, never contents."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from safetensors import SafetensorError, safe_open

from privlora.config import DataSettings, Settings
from privlora.config.auto import MOST_TEXTS
from privlora.config.groups import PUBLIC_TEXTS
from privlora.data.examples import Template
from privlora.data.formats import PLACE, Format, Record, read_placed
from privlora.data.records import (
    HUB,
    SHOWN,
    TABLES,
    as_records,
    files_in,
    has_column,
    is_data_file_name,
    iterate_records,
    local_file,
    missing_column,
    no_records,
    places,
    refuse_missing,
    shared_columns,
    text_of,
)
from privlora.data.rendering import Renderer, holds_turns, messages_of
from privlora.data.tasks import find_task, labelled_record, task_record
from privlora.data.templates import fields_of
from privlora.data.units import Grouping
from privlora.errors import (
    ConfigError,
    DataError,
    ModelError,
    PrivloraError,
    RecordError,
    Together,
    in_one,
    named,
)
from privlora.names import HUB_NAME
from privlora.training.files import RunFolder
from privlora.training.ranks import own_device
from privlora.training.takeover import refuse_if_spent

READ_TWICE: Final = 64 * 2**20
"""Bytes of files that are read once more to tell all that is wrong in them, which takes about a second."""

_FEW: Final = 64
"""First records that tell which columns are of most of them."""


def preflight(
    settings: Settings,
    records: Any = None,
    evaluation: Any = None,
    *,
    given: bool = False,
    begins: bool = True,
) -> None:
    """Refuse a folder that holds a run or other files or cannot be written to, a model that is not there, files that
    are not there, and columns that the first record lacks: all together, each with its line where that is known.

    records, evaluation: what stands for the files, in memory. given: whether a loaded model stands for its name.
    begins: whether a run that is in the folder is none to go on with.
    Raises DataError, ModelError or RunError; ConfigError of several kinds.
    """
    problems, folder = Together(), RunFolder(Path(settings.run.output))
    spent = begins and problems.fails(refuse_if_spent, folder)
    looks = [
        ("run.output", spent, folder.refuse_foreign),
        ("run.output", spent, lambda: folder.refuse_unwritable(protects=settings.privacy.protects)),
        ("model.name", given, lambda: refuse_no_model(settings.model.name, settings.model.revision)),
    ]
    for about, known, look in looks:
        if not known:
            try:
                look()
            except PrivloraError as error:
                problems.found.append(settings.placed(error, about))
    data, owner = settings.data, settings.privacy.user_column
    lacking: list[tuple[str, DataError]] = []
    if isinstance(records, list):
        lacking = problems.of(lacking, _lacking, data, records[:_FEW], True, owner)
    for setting, paths, form, _ in read_files(settings, records, evaluation):
        private = setting == "data.path"
        try:
            refuse_missing(paths[private:], format=form, look=True)
            lacking += _lacking_columns(data, paths[0], owner) if private else []
        except DataError as error:
            problems.found.append(error.of(f"{setting}{settings.where(setting)}"))
    problems.found += [settings.placed(error, about) for about, error in lacking]
    problems.tell()


def read_files(
    settings: Settings, records: Any = None, evaluation: Any = None
) -> Iterator[tuple[str, list[str], Format, int | None]]:
    """Of each setting or client that names files which a run reads, these, their format, and how many records of them
    are read.

    records, evaluation: what stands for files, in memory; of a federation's clients by their names.
    """
    data, lora, auto, texts = settings.data, settings.adapter, settings.auto, settings.synthesis
    clients = [] if settings.federation is None else settings.federation.clients
    clients = [] if isinstance(clients, int) else clients
    named: list[tuple[str, str | list[str] | None, Format, int | None]] = [
        ("adapter.public_text", lora.public_text, data.format, PUBLIC_TEXTS),
        ("data.path", data.path if records is None and not clients else None, data.format, None),
        ("data.evaluation", data.evaluation if evaluation is None else None, data.format, None),
    ]
    if auto is not None:
        named.append(("auto.file", auto.file, data.format, MOST_TEXTS))
    if texts is not None:
        named.append(("synthesis.file", texts.file, "auto", None))
    if records is None or isinstance(records, Mapping):
        away = (each for each in clients if each.name not in (records or {}))
        named += [(f"client {each.name}", each.path, data.format, None) for each in away]
    for setting, path, form, limit in named:
        if path is not None:
            yield setting, [path] if isinstance(path, str) else path, form, limit


def are_read_twice(paths: Iterable[str]) -> bool:
    """Whether files may be gone through once more: none is on a hub, and they are small."""
    paths = list(paths)
    if any(path.startswith(HUB) for path in paths):
        return False
    try:
        files = (file for path in paths for file in files_in(Path(path).expanduser()))
        return sum(file.stat().st_size for file in files) <= READ_TWICE
    except (OSError, ValueError):  # refused where it is read
        return False


def missing_files(settings: Settings, records: Any = None, evaluation: Any = None) -> dict[str, DataError]:
    """What is wrong with the files that settings name, by these; none of them is read. records, evaluation: what stands
    for the files, in memory."""
    found = {}
    for setting, paths, form, _ in read_files(settings, records, evaluation):
        try:
            refuse_missing(paths, format=form)
        except DataError as error:
            found[setting] = error.of(f"{setting}{settings.where(setting)}")
    return found


def check_sources(settings: Settings, records: Any = None, evaluation: Any = None) -> None:
    """Raise DataError of all `missing_files`."""
    if found := missing_files(settings, records, evaluation):
        raise in_one([*found.values()])


def check_columns(data: DataSettings, *, options: bool = False) -> None:
    """Raise DataError, for all files of ``data`` together, for one that is not there or whose first record lacks
    columns. options: whether these are named by options of a command."""
    problems = Together()
    for path in [data.path] if isinstance(data.path, str) else data.path:
        try:
            lacking = _lacking_columns(data, path, options=options)
        except DataError as error:
            problems.found.append(error)
        else:
            problems.found += [error.of(repr(path)) if options else error for _, error in lacking]
    problems.tell()


def _lacking_columns(
    data: DataSettings, path: str, owner: str | None = None, *, options: bool = False
) -> list[tuple[str, DataError]]:
    """Of each column that a file's first record lacks the setting that names it, and what to say. Of records on the hub
    and in a JSON list, which is read as a whole, none is looked at; a broken one is told where all are read.

    owner: the column of a record's user. Raises DataError for a file that is not there, or a record that is none of
    data.task.
    """
    if path.startswith(HUB):
        return []
    file, format = local_file(path, data.format, look=True)
    if format == "json":
        return []
    placed = islice(read_placed(file, format), _FEW)
    first = [record for _, record in takewhile(lambda each: isinstance(each[1], dict), placed)]
    return _lacking(data, first, format in TABLES, owner, options=options)


def _lacking(
    data: DataSettings, first: Sequence[Any], table: bool, owner: str | None, *, options: bool = False
) -> list[tuple[str, DataError]]:
    """What these columns lack in the first records. table: whether their columns may have been a record, as the first
    line of a table is; so may those of records that were handed over."""
    if not first or not all(isinstance(record, Mapping) for record in first):
        return []
    record, named = first[0], list[tuple[str, str]]()
    if data.task is not None:
        (task_record if data.label is None else labelled_record)(find_task(data.task), record, 1)
    else:
        kinds = {kind: getattr(data, kind) for kind in _KINDS} | {"text": data.columns["text"]}
        given = ((kind, form) for kind, form in kinds.items() if form)
        setting_of = {name: f"data.{kind}" for kind, form in given for name in fields_of([form])}
        named = [(setting, name) for name, setting in sorted(setting_of.items())]
    named += [] if owner is None else [("privacy.user_column", owner)]
    lacking = [(setting, name) for setting, name in named if not has_column(record, name)]
    shared = shared_columns(first, table=table, user_column=owner) if lacking else []

    def told(setting: str, name: str) -> DataError:
        mend = f"--{setting.removeprefix('data.').replace('_', '-')} NAME" if options else None
        return missing_column(name, record, 1, shared=shared, mend=mend)

    return [(setting, told(setting, name)) for setting, name in lacking]


_KINDS: Final = ("label", "text_pair", "rejected", "chosen", "messages", "completion", "prompt", "text")
"""Settings that name columns; of one that several name, the last is told."""


def device_of(name: str) -> str:
    """Of model.device; of several processes each has a GPU of its own. Raises ConfigError if there is none."""
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return own_device("cuda") if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        what = f"model.device={named(name)} is not available here"
        raise ConfigError(what, fix="use auto or cpu") from None
    return name


# Where runs lie unless run.output says otherwise, and where base models do; no owner on the hub is called so.
_FOLDERS = ("runs/", "models/")
_GIVE = "give a local folder with config.json and safetensors, or a model of the hub as owner/name"


def refuse_no_model(name: str, revision: str | None = None) -> None:
    """Raise ModelError for a name under which no base model lies here nor can be fetched. The hub is not asked: where
    it is out of reach, loaders would find that out in a minute, so the system looks up its address."""
    from huggingface_hub import constants

    refuse_unknown_model(name)
    host = urlsplit(constants.ENDPOINT).hostname
    if host is None or kept_file(name, revision, "config.json") is not None:
        return
    why = "HF_HUB_OFFLINE is set, so that the hub is not asked"
    if not constants.HF_HUB_OFFLINE:
        with contextlib.suppress(OSError):
            if not getproxies():
                socket.getaddrinfo(host, None)
            return
        why = f"the hub ({host}) cannot be reached"
    raise ModelError(
        f"cannot load model {name!r}: it is no local folder, the hub's cache here does not have it, and {why}",
        fix=or_near_folder(name, "give a local folder, or fetch the model where there is a network"),
    )


def refuse_unknown_model(name: str, *, owner: bool = False) -> None:
    """Raise ModelError for a name that is no base model's local folder and no name on the hub. Only the local disk is
    asked.

    What looks like a path, or lies in a folder that exists, is a path. owner: a hub name must be owner/name.
    """
    try:
        place = Path(name).expanduser()
        exists, is_folder, in_folder = place.exists(), place.is_dir(), "/" in name and place.parent.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, no such home: no name of a folder
        exists = is_folder = in_folder = False
    if is_folder:
        _refuse_other_folder(place, name)
        return
    hub = HUB_NAME.fullmatch(name) and not is_data_file_name(name) and not name.startswith(_FOLDERS)
    if hub and not exists and not in_folder and ("/" in name or not owner):
        return
    # A text may stand in the wrong place, and be a record.
    shown = "(not shown: it is a text)" if re.search(r"\s", name) else repr(name)
    packed = exists and place.suffix.lower() == ".gguf"
    raise ModelError(
        f"cannot load model {shown}: it is {'a GGUF file' if packed else 'a file' if exists else 'no local folder'}",
        fix=_unpacked(place) if packed else or_near_folder(name, _GIVE),
    )


def _refuse_other_folder(folder: Path, name: str) -> None:
    """Raise ModelError for a local folder that is no base model's: a run's, an adapter's, or without config.json."""
    if (folder / "config.json").is_file():
        return
    adapter, run, packed = folder / "adapter_config.json", RunFolder(folder), sorted(folder.glob("*.gguf"))
    what, fix = "there is no config.json in it", _GIVE
    inside = sorted(each.parent for each in folder.glob("*/config.json"))
    if run.settings.exists() or run.ledger.exists():
        what = "it is a run of privlora"
        fix = f"name its base model, or what `privlora export {name} NEW --merge` wrote; or `privlora resume {name}`"
    elif adapter.is_file():
        base = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            told = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"]
            base = f", of {named(told.removeprefix('path/to/'), longest=200)}" if told else ""
        what = f"the folder holds an adapter already{base}, and no base model"
        fix = f"name the base model; to start from the adapter, set adapter.init={name}"
    elif packed:
        what, fix = f"{what}, but a GGUF file", _unpacked(packed[0])
    elif len(inside) == 1:
        fix = f"did you mean {str(inside[0])!r}? Else {fix}"
    raise ModelError(f"cannot load model {name!r}: {what}", fix=fix)


def in_float16(files: _ModelFiles) -> bool:
    """Whether a model is loaded in float16 where no dtype is asked for."""
    told = files.config.get("dtype") or files.config.get("torch_dtype")
    if told is None and "text_config" not in files.config:
        for file in files.weights[:1]:
            with contextlib.suppress(OSError, SafetensorError), safe_open(file, "np") as found:
                kinds = (found.get_slice(name).get_dtype() for name in found.keys())  # noqa: SIM118 - it is no mapping
                told = next((kind for kind in kinds if kind.startswith(("F", "BF"))), None)
    return told in ("float16", "F16") and "quantization_config" not in files.config


def _unpacked(file: Path) -> str:
    """How to make a model's folder of a GGUF file."""
    new = str(file.parent / "unpacked")
    held = f"{json.dumps(str(file.parent))}, gguf_file={json.dumps(file.name)}"
    lines = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig",
        f"AutoModelForCausalLM.from_pretrained({held}, quantization_config=GgufConfig(dequantize=True), "
        f'dtype="bfloat16").save_pretrained({json.dumps(new)})',
        f"AutoTokenizer.from_pretrained({held}).save_pretrained({json.dumps(new)})",
    )
    return (
        f"name the model's original folder, or make one of this file, {new!r}: `pip install gguf`, then "
        f"`python -c {shlex.quote('; '.join(lines))}`"
    )


def near_folder(name: str) -> str | None:
    """The model's folder next to it whose name is nearest; None where none is near, and of a folder that is there."""
    try:
        place = Path(name).expanduser()
        if place.is_dir():
            return None
        found = (each.parent for below in ("*", "*/*") for each in place.parent.glob(f"{below}/config.json"))
        known = {each.name: each for each in found}
    except (OSError, ValueError, RuntimeError):
        return None
    near = difflib.get_close_matches(place.name, known, n=1, cutoff=0.7)
    return str(known[near[0]]) if near else None


def or_near_folder(name: str, fix: str) -> str:
    """How to mend a model's name: by the folder whose name is nearest, if one is near, or else by ``fix``."""
    near = near_folder(name)
    return fix if near is None else f"did you mean the folder {near!r}? Else {fix}"


def kept_file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a model's local folder, or of what the hub's cache holds of it; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    kept = try_to_load_from_cache(name, file, revision=revision)
    return Path(kept) if isinstance(kept, str) else None


def model_source(name: str, revision: str | None) -> dict[str, Any]:
    """Where transformers' loaders find the model. Raises ModelError for what they cannot find."""
    refuse_no_model(name, revision)
    folder = Path(name).expanduser()
    is_local = folder.is_dir()
    return {
        "pretrained_model_name_or_path": str(folder) if is_local else name,
        "revision": revision,
        "local_files_only": is_local,  # what a folder lacks is not sought elsewhere
    }


@dataclass(frozen=True)
class _ModelFiles:
    """Of a folder with config.json."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def weights(self) -> list[Path]:
        """The files of weights that transformers reads: one, or those that an index names."""
        whole = self.folder / "model.safetensors"
        if whole.is_file():
            return [whole]
        try:
            parts = json.loads((self.folder / f"{whole.name}.index.json").read_text("utf-8"))["weight_map"]
            return [self.folder / name for name in dict.fromkeys(parts.values())]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []


def files_of(name: str, revision: str | None = None) -> _ModelFiles | None:
    """Those of a local folder, or of what the hub's cache holds; None where there are none that can be read."""
    try:
        place = kept_file(name, revision, "config.json")
        config = None if place is None else json.loads(place.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return _ModelFiles(place.parent, config) if place is not None and isinstance(config, dict) else None


def refuse_damaged_weights(name: str) -> None:
    """Raise ModelError for weights in a local folder that are shorter than their header says. What a hub's cache holds
    is left to who loads it: the rest may still be fetched."""
    files = files_of(name) if Path(name).expanduser().is_dir() else None
    for file in [] if files is None else files.weights:
        try:
            with contextlib.suppress(OSError), safe_open(file, "np"):
                pass
        except SafetensorError:
            with open(file, "rb") as stream:
                is_pointer = stream.read(23) == b"version https://git-lfs"
            how = "a pointer of git LFS, without the weights" if is_pointer else "cut short or damaged"
            raise ModelError(
                f"cannot load model {name!r}: {str(file)!r} is {how}",
                fix="fetch it with `git lfs pull`" if is_pointer else "copy it again",
            ) from None


def refuse_encoder_decoder(name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that reads one text and writes another, as T5 does."""
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"cannot train model {name!r}: it is an encoder with a decoder ({config.get('model_type', 'of no type')})",
            fix="use a decoder-only model, as those of Llama, Qwen or Gemma are",
        )


Check = Callable[[Mapping[str, Any], int], None]
"""Raises DataError for a record, with this number (from 1), that cannot be used."""


def check_of(data: DataSettings, units: Grouping | None = None, tokenizer: Any = None) -> Check:
    """What can be told of a record by itself: columns, texts, messages, answers and labels; with a tokenizer also that
    the chat template takes it. units: takes each record in, and tells whose it is."""
    columns = [each for each in (data.columns, data.rejected_columns) if each is not None]
    chats = [each["messages"] for each in columns if each["messages"] is not None]
    given = {each[kind] for each in columns for kind in ("text", "prompt", "completion")} | {data.pair}
    forms = sorted(form for form in given if form is not None)
    task = None if data.task is None else find_task(data.task)
    classes, renders = data.classes, list[Renderer]()
    if tokenizer is not None and task is None and data.label is None:
        loss_on = data.loss_on if data.rejected_columns is None else "completion"
        renders = [Renderer(Template(**each), tokenizer, loss_on) for each in columns]

    def check(record: Mapping[str, Any], number: int) -> None:
        if units is not None:
            units.add(record, number)
        if task is not None:
            (task_record if classes is None else labelled_record)(task, record, number)
            return
        for name in chats:
            messages_of(record, number, name)
        for form in forms:
            if data.label is None and form != data.text and holds_turns(record, form):
                messages_of(record, number, form)
                continue
            for name in fields_of([form]):
                text_of(record, name, number)
        if classes is not None:
            classes.answer_of(record, number)
        for render in renders:
            render(record, number)

    return check


def refuse_unusable_files(paths: Sequence[str], form: Format, limit: int | None, check: Check | None) -> None:
    """Read local files to their end, or up to ``limit`` records, and raise DataError for all that cannot be read or
    does not pass ``check``, by its lines. Nothing is kept. check: None to look at no record."""
    if not _refuse(_placed(paths, form), limit, check):
        raise no_records(paths)


def refuse_unusable(records: Any, check: Check) -> None:
    """The same of a list of records in memory."""
    _refuse((("", "record", number, each) for number, each in enumerate(as_records(records), 1)), None, check)


def _placed(paths: Iterable[str], form: Format) -> Iterator[tuple[str, str, int, Record | DataError]]:
    """Of each record its file, what is counted there, and its number in that; of those of a hub their own numbers."""
    for path in paths:
        if path.startswith(HUB):
            for number, record in enumerate(iterate_records(path), start=1):
                yield path, "record", number, record
            continue
        file, format = local_file(path, form, look=True)
        for place, found in read_placed(file, format):
            yield str(file), PLACE[format], place, found


def _refuse(
    placed: Iterable[tuple[str, str, int, Mapping[str, Any] | DataError]],
    limit: int | None,
    check: Check | None,
) -> int:
    """How many records there are, all fit. Else raises DataError of all mistakes: each by its words, with the first
    places where it is found, and whether there are more."""
    kinds, number = dict[tuple[Any, ...], tuple[DataError, list[str]]](), 0
    for file, counted, place, record in placed:
        error, kind = None, counted if place else ""
        if isinstance(record, DataError):
            error = record
        else:
            number, kind, place = number + 1, counted, place or number + 1
            try:
                if check is not None:
                    check(record, number)
            except DataError as unfit:
                error = unfit
        if error is not None:
            what = error.bare if isinstance(error, RecordError) else error.what
            key = file, kind, what, error.why, error.fixes
            if key in kinds or len(kinds) <= SHOWN:
                where = kinds.setdefault(key, (error, []))[1]
                where += [str(place)] * (len(where) <= SHOWN)
        if number == limit:
            break
    told = list[DataError]()
    for (file, kind, what, *_), (error, where) in list(kinds.items())[:SHOWN]:
        at = [file] * bool(file) + [places(kind, where[:SHOWN], len(where) - SHOWN)] * bool(kind)
        told.append(DataError(f"{', '.join(at)}: {what}", why=error.why, fix=error.fixes))
    if len(kinds) > SHOWN:
        told.append(DataError("other records have other mistakes", fix="mend these first"))
    if told:
        raise in_one(told)
    return number
