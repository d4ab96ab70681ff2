"""Records that cannot be used, told together: files are read to their end, lists gone through.

Errors name files, lines and columns, never contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from privlora.config import DataSettings
from privlora.data.examples import Template
from privlora.data.formats import PLACE, Format, Record, read_placed
from privlora.data.records import (
    HUB,
    SHOWN,
    as_records,
    iterate_records,
    local_file,
    no_records,
    places,
    text_of,
)
from privlora.data.rendering import Renderer, holds_turns, messages_of
from privlora.data.tasks import find_task, labelled_record, task_record
from privlora.data.templates import fields_of
from privlora.data.units import Grouping
from privlora.errors import DataError, RecordError, in_one

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
    found, number = _Unusable(), 0
    for path, kind, place, record in _placed(paths, form):
        if isinstance(record, DataError):
            found.add(record, place, path, kind if place else "")
            continue
        number += 1
        if check is not None:
            try:
                check(record, number)
            except DataError as error:
                found.add(error, place or number, path, kind)
        if number == limit:
            break
    if not number and not found.kinds:
        raise no_records(paths)
    found.tell()


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


def refuse_unusable(records: Any, check: Check) -> None:
    """The same of a list of records in memory."""
    found = _Unusable()
    for number, record in enumerate(as_records(records), start=1):
        try:
            check(record, number)
        except DataError as error:
            found.add(error, number)
    found.tell()


class _Unusable:
    """Mistakes of records, each by its words, with the first places where it is found, and whether there are more."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[Any, ...], tuple[DataError, list[str]]] = {}

    def add(self, error: DataError, place: int, file: str = "", kind: str = "record") -> None:
        """What is wrong there. kind: what is counted in the file; empty where it is all of the file."""
        what = error.bare if isinstance(error, RecordError) else error.what
        key = file, kind, what, error.why, error.fixes
        if key in self.kinds or len(self.kinds) <= SHOWN:
            where = self.kinds.setdefault(key, (error, []))[1]
            where += [str(place)] * (len(where) <= SHOWN)

    def tell(self) -> None:
        """Raise what was found, if anything was."""
        told = list[DataError]()
        for (file, kind, what, *_), (error, where) in list(self.kinds.items())[:SHOWN]:
            at = [file] * bool(file) + [places(kind, where[:SHOWN], len(where) - SHOWN)] * bool(kind)
            told.append(DataError(f"{', '.join(at)}: {what}", why=error.why, fix=error.fixes))
        if len(self.kinds) > SHOWN:
            told.append(DataError("other records have other mistakes", fix="mend these first"))
        if told:
            raise in_one(told) from None
