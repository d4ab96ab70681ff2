"""Whether the model, the files that settings name and their columns are there: asked before slow imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privlora.config import DataSettings, Settings
from privlora.config.groups import AT_CLIENTS, IN_MEMORY
from privlora.data.records import HUB, iterate_records, local_file, missing_column, refuse_missing
from privlora.data.tasks import find_task, labelled_record, task_record
from privlora.data.templates import fields_of
from privlora.errors import DataError, ModelError, Together, in_one
from privlora.training.files import RunFolder
from privlora.training.model_names import refuse_no_model
from privlora.training.takeover import refuse_if_spent


def refuse_first(
    settings: Settings, records: Any = None, evaluation: Any = None, *, given: bool = False
) -> None:
    """Before slow imports, refuse a folder that holds a run, a model that is not there, files that are not there and
    columns that the first record lacks: all of them together, each with its line where that is known.

    records, evaluation: what stands for the files, in memory. given: whether a loaded model stands for its name.
    Raises DataError, ModelError or RunError; ConfigError of several kinds.
    """
    problems = Together()
    problems.of(None, refuse_if_spent, RunFolder(Path(settings.run.output)))
    if not given:
        problems.of(None, _refuse_no_model, settings)
    missing = len(problems.found)
    problems.of(None, check_sources, settings, records, evaluation)
    if len(problems.found) == missing:
        problems.of(None, check_columns, settings, records)
    with settings.placing():
        problems.tell()


def _refuse_no_model(settings: Settings) -> None:
    try:
        refuse_no_model(settings.model)
    except ModelError as error:
        settings.placed(error, "model.name")
        raise


def check_sources(settings: Settings, records: Any = None, evaluation: Any = None) -> None:
    """Refuse settings that name files which are not there, before a model is loaded. Raises DataError of all of them.

    records, evaluation: what stands for the files, in memory.
    """
    data = settings.data
    read = {
        "adapter.public_text": (settings.adapter.public_text, data.format),
        "data.path": (data.path if records is None else None, data.format),
        "data.evaluation": (data.evaluation if evaluation is None else None, data.format),
        "auto.file": (None if settings.auto is None else settings.auto.file, data.format),
        "synthesis.file": (None if settings.synthesis is None else settings.synthesis.file, "auto"),
    }
    problems = Together()
    for setting, (path, form) in read.items():
        if path is not None:
            problems.of(None, _refuse_missing, setting, path, form)
    problems.tell()


def _refuse_missing(setting: str, path: str | list[str], form: Any) -> None:
    try:
        refuse_missing(path, format=form)
    except DataError as error:
        raise error.of(setting) from None


def check_columns(settings: Settings, records: Any = None) -> None:
    """Refuse settings whose columns the first private record lacks, before a model is loaded. Raises DataError as
    reading all of them would.

    Of records on the hub, in a JSON list (which is read as a whole) and of an iterator none is looked at.
    records: what stands for the files, in memory.
    """
    record = _first(settings.data) if records is None else _first_given(records)
    if record is not None:
        lacking = _lacking(settings.data, record, settings.privacy.user_column)
        if lacking:
            raise in_one([settings.placed(error, about) for about, error in lacking])


def check_parts(data: DataSettings) -> None:
    """``check_columns`` for every file of ``data``, which is asked for in parts or as a whole, and belongs to no run.
    Raises DataError of a file that is not there as well."""
    for path in [data.path] if isinstance(data.path, str) else data.path:
        refuse_missing(path, format=data.format)
        record = _first(data.model_copy(update={"path": path}))
        if record is not None and (lacking := _lacking(data, record, None)):
            raise in_one([error for _, error in lacking])


def _lacking(data: DataSettings, record: Mapping[str, Any], owner: str | None) -> list[tuple[str, DataError]]:
    """Of each column that is not there the setting that names it, and what to say. owner: that of a record's user.
    Raises DataError for a record that is none of data.task."""
    if data.task is not None:
        (task_record if data.label is None else labelled_record)(find_task(data.task), record, 1)
        wanted = set[str]()
    else:
        columns = [data.columns, data.rejected_columns or {}]
        chats = {each["messages"] for each in columns if each.get("messages") is not None}
        texts = [each.get(name) for each in columns for name in ("text", "prompt", "completion")]
        wanted = {*chats, *fields_of([*texts, data.pair]), *([] if data.label is None else [data.label])}
    found = [
        (f"data.{_named_by(data, name)}", missing_column(name, record, 1))
        for name in sorted(wanted)
        if name not in record
    ]
    if owner is not None and owner not in record:
        found.append(("privacy.user_column", missing_column(owner, record, 1)))
    return found


def _named_by(data: DataSettings, column: str) -> str:
    """The field of data that names a column."""
    kinds = ("text", "prompt", "completion", "messages", "chosen", "rejected", "text_pair", "label")
    named = {kind: getattr(data, kind) for kind in kinds}
    return next(
        (
            kind
            for kind, value in named.items()
            if value is not None and column in {value, *fields_of([value])}
        ),
        "text",
    )


def _first(data: DataSettings) -> Mapping[str, Any] | None:
    return next(iter(first_records(data, 1)), None)


def first_records(data: DataSettings, count: int) -> list[Mapping[str, Any]]:
    """The first ones, without reading more; none of records on the hub, elsewhere, or in a JSON list."""
    path = data.path if isinstance(data.path, str) else data.path[0]
    if path in (IN_MEMORY, AT_CLIENTS) or path.startswith(HUB) or local_file(path, data.format)[1] == "json":
        return []
    return list(iterate_records(path, format=data.format, limit=min(count, data.limit or count)))


def _first_given(records: Any) -> Mapping[str, Any] | None:
    first = records[0] if isinstance(records, list) and records else None
    return first if isinstance(first, Mapping) else None
