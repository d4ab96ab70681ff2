"""Reading private records from memory, local files or a hub dataset.

Errors name files, lines and columns, never contents. What may be a record instead of a file's name is not shown
either, and the hub is asked only for what is written with ``hf://``.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import itertools
import json
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast, get_args

from privlora.data.canonical import canonical
from privlora.data.formats import (
    FORMAT_OF_SUFFIX,
    PLACE,
    SAID,
    SAVED,
    Format,
    Record,
    begins_a_list,
    read_placed,
    rows_of,
    seems,
    separator_of,
)
from privlora.data.forms import COLUMN, are_names, is_usual
from privlora.errors import ConfigError, DataError, RecordError, is_a_slip, named

HUB = "hf://"
"""Begins the name of a hub dataset; nothing else is ever sought there."""

CONTENT_BYTES = 16
"""Of a content hash."""

GIVE_RECORDS: Final = (
    "give a list of mappings or of texts, a table (datasets, pandas, polars, Arrow), or a file of records"
)

_OTHER_ENDINGS: Final = {
    ".xlsx .xls .xlsm .ods": "save the sheet as CSV (UTF-8), or in Python pass pandas.read_excel(...)",
    ".tsv": "write it with commas as .csv, or as JSONL",
    ".pdf .docx .doc .html .md": 'write its texts as JSON lines, {"text": ...}; rename plain text to .txt',
    ".zip .tar .7z": "unpack it",
}
"""How to give files of other programs."""

_HUB_NAME = re.compile(
    HUB + r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.%\[\]:+-]+))?"
)
TABLES: Final = frozenset({"csv", "parquet", "arrow"})
"""Formats of files whose columns may be those of a first line, which may have been a record."""

_SHOWN_COLUMNS = 20
_ENOUGH: Final = 8  # records that have a column which is no matter of one of them

MOST_CHARACTERS: Final = 10_000_000
"""Of one text: tokenizers need minutes for more, of which a model would read a few thousand tokens."""

Broken = Callable[[DataError], None]
"""Is given what of a file cannot be read as a record, and may raise."""


def _refuse(error: DataError) -> NoReturn:
    raise error from None  # what it came from may hold a record


def load_records(path: str | list[str], **how: Any) -> list[Record]:
    """What `iterate_records` yields, as a list. how: its other arguments. Raises what it does."""
    return list(iterate_records(path, **how))


def iterate_records(
    path: str | list[str],
    *,
    format: Format = "auto",
    limit: int | None = None,
    broken: Broken = _refuse,
    look: bool = True,
) -> Iterator[Record]:
    """Read records, one dictionary each, in the order of the files; nothing is kept of those that were yielded.

    Lines, paragraphs, CSV, Parquet, Arrow and hub datasets are read piece by piece; a JSON list is one piece.

    Args:
        path: a local file (``.gz`` is unpacked on the fly), a folder that ``datasets`` saved, several of them, or a
            hub dataset as ``hf://name``, ``hf://name:split`` or ``hf://name@config:split`` (the split is ``train``
            unless given).
        format: ``auto`` goes by the file's ending; of JSON, lines and a list are told apart by how the file begins.
            ``text`` is one record a non-blank line and ``paragraphs`` one between blank lines (both as column "text").
        limit: keep only the first ``limit`` records.
        broken: is given what of a file that is there cannot be read as a record, and may raise. What it does not raise
            for counts as no record (`privlora.data.formats` says how far the others stay as they are).
        look: whether a file's beginning may show its format, besides its ending. Not for a client of a federation: no
            record may decide how the others are read.

    Yields:
        At least one record.

    Raises:
        ConfigError: unknown ``format``, or ``limit`` < 1.
        DataError: missing, empty, damaged or undecodable file, bad JSON or CSV (with the line), unknown
            hub dataset.
    """
    format = format_of(format)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} is below 1", fix="leave it out to read everything")
    sources = [path] if isinstance(path, str) else path
    read = itertools.chain.from_iterable(_read(s, format, broken, look) for s in sources)
    number = 0
    for number, record in enumerate(itertools.islice(read, limit), start=1):  # noqa: B007
        yield record
    if not number:
        raise no_records(sources)


def format_of(name: str) -> Format:
    """A format by its name. Raises ConfigError for an unknown one."""
    if name not in get_args(Format):
        raise ConfigError(f"format={named(name)} is unknown", fix=f"use one of {', '.join(get_args(Format))}")
    return cast(Format, name)


def no_records(sources: Sequence[str]) -> DataError:
    """The error for files that hold none."""
    return DataError(
        f"no records in {', '.join(map(shown, sources)) or 'an empty list of files'}",
        fix="give a file with at least one record, or leave this one out",
    )


def refuse_missing(path: str | list[str], *, format: Format = "auto", look: bool = False) -> None:
    """Raise what ``load_records`` would of a file that is not there or of no known format, without reading or asking.
    look: whether files may be read for it."""
    for source in [path] if isinstance(path, str) else path:
        if not source.startswith(HUB):
            local_file(source, format, look=look)


class Records(list[Mapping[str, Any]]):
    """What `as_records` gave, which is not looked at again."""


def as_records(data: Any) -> list[Mapping[str, Any]]:
    """Records that a Python caller has in memory, as a list of mappings; strings become the column "text".

    data: any iterable of mappings or of strings, for example a list, a generator or a ``datasets.Dataset``; a data set
    of torch; a mapping from columns to lists; or a table of pandas, polars, pyarrow, duckdb or what else has Arrow's
    ``__arrow_c_stream__``. A string is a text, whatever it holds: it is never looked up as a file.

    Raises DataError for anything else, without showing any of it.
    """
    if isinstance(data, Records):
        return data
    items = list(_items_of(data))
    if not items:
        raise DataError("there are no records", fix="give at least one")
    texts, mappings = (sum(isinstance(item, kind) for item in items) for kind in (str, Mapping))
    kind, called = (str, "text") if texts >= max(1, mappings) else (Mapping, "mapping of columns")
    wrong = [str(number) for number, item in enumerate(items, start=1) if not isinstance(item, kind)]
    if wrong:
        what = f"no {called}, as the others are"
        if len(wrong) == len(items):
            what = f"of type {type(items[0]).__name__}"
        where = places("record", wrong[:SHOWN], len(wrong) - SHOWN)
        raise DataError(
            f"{where} {'are' if len(wrong) > 1 else 'is'} {what} (counted from 1)",
            fix=f"write every record as a {called}, and leave out what is missing (None, NaN)",
        )
    if texts and all(map(is_data_file_name, items)):
        what = "all strings end like names of data files, and strings in a list are records"
        raise DataError(what, fix="give files as pathlib.Path")
    try:
        return Records({"text": item} for item in items) if texts else Records(map(_without_arrays, items))
    except RecursionError:
        raise DataError("a record is too deeply nested", fix="give records of fewer levels") from None


def _items_of(data: Any) -> Iterable[Any]:
    """Mappings or strings, as far as they are; what else there is, too. Raises DataError for what holds no records."""
    _refuse_splits(data)
    if isinstance(data, Mapping):
        return _rows_of_columns(data)
    pandas = sys.modules.get("pandas")  # who passes a table has imported it
    if pandas is not None and isinstance(data, pandas.DataFrame):
        return data.to_dict("records")  # and not by Arrow, which finds one type for a column
    if callable(getattr(data, "collect", None)):  # a query of polars that did not run yet
        data = data.collect()
    if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
        return _rows_of_table(data)
    if hasattr(data, "collate_fn") and hasattr(data, "dataset"):
        what = f"the data are a {type(data).__name__}, which gives batches and not records"
        raise DataError(what, fix="give what it was made from, as loader.dataset")
    if inspect.isroutine(data):
        raise DataError("the data are a function, and not what it gives", fix="call it, as records()")
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Path):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes):
        return (data[at] for at in range(len(data)))  # a data set of torch
    raise DataError(f"records in memory cannot be of type {type(data).__name__}", fix=GIVE_RECORDS)


def _rows_of_columns(data: Mapping[str, Any]) -> Iterable[Record]:
    columns = {name: _without_arrays(column) for name, column in data.items()}
    if not all(isinstance(column, list) for column in columns.values()):
        fix = "give a mapping from columns to lists, or a list of mappings; put a single record in a list"
        raise DataError("the data are one mapping that holds no lists, and not several records", fix=fix)
    try:
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    except ValueError:
        fix = "give each column one value for each record"
        raise DataError("the columns of the data are of different lengths", fix=fix) from None


def _rows_of_table(data: Any) -> Iterable[Any]:
    import pyarrow

    try:
        rows = [row for _, row in rows_of(pyarrow.table(data).to_batches())]
    except (TypeError, ValueError, pyarrow.ArrowException):  # a single column
        return data.to_pylist() if hasattr(data, "to_pylist") else data
    for number, row in enumerate(rows, start=1):
        if isinstance(row, DataError):
            raise row.of(f"record {number}") from None
    return rows


def _without_arrays(value: Any) -> Any:
    """Lists and Python's own numbers instead of what numpy or torch holds, also inside; else the same value."""
    if isinstance(value, Mapping):
        found = {key: _without_arrays(part) for key, part in value.items()}
        return found if any(found[key] is not part for key, part in value.items()) else value
    if isinstance(value, list):
        parts = [_without_arrays(part) for part in value]
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if isinstance(value, tuple):
        return _without_arrays(list(value))
    return _without_arrays(value.tolist()) if hasattr(value, "tolist") else value


