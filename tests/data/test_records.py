from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlora.data.records import (
    as_records,
    content_hash,
    load_records,
    missing_as,
    missing_column,
    refuse_missing,
    shared_columns,
    text_of,
)
from privlora.errors import ConfigError, DataError

SECRET = "Zanzibar-4815"
ROWS = [{"text": "one", "label": "a"}, {"text": "two, with\na line", "label": "ü"}]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def as_parquet(rows: list[dict[str, str]], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


JSONL = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
CSV = '\ufefftext,label\r\none,a\r\n"two, with\na line",ü\r\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", JSONL),
        ("a.NDJSON", JSONL),
        ("a.jsonl.gz", JSONL),
        ("a.json", json.dumps(ROWS, ensure_ascii=False, indent=1)),
        ("a.json.gz", json.dumps(ROWS)),
        ("a.csv", CSV),
        ("a.csv.gz", CSV),
    ],
)
def test_reads_every_format_by_its_ending(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path / name, gzip.compress(content.encode()) if name.endswith(".gz") else content)
    assert load_records(path) == ROWS
    assert load_records(path, limit=1) == ROWS[:1]


def test_reads_parquet(tmp_path: Path) -> None:
    as_parquet(ROWS, tmp_path / "a.parquet")
    assert load_records(str(tmp_path / "a.parquet")) == ROWS


