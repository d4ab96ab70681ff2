"""What cannot be read as a record, where that is told and not refused: it counts as none and moves no other."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path

import pytest

from privlora.data.formats import read_placed
from privlora.data.records import load_records
from privlora.errors import DataError

SECRET = "Zanzibar-4815"
LATIN = f"{SECRET}é".encode("latin-1")
ROWS = [{"text": "one"}, {"text": "two, with\na line"}, {"text": "three"}]
JSONL = [json.dumps(row).encode() for row in ROWS]
CSV = [b"one", b'"two, with\na line"', b"three"]
LINES = [b"one", b"two", b"three"]

# How a file begins, its records, what stands between two of them and how it ends; then what is no record.
FILES: dict[str, tuple[bytes, list[bytes], bytes, bytes, list[bytes]]] = {
    "a.jsonl": (
        b"",
        JSONL,
        b"\n",
        b"\n",
        [
            b'{"text": "' + SECRET.encode(),
            b'"' + SECRET.encode() + b'"',
            b'{"text": "' + LATIN + b'"}',
            b'{"text": "one", "note": "' + LATIN + b'"}',
            b"[" * 100_000,
            b"\xff\xfe\x00",
        ],
    ),
    "a.json": (
        b"[",
        JSONL,
        b",\n",
        b"]",
        [
            b'"' + SECRET.encode() + b'"',
            b"[]",
            b"null",
            b"[" * 2000 + b"]" * 2000,
            b'{"text": "], \\"{", "note": ' + b'{"a": [1, ' * 1000 + b"2" + b"]}" * 1000 + b"}",
        ],
    ),
    "a.csv": (
        b"text\r\n",
        CSV,
        b"\r\n",
        b"\r\n",
        [
            SECRET.encode() + b",more",
            b'"' + SECRET.encode() + b'"x',
            b'"' + SECRET.encode(),  # a quote that nothing closes, or a later row's
            LATIN,
            b'"' + LATIN + b'\n"',
        ],
    ),
    "a.txt": (b"\xef\xbb\xbf", LINES, b"\n", b"", [LATIN, b"\xff\xff"]),
    "paragraphs.txt": (b"", LINES, b"\n\n", b"\n", [LATIN, b"fine\n" + LATIN + b"\nfine"]),
}
CASES = [(name, number) for name, file in FILES.items() for number in range(len(file[-1]))]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_what_is_broken_moves_no_record(name: str, number: int, zipped: bool, tmp_path: Path) -> None:
    begin, good, between, end, bad = FILES[name]
    format = "paragraphs" if "paragraphs" in name else "auto"
    path = tmp_path / (f"{name}.gz" if zipped else name)

    def write(parts: list[bytes]) -> str:
        content = begin + between.join(parts) + end
        path.write_bytes(gzip.compress(content, 1) if zipped else content)
        return str(path)

    whole = load_records(write(good), format=format)  # type: ignore[arg-type]
    assert len(whole) == len(good)
    for place in range(len(good) + 1):
        broken: list[DataError] = []
        write([*good[:place], bad[number], *good[place:]])
        assert load_records(str(path), format=format, broken=broken.append) == whole, place  # type: ignore[arg-type]
        assert broken
        assert not any(SECRET in str(error) for error in broken)
        with pytest.raises(DataError):  # where nobody asks to be told
            load_records(str(path), format=format)  # type: ignore[arg-type]


def test_a_text_that_looks_like_json_moves_no_record_of_a_client(tmp_path: Path) -> None:
    """First of all lines it would tell of the whole file what it is; where somebody trains alone, that is asked."""
    path = tmp_path / "a.txt"
    odd = b'{"text": "odd"}'
    for place in range(len(LINES) + 1):
        path.write_bytes(b"\n".join([*LINES[:place], odd, *LINES[place:]]))
        broken: list[DataError] = []
        found = [record["text"] for record in load_records(str(path), broken=broken.append)]
        assert found == [line.decode() for line in (*LINES[:place], odd, *LINES[place:])]
        assert not broken
    path.write_bytes(b"\n".join([odd, *LINES]))
    with pytest.raises(DataError, match="holds JSON"):
        load_records(str(path))


DEEP = b'{"text": "deep", "note": ' + b"[" * 2000 + b"{}" + b"]" * 2000 + b"}"
NO_JSON = {
    "an item": b'[{"text": "one"}, {"text": "two}, DEEP]',
    "an item before": b'[{"text" "one"}, DEEP, {"text": "two"}]',
    "an item after": b'[{"text": "one"}, DEEP, {"text" "two"}, {"text": "three"}]',
    "a string that is never closed": b'[{"text": "one"}, DEEP, "]',
    "a deep item": b'[{"text": "one"}, DEEP1]',
    "a deep key": b'[{"text": "one"}, {DEEP: 1}]',
    "a deep item's end": b'[{"text": "one"}, ' + DEEP[:-9] + b"]",
    "no item": b'[{"text": "one"},, DEEP]',
    "a last comma": b'[{"text": "one"}, DEEP,]',
    "what comes before": b'1[{"text": "one"}, DEEP]',
    "what comes after": b'[{"text": "one"}, DEEP] 1',
    "one bracket too many": b'[{"text": "one"}, DEEP]]',
    "one bracket too few": b'[{"text": "one"}, DEEP',
    "another bracket": b'[{"text": "one"}, DEEP}',
    "a number of brackets": b'[{"text": "one"}, DEEP, 1[]]',
    "no list": b'{"text": "one", "note": DEEP}',
}


@pytest.mark.parametrize("name", list(NO_JSON))
def test_whether_a_list_is_json_follows_from_no_items_depth(name: str, tmp_path: Path) -> None:
    """All of a list that is no JSON counts as none, also where one item of it is deep: without that item, too."""
    path = tmp_path / "a.json"
    said = set()
    for deep in (DEEP, b'{"text": "flat"}'):
        path.write_bytes(b"\n" + NO_JSON[name].replace(b"DEEP", deep))
        broken: list[DataError] = []
        with pytest.raises(DataError, match="no records"):
            load_records(str(path), broken=broken.append)
        (error,) = broken
        said.add(error.fix)
    assert len(said) == 1


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"9" * 5000, b'"a \\" ]"', b"\t1e5\r\n"])
def test_a_deep_item_moves_no_item_beside_it(number: bytes, tmp_path: Path) -> None:
    """Whatever JSON as Python reads it these hold."""
    path = tmp_path / "a.json"
    for items in ([DEEP, b"3", b'{"text": "one", "n": ' + number + b"}"], [b'{"text": "one"}', b"[]", DEEP]):
        path.write_bytes(b" [ " + b" , ".join(items) + b" ] ")
        assert [row["text"] for row in load_records(str(path), broken=lambda error: None)] == ["one"]


def test_a_row_of_parquet_that_holds_no_value_of_its_column(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 in a column of texts: whoever wrote the file did not look."""
    import pyarrow
    import pyarrow.parquet

    for texts in ([b"one", LATIN, b"three"], [LATIN, b"one", b"three"]):
        held = pyarrow.array(texts, pyarrow.binary())
        column = pyarrow.StringArray.from_buffers(len(held), *held.buffers()[1:])
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        broken: list[DataError] = []
        assert load_records(str(path), broken=broken.append) == [{"text": "one"}, {"text": "three"}]
        assert [f"row {texts.index(LATIN) + 1}" in str(error) for error in broken] == [True]
        with pytest.raises(DataError, match="no value of its column"):
            load_records(str(path))