SHOWN: Final = 5
"""Places of one mistake that are named."""
_BLANKS: Final = 2  # in a path that is shown


def missing_as(value: Any) -> str | None:
    """As what a value that is not there was written, null or NaN; None for others."""
    if value is None:
        return "null"
    is_nan = (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    return "NaN" if is_nan else None


def places(kind: str, where: Sequence[str], more: int = 0) -> str:
    """
    >>> places("record", ["4"]), places("line", ["4", "7"], 2)
    ('record 4', 'lines 4, 7 and more')
    """
    # How many more is a count of private records, and errors are passed on.
    return f"{kind}{'s' * (len(where) > 1)} {', '.join(where)}" + (" and more" if more > 0 else "")


_SPLITS: Final = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})


def _refuse_splits(data: Any) -> None:
    """Raise DataError for a ``datasets.DatasetDict``, the streaming kind of it, or a mapping that is like one."""
    if not isinstance(data, Mapping) or not data:
        return
    if not type(data).__module__.startswith("datasets.") and not _SPLITS.issuperset(data):
        return
    splits = [str(name) for name in data if COLUMN.fullmatch(str(name))] or ["train"]
    split = "train" if "train" in splits else splits[0]
    raise DataError(
        f"the data are a {type(data).__name__} of several splits, and which of them are private is yours to say",
        fix=f"give one split, as data[{split!r}]",
    )