def test_reads_text_by_line_or_paragraph(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one \n\ntwo\r\nthree\n \n\nfour")
    assert [r["text"] for r in load_records(path)] == ["one ", "two", "three", "four"]
    assert [r["text"] for r in load_records(path, format="paragraphs")] == ["one ", "two\nthree", "four"]


def test_joins_files_in_order(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.txt", f"{i}a\n{i}b") for i in range(2)]
    assert [r["text"] for r in load_records(paths)] == ["0a", "0b", "1a", "1b"]
    assert [r["text"] for r in load_records(paths, limit=3)] == ["0a", "0b", "1a"]


def test_a_format_overrules_the_ending(tmp_path: Path) -> None:
    path = write(tmp_path / "a.data", JSONL)
    assert load_records(path, format="jsonl") == ROWS
    assert load_records(write(tmp_path / "b.json", JSONL), format="jsonl") == ROWS


BAD_FILES: list[tuple[str, str | bytes, str]] = [
    ("empty.jsonl", "", "no records"),
    ("blank.jsonl", "\n \n", "no records"),
    ("empty.json", "", "no records"),
    ("none.json", "[]", "no records"),
    ("empty.csv", "", "no records"),
    ("header.csv", "text,label\n", "no records"),
    ("empty.txt", "\n\n", "no records"),
    ("bad.jsonl", '{"text": "fine"}\n{"text": "' + SECRET + "\n", "line 2: this is not JSON"),
    ("number.jsonl", "1" * 5000, "line 1"),
    ("deep.jsonl", "[" * 100_000, "line 1"),
    ("scalar.jsonl", f'"{SECRET}"', "line 1.*str, not an object"),
    ("bad.json", '[{"text": "' + SECRET, "no JSON list of objects, from line 1 on.*jsonl"),
    (
        "twice.jsonl",
        f'{{"text": "a"}}\n{{"text": "{SECRET}", "text": "b"}}',
        "line 2: an object has a key twice",
    ),
    ("inside.jsonl", f'{{"a": [{{"{SECRET}": 1, "{SECRET}": 2}}]}}', "line 1: an object has a key twice"),
    ("twice.json", f'[{{"text": "{SECRET}", "text": "b"}}]', "item 1: an object has a key twice"),
    ("lines.json", f'{{"text": "{SECRET}"}}\n{{"text": "b"}}', "from line 1 on.*jsonl"),
    ("object.json", f'{{"text": "{SECRET}"}}', "no JSON list"),
    ("items.json", f'[{{}}, "{SECRET}"]', "item 2"),
    ("latin.jsonl", f'{{"text": "{SECRET}é"}}'.encode("latin-1"), "not UTF-8"),
    ("latin.txt", f"{SECRET}é".encode("latin-1"), "not UTF-8"),
    ("plain.jsonl.gz", SECRET, "gzip"),
    ("torn.txt.gz", gzip.compress(SECRET.encode() * 99)[:-9], "gzip"),
    ("long.csv", f"text\n{SECRET},{SECRET}\n", "line 2: more fields than the header has"),
    ("short.csv", f"a,b\n{SECRET}\n", "line 2: fewer fields"),
    ("twice.csv", f"a,a\n{SECRET},b\n", "line 1"),
    ("unnamed.csv", f"a,\n{SECRET},b\n", "line 1"),
    ("quotes.csv", f'text\n"{SECRET}"x\n', "line 2"),
    ("bad.parquet", SECRET, "not a readable Parquet"),
    ("a.parquet.gz", SECRET, "table inside gzip"),
    ("a.unknown", SECRET, "set data.format=text .* data.format=csv"),
    ("only.gz", SECRET, "set data.format=text"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=[case[0] for case in BAD_FILES])
def test_refuses_bad_files_without_showing_them(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(DataError, match=f"(?s){message}") as caught:
        load_records(write(tmp_path / name, content))
    assert SECRET not in str(caught.value)
    assert name in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", '[\n{"text": "Zanzibar"}\n]', "holds JSON. .*set data.format=json, or data.format=text"),
        ("a.txt", '["Zanzibar", "b"]', "holds JSON"),
        (
            "a.txt",
            '\n{"text": "Zanzibar"}\n{"text": "b"}',
            "holds JSON, an object a line.* set data.format=jsonl",
        ),
        ("a.txt", '{\n  "text": "Zanzibar"}', "holds JSON. "),
        ("a.txt.gz", gzip.compress(b'{"text": "Zanzibar"}', mtime=0), "set data.format=jsonl"),
        ("a", b"PAR1Zanzibar", "it holds Parquet: set data.format=parquet"),
    ],
)
def test_a_name_that_says_something_else_than_the_file_holds(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    path = write(tmp_path / name, content)
    for read in (load_records, lambda path: refuse_missing(path, look=True)):
        with pytest.raises(DataError, match=words) as caught:
            read(path)
        assert "Zanzibar" not in str(caught.value)
    if name.startswith("a.txt"):
        assert load_records(path, format="text")
        refuse_missing(path)


@pytest.mark.parametrize(
    "line", ["[1]", "[Ada] said {nothing}", '["Now" he said', "{\\rtf1", "{a: b}", "[", "PARK"]
)
def test_lines_of_prose_that_begin_with_a_bracket(tmp_path: Path, line: str) -> None:
    assert load_records(write(tmp_path / "a.txt", f"{line}\nb\n")) == [{"text": line}, {"text": "b"}]


def test_whether_a_file_is_there_is_told_without_opening_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plan does, and a server that asks a client."""
    paths = [write(tmp_path / name, '{"text": "a"}') for name in ("a.txt", "b")]
    monkeypatch.setattr("privlora.data.records.seems", lambda *_: pytest.fail("opened"))
    refuse_missing(paths[0])
    with pytest.raises(
        DataError, match=r"give it an ending that does .*\.jsonl.* or set data.format to one of jsonl, json"
    ):
        refuse_missing(paths[1])


@pytest.mark.parametrize(
    "name",
    [
        "missing.jsonl",
        "./missing",
        "/no/such/file",
        "a/b/c",
        "missing.txt.gz",
        "imdb",
        "org/name:train",
        "x\0y",
        "~x/y",
    ],
)
def test_only_what_is_written_with_hf_is_sought_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlora.data.records._read_hub", lambda *_: pytest.fail("sought on the hub"))
    for read in (load_records, refuse_missing):
        with pytest.raises(DataError, match=r"no local file|there is no file.*hf://name:split"):
            read(name)


@pytest.mark.parametrize(
    "text",
    [
        *(SECRET, SECRET * 40, f"{SECRET}\n.txt", f"{SECRET}.", "a" * 5000),
        *(f"patient {SECRET} had a fever, see notes.txt", f"{SECRET}\x1b[31mred.jsonl"),
    ],
)
def test_a_text_in_the_place_of_a_file_is_not_shown(text: str) -> None:
    for path in (text, [text]):
        with pytest.raises(DataError, match="the string given as data is no local file") as caught:
            load_records(path)
        assert text not in str(caught.value)
        assert SECRET not in str(caught.value)


def test_refuses_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no file of records, nor a folder of them. Fix: name a file"):
        load_records(str(tmp_path))


@pytest.mark.parametrize("kwargs", [{"format": "xml"}, {"limit": 0}])
def test_refuses_settings(tmp_path: Path, kwargs: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        load_records(write(tmp_path / "a.txt", "x"), **kwargs)  # type: ignore[arg-type]


def test_refuses_no_files() -> None:
    with pytest.raises(DataError, match="empty list"):
        load_records([])


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf://imdb", ("imdb", None, "train")),
        ("hf://org/data-set_1:test", ("org/data-set_1", None, "test")),
        ("hf://glue@sst2:train[:10%]", ("glue", "sst2", "train[:10%]")),
    ],
)
def test_takes_hub_names_apart(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple[str, str | None, str]
) -> None:
    calls = []

    def load_dataset(path: str, config: str | None, *, split: str, **_: object) -> list[dict[str, str]]:
        calls.append((path, config, split))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert load_records(name) == ROWS
    assert calls == [asked]


def test_an_unreachable_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Both libraries read the variable when they are imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"nobody/no-such-data-set, split test, cannot be loaded.*network"):
        load_records("hf://nobody/no-such-data-set:test")


def test_a_load_from_the_hub_shows_no_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has the exact number of records, and seconds; after the load the user's own bars are as they were."""
    import datasets
    from datasets.utils import are_progress_bars_disabled

    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", "".join(f"{json.dumps({'text': str(k)})}\n" for k in range(31)))
    load, before = datasets.load_dataset, are_progress_bars_disabled()
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *_, split, **__: load(
            "json", data_dir=tmp_path / "data", split=split, cache_dir=str(tmp_path / "kept")
        ),
    )
    assert len(load_records("hf://org/notes")) == 31
    assert "31" not in "".join(capfd.readouterr())
    assert are_progress_bars_disabled() == before


def test_a_hub_name_that_is_none() -> None:
    with pytest.raises(DataError, match="is no name of a hub dataset"):
        load_records(f"hf://{SECRET} and more")


def test_records_in_memory_of_every_kind() -> None:
    import datasets
    import pandas

    table = pandas.DataFrame(ROWS)
    for given in (ROWS, tuple(ROWS), (row for row in ROWS), table, datasets.Dataset.from_list(ROWS)):
        assert [dict(row) for row in as_records(given)] == ROWS
    for texts in (["a.txt", "b"], pandas.Series(["a.txt", "b"]), (text for text in ("a.txt", "b"))):
        assert as_records(texts) == [{"text": "a.txt"}, {"text": "b"}]


def _splits() -> object:
    import datasets

    return datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": SECRET}]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "there are no records"),
        (["a.jsonl", "b.csv.gz"], "strings in a list are records. Fix: give files as pathlib.Path"),
        ({"text": SECRET}, "put a single record in a list"),
        (_splits, r"give one split, as data\['train'\]"),
        ([SECRET, {"text": SECRET}], "record 2 is no text, as the others are"),
        (
            [SECRET, None, SECRET, None],
            r"records 2, 4 are no text, as the others are \(counted from 1\). .* leave out what is missing",
        ),
        ([SECRET, SECRET, float("nan")], "record 3 is no text"),
        (
            [SECRET, *[3] * 9],
            "records 2, 3, 4, 5, 6 and more are no text.* Fix: write every record as a text",
        ),
        ([{"text": SECRET}, None], "record 2 is no mapping of columns"),
        ([{"text": SECRET}, {"text": SECRET}, SECRET], "record 3 is no mapping of columns"),
        ([(SECRET,), (SECRET,)], "records 1, 2 are of type tuple.*write every record as a mapping"),
        ({"text": [SECRET], "label": []}, "of different lengths"),
        ({"train": [{"text": SECRET}], "test": []}, r"give one split, as data\['train'\]"),
        ([{"text": SECRET}, (SECRET,)], "record 2 is no mapping of columns"),
        (SECRET, "of type str"),
        (SECRET.encode(), "of type bytes"),
        (7, "of type int"),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_what_are_no_records_is_refused_without_showing_it(given: object, message: str) -> None:
    with pytest.raises(DataError, match=f"(?i){message}") as caught:
        as_records(_splits() if given is _splits else given)
    assert SECRET not in str(caught.value)


def test_what_a_table_lacks_is_known_by_any_name() -> None:
    import pandas

    assert [missing_as(value) for value in (None, float("nan"), pandas.NA, pandas.NaT, "", 0, "nan")] == [
        *("null", "NaN", "NaN", "NaN"),
        *(None, None, None),
    ]


def test_hashes_are_of_the_columns_that_are_used() -> None:
    columns = {"prompt", "completion"}
    first = content_hash({"prompt": "a", "completion": "b", "id": 1}, columns)
    assert first is not None
    assert content_hash({"id": 2, "completion": "b", "prompt": "a"}, columns) == first
    assert content_hash({"prompt": "a"}, columns) is None
    assert content_hash({"prompt": "b", "completion": "a"}, columns) != first
    turns = [{"role": "user", "content": "x"}]
    turned = [{"content": "x", "role": "user"}]
    assert content_hash({"m": turns}, {"m"}) == content_hash({"m": turned}, {"m"})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"txet": SECRET, "label": "a"}, "no column 'text'; its columns are: txet, label.*mean 'txet'"),
        ({}, "its columns are: none"),
        ({"id": 1, "chief complaint": SECRET}, r"its columns are: id and others \(not shown"),
        ({"Ada Lovelace": 1, "flu": 2}, r"its columns are: \(not shown"),
        (
            {"HIV_positive": 1, "label": 2, "note_Ada": SECRET},
            r"its columns are: label and others \(not shown",
        ),
        ({"text": None}, r"column .text. is empty \(null\)"),
        ({"text": float("nan")}, r"is empty \(NaN\).*leave such records out"),
        ({"text": float("inf")}, "holds float"),
        ({"text": 4815}, "holds int"),
        ({"text": [SECRET]}, "holds list"),
        ({"text": SECRET + "\ud800"}, "surrogate"),
    ],
)
def test_text_of_refuses_without_showing(record: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=f"record 3.*{message}") as caught:
        text_of(record, "text", 3)
    assert SECRET not in str(caught.value)
    assert "4815" not in str(caught.value)


