"""Local files as records, by their format.

What cannot be read as a record is given as the error that says so. As far as the format lets one tell records apart, it
moves no other: lines, paragraphs, items of a JSON list, rows of CSV and of Arrow. So no reader infers a type from a
whole column: one record would change another's text. Errors name lines and columns, never contents.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from privlora.errors import DataError

Record = dict[str, Any]
Format = Literal["auto", "jsonl", "json", "csv", "parquet", "arrow", "text", "paragraphs"]
Placed = tuple[int, Record | DataError]
"""A record, or what is wrong instead, and where it stands, from 1; 0 is the whole file."""

PLACE: Final[dict[Format, str]] = {
    **dict.fromkeys(("jsonl", "csv", "text", "paragraphs"), "line"),
    "json": "item",
    **dict.fromkeys(("parquet", "arrow"), "row"),
}
"""What of a file is counted to say where a record stands: of CSV its last line, of paragraphs the first one."""

FORMAT_OF_SUFFIX: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
}

SAVED: Final = ("dataset_info.json", "dataset_dict.json")
"""In a folder that ``datasets`` saved: of one split, and of several."""

_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
"""What a JSON text is nested by; strings as a whole, one that is never closed to the end of the text."""
_BLANK: Final = re.compile(r"[ \t\r\n]*")

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
    "arrow": "Arrow",
}
"""What a file `seems` to be, in words."""

_HEAD: Final = 1 << 16
_LIST: Final = re.compile(r"\[\s*(?:\{\s*\"[^\"\\]*\"\s*:|\"[^\"\\\n]*\"\s*[],])")
_OBJECT: Final = re.compile(r"\{\s*\"[^\"\\]*\"\s*:")


def seems(file: Path) -> Format:
    """What a file's first 64 KiB look like: Parquet, Arrow, JSON (a list, or an object a line), else text, which may be
    CSV. A line of prose may well begin with a bracket, so what JSON has behind it is sought."""
    head = _head(file)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    text = _text(head)
    line, more, _ = text.partition("\n")
    if not _OBJECT.match(text):
        return "json" if _LIST.match(text) else "text"
    try:
        json.loads(line, parse_int=_number)
    except ValueError:
        return "json" if more else "jsonl"
    return "jsonl"


def begins_a_list(file: Path) -> bool:
    """Whether a file begins as a JSON list of records or texts does."""
    return _LIST.match(_text(_head(file))) is not None


def _head(file: Path) -> bytes:
    try:
        with gzip.open(file) if _is_zipped(file) else open(file, "rb") as stream:
            return stream.read(_HEAD)
    except (OSError, zlib.error, EOFError):  # reported where it is read
        return b""


def _text(head: bytes) -> str:
    return head.decode("utf-8", "replace").lstrip(_MARK).lstrip()


def _is_zipped(file: Path) -> bool:
    return file.name.lower().endswith(".gz")


def read_placed(file: Path, format: Format) -> Iterator[Placed]:
    """The records of a file or folder that is there, in order; ``.gz`` is unpacked on the fly. format: not ``auto``.

    Damage that is of no record, as that of a compressed file, is reported once, and ends the file.
    """
    if format in ("parquet", "arrow"):
        yield from _read_arrow(file, format)
        return
    # surrogateescape: else nothing could be read of the lines around one that is not UTF-8.
    how: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    try:
        with gzip.open(file, "rt", **how) if _is_zipped(file) else open(file, **how) as stream:
            # Of every line, and not of the first alone: where files were joined, a record would change when the one
            # before it is removed.
            yield from _READERS[format](line.lstrip(_MARK) for line in stream)
    except (gzip.BadGzipFile, zlib.error, EOFError):
        yield 0, DataError("this is not a whole gzip file", fix="copy or compress it again")
    except OSError as error:
        what = f"this cannot be read: {error.strerror or type(error).__name__}"
        yield 0, DataError(what, fix="check its permissions and its disk")


def _no_utf8(text: str) -> DataError:
    seems, of = (" but seems to be UTF-16", "UTF-16") if text.startswith(_UTF16) else ("", "WINDOWS-1252")
    return DataError(f"this is not UTF-8 text{seems}", fix=f"convert it, as iconv -f {of} -t UTF-8 does")


class _Twice(ValueError):
    """A JSON object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> Record:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice
    return found