def is_data_file_name(text: str) -> bool:
    """Whether a string ends like the name of a data file; nothing is looked up."""
    return text.lower().endswith((*FORMAT_OF_SUFFIX, ".gz")) and "\n" not in text


def shown(source: str) -> str:
    """How an error speaks of a string that stands where a file is named: only a file's name is shown. A text may end
    like one, as a record that mentions a file does; it has more blanks."""
    path = is_data_file_name(source) and source.isprintable() and source.count(" ") <= _BLANKS
    return source if path or _HUB_NAME.fullmatch(source) else "the string given as data"


def content_hash(record: Mapping[str, Any], columns: Collection[str]) -> bytes | None:
    """16 bytes of the SHA-256 of what a record holds in ``columns``, whatever their order; None if it lacks one.

    Upper case, the number of blanks and what Arrow adds to nested values make no difference: copies through other
    programs differ in them.
    """
    found = {name: field_of(record, name) for name in sorted(columns)}
    if any(value is _NONE for value in found.values()):
        return None
    plain = [_plain(canonical(value)) for value in found.values()]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=repr).encode()).digest()[:CONTENT_BYTES]


_NONE: Final = object()


def field_of(record: Mapping[str, Any], name: str) -> Any:
    """What a record has in a column, or, by a name such as ``note.text``, inside one; ``_NONE`` where it has not."""
    if name in record:
        return record[name]
    outer, dot, inner = name.partition(".")
    held = record.get(outer) if dot else None
    return field_of(held, inner) if isinstance(held, Mapping) else _NONE


def has_column(record: Mapping[str, Any], name: str) -> bool:
    """Whether `value_of` gives anything."""
    return field_of(record, name) is not _NONE


def value_of(record: Mapping[str, Any], name: str, number: int) -> Any:
    """What record ``number`` (from 1) has in a column, or by a name with dots inside one. Raises DataError."""
    found = field_of(record, name)
    if found is _NONE:
        raise missing_column(name, record, number)
    return found