def told(asked: str, records: list[dict[str, Any]], *, table: bool = False, user: str | None = None) -> str:
    shared = shared_columns(records, table=table, user_column=user)
    return str(missing_column(asked, records[0], 1, shared=shared)).partition(". Fix")[0]


SAYS = "its columns are: "


def test_columns_of_most_first_records_are_shown() -> None:
    first, second = {"alpha": 1, "beta": 2, "HIV": 3}, {"beta": 1, "alpha": 2}
    assert told("text", [first] + [second] * 9).endswith(
        f"{SAYS}alpha, beta and others (not shown, since few records may have them)"
    )
    assert "did you mean 'beta'?" in str(missing_column("betas", first, 1, shared=["alpha", "beta"]))
    assert "alpha" not in told("text", [first] + [second] * 6)
    assert "Meier" not in told("text", [{"Anna Meier": "came late", "Karl Otto": "left"}] * 9)
    assert told("text", [{f"column{i}": SECRET for i in range(99)}] * 8).endswith("column19 and more")


@pytest.mark.parametrize("missing", [None, float("nan"), ""])
def test_a_column_that_a_table_has_for_one_record_is_not_shown(missing: object) -> None:
    rows = [{"note": "a b c d e", "HIV": 1}] + [{"note": "a b c d e", "HIV": missing}] * 9
    assert "HIV" not in told("text", rows)
    assert "HIV" not in told("text", rows, table=True)