def _number(digits: str) -> int | float:
    """An integer; one that Python does not read, for its thousands of digits, is infinite."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


_JSON: Final = json.JSONDecoder(parse_int=_number, object_pairs_hook=_object)
_NO_RECORD: Final = {
    _Twice: DataError(
        "an object has a key twice, and one of its values would be lost", fix="name every key once"
    ),
    RecursionError: DataError("this is too deeply nested", fix="mend or remove it"),
}


def _record(found: Any) -> Record | DataError:
    """What JSON holds, if it is a record."""
    if isinstance(found, dict):
        return found
    return DataError(
        f"this is a JSON {type(found).__name__}, not an object with columns",
        fix='write {"text": ...}; of a file that is one list of records, set data.format=json',
    )


def _of_line(line: str) -> Record | DataError:
    try:
        return _record(_JSON.decode(line))
    except (_Twice, RecursionError) as error:
        return _NO_RECORD[type(error)]
    except ValueError:
        # Only which line: the error itself holds it, and a column in it says how long a record is.
        as_python = line.lstrip().startswith("{'")
        fix = "write each record with json.dumps(record)" if as_python else "mend or remove the line"
        return DataError("this is not JSON", fix=fix)


def _read_json(stream: Iterable[str]) -> Iterator[Placed]:
    content = "".join(stream)
    if not content.strip():
        return
    if _NO_UTF8.search(content):
        yield 0, _no_utf8(content)  # what holds such bytes is no valid text; the rest is
    try:
        yield from enumerate(list(_items(content)), start=1)
    except json.JSONDecodeError as error:
        fix = "write a list, [{...}, {...}]; if it holds one object a line, set data.format=jsonl"
        yield 0, DataError(f"this is no JSON list of objects, from line {error.lineno} on", fix=fix)


def _items(content: str) -> Iterator[Record | DataError]:
    """Of a JSON list. Raises JSONDecodeError for what is none."""

    def after(at: int) -> int:
        return _BLANK.match(content, at).end()  # type: ignore[union-attr]

    at = after(0)
    if not content.startswith("[", at):
        raise json.JSONDecodeError("", content, at)
    at = after(at + 1)
    more = not content.startswith("]", at)
    while more:
        try:
            item, at = _JSON.raw_decode(content, after(at))
            yield _record(item)
        except (_Twice, RecursionError) as error:
            yield _NO_RECORD[type(error)]
            at = _end(content, after(at))
        at = after(at)
        more = content.startswith(",", at)
        at += more
    if content[at : at + 1] != "]" or content[at + 1 :].strip():
        raise json.JSONDecodeError("", content, at)


def _end(content: str, at: int) -> int:
    """Behind the list or object that begins at ``at``, however deep it is."""
    depth = 0
    for token in _TOKEN.finditer(content, at):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth == 0:
            return token.end()
    return len(content)


def _read_csv(stream: Iterator[str]) -> Iterator[Placed]:
    rows = _rows(stream)
    _, header = next(rows, (1, []))
    if isinstance(header, DataError):  # the next row is none
        yield 1, header
        return
    if len(set(header)) != len(header) or "" in header:
        yield 1, DataError("a column has no name, or two have the same", fix="name every column once")
        return
    mark = separator_of(header)
    fix = 'quote fields that contain a comma or a line break with "..."'
    if mark is not None:
        fix = f"the table seems to be separated by {mark!r}; write it with commas, or as JSONL"
    for number, row in rows:
        if isinstance(row, DataError):
            yield number, row
        elif len(row) == len(header):
            yield number, dict(zip(header, row, strict=True))
        elif row:
            more = "more" if len(row) > len(header) else "fewer"
            yield number, DataError(f"{more} fields than the header has", fix=fix)


def separator_of(columns: Collection[str]) -> str | None:
    """By what a table seems to be separated that was read as if by commas, since one column holds the names of all."""
    if len(columns) != 1:
        return None
    return next((mark for mark in (";", "\t", "|") if mark in next(iter(columns))), None)


def _rows(stream: Iterator[str]) -> Iterator[tuple[int, list[str] | DataError]]:
    """Rows with the number of their last line.

    A wrong quote may have drawn whole rows into a broken one, so reading goes on at its second line.
    """
    ahead, taken, number = deque[str](), list[str](), 0

    def lines() -> Iterator[str]:
        while line := ahead.popleft() if ahead else next(stream, ""):
            taken.append(line)
            yield line

    reader = csv.reader(lines(), strict=True)
    while True:
        taken.clear()
        # Whatever its length: of a long field that is refused, which has line breaks, the rest would be read as rows.
        limit = csv.field_size_limit(2**31 - 1)
        try:
            row: list[str] | DataError | None = next(reader, None)
        except csv.Error as error:
            ahead.extendleft(reversed(taken[1:]))
            del taken[1:]
            reader = csv.reader(lines(), strict=True)
            row = DataError(str(error), fix="mend the quotes, or use jsonl")
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        number += len(taken)
        if isinstance(row, list) and any(map(_NO_UTF8.search, row)):
            row = _no_utf8(row[0])
        yield number, row


def _read_arrow(file: Path, format: Format) -> Iterator[Placed]:
    """Parquet; an Arrow file or stream; or a folder that ``datasets`` saved. Nothing is copied to another place."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if _is_zipped(file):
        yield 0, DataError("this is a table inside gzip", fix="unpack it; such files are compressed inside")
        return
    try:
        if file.is_dir():
            import datasets

            saved = datasets.load_from_disk(str(file)).with_format("arrow")
            batches: Iterable[Any] = (batch for table in saved.iter(1000) for batch in table.to_batches())
        elif format == "parquet":
            batches = pyarrow.parquet.ParquetFile(file).iter_batches()
        else:
            mapped = pyarrow.memory_map(str(file))
            # By its first bytes: the last ones of a stream may be a record's.
            if _head(file).startswith(b"ARROW1"):
                held = pyarrow.ipc.open_file(mapped)
                batches = map(held.get_batch, range(held.num_record_batches))
            else:
                batches = pyarrow.ipc.open_stream(mapped)
        yield from rows_of(batches)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        kind = "Parquet" if format == "parquet" else "Arrow"
        what = f"this is not a readable {kind} file ({type(error).__name__})"
        yield 0, DataError(what, fix="write or copy it again")