def _plain(value: Any) -> Any:
    """A value without what copying may change in it, also inside lists and mappings."""
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def text_of(record: Mapping[str, Any], column: str, number: int) -> str:
    """The text in ``column`` of record ``number`` (counted from 1).

    Raises:
        DataError: the column is missing, or holds no valid Unicode string.
    """
    value = value_of(record, column, number)
    if not isinstance(value, str):
        what = missing_as(value)
        held = f"is empty ({what})" if what else f"holds {type(value).__name__}, not text"
        fix = "write every value as a string, an empty one if there is nothing to say, or leave such records out"
        if isinstance(value, Mapping):
            inner = next((name for name in value if isinstance(name, str) and is_usual(name)), "FIELD")
            fix = f"name what is in it with a dot, as {column}.{inner}"
        raise RecordError(number, f"column {column!r} {held}", fix=fix)
    if len(value) > MOST_CHARACTERS:
        what = f"column {column!r} has more than {MOST_CHARACTERS:,} characters"
        raise RecordError(number, what, fix="divide the text into several records, or remove it")
    try:
        value.encode()
    except UnicodeEncodeError:
        what = f"column {column!r} holds half of a surrogate pair, which is no valid Unicode"
        # Not chained: the original error holds the text.
        raise RecordError(number, what, fix="replace such characters, or mend what wrote the file") from None
    return value


def missing_column(
    column: str,
    record: Mapping[str, Any],
    number: int,
    *,
    shared: Collection[str] = (),
    mend: str | None = None,
) -> DataError:
    """The error for a record without ``column``: the nearest name, and its columns that may be shown.

    mend: how one is named. shared: columns of other records, too (`shared_columns`). A key of one record may be about a
    person: of the others those alone are shown that are called as columns usually are, or that differ from what was
    asked for by one letter.
    """
    names = [str(name) for name in record]
    slips = [name for name in names if COLUMN.fullmatch(name) and is_a_slip(name, column)]
    nearest = difflib.get_close_matches(column, shared, n=1) or slips[:1]
    shown = [name for name in names if name in shared or name in nearest or is_usual(name)]
    listed = ", ".join(shown[:_SHOWN_COLUMNS]) + (" and more" if len(shown) > _SHOWN_COLUMNS else "")
    if len(shown) < len(names):
        left = "few records may have them" if shown else "they look like contents: is there a header line?"
        listed = f"{listed}{' and others ' * bool(shown)}(not shown, since {left})"
    fix = "name one of its columns"
    if (separator := separator_of(names)) is not None:
        fix = f"the table seems to be separated by {separator!r}; write it with commas, or as JSONL"
    elif nearest:
        fix = f"did you mean {nearest[0]!r}?"
    elif "input_ids" in names:
        fix = "give texts and not tokens: what of a record is learnt, and where it is cut, is decided here"
    elif "[" in column:
        fix = f"write {named(column.replace('[', '.').replace(']', ''))} for what is inside a column"
    elif mend is not None:
        fix += f", as {mend}"
    elif column == "text":
        fix = "name its columns, as data.text=NAME; or data.prompt=NAME, data.completion=NAME; or data.messages=NAME"
    return RecordError(number, f"has no column {named(column)}; its columns are: {listed or 'none'}", fix=fix)