def test_columns_of_one_user_are_not_shown() -> None:
    rows, others = [{"user": "anna", "hiv_positive_anna": "x"}] * 9, [{"user": "bob"}] * 3
    assert "positive" in told("text", rows + others)
    assert told("text", rows + others, user="user").endswith(
        f"{SAYS}user and others (not shown, since few records may have them)"
    )
    assert "positive" in told("text", [*rows, {**rows[0], "user": "bob"}], user="user")


@pytest.mark.parametrize(
    "row",
    [
        "patient_17,HIV,Berlin",
        "user_42,depression,Zurich",
        "Anna Maria Miller,HIV positive,letter",
        "Anna-Lena.Meier,label,suicidal",
        "anna.miller.email,HIV",
        "Anna Meier,HIV positive since May,user",
        "Lovelace,flu",
    ],
)
def test_a_table_without_a_header_shows_no_first_record(row: str) -> None:
    names = row.split(",")
    rows = [dict.fromkeys(names, "gout")] * 9
    said = told("story", rows, table=True)
    assert all(name in ("letter", "label", "user") or name not in said for name in names)
    headed = [{"finding": "no sign of it in May", "dx": "gout"}] * 9
    assert told("story", headed, table=True).endswith(f"{SAYS}finding, dx")


@pytest.mark.parametrize("key", ["clinical_note_bob_hiv", "clinical_notes_2", "clinical_note_b"])
def test_only_a_slip_of_what_was_asked_is_shown(key: str) -> None:
    assert key not in told("clinical_note", [{key: SECRET, "id": 4}])
    assert "clinical_notes" in told("clinical_note", [{"clinical_notes": SECRET}])