def test_a_date_that_python_does_not_have(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    when = pyarrow.array([0, 10**15, 2], pyarrow.timestamp("s"))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two", "three"], "when": when}), path)
    broken: list[DataError] = []
    assert [row["text"] for row in load_records(str(path), broken=broken.append)] == ["one", "three"]
    assert len(broken) == 1


LONG = {
    "a.csv": b'text,id\n"' + b"one\n" * 60_000 + b'",1\ntwo,2\n',
    "a.json": b'[{"text": "one", "id": ' + b"9" * 5000 + b'}, {"text": "two", "id": -' + b"9" * 5000 + b"}]",
    "a.jsonl": b'{"text": "one", "id": ' + b"9" * 5000 + b'}\n{"text": "two", "id": -' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", list(LONG))
def test_what_is_long_is_one_record(name: str, tmp_path: Path) -> None:
    """A field beyond the csv module's limit, of which lines would be rows; an integer that Python does not read."""
    (tmp_path / name).write_bytes(LONG[name])
    limit = csv.field_size_limit()
    texts = [record["text"].strip() for record in load_records(str(tmp_path / name))]
    assert [text.count("one") for text in texts] == [60_000 if name == "a.csv" else 1, 0]
    assert texts[1] == "two"
    assert csv.field_size_limit() == limit


def test_a_damaged_file_takes_no_other_with_it(tmp_path: Path) -> None:
    contents = {"a.jsonl.gz": b"no gzip", "b.parquet": b"none", "c.json": b"[{", "d.csv": b"a,a\n1,2\n"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "e.txt").write_text("one\ntwo\n")
    paths = [str(tmp_path / name) for name in [*contents, "e.txt"]]
    broken: list[DataError] = []
    assert load_records(paths, broken=broken.append) == [{"text": "one"}, {"text": "two"}]
    assert [Path(path).name in str(error) for path, error in zip(paths, broken, strict=False)] == [True] * 4


def test_a_header_that_is_broken_is_not_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for header in (b'"a"b', LATIN, b'"a'):
        path.write_bytes(header + b"\none\ntwo\n")
        with pytest.raises(DataError, match="no records"):
            load_records(str(path), broken=lambda error: None)


def test_a_file_that_is_not_there_is_no_broken_record(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load_records(str(tmp_path / "a.jsonl"), broken=lambda error: None)


MARK = b"\xef\xbb\xbf"
# Of each format: what begins every file, records, and what is none, each with the end of its line.
MARKED: dict[str, tuple[bytes, list[bytes]]] = {
    "jsonl": (
        b"",
        [b'{"text": "one"}\n', b'{"text": "\xef\xbb\xbftwo"}\r\n', b"no JSON\n", b"\n", b"\xff\n"],
    ),
    "text": (b"", [b"one\n", b"t\xef\xbb\xbfwo\r\n", b"\n", b" \n", b"\xff\n"]),
    "paragraphs": (b"", [b"one\n\n", b"two\n" + MARK + b"lines\n\n", b"\n", b"\xff\n\n", b" \n"]),
    "csv": (b"text,note\n", [b"one,a\n", b'"two","b\n' + MARK + b'c"\r\n', b"three\n", b"\n", b"\xff,d\n"]),
}


@pytest.mark.parametrize("format", MARKED)
def test_a_record_is_the_same_wherever_files_with_byte_order_marks_were_joined(
    format: str, tmp_path: Path
) -> None:
    """What is removed takes at most its own record with it, whatever lines begin with a mark."""
    path, draw = tmp_path / "a", random.Random(format)
    head, kinds = MARKED[format]

    def read(parts: list[bytes]) -> list[str]:
        path.write_bytes(draw.choice((b"", MARK)) + head + b"".join(parts))
        rows = [row for _, row in read_placed(path, format)]  # type: ignore[arg-type]
        return [str(row["text"]) for row in rows if not isinstance(row, DataError)]

    for _ in range(60):
        parts = [
            draw.choice((b"", MARK, MARK + MARK)) + draw.choice(kinds) for _ in range(draw.randint(1, 6))
        ]
        alone = [read([part]) for part in parts]
        assert read(parts) == [text for texts in alone for text in texts], parts
    assert read([MARK + kinds[0], MARK + kinds[1]])[0] == "one"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_marks_are_no_text_in_a_central_run_either(name: str, tmp_path: Path) -> None:
    line = b"one\n" if name == "a.txt" else JSONL[0] + b"\n"
    (tmp_path / name).write_bytes(MARK + line + MARK + line)
    assert load_records(str(tmp_path / name)) == [{"text": "one"}] * 2