def rows_of(batches: Iterable[Any]) -> Iterator[Placed]:
    """Rows of Arrow's record batches, with their numbers."""
    number = 0
    for batch in batches:
        try:
            rows: Iterable[Record | DataError] = batch.to_pylist()
        except Exception:  # noqa: BLE001 - a text that is not UTF-8, a date that Python does not have, …
            rows = (_row(batch.slice(at, 1)) for at in range(batch.num_rows))
        for row in rows:
            number += 1
            yield number, row


def _row(one: Any) -> Record | DataError:
    try:
        return one.to_pylist()[0]
    except Exception:  # noqa: BLE001 - as in rows_of
        return DataError("this holds what is no value of its column", fix="mend or remove the row")


def _read_lines(stream: Iterable[str], made: Callable[[str], Record | DataError]) -> Iterator[Placed]:
    """Lines that are not blank, each made a record."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield number, _no_utf8(line) if _NO_UTF8.search(line) else made(line)


def _of_text(line: str) -> Record:
    return {"text": line.rstrip("\r\n")}


def _read_paragraphs(stream: Iterable[str]) -> Iterator[Placed]:
    for blank, group in itertools.groupby(enumerate(stream, start=1), key=lambda line: not line[1].strip()):
        if not blank:
            (number, *_), lines = zip(*group, strict=True)
            text = "\n".join(line.rstrip("\r\n") for line in lines)
            yield number, _no_utf8(text) if _NO_UTF8.search(text) else _of_text(text)


_READERS: Final[dict[str, Callable[[Iterator[str]], Iterator[Placed]]]] = {
    "jsonl": partial(_read_lines, made=_of_line),
    "json": _read_json,
    "csv": _read_csv,
    "text": partial(_read_lines, made=_of_text),
    "paragraphs": _read_paragraphs,
}
"""Of texts, by their format: from the lines of a file."""
