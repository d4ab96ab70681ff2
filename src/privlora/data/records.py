"""Reading private records from memory, local files or a hub dataset.

Errors name files, lines and columns, never contents. What may be a record in the place of a file's name is not shown
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, get_args

from privlora.data.canonical import canonical
from privlora.data.formats import (
    FORMAT_OF_SUFFIX,
    SAID,
    Broken,
    Format,
    Record,
    read_file,
    seems,
    separator_of,
)
from privlora.data.forms import COLUMN, are_names, is_usual
from privlora.errors import ConfigError, DataError, in_one, is_a_slip, named

HUB = "hf://"
"""Begins the name of a hub dataset; nothing else is ever sought there."""

CONTENT_BYTES = 16
"""Of a content hash."""

GIVE_RECORDS: Final = (
    "give a list of mappings or of texts, a table (pandas, datasets), or the path of a file of records"
)

_OTHER_ENDINGS: Final = {
    **dict.fromkeys(
        (".xlsx", ".xls", ".xlsm", ".ods"),
        "save the sheet as CSV (UTF-8), or in Python pass pandas.read_excel(...) as the records",
    ),
    ".tsv": "write it with commas as .csv, or as JSONL",
    **dict.fromkeys(
        (".arrow", ".feather"), "write it as .parquet, or in Python pass the table as the records"
    ),
    **dict.fromkeys(
        (".pdf", ".docx", ".doc", ".html", ".md"),
        'write its texts as JSON lines, one record each, as {"text": ...}; or, of plain text, rename it to .txt',
    ),
    **dict.fromkeys((".zip", ".tar", ".7z"), "unpack it"),
}
"""How to give files of other programs."""

_HUB_NAME = re.compile(
    HUB + r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.%\[\]:+-]+))?"
)
TABLES: Final = frozenset({"csv", "parquet"})
"""Formats of files whose columns may be those of a first line, which may have been a record."""

_SHOWN_COLUMNS = 20
_ENOUGH: Final = 8  # records that have a column which is no matter of one of them


def _refuse(error: DataError) -> NoReturn:
    raise error from None  # what it came from may hold a record


def load_records(
    path: str | list[str],
    *,
    format: Format = "auto",
    limit: int | None = None,
    broken: Broken = _refuse,
) -> list[Record]:
    """What `iterate_records` yields, as a list. Raises what it does."""
    return list(iterate_records(path, format=format, limit=limit, broken=broken))


def iterate_records(
    path: str | list[str],
    *,
    format: Format = "auto",
    limit: int | None = None,
    broken: Broken = _refuse,
) -> Iterator[Record]:
    """Read records, one dictionary each, in the order of the files; nothing is kept of those that were yielded.

    Lines, paragraphs, CSV, Parquet and hub datasets are read piece by piece; a JSON list is one piece.

    Args:
        path: a local file (``.gz`` is unpacked on the fly), several of them, or a hub dataset as ``hf://name``,
            ``hf://name:split`` or ``hf://name@config:split`` (the split is ``train`` unless given).
        format: ``auto`` goes by the file's ending. ``jsonl`` is one object a line, ``json`` a list of
            objects, ``text`` one record a non-blank line and ``paragraphs`` one between blank lines (both
            as column "text").
        limit: keep only the first ``limit`` records.
        broken: is told what of a file that is there cannot be read as a record, and may raise. What it does not raise
            for counts as no record (`privlora.data.formats` says how far the others stay as they are).

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
    read = itertools.chain.from_iterable(_read(s, format, broken) for s in sources)
    number = 0
    for number, record in enumerate(itertools.islice(read, limit), start=1):  # noqa: B007
        yield record
    if not number:
        raise no_records(sources)


def format_of(name: str) -> Format:
    """A format by its name. Raises ConfigError for an unknown one."""
    found = next((each for each in get_args(Format) if each == name), None)
    if found is None:
        raise ConfigError(f"format={named(name)} is unknown", fix=f"use one of {', '.join(get_args(Format))}")
    return found


def no_records(sources: Sequence[str]) -> DataError:
    """The error for files that hold none."""
    return DataError(
        f"no records in {', '.join(map(shown, sources)) or 'an empty list of files'}",
        fix="give a file with at least one record, or leave this one out",
    )


