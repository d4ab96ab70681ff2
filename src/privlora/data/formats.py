"""Local files as records, by their format. What cannot be read as a record is told to `Broken`, which may raise.

Where it does not, what is broken counts as no record and, as far as the format lets one tell records apart, moves no
other: lines, paragraphs, items of a JSON list, rows of CSV and of Parquet. Errors name files, lines and columns, never
contents.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from privlora.errors import DataError

Record = dict[str, Any]
Format = Literal["auto", "jsonl", "json", "csv", "parquet", "text", "paragraphs"]
Placed = tuple[int, Record]
"""A record and where it stands, from 1."""
Broken = Callable[[DataError], None]

PLACE: Final[dict[Format, str]] = {
    **dict.fromkeys(("jsonl", "csv", "text", "paragraphs"), "line"),
    "json": "item",
    "parquet": "row",
}
"""What of a file is counted to say where a record stands: of CSV its last line, of paragraphs the first one."""

FORMAT_OF_SUFFIX: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}

_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{},]', re.DOTALL)
"""What a JSON text is nested by; strings as a whole, one that is never closed to the end of the text."""

_MARK: Final = "\ufeff"
"""Of the byte order; spreadsheet programs begin a file with it."""

_UTF16: Final = ("\udcff\udcfe", "\udcfe\udcff")
"""Its byte order marks, as ``surrogateescape`` reads them."""

_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""What ``surrogateescape`` makes of bytes that are no UTF-8."""


SAID: Final[dict[Format, str]] = {
    "jsonl": "JSON, an object a line",
    "json": "JSON",
    "parquet": "Parquet",
}
"""What a file `seems` to be, in words."""

_HEAD: Final = 1 << 16
_LIST: Final = re.compile(r"\[\s*(?:\{\s*\"[^\"\\]*\"\s*:|\"[^\"\\\n]*\"\s*[],])")
_OBJECT: Final = re.compile(r"\{\s*\"[^\"\\]*\"\s*:")


def seems(file: Path) -> Format:
    """What a file's first 64 KiB look like: Parquet, JSON (a list, or an object a line), else text, which may be CSV.
    A line of prose may well begin with a bracket, so what JSON has behind it is sought."""
    zipped = file.name.lower().endswith(".gz")
    try:
        with gzip.open(file) if zipped else open(file, "rb") as stream:
            head = stream.read(_HEAD)
    except (OSError, zlib.error, EOFError):  # told where it is read
        return "text"
    if head.startswith(b"PAR1"):
        return "parquet"
    text = head.decode("utf-8", "replace").lstrip(_MARK).lstrip()
    line = text.partition("\n")[0]
    if _OBJECT.match(text):
        return "jsonl" if _is_flat_json(line) or "\n" not in text else "json"
    return "json" if _LIST.match(text) else "text"


def read_file(file: Path, format: Format, broken: Broken) -> Iterator[Record]:
    """The records of `read_placed`."""
    return (record for _, record in read_placed(file, format, broken))


def read_placed(file: Path, format: Format, broken: Broken) -> Iterator[Placed]:
    """The records of a file that is there, in order, each with the number of its `PLACE`; ``.gz`` is unpacked on the
    fly. format: not ``auto``.

    Damage that is of no record, as that of a compressed file, is told once, and ends the file.
    """
    zipped = file.name.lower().endswith(".gz")
    if format == "parquet":
        yield from _read_parquet(file, zipped, broken)
        return
    readers = {
        "jsonl": _read_jsonl,
        "json": _read_json,
        "csv": _read_csv,
        "text": _read_lines,
        "paragraphs": _read_paragraphs,
    }
    # surrogateescape: else nothing could be read of the lines around one that is not UTF-8.
    how: dict[str, str] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    try:
        with gzip.open(file, "rt", **how) if zipped else open(file, **how) as stream:  # type: ignore[call-overload]
            yield from readers[format](_unmarked(stream), file, broken)
    except (gzip.BadGzipFile, zlib.error, EOFError):
        broken(DataError(f"{file} is not a whole gzip file", fix="copy or compress it again"))
    except OSError as error:
        broken(
            DataError(
                f"{file} cannot be read: {error.strerror or type(error).__name__}",
                fix="check its permissions and its disk",
            )
        )


def _unmarked(stream: TextIO) -> Iterator[str]:
    """Lines without the marks at their beginning, which belong to no text.

    Of every line, and not of the first alone: where such files were joined, a record would change when the one before
    it is removed.
    """
    for line in stream:
        yield line.lstrip(_MARK)