def test_what_a_text_says_changes_no_error() -> None:
    said = {str(missing_column("text", {"note": v, "user": "b"}, 1)) for v in ("x", "", None, " ")}
    assert len(said) == 1
    assert "columns are" in str(missing_column("text", {None: 1, True: SECRET}, 1))  # type: ignore[dict-item]


def shared_file(name: str) -> Path:
    root = os.environ.get("PRIVLORA_ASSETS") or Path(__file__).parents[3] / "shared"
    return Path(root) / "assets" / name


@pytest.mark.parametrize(
    ("name", "count", "check"),
    [
        ("data/glue/cola/validation.jsonl.gz", 1043, lambda r: r["label"] in (0, 1)),
        ("data/pretrain_corpus/validation.parquet", 575, lambda r: isinstance(r["text"], str)),
    ],
)
def test_reads_real_files(name: str, count: int, check: Callable[[dict[str, object]], bool]) -> None:
    if not shared_file(name).exists():
        pytest.skip("the optional data sets are absent (set PRIVLORA_ASSETS)")
    records = load_records(str(shared_file(name)))
    assert len(records) == count
    assert all(map(check, records))


def test_folders_and_files_that_datasets_saved(tmp_path: Path) -> None:
    """Read where they lie: nothing of them is copied to another folder."""
    import datasets

    data = datasets.Dataset.from_list([*ROWS, ROWS[0]])
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "both")
    data.select([2, 1]).save_to_disk(tmp_path / "one", num_shards=2)
    before = sorted(tmp_path.rglob("*"))
    assert load_records(str(tmp_path / "one")) == ROWS
    assert load_records(str(tmp_path / "both" / "train"), limit=2) == ROWS
    assert load_records(str(tmp_path / "both" / "test" / "data-00000-of-00001.arrow")) == ROWS[1:]
    with pytest.raises(DataError, match=r"several splits.*Fix: name one of them, as .*/both/test"):
        load_records(str(tmp_path / "both"))
    refuse_missing(str(tmp_path / "one"), look=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("pad", range(0, 64, 2))
def test_no_record_of_an_arrow_stream_says_that_it_is_a_file(pad: int, tmp_path: Path) -> None:
    """A stream whose writer was killed has no end, and its last bytes are a record's."""
    import pyarrow
    import pyarrow.ipc

    rows = [{"text": f"case {number}"} for number in range(5)]
    rows.append({"text": pad * "x" + "\x08\0\0\0ARROW1"})
    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    pyarrow.ipc.new_stream(sink, table.schema).write_table(table)
    (tmp_path / "a.arrow").write_bytes(sink.getvalue().to_pybytes())
    assert load_records(str(tmp_path / "a.arrow")) == rows


def test_arrow_files(tmp_path: Path) -> None:
    import pyarrow.feather
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.feather.write_feather(table, tmp_path / "a.feather")
    with pyarrow.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table)
    write(tmp_path / "c.arrow", SECRET)
    for name in ("a.feather", "b.arrow"):
        assert load_records(str(tmp_path / name)) == ROWS
    with pytest.raises(DataError, match=r"c.arrow: this is not a readable Arrow file") as caught:
        load_records(str(tmp_path / "c.arrow"))
    assert SECRET not in str(caught.value)


def test_a_list_in_a_file_of_lines_is_read_as_one(tmp_path: Path) -> None:
    for content in (json.dumps(ROWS), json.dumps(ROWS, indent=1)):
        assert load_records(write(tmp_path / "a.jsonl", content)) == ROWS
        assert load_records(write(tmp_path / "a.jsonl.gz", gzip.compress(content.encode()))) == ROWS
    broken: list[DataError] = []  # a client's first record decides nothing for the others
    path = write(tmp_path / "b.jsonl", f'["a"]\n{JSONL}')
    assert load_records(path, broken=broken.append, look=False) == ROWS
    assert len(broken) == 1


