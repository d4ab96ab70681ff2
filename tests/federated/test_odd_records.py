"""Whatever one record holds, a client answers, and that record counts as none or as one: it moves no other."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated_cases import settings_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model, tiny_tokenizer

from privlora.config import Settings
from privlora.errors import ConfigError
from privlora.federated import workplace
from privlora.federated.plans import public_settings, with_local_method
from privlora.federated.workplace import Own
from privlora.training.inputs import Data, load_data

SECRET = "Zanzibar"
GOOD: dict[str, Any] = {
    "text": "hello abc",
    "prompt": "abc",
    "completion": "def",
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "abc"}],
    "sentence1": "a",
    "sentence2": "b",
    "label": 1,
    "instruction": "do",
    "output": "x",
    "answer": "5",
    "task": "mrpc",
    "user": "u0",
}
MODEL, TOKENIZER = tiny_model(), tiny_tokenizer()
TOKENIZER.chat_template = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name.first }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def terms(data: Mapping[str, Any], **groups: Any) -> Settings:
    made = settings_of("tan", ["a", "b"], data={"max_length": 40, **data}, **groups)
    return public_settings(with_local_method(made))


TERMS = {
    "text": terms({"text": "text"}),
    "format": terms({"text": "{text} {user}"}),
    "pair": terms({"prompt": "prompt", "completion": "completion", "loss_on": "completion"}),
    "chat": terms({"messages": "messages"}),
    "answers": terms({"messages": "messages", "loss_on": "completion"}),
    "stsb": terms({"task": "stsb"}),
    "mrpc": terms({"task": "mrpc"}),
    "gsm8k": terms({"task": "gsm8k"}),
    "glue8": terms({"task": "glue8"}),
    "user": terms({"text": "text"}, privacy={"unit": "user", "user_column": "user"}),
}
COLUMNS = (*GOOD, "label_text", "input", "options", "question", "Body", "source")


def nested(depth: int) -> Any:
    found: Any = SECRET
    for _ in range(depth):
        found = [found]
    return found


ODD: list[Any] = [
    10**400,
    10**4999,
    nested(600),
    nested(900),
    {"a": nested(900)},
    float("nan"),
    "\ud800",
    b"ab",
    {1: 2, "a": 3},
    {(1, 2): 3},
    np.zeros(3),
    np.int64(3),
    np.str_("u0"),
    [{"role": "user", "content": "hi", "tool_calls": 5}],
    [{"role": "user", "content": SECRET, "tool_calls": [SECRET]}],
    [{"role": np.zeros(2), "content": "a"}],
    [{"role": "user", "content": "hi", "more": nested(900)}, {"role": "assistant", "content": ""}],
]
ANY = st.one_of(
    st.sampled_from(ODD),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=6,
    ),
)


def base() -> list[Any]:
    return [{**GOOD, "user": f"u{number}"} for number in range(4)]


def plain(chosen: Settings) -> list[bytes]:
    return [example.digest for example in Own("a", records=base()).data(chosen, MODEL, TOKENIZER).examples]


def assert_unmoved(read: Data, chosen: Settings) -> None:
    """What is around the one in the middle is as it is without it."""
    found = [example.digest for example in read.examples]
    assert len(found) in (4, 5)
    assert [*found[:2], *found[-2:]] == plain(chosen)


def with_odd(chosen: Settings, odd: Any) -> None:
    records = [*base()[:2], odd, *base()[2:]]
    assert_unmoved(Own("a", records=records).data(chosen, MODEL, TOKENIZER), chosen)
    Own("a", records=[odd]).warn_of_unreadable(chosen)


@pytest.mark.parametrize("number", range(len(ODD)))
@pytest.mark.parametrize("name", TERMS)
def test_an_odd_value_moves_no_other_record(name: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    column = {"user": "user", "chat": "messages", "answers": "messages", "pair": "prompt"}.get(name, "text")
    column = {"stsb": "label", "mrpc": "label", "gsm8k": "answer", "glue8": "task"}.get(name, column)
    with caplog.at_level(logging.ERROR):
        with_odd(TERMS[name], {**GOOD, column: ODD[number]})
    assert SECRET not in caplog.text


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(name=st.sampled_from(sorted(TERMS)), column=st.sampled_from(COLUMNS), value=ANY, without=st.booleans())
def test_no_record_moves_another(name: str, column: str, value: Any, without: bool) -> None:
    with_odd(TERMS[name], {column: value} if without else {**GOOD, column: value})


@pytest.mark.parametrize("odd", ["hello", None, 3, b"ab", ["hello"], SECRET * 20])
def test_what_is_no_mapping_moves_no_other_record(odd: Any, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("text", "user"):
        with_odd(TERMS[name], odd)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "abc", "id": ' + b"9" * 5000 + b"}",
        b'{"text": ' + b"9" * 5000 + b"}",
        b'{"text": "abc", "x": ' + b"[" * 480 + b"]" * 480 + b"}",
        b'{"text": "abc", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"text": "\xff"}',
        b"5",
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_an_odd_line_moves_no_other_record(suffix: str, line: bytes, tmp_path: Path) -> None:
    lines = [json.dumps(record).encode() for record in base()]
    lines.insert(2, line)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"\n".join(lines) if suffix == "jsonl" else b"[" + b",".join(lines) + b"]")
    chosen = TERMS["text"]
    assert_unmoved(Own("a", path=str(path)).data(chosen, MODEL, TOKENIZER), chosen)


@pytest.mark.parametrize("name", ["chat", "text"])
def test_terms_that_nobody_can_follow_are_refused_whatever_the_records_are(name: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.eos_token = None
    for records in ([], base(), [{"other": "x"}]):
        with pytest.raises(ConfigError):
            Own("a", records=records).data(TERMS[name], MODEL, tokenizer)


def test_a_library_that_raises_on_one_record_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises: all other records count, and the log says of what kind the error was."""

    def load(*args: Any, **options: Any) -> Data:
        if any(record["text"] == SECRET for record in args[2]):
            raise RuntimeError(f"cannot read {SECRET}")
        return load_data(*args, **options)

    monkeypatch.setattr(workplace, "load_data", load)
    records = [*base(), {**GOOD, "text": SECRET}]
    with caplog.at_level(logging.ERROR):
        found = Own("a", records=records).data(TERMS["text"], MODEL, TOKENIZER)
    assert [example.digest for example in found.examples] == plain(TERMS["text"])
    assert SECRET not in caplog.text
    assert "RuntimeError" in caplog.text


@pytest.mark.parametrize("odd", ['{"text": "odd"}', '["odd"]', '[{"text": "odd"}]'])
@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_no_first_record_tells_what_a_file_is(suffix: str, odd: str, tmp_path: Path) -> None:
    texts = ["one two", "three four", "five six"]
    lines = [json.dumps({"text": text}) if suffix == "jsonl" else text for text in texts]
    path = tmp_path / f"a.{suffix}"

    def read(*lines: str) -> list[bytes]:
        path.write_text("\n".join(lines))
        found = Own("a", path=str(path)).data(TERMS["text"], MODEL, TOKENIZER)
        return [example.digest for example in found.examples]

    assert read(odd, *lines)[-3:] == read(*lines)
