"""A record's text is a function of that record alone, whatever source it came from and whatever stood beside it."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from tiny_models import tiny_tokenizer

from privlora.data.canonical import canonical
from privlora.data.examples import IGNORED, Template, build_examples
from privlora.data.records import as_records, content_hash, load_records
from privlora.errors import DataError

PRINTS = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.items()|list }}"
    "{% if 'tool_calls' in m %} {{ m.tool_calls|tojson }}{% endif %}{% if m.name is defined %}!{% endif %}{% endfor %}"
)
Rows = Sequence[Mapping[str, Any]]


def record(text: str, arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    call = {"function": {"name": "find", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], **more}
    return {"talk": [{"role": "user", "content": text}, answer]}


def _jsonl(rows: Rows, folder: Path) -> Rows:
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_records(str(folder / "a.jsonl"))


def _parquet(rows: Rows, folder: Path) -> Rows:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "a.parquet")
    return load_records(str(folder / "a.parquet"))


def _dataset(rows: Rows, _: Path) -> Rows:
    return as_records(Dataset.from_list(list(rows)))


def _memory(rows: Rows, _: Path) -> Rows:
    return as_records(list(rows))


SOURCES: list[Callable[[Rows, Path], Rows]] = [_memory, _jsonl, _parquet, _dataset]
BASE = [
    record("a", {"who": "x", "count": 1}),
    record("b", {"who": "y", "tags": ["u", None], "more": {"in": 2}}),
    record("c", {"who": "z", "count": 3}),
]
JOINING = [
    record("n", {"note": "q"}),
    record("n", {"who": "q", "more": {"deeper": "q"}}),
    record("n", {"count": 1.5}),
    record("n", {"who": "q"}, name="q"),
    record("n", {"who": "q"}, content=None),
    record("n", {"zz": 1, "more": {"a": 1, "in": 3}, "who": "q"}),
]


def tokens(rows: Rows) -> list[list[int]]:
    template = Template(messages="talk", chat_template=PRINTS)
    return [list(one.input_ids) for one in build_examples(rows, template, tiny_tokenizer(), max_length=400)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("number", range(len(JOINING)))
def test_one_record_more_changes_no_other(
    source: Callable[[Rows, Path], Rows], number: int, tmp_path: Path
) -> None:
    """In front, where it decides Arrow's order of keys, and behind; and no source renders otherwise than another."""
    alone = tokens(BASE)
    assert tokens(source(BASE, tmp_path)) == alone
    assert tokens(source([JOINING[number], *BASE], tmp_path))[1:] == alone
    assert tokens(source([*BASE, JOINING[number]], tmp_path))[:-1] == alone


def test_a_message_of_calls_alone_needs_no_content() -> None:
    """As APIs write it: null, or nothing; both are rendered as an empty one."""
    without = record("a", {"who": "x"})
    del without["talk"][1]["content"]
    said = tokens([record("a", {"who": "x"}), record("a", {"who": "x"}, content=None), without])
    assert said[0] == said[1] == said[2]
    for answer in ({"tool_calls": []}, {"tool_calls": None}, {"role": "user"}):
        with pytest.raises(DataError, match=r"message 2 of column 'talk' has no content"):
            tokens([record("a", {"who": "x"}, **{"content": None, **answer})])
    example = build_examples(
        [record("a", {"who": "x"}, content=None)],
        Template(messages="talk", chat_template=PRINTS),
        tiny_tokenizer(),
        max_length=400,
        loss_on="completion",
    )[0]
    assert (example.labels != IGNORED).any()


@pytest.mark.parametrize("number", [9007199254740993, 2**53, -(2**60), 1e17])
def test_a_number_that_a_table_may_have_rounded_is_refused(number: float) -> None:
    """Alone it is an integer, and beside a fraction another one: some readers of Arrow's refuse that, and not all."""
    for written in (record("a", {"id": float(number)}), record("a", {"ids": [{"id": float(number)}]})):
        with pytest.raises(
            DataError, match=r"record 1: message 2 .*more than 15 digits.* Fix: write it as a string"
        ):
            tokens([written])
    template = Template(messages="talk", chat_template=PRINTS)
    for column, value in (
        ("tools", [{"most": float(number)}]),
        ("chat_template_kwargs", {"most": float(number)}),
    ):
        with pytest.raises(
            DataError, match=rf"record 1: column '{column}' has a number of more than 15 digits"
        ):
            build_examples([{**record("a", {}), column: value}], template, tiny_tokenizer(), max_length=400)
    assert tokens([record("a", {"id": 2**60})])  # nothing rounds it here
    assert tokens([record("a", {"id": 2.0**52})])


def test_a_date_that_a_table_made_of_a_text_is_refused() -> None:
    """Alone a text that looks like a date becomes one, and beside another text it stays: by Arrow's reader of JSON."""
    template = Template(messages="talk", chat_template=PRINTS)
    made = datetime.date(2024, 5, 1)
    for column, value in (("tools", [{"since": made}]), ("chat_template_kwargs", {"days": [made]})):
        with pytest.raises(DataError, match=rf"record 1: column '{column}' has a value that is neither text"):
            build_examples([{**record("a", {}), column: value}], template, tiny_tokenizer(), max_length=400)
    with pytest.raises(DataError, match=r"record 1: message 2 .*neither text"):
        tokens([record("a", {"since": made})])


def test_a_record_without_tools_has_none_whatever_stands_there() -> None:
    template = Template(messages="talk", chat_template=PRINTS)
    ids = [
        build_examples([{**record("a", {}), **told}], template, tiny_tokenizer(), max_length=400)[
            0
        ].input_ids.tolist()
        for told in ({}, {"tools": math.nan}, {"tools": None}, {"chat_template_kwargs": {"documents": None}})
    ]
    assert all(each == ids[0] for each in ids)


def test_what_is_taken_away() -> None:
    schema = {"type": "object", "properties": {"b": {"default": None}, "a": {"enum": ["x", None]}}}
    assert json.dumps(canonical({"arguments": schema, "note": None, "role": "tool"})) == json.dumps(
        {"role": "tool", "arguments": {"type": "object", "properties": {"a": {"enum": ["x", None]}, "b": {}}}}
    )
    numbers = [1.0, -0.0, 1.5, 1e300, float("inf"), True, 2**60]
    assert json.dumps(canonical(numbers)) == "[1, 0, 1.5, 1e+300, Infinity, true, 1152921504606846976]"


def test_equal_records_are_known_whatever_their_source(tmp_path: Path) -> None:
    """Public records that equal private ones are refused by these."""
    for source in SOURCES:
        found = source([JOINING[4], *BASE, JOINING[2]], tmp_path)[1:-1]
        assert [content_hash(one, ["talk"]) for one in found] == [content_hash(one, ["talk"]) for one in BASE]
