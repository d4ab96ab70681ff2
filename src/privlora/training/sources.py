"""Whether the model, its device, the files that settings name and their columns are there, and files can be read and
written: asked before slow imports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from privlora.config import DataSettings, Settings
from privlora.config.groups import AT_CLIENTS, IN_MEMORY, PUBLIC_TEXTS
from privlora.data.formats import Format
from privlora.data.records import (
    HUB,
    TABLES,
    files_in,
    has_column,
    iterate_records,
    local_file,
    missing_column,
    refuse_missing,
    shared_columns,
)
from privlora.data.tasks import find_task, labelled_record, task_record
from privlora.data.templates import fields_of
from privlora.errors import DataError, PrivloraError, Together, in_one
from privlora.training.files import RunFolder
from privlora.training.model_files import refuse_unfit_files
from privlora.training.model_names import refuse_no_device, refuse_no_model
from privlora.training.takeover import refuse_if_spent

READ_TWICE: Final = 64 * 2**20
"""Bytes of files that are read once more to tell all that is wrong in them, which takes about a second."""

_FEW: Final = 64
"""First records that tell which columns are of most of them."""


def refuse_first(
    settings: Settings,
    records: Any = None,
    evaluation: Any = None,
    *,
    given: bool = False,
    tokenizer: Any = None,
    begins: bool = True,
    unread: Collection[str] = (),
) -> None:
    """Before slow imports, refuse a folder that holds a run or other files or cannot be written to, a model or a device
    that is not there, settings that the model's own files rule out, files that are not there, and columns that the
    first record lacks: all of them together, each with its line where that is known. Records are read later, once.

    records, evaluation: what stands for the files, in memory. given: whether a loaded model stands for its name.
    tokenizer: one in the place of the model's own. begins: whether a run that is in the folder is none to go on with.
    unread: settings, as data.evaluation, of which nothing is said.
    Raises DataError, ModelError or RunError; ConfigError of several kinds.
    """
    problems = Together()
    folder = RunFolder(Path(settings.run.output))
    if begins:
        problems.of(None, refuse_if_spent, folder)
    if not problems.found and "run.output" not in unread:
        protects = settings.privacy.protects
        problems.of(None, _about, settings, "run.output", folder.refuse_foreign)
        problems.of(None, _about, settings, "run.output", lambda: folder.refuse_unwritable(protects=protects))
    is_there = partial(_about, settings, "model.name", lambda: refuse_no_model(settings.model))
    if not given and not problems.fails(is_there):
        own_template = tokenizer is None
        problems.of(None, partial(refuse_unfit_files, settings, own_template=own_template))
    if not given:
        problems.of(None, refuse_no_device, settings.model)
    files = [each for each in read_files(settings, records, evaluation) if each[0] not in unread]
    files = [each for each in files if not problems.fails(_refuse_missing, settings, *each[:3], True)]
    if records is not None or "data.path" in {setting for setting, *_ in files}:
        problems.of(None, check_columns, settings, records)
    problems.tell()


def naming(named: str, call: Callable[[], None]) -> None:
    """Let what ``call`` raises begin with what it is of."""
    try:
        call()
    except DataError as error:
        raise error.of(named) from None


def _about(settings: Settings, setting: str, call: Callable[[], None]) -> None:
    """What ``call`` raises is about a setting, whose line it tells."""
    try:
        call()
    except PrivloraError as error:
        raise settings.placed(error, setting) from None


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
        ("data.path", data.path if records is None and not clients else None, data.format, data.limit),
        ("data.evaluation", data.evaluation if evaluation is None else None, data.format, None),
    ]
    if auto is not None:
        named.append(("auto.file", auto.file, data.format, auto.limit))
    if texts is not None:
        named.append(("synthesis.file", texts.file, "auto", None))
    if records is None or isinstance(records, Mapping):
        given = () if records is None else records
        named += [
            (f"client {each.name}", each.path, each.format, None)
            for each in clients
            if each.name not in given
        ]
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


def check_sources(
    settings: Settings,
    records: Any = None,
    evaluation: Any = None,
) -> None:
    """Refuse settings that name files which are not there, before a model is loaded. Raises DataError of all of them.

    records, evaluation: what stands for the files, in memory.
    """
    problems = Together()
    for setting, paths, form, _ in read_files(settings, records, evaluation):
        problems.of(None, _refuse_missing, settings, setting, paths, form)
    problems.tell()


def missing_records(settings: Settings) -> PrivloraError | None:
    """What is wrong with data.path alone, which a plan for another machine can do without."""
    problems = Together()
    for setting, paths, form, _ in read_files(settings, None, ()):
        if setting == "data.path":
            problems.of(None, _refuse_missing, settings, setting, paths, form)
    return next(iter(problems.found), None)


def _refuse_missing(
    settings: Settings, setting: str, path: list[str], form: Format, look: bool = False
) -> None:
    try:
        refuse_missing(path, format=form, look=look)
    except DataError as error:
        raise error.of(f"{setting}{settings.where(setting)}") from None


def check_columns(settings: Settings, records: Any = None) -> None:
    """Refuse settings whose columns the first private record lacks, before a model is loaded. Raises DataError as
    reading all of them would.

    Of records on the hub, in a JSON list (which is read as a whole) and of an iterator none is looked at.
    records: what stands for the files, in memory.
    """
    first = _first(settings.data) if records is None else _first_given(records)
    lacking = _lacking(settings.data, first, settings.privacy.user_column)
    if lacking:
        raise in_one([settings.placed(error, about) for about, error in lacking])


def check_parts(data: DataSettings) -> None:
    """``check_columns`` for every file of ``data``, which belongs to no run and whose columns are named by options.
    Raises DataError, also of files that are not there, for all of them."""
    problems = Together()
    for path in [data.path] if isinstance(data.path, str) else data.path:
        problems.of(None, _check_part, data, path)
    problems.tell()


def _check_part(data: DataSettings, path: str) -> None:
    refuse_missing(path, format=data.format, look=True)
    if lacking := _lacking(data, _first(data.model_copy(update={"path": path})), None, options=True):
        raise in_one([error for _, error in lacking]).of(repr(str(path)))


def _lacking(
    data: DataSettings, first: Sequence[Mapping[str, Any]], owner: str | None, *, options: bool = False
) -> list[tuple[str, DataError]]:
    """Of each column that the first record lacks the setting that names it, and what to say. owner: that of a record's
    user. options: whether columns are named by options of a command. Raises DataError for a record that is none of
    data.task."""
    if not first:
        return []
    record = first[0]
    if data.task is not None:
        (task_record if data.label is None else labelled_record)(find_task(data.task), record, 1)
        kinds = []
    else:
        kinds = [(kind, getattr(data, kind)) for kind in _KINDS]
        kinds = [each for each in kinds if each[1] is not None]
        if data.columns["text"] is not None and data.text is None:
            kinds.append(("text", data.columns["text"]))
    setting_of = {name: f"data.{kind}" for kind, value in reversed(kinds) for name in fields_of([value])}
    named = [(setting, name) for name, setting in sorted(setting_of.items())]
    named += [] if owner is None else [("privacy.user_column", owner)]
    lacking = [(setting, name) for setting, name in named if not has_column(record, name)]
    shared = shared_columns(first, table=_is_table(data), user_column=owner) if lacking else []

    def told(setting: str, name: str) -> DataError:
        mend = f"--{setting.removeprefix('data.').replace('_', '-')} NAME" if options else None
        return missing_column(name, record, 1, shared=shared, mend=mend)

    return [(setting, told(setting, name)) for setting, name in lacking]


_KINDS: Final = ("text", "prompt", "completion", "messages", "chosen", "rejected", "text_pair", "label")


def _is_table(data: DataSettings) -> bool:
    """Whether the first file's columns may have been a record, as the first line of a table is; also of records that
    were handed over, which a table may have been."""
    path = data.path if isinstance(data.path, str) else data.path[0]
    return path in (IN_MEMORY, AT_CLIENTS) or local_file(path, data.format)[1] in TABLES


def _first(data: DataSettings) -> list[Mapping[str, Any]]:
    """The first record, and those after it that can be read, a few. Raises DataError as reading it does."""
    first: list[Mapping[str, Any]] = []
    try:
        for record in _begun(data, _FEW):
            first.append(record)  # those before a broken one are kept
    except DataError:
        if not first:
            raise
    return first


def _begun(data: DataSettings, count: int) -> Iterator[Mapping[str, Any]]:
    path = data.path if isinstance(data.path, str) else data.path[0]
    if path in (IN_MEMORY, AT_CLIENTS) or path.startswith(HUB) or local_file(path, data.format)[1] == "json":
        return
    yield from iterate_records(path, format=data.format, limit=min(count, data.limit or count))


def _first_given(records: Any) -> list[Mapping[str, Any]]:
    first = records[:_FEW] if isinstance(records, list) else []
    return first if all(isinstance(record, Mapping) for record in first) else []