def refuse_missing(path: str | list[str], *, format: Format = "auto", look: bool = False) -> None:
    """Raise what ``load_records`` would of a file that is not there or cannot be told, without reading or asking. look:
    whether files may be read for it."""
    for source in [path] if isinstance(path, str) else path:
        if not source.startswith(HUB):
            local_file(source, format, look=look)


def as_records(data: Any) -> list[Mapping[str, Any]]:
    """Records that a Python caller has in memory, as a list of mappings; strings become the column "text".

    data: any iterable of mappings or of strings, for example a list, a generator or a ``datasets.Dataset``; or a
    ``pandas.DataFrame``. A string is a text, whatever it holds: it is never looked up as a file.

    Raises DataError for anything else, without showing any of it.
    """
    pandas = sys.modules.get("pandas")  # who passes a table has imported it
    if pandas is not None and isinstance(data, pandas.DataFrame):
        data = data.to_dict("records")
    refuse_splits(data)
    if isinstance(data, Mapping):
        raise DataError(
            "the data are one mapping, not a list of records",
            fix="give one split, as data['train'], of a DatasetDict; put a single record in a list",
        )
    if inspect.isroutine(data):
        raise DataError("the data are a function, and not what it gives", fix="call it, as records()")
    if isinstance(data, str | bytes | Path) or not isinstance(data, Iterable):
        raise DataError(f"records in memory cannot be of type {type(data).__name__}", fix=GIVE_RECORDS)
    items = list(data)
    if not items:
        raise DataError("there are no records", fix="give at least one")
    texts = sum(isinstance(item, str) for item in items)
    if wrong := _wrong_items(items):
        raise in_one(wrong) from None
    if texts and all(map(is_data_file_name, items)):
        raise DataError(
            "the data are a list of strings that all end like names of data files",
            why="strings in a list are records",
            fix="give files as pathlib.Path",
        )
    return [{"text": item} for item in items] if texts else items


def _wrong_items(items: Sequence[Any]) -> list[DataError]:
    """What of a list cannot be a record beside the others, each kind with its places, counted from 1."""
    texts, mappings = (sum(isinstance(item, kind) for item in items) for kind in (str, Mapping))
    of_texts = texts >= max(1, mappings)
    kind, where = str if of_texts else Mapping, dict[str, list[str]]()
    for number, item in enumerate(items, start=1):
        if not isinstance(item, kind):
            what = missing_as(item) or (_MIXED if isinstance(item, Mapping | str) else type(item).__name__)
            where.setdefault(what, []).append(str(number))
    return [_wrong_item(what, numbers, of_texts=of_texts) for what, numbers in where.items()]


_MIXED: Final = "mixed"


def _wrong_item(what: str, numbers: Sequence[str], *, of_texts: bool) -> DataError:
    be = "are" if len(numbers) > 1 else "is"
    told = f"{places('record', numbers[:SHOWN], len(numbers) - SHOWN)} {be}"
    if what == _MIXED:
        told = f"the data mix texts and other records: {told} {'no text' if of_texts else 'text alone'}"
        return DataError(told, fix='write every record as {"text": ...}')
    if what in (NULL, NAN):
        one = "text" if of_texts else "record"
        return DataError(
            f"{told} {what} in the place of a {one} (counted from 1)",
            fix="leave such out, as "
            + (
                f"[{one} for {one} in data if {one} is not None]"
                if what == NULL
                else "column.dropna() of a table"
            ),
        )
    fix = "write every record as a text" if of_texts else "write it as a mapping of columns"
    return DataError(f"{told} of type {what}", fix=fix)


SHOWN: Final = 5
_BLANKS: Final = 2  # in a path that is shown
"""Places of one mistake that are told."""
NULL: Final = "None"
NAN: Final = "NaN"