def _no_utf8(where: str, text: str) -> DataError:
    begins = text.startswith(_UTF16)
    how = (
        "iconv -f UTF-16 -t UTF-8"
        if begins
        else "iconv -f WINDOWS-1252 -t UTF-8, where that is what it is in"
    )
    return DataError(
        f"{where} is not UTF-8 text" + (" but seems to be UTF-16" if begins else ""),
        fix=f"convert it, for example with {how}",
    )


def _read_jsonl(stream: Iterator[str], file: Path, broken: Broken) -> Iterator[Placed]:
    for number, line in _lines(stream, file, broken):
        where = f"{file}, line {number}"
        try:
            record = json.loads(line, parse_int=_number)
        except (ValueError, RecursionError):
            # Only which line: the error itself holds it, and a column in it tells how long a record is.
            fix, begins = "mend or remove the line", line.lstrip()[:2]
            if number == 1 and begins.startswith("["):
                fix = "the file begins a JSON list: name it .json, or set data.format=json"
            elif begins == "{'":
                fix = "it is written as Python prints it; write each record with json.dumps(record)"
            broken(DataError(f"{where}: this is not JSON", fix=fix))
        else:
            yield from _objects(record, number, where, broken)


def _read_json(stream: Iterator[str], file: Path, broken: Broken) -> Iterator[Placed]:
    content = "".join(stream)
    if not content.strip():
        return
    if _NO_UTF8.search(content):
        broken(_no_utf8(str(file), content))  # what holds such bytes is no valid text; the rest is
    try:
        records = json.loads(content, parse_int=_number)
    except RecursionError:
        if _is_json(content):  # whether the whole is JSON follows from no depth
            yield from _read_items(content, file, broken)
        else:
            broken(_no_json(str(file)))
        return
    except ValueError as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        broken(_no_json(f"{file}{where}"))
        return
    if not isinstance(records, list):
        broken(_no_list(file))
        return
    for number, record in enumerate(records, start=1):
        yield from _objects(record, number, f"{file}, item {number}", broken)


def _no_list(file: Path) -> DataError:
    return DataError(
        f"{file} is not a list of objects", fix="write [{...}, {...}], or one object a line as .jsonl"
    )


def _no_json(where: str) -> DataError:
    return DataError(f"{where}: this is not JSON", fix="if it holds one object a line, set data.format=jsonl")


def _is_json(content: str) -> bool:
    """However deeply it is nested: brackets are read from the innermost on, each with null in the place of what it
    holds in brackets."""
    levels: list[list[str]] = [[]]
    begin = 0
    for token in _TOKEN.finditer(content):
        if token[0] in "[{":
            levels[-1].append(content[begin : token.start()])
            levels.append([])
            begin = token.start()
        elif token[0] in "]}":
            levels[-1].append(content[begin : token.end()])
            if not _is_flat_json("".join(levels.pop())) or not levels:
                return False
            levels[-1].append("null")
            begin = token.end()
    levels[-1].append(content[begin:])
    return _is_flat_json("".join(levels.pop())) and not levels


def _is_flat_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=_number)
    except ValueError:
        return False
    return True


def _read_items(content: str, file: Path, broken: Broken) -> Iterator[Placed]:
    """Of JSON that is nested too deeply somewhere: what is between the list's commas, each by itself."""
    if content.lstrip()[0] != "[":
        broken(_no_list(file))
        return
    depth = number = begin = 0
    for token in _TOKEN.finditer(content):
        mark = token[0]
        depth += (mark in "[{") - (mark in "]}")
        if depth == 1 and mark == "[":
            begin = token.end()
        elif (depth == 1 and mark == ",") or (depth == 0 and mark == "]"):
            number += 1
            where = f"{file}, item {number}"
            try:
                record = json.loads(content[begin : token.start()], parse_int=_number)
            except RecursionError:
                broken(DataError(f"{where}: this is too deeply nested", fix="mend or remove it"))
            else:
                yield from _objects(record, number, where, broken)
            begin = token.end()


