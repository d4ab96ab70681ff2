"""Reading private records from local files or a hub dataset.

Errors name files, lines and columns, never contents.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from privlora.errors import ConfigError, DataError

Record = dict[str, Any]
Format = Literal["auto", "jsonl", "json", "csv", "parquet", "text", "paragraphs"]

_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.%\[\]:+-]+))?")
_SHOWN_COLUMNS = 20


def load_records(path: str | list[str], *, format: Format = "auto", limit: int | None = None) -> list[Record]:
    """Read records, one dictionary each, in the order of the files.

    Args:
        path: a local file (``.gz`` is unpacked on the fly), several of them, or a hub dataset as
            ``name``, ``name:split`` or ``name@config:split`` (the split is ``train`` unless given).
            What exists locally, looks like a path or has a format is never sought on the hub.
        format: ``auto`` goes by the file's ending. ``jsonl`` is one object a line, ``json`` a list of
            objects, ``text`` one record a non-blank line and ``paragraphs`` one between blank lines (both
            as column "text").
        limit: keep the first so many records.

    Returns:
        At least one record.

    Raises:
        ConfigError: unknown ``format``, or ``limit`` < 1.
        DataError: missing, empty, damaged or undecodable file, bad JSON or CSV (with the line), unknown
            hub dataset.
    """
    if format not in get_args(Format):
        raise ConfigError(f"format={format!r} is unknown", fix=f"use one of {', '.join(get_args(Format))}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} is below 1", fix="leave it out to read everything")
    sources = [path] if isinstance(path, str) else path
    records = list(itertools.islice(itertools.chain.from_iterable(_read(s, format) for s in sources), limit))
    if not records:
        raise DataError(f"no records in {', '.join(sources) or 'an empty list of files'}")
    return records


def text_of(record: Mapping[str, Any], column: str, number: int) -> str:
    """The text in ``column`` of record ``number`` (counted from 1).

    Raises:
        DataError: the column is missing, or holds no valid Unicode string.
    """
    if column not in record:
        raise missing_column(column, record, number)
    value = record[column]
    if not isinstance(value, str):
        raise DataError(
            f"record {number}: column {column!r} holds {type(value).__name__}, not text",
            fix="write every value of it as a string (an empty one if there is nothing to say)",
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        # Not chained: the original error holds the text.
        raise DataError(
            f"record {number}: column {column!r} holds half of a surrogate pair, which is no valid Unicode",
            fix="repair the program that wrote the file, or replace such characters",
        ) from None
    return value


def missing_column(column: str, record: Mapping[str, Any], number: int) -> DataError:
    """The error for a record without ``column``: lists its columns and the nearest name."""
    names = [str(name) for name in record]
    nearest = difflib.get_close_matches(column, names, n=1)
    shown = ", ".join(names[:_SHOWN_COLUMNS]) + (" and more" if len(names) > _SHOWN_COLUMNS else "")
    return DataError(
        f"record {number} has no column {column!r}; its columns are: {shown or 'none'}",
        fix=f"did you mean {nearest[0]!r}?" if nearest else "name one of its columns",
    )


def _read(source: str, format: Format) -> Iterator[Record]:
    file = Path(source).expanduser()
    zipped = file.name.lower().endswith(".gz")
    known = _FORMAT_OF_SUFFIX.get(Path(file.name.lower().removesuffix(".gz")).suffix)
    if not file.exists():
        hub = _HUB_NAME.fullmatch(source)
        if hub is None or known or zipped or format != "auto" or source.startswith((".", "~")):
            raise DataError(
                f"there is no file {source}", fix="check the path, or give a hub dataset as name:split"
            )
        yield from _read_hub(hub["name"], hub["config"], hub["split"] or "train")
        return
    if not file.is_file():
        raise DataError(f"{source} is not a file", fix="name the files in it, as a list")
    if format == "auto" and known is None:
        raise DataError(
            f"the ending of {source} does not say what it is", fix="set format, for example to jsonl"
        )
    yield from _read_file(file, known if format == "auto" and known else format, zipped)


def _read_file(file: Path, format: Format, zipped: bool) -> Iterator[Record]:
    if format == "parquet":
        yield from _read_parquet(file, zipped)
        return
    readers = {
        "jsonl": _read_jsonl,
        "json": _read_json,
        "csv": _read_csv,
        "text": _read_lines,
        "paragraphs": _read_paragraphs,
    }
    # utf-8-sig: spreadsheet programs write a byte order mark, which is no part of the first column's name.
    encoding, newline = "utf-8-sig", ""
    try:
        with (
            gzip.open(file, "rt", encoding=encoding, newline=newline)
            if zipped
            else open(file, encoding=encoding, newline=newline)
        ) as stream:
            yield from readers[format](stream, file)
    except UnicodeDecodeError:
        # Not chained: the original error shows the bytes.
        raise DataError(
            f"{file} is not UTF-8 text", fix="convert it, for example with iconv -t UTF-8"
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise DataError(f"{file} is not a whole gzip file", fix="copy or compress it again") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or type(error).__name__}") from error


def _read_jsonl(stream: TextIO, file: Path) -> Iterator[Record]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Not chained: the original error holds the line.
            where = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(
                f"{file}, line {number}{where}: this is not JSON", fix="mend or remove the line"
            ) from None
        yield _object(record, f"{file}, line {number}")


def _read_json(stream: TextIO, file: Path) -> Iterator[Record]:
    content = stream.read()
    if not content.strip():
        return
    try:
        records = json.loads(content)
    except (ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{file}{where}: this is not JSON", fix="if it holds one object a line, set format to jsonl"
        ) from None
    if not isinstance(records, list):
        raise DataError(
            f"{file} is not a list of objects", fix="write [{...}, {...}], or one object a line as .jsonl"
        )
    for number, record in enumerate(records, start=1):
        yield _object(record, f"{file}, item {number}")


def _object(record: object, where: str) -> Record:
    if not isinstance(record, dict):
        raise DataError(f"{where}: this is a JSON {type(record).__name__}, not an object with columns")
    return record


def _read_csv(stream: TextIO, file: Path) -> Iterator[Record]:
    reader = csv.reader(stream, strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) != len(header) or (header and "" in header):
            raise DataError(
                f"{file}, line 1: a column has no name, or two have the same", fix="name every column once"
            )
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{file}, line {reader.line_num}: {len(row)} fields under a header of {len(header)}",
                    fix='quote fields that contain a comma or a line break with "..."',
                )
            yield dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{file}, line {reader.line_num}: {error}", fix="mend the quotes, or use jsonl"
        ) from None


def _read_parquet(file: Path, zipped: bool) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    if zipped:
        raise DataError(
            f"{file}: Parquet inside gzip cannot be read", fix="unpack it; Parquet is compressed inside"
        )
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file ({type(error).__name__})") from None


def _read_lines(stream: TextIO, file: Path) -> Iterator[Record]:
    for line in stream:
        if line.strip():
            yield {"text": line.rstrip("\r\n")}


def _read_paragraphs(stream: TextIO, file: Path) -> Iterator[Record]:
    for blank, lines in itertools.groupby(stream, key=lambda line: not line.strip()):
        if not blank:
            yield {"text": "\n".join(line.rstrip("\r\n") for line in lines)}


def _read_hub(name: str, config: str | None, split: str) -> Iterator[Record]:
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        # Only the kind of error: the message of a failed conversion may quote a record.
        wanted = f"{name}@{config}" if config else name
        raise DataError(
            f"there is no file {name}, and the hub dataset {wanted}, split {split}, cannot be loaded "
            f"({type(error).__name__})",
            fix="check the path or the name, its configurations and splits, and the network; "
            "or download it and give the local file",
        ) from None
    yield from rows