def missing_as(value: Any) -> str | None:
    """As what a value that is not there was written; None for others."""
    if value is None:
        return NULL
    is_nan = (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    return NAN if is_nan else None


def places(kind: str, where: Sequence[str], more: int = 0) -> str:
    """
    >>> places("record", ["4"]), places("line", ["4", "7"], 2)
    ('record 4', 'lines 4, 7 and more')
    """
    # How many more is a count of private records, and errors are passed on.
    return f"{kind}{'s' * (len(where) > 1)} {', '.join(where)}" + (" and more" if more > 0 else "")


def refuse_splits(data: Any) -> None:
    """Raise DataError for a ``datasets.DatasetDict`` or the streaming kind of it, naming its splits."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        return
    splits = [str(name) for name in data if COLUMN.fullmatch(str(name))][:_SHOWN_COLUMNS]
    one = "train" if "train" in splits or not splits else splits[0]
    raise DataError(
        f"the data are a {type(data).__name__} with the splits {', '.join(splits) or '(not shown)'}",
        why="each split is a set of records of its own, and which of them are private is yours to say",
        fix=f"give one split, as data[{one!r}]",
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
    if not all(c in record for c in columns):
        return None
    plain = [_plain(canonical(record[c])) for c in sorted(columns)]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=repr).encode()).digest()[:CONTENT_BYTES]


def _plain(value: Any) -> Any:
    """A value without what copying may change in it, also inside lists and mappings."""
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def synthesis_texts(path: str | list[str], column: str) -> list[str]:
    """The texts of synthesis.file in synthesis.column, which its errors name. Raises DataError."""
    records = load_records(path)
    try:
        return [text_of(record, column, number) for number, record in enumerate(records, start=1)]
    except DataError as error:
        if column not in records[0]:
            fix = "name the column that holds its texts, as synthesis.column=NAME"
            error = DataError(error.what, why=error.why, fix=fix)
        raise error.of("synthesis.file, read by synthesis.column") from None


def text_of(record: Mapping[str, Any], column: str, number: int) -> str:
    """The text in ``column`` of record ``number`` (counted from 1).

    Raises:
        DataError: the column is missing, or holds no valid Unicode string.
    """
    if column not in record:
        raise missing_column(column, record, number)
    value = record[column]
    if not isinstance(value, str):
        empty = {
            None: f"holds {type(value).__name__}, not text",
            NULL: "is empty (null)",
            NAN: "is empty (NaN)",
        }
        what = missing_as(value)
        fix = "write every value of it as a string (an empty one if there is nothing to say)"
        if what == NAN:  # as a table of pandas has it
            fix += f", or leave such records out, of a table of pandas as table.dropna(subset=[{column!r}])"
        raise DataError(f"record {number}: column {column!r} {empty[what]}", fix=fix)
    try:
        value.encode()
    except UnicodeEncodeError:
        # Not chained: the original error holds the text.
        raise DataError(
            f"record {number}: column {column!r} holds half of a surrogate pair, which is no valid Unicode",
            fix="repair the program that wrote the file, or replace such characters",
        ) from None
    return value


def missing_column(
    column: str, record: Mapping[str, Any], number: int, *, shared: Collection[str] = ()
) -> DataError:
    """The error for a record without ``column``: the nearest name, and its columns that may be shown.

    shared: columns of other records, too (`shared_columns`). A key of one record may be about a person: of the others
    those alone are shown that are called as columns usually are, or that differ from what was asked for by one letter.
    """
    values = {str(name): value for name, value in record.items()}
    slips = [name for name in values if COLUMN.fullmatch(name) and is_a_slip(name, column)]
    nearest = difflib.get_close_matches(column, shared, n=1) or slips[:1]
    shown = [name for name in values if name in shared or name in nearest or is_usual(name)]
    listed = ", ".join(shown[:_SHOWN_COLUMNS]) + (" and more" if len(shown) > _SHOWN_COLUMNS else "")
    if len(shown) < len(values):
        left = "not shown, since they look like contents: does the file have a header line?"
        if shown:
            left = "not shown, since few records may have them"
        listed = f"{listed} and others ({left})" if shown else f"({left})"
    mend = "name one of its columns"
    if column == "text":
        mend = "name those that are learnt: text; or prompt and completion; or messages"
    if "input_ids" in values:
        mend = "give texts and not tokens: what of a record is learnt, and where it is cut, is decided here"
    if nearest:
        mend = f"did you mean {nearest[0]!r}?"
    separator = separator_of(list(values))
    if separator is not None:
        mend = f"the table seems to be separated by {separator!r}; write it with commas, or as JSONL"
    return DataError(
        f"record {number} has no column {named(column)}; its columns are: {listed or 'none'}", fix=mend
    )


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
        whose = str(record.get(user_column) if user_column in records[0] else number)
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


def _read(source: str, format: Format, broken: Broken) -> Iterator[Record]:
    if source.startswith(HUB):
        yield from _read_hub(source)
    else:
        # Where broken records count as none, no record may decide how the others are read.
        yield from read_file(*local_file(source, format, look=broken is _refuse), broken)


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
        raise DataError(
            f"there is no file {source}"
            if shown(source) == source and is_data_file_name(source)
            else f"{shown(source)} is no local file",
            fix=f"check the path; a hub dataset is written {HUB}name:split",
        )
    if not is_file:
        # What is there on the disk is a path, whatever it looks like.
        raise _no_file(source, file)
    if format == "auto":
        format = FORMAT_OF_SUFFIX.get(Path(file.name.lower().removesuffix(".gz")).suffix, "auto")
        if format == "text" and look:
            _refuse_json(source, file)
    if format == "auto":
        other = _OTHER_ENDINGS.get(file.suffix.lower())
        raise DataError(
            f"the ending of {source} does not say what it is"
            if other is None
            else f"{source} is no file of records that can be read, by its ending",
            fix=other or _to_name(file, seems(file) if look else None),
        )
    return file, format


def _to_name(file: Path, format: Format | None) -> str:
    """How to say what a file is that has no ending, or another one. format: None for what is not known."""
    if format is None:
        return (
            f"give it an ending that does ({', '.join(FORMAT_OF_SUFFIX)}), or set data.format to jsonl, json, csv, "
            "parquet, text or paragraphs"
        )
    ending = next(suffix for suffix, each in FORMAT_OF_SUFFIX.items() if each == format)
    stem = file.name.removesuffix(".gz").removesuffix(".txt")
    zipped = ".gz" if file.name.endswith(".gz") else ""
    named_so = f"name it {stem}{ending}{zipped}, or set data.format={format}"
    if format == "text":
        return f"if it is a text a line, {named_so}; of a table with commas, {stem}.csv{zipped} or data.format=csv"
    return f"it holds {SAID[format]}: {named_so}"


def _refuse_json(source: str, file: Path) -> None:
    """Raise DataError for a file of JSON that is named as one of text: half of its lines may be nobody's record."""
    format = seems(file)
    if format in ("json", "jsonl"):
        raise DataError(
            f"{source} is named as a text with a record in each line, and holds {SAID[format]}",
            why="each line would be trained on as it stands, with its brackets and names of columns",
            fix=f"{_to_name(file, format).partition(': ')[2]}; set data.format=text if its lines are the texts",
        )


def _no_file(source: str, place: Path) -> DataError:
    """The error for what is there and no file."""
    if any((place / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        fix = "it was saved by datasets: in Python pass datasets.load_from_disk(...), or one split of it"
    else:
        fix = "name the files of records in it, as a list: .jsonl, .json, .csv, .parquet or .txt"
    return DataError(f"{source!r} is not a file" + (" but a folder" if place.is_dir() else ""), fix=fix)


@contextmanager
def _without_bars() -> Iterator[None]:
    """No bars of datasets inside; afterwards as before."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the environment may have the last word on them
        disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                enable_progress_bars()


def _read_hub(source: str) -> Iterator[Record]:
    import datasets

    hub = _HUB_NAME.fullmatch(source)
    if hub is None:
        raise DataError(
            f"what follows {HUB} is no name of a hub dataset", fix=f"write {HUB}name@config:split"
        )
    name, config, split = hub["name"], hub["config"], hub["split"] or "train"
    try:
        with _without_bars():  # which tell how many records there are, and how fast they are read
            rows = datasets.load_dataset(name, config, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        # Only the kind of error: the message of a failed conversion may quote a record.
        wanted = f"{name}@{config}" if config else name
        raise DataError(
            f"the hub dataset {wanted}, split {split}, cannot be loaded ({type(error).__name__})",
            fix="check the name, its configurations and splits, and the network; "
            "or download it and give the local file",
        ) from None
    yield from rows