def _number(digits: str) -> int | float:
    """An integer; one that Python does not read, for its thousands of digits, is infinite."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _objects(record: object, number: int, where: str, broken: Broken) -> Iterator[Placed]:
    """The record, if it is one."""
    if isinstance(record, dict):
        yield number, record
        return
    broken(
        DataError(
            f"{where}: this is a JSON {type(record).__name__}, not an object with columns",
            fix='write {"text": ...}, or set data.format=text',
        )
    )


def _read_csv(stream: Iterator[str], file: Path, broken: Broken) -> Iterator[Placed]:
    rows = _rows(stream, file, broken)
    _, header = next(rows, (1, None))
    if header is None:  # an empty file, or one of which no row says anything
        return
    if len(set(header)) != len(header) or (header and "" in header):
        fix = "name every column once"
        broken(DataError(f"{file}, line 1: a column has no name, or two have the same", fix=fix))
        return
    mark = separator_of(header)
    fix = 'quote fields that contain a comma or a line break with "..."'
    if mark is not None:
        fix = f"the table seems to be separated by {mark!r}; write it with commas, or as JSONL"
    for number, row in rows:
        if not row:
            continue
        if len(row) == len(header):
            yield number, dict(zip(header, row, strict=True))
            continue
        broken(
            DataError(
                f"{file}, line {number}: {'more' if len(row) > len(header) else 'fewer'} fields than the header has",
                fix=fix,
            )
        )


def separator_of(columns: Collection[str]) -> str | None:
    """By what a table seems to be separated that was read as if by commas, since one column holds the names of all."""
    if len(columns) != 1:
        return None
    return next((mark for mark in (";", "\t", "|") if mark in next(iter(columns))), None)


def _rows(stream: Iterator[str], file: Path, broken: Broken) -> Iterator[tuple[int, list[str] | None]]:
    """Rows with the number of their last line; None for one that is broken.

    A wrong quote may have drawn whole rows into a broken one, so reading goes on at its second line.
    """
    ahead: deque[str] = deque()
    taken: list[str] = []
    reader, number = csv.reader(_taking(stream, ahead, taken), strict=True), 0
    while True:
        taken.clear()
        try:
            row = _next_row(reader)
        except csv.Error as error:
            where = f"{file}, line {number + len(taken)}"
            broken(DataError(f"{where}: {error}", fix="mend the quotes, or use jsonl"))
            ahead.extendleft(reversed(taken[1:]))
            reader = csv.reader(_taking(stream, ahead, taken), strict=True)
            number += 1
            yield number, None
            continue
        if row is None:
            return
        number += len(taken)
        if any(map(_NO_UTF8.search, row)):
            broken(_no_utf8(f"{file}, line {number}", row[0]))
            row = None
        yield number, row


def _next_row(reader: Iterator[list[str]]) -> list[str] | None:
    """Whatever its length: of a long field that is refused, which has line breaks, the rest would be read as rows."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(limit)


def _taking(stream: Iterator[str], ahead: deque[str], taken: list[str]) -> Iterator[str]:
    """Lines, those ``ahead`` first; each is also put into ``taken``."""
    while line := ahead.popleft() if ahead else next(stream, ""):
        taken.append(line)
        yield line


def _read_parquet(file: Path, zipped: bool, broken: Broken) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    if zipped:
        fix = "unpack it; Parquet is compressed inside"
        broken(DataError(f"{file}: Parquet inside gzip cannot be read", fix=fix))
        return
    before = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            try:
                rows: Iterator[Placed] = enumerate(batch.to_pylist(), start=before + 1)
            except Exception:  # noqa: BLE001 - a text that is not UTF-8, a date that Python does not have, …
                rows = _each(batch, f"{file}, row", before, broken)
            yield from rows
            before += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        wrong = f"{file} is not a readable Parquet file ({type(error).__name__})"
        broken(DataError(wrong, fix="write or copy it again"))


def _each(batch: Any, where: str, before: int, broken: Broken) -> Iterator[Placed]:
    """Rows of a batch that has one which is no record. before: rows of earlier batches."""
    for number in range(batch.num_rows):
        try:
            (row,) = batch.slice(number, 1).to_pylist()
        except Exception:  # noqa: BLE001 - as in _read_parquet
            fix = "mend or remove the row"
            broken(
                DataError(f"{where} {before + number + 1}: it holds what is no value of its column", fix=fix)
            )
        else:
            yield before + number + 1, row


def _lines(stream: Iterator[str], file: Path, broken: Broken) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    for number, line in enumerate(stream, start=1):
        if _NO_UTF8.search(line):
            broken(_no_utf8(f"{file}, line {number}", line))
        elif line.strip():
            yield number, line


def _read_lines(stream: Iterator[str], file: Path, broken: Broken) -> Iterator[Placed]:
    for number, line in _lines(stream, file, broken):
        yield number, {"text": line.rstrip("\r\n")}


def _read_paragraphs(stream: Iterator[str], file: Path, broken: Broken) -> Iterator[Placed]:
    for blank, group in itertools.groupby(enumerate(stream, start=1), key=lambda line: not line[1].strip()):
        if blank:
            continue
        lines = list(group)
        text = "\n".join(line.rstrip("\r\n") for _, line in lines)
        if _NO_UTF8.search(text):
            broken(_no_utf8(f"{file}, the paragraph that begins in line {lines[0][0]}", text))
        else:
            yield lines[0][0], {"text": text}