class _Frame:
    """As polars, duckdb and others hand a table over."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class _Query(_Frame):
    __arrow_c_stream__ = None  # type: ignore[assignment]

    def collect(self) -> _Frame:
        return _Frame(self._table)


class _Items:
    """As a data set of torch."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, at: int) -> dict[str, Any]:
        assert at < len(ROWS)
        return dict(ROWS[at])


def test_tables_and_data_sets_of_others() -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    given = [columns, table, table.to_reader(), table.to_batches()[0], _Frame(table), _Query(table), _Items()]
    for data in given:
        assert [dict(row) for row in as_records(data)] == ROWS, type(data)
    assert as_records(table["text"]) == [{"text": row["text"]} for row in ROWS]


def test_a_loader_of_batches_is_refused() -> None:
    from torch.utils.data import DataLoader

    with pytest.raises(DataError, match=r"a DataLoader, which gives batches.*as loader.dataset"):
        as_records(DataLoader(ROWS))  # type: ignore[arg-type]
    assert as_records(DataLoader(_Items()).dataset) == ROWS  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["polars", "duckdb"])
def test_frames_of_others(name: str) -> None:
    module = pytest.importorskip(name)
    if name == "polars":
        frame = module.DataFrame(ROWS)
        assert as_records(frame) == as_records(frame.lazy()) == ROWS
        assert as_records(frame["text"]) == [{"text": row["text"]} for row in ROWS]
    else:
        assert as_records(module.sql("select 'one' as text, 'a' as label")) == ROWS[:1]


def test_arrays_in_cells_are_lists() -> None:
    import numpy as np
    import pandas

    chat = [{"role": "user", "content": "a", "parts": ["x", "y"]}]
    table = pandas.DataFrame({"messages": [chat, chat], "n": [np.int64(3), np.int64(4)]})
    held = np.array([{**chat[0], "parts": np.array(["x", "y"])}], dtype=object)
    records: list[object] = [
        table,
        table.assign(messages=[held, held]),
        [{"messages": held, "n": np.int64(3)}] * 2,
    ]
    for data in records:
        first = as_records(data)[0]
        assert first == {"messages": chat, "n": 3}
        assert type(first["messages"]) is list
        assert type(first["n"]) is int


def test_one_value_of_a_table_changes_no_other() -> None:
    import pandas

    for more in (2.5, "a", None):
        table = pandas.DataFrame({"a": pandas.Series([1, more], dtype=object)})
        for records in (as_records(table), as_records({"a": [1, more]})):
            assert repr(records[0]["a"]) == "1"  # and no 1.0, which is equal to it


def test_what_is_inside_a_column_has_a_name_with_a_dot() -> None:
    record = {"note": {"text": "a", "by": {"name": "b"}}, "x.y": "c", "x": {"y": "d"}}
    assert [text_of(record, name, 1) for name in ("note.text", "note.by.name", "x.y")] == ["a", "b", "c"]
    with pytest.raises(
        DataError, match=r"record 2: column 'note' holds dict, not text. Fix: .* as note.text"
    ):
        text_of(record, "note", 2)
    with pytest.raises(DataError, match=r"record 2: has no column 'note.title'"):
        text_of(record, "note.title", 2)
    assert content_hash(record, {"note.text"}) == content_hash({"note.text": "a"}, {"note.text"})
    assert content_hash(record, {"note.title"}) is None


def test_a_text_that_is_too_long_to_tokenise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlora.data.records.MOST_CHARACTERS", 1000)
    with pytest.raises(
        DataError, match=r"record 3: column 'text' has more than 1,000 characters. Fix: divide"
    ):
        text_of({"text": "a" * 4815}, "text", 3)
    assert text_of({"text": "a" * 1000}, "text", 3)


def test_the_files_of_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "readme.md"):
        write(tmp_path / name, "x")
    with pytest.raises(DataError, match=r"as path: \[.*/a.jsonl, .*/b.jsonl\]"):
        load_records(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a.xlsx", r"save the sheet as CSV .*pandas.read_excel"),
        ("A.XLS", r"save the sheet as CSV"),
        ("a.tsv", r"write it with commas"),
        ("a.docx", r"write its texts as JSON lines"),
        ("a.dat", r"it holds JSON, an object a line: set data.format=jsonl"),
    ],
)
def test_files_of_other_programs(name: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=fix):
        load_records(str(tmp_path / name))
    assert load_records(str(tmp_path / name), format="jsonl") == [{"text": "a"}]