def shared_columns(
    records: Sequence[Mapping[Any, Any]], *, table: bool, user_column: str | None = None
) -> list[str]:
    """Columns in which most of the first records, and no fewer than eight, have a value, where all look like names.

    table: whether their columns may have been a record, as the first line of a table. user_column: of a record's user;
    what the records of a single one have is not shown.
    """
    if len(records) < _ENOUGH:
        return []
    holders: dict[str, list[str]] = {}  # of each column, whose records have it
    for number, record in enumerate(records):
        whose = str(number if user_column is None else field_of(record, user_column))
        for name in (str(name) for name, value in record.items() if is_there(value)):
            holders.setdefault(name, []).append(whose)
    most = max(_ENOUGH, len(records) // 2 + 1)
    common = {name for name, found in holders.items() if len(found) >= most and len({*found}) > 1}
    names = [name for name in map(str, records[0]) if name in common]
    columns = list(map(str, records[0])) if table else names
    return names if are_names(columns, records if table else None) else []


def is_there(value: Any) -> bool:
    """Not so where a table has a column for the sake of other rows."""
    return missing_as(value) is None and not (isinstance(value, str) and not value)


def _read(source: str, format: Format, broken: Broken, look: bool) -> Iterator[Record]:
    if source.startswith(HUB):
        yield from _read_hub(source)
        return
    file, format = local_file(source, format, look=look)
    for number, record in read_placed(file, format):
        if isinstance(record, DataError):
            broken(record.of(f"{file}, {PLACE[format]} {number}" if number else str(file)))
        else:
            yield record


def local_file(source: str, format: Format, *, look: bool = False) -> tuple[Path, Format]:
    """The file of a path and its format, not ``auto``. Raises DataError if there is none; nothing but the local disk is
    asked. look: whether the file may be read to tell its format, where its name says none or that it is text."""
    file = Path(source)
    try:
        file = file.expanduser()
        exists, is_file = file.exists(), file.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, no such home: no name of a file
        exists = is_file = False
    if not exists:
        is_shown = shown(source) == source and is_data_file_name(source)
        raise DataError(
            f"there is no file {source}" if is_shown else f"{shown(source)} is no local file",
            fix=f"check the path; a hub dataset is written {HUB}name:split, and in Python texts are a list of strings",
        )
    if not is_file:
        if (file / SAVED[0]).is_file():
            return file, "arrow"
        # What is there on the disk is a path, whatever it looks like.
        raise _no_file(source, file)
    if format == "auto":
        format = FORMAT_OF_SUFFIX.get(Path(file.name.lower().removesuffix(".gz")).suffix, "auto")
        if format == "text" and look:
            _refuse_json(source, file)
    if format == "auto":
        ending = file.suffix.lower()
        other = next((fix for endings, fix in _OTHER_ENDINGS.items() if ending in endings.split()), None)
        fix = other or _to_say(seems(file) if look else None)
        raise DataError(f"the ending of {source} does not say what it is as records", fix=fix)
    if format == "jsonl" and look and begins_a_list(file):
        format = "json"
    return file, format


def files_in(place: Path) -> list[Path]:
    """A file by itself, or those of a folder that ``datasets`` saved. Raises OSError."""
    return sorted(each for each in place.iterdir() if each.is_file()) if place.is_dir() else [place]


def _to_say(format: Format | None) -> str:
    """How to say what a file is that has no ending, or another one. format: None for what is not known."""
    if format == "text":
        return "set data.format=text if each line is a text, or data.format=csv for a table with commas"
    if format is not None:
        return f"it holds {SAID[format]}: set data.format={format}"
    endings = ", ".join(FORMAT_OF_SUFFIX)
    formats = ", ".join(get_args(Format)[1:])
    return f"give it an ending that does ({endings}), or set data.format to one of {formats}"


def _refuse_json(source: str, file: Path) -> None:
    """Raise DataError for a file of JSON that is named as one of text: half of its lines may be nobody's record."""
    format = seems(file)
    if format in ("json", "jsonl"):
        raise DataError(
            f"{source} is named as a text with a record in each line, and holds {SAID[format]}",
            why="each line would be trained on as it stands, with its brackets and names of columns",
            fix=f"set data.format={format}, or data.format=text if its lines are the texts",
        )


def _no_file(source: str, place: Path) -> DataError:
    """The error for what is there and no file."""
    if (place / SAVED[1]).is_file():
        split = min((each.parent for each in place.glob(f"*/{SAVED[0]}")), default=place / "train")
        what = f"{source!r} holds several splits, and which of them are private is yours to say"
        return DataError(what, fix=f"name one of them, as {split}")
    files = [str(each) for each in sorted(place.glob("*")) if is_data_file_name(each.name)]
    if not files:
        what = f"{source!r} is no file of records, nor a folder of them"
        return DataError(what, fix=f"name a file: {', '.join(FORMAT_OF_SUFFIX)}")
    listed = ", ".join(files[:SHOWN]) + ", …" * (len(files) > SHOWN)
    fix = f"name its files, as path: [{listed}]; for `privlora init` one after the other, with --clients if each is "
    return DataError(f"{source!r} is not a file but a folder", fix=f"{fix}of another owner")


def _read_hub(source: str) -> Iterator[Record]:
    import datasets
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hub = _HUB_NAME.fullmatch(source)
    if hub is None:
        fix = f"write {HUB}name@config:split"
        raise DataError(f"what follows {HUB} is no name of a hub dataset", fix=fix)
    name, config, split = hub["name"], hub["config"], hub["split"] or "train"
    had_bars = not are_progress_bars_disabled()
    with warnings.catch_warnings(action="ignore"):  # the environment may have the last word on bars
        # They show how many records there are, and how fast they are read.
        disable_progress_bars()
        try:
            rows = datasets.load_dataset(name, config, split=split, trust_remote_code=False)
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            # Only the kind of error: the message of a failed conversion may quote a record.
            wanted = f"the hub dataset {f'{name}@{config}' if config else name}, split {split},"
            fix = "check the name, its configurations and splits, and the network; or give a local file"
            raise DataError(f"{wanted} cannot be loaded ({type(error).__name__})", fix=fix) from None
        finally:
            if had_bars:
                enable_progress_bars()
    yield from rows
