"""A client's own files: what is broken in them is broken for itself, and their names say what they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from federated_cases import Federation, Records, drawing, owners, records, settings_of, without_noise
from tiny_models import tiny_model, tiny_tokenizer

from privlora.config import Settings
from privlora.data.formats import Format
from privlora.errors import DataError
from privlora.federated.messages import NO_RECORDS, Reply
from privlora.federated.plans import public_settings, with_local_method
from privlora.federated.run import _refuse_missing_sources, records_of
from privlora.federated.workplace import Own

NAMES = ["owner-0", "owner-1", "owner-2"]
OWN = records(1)


def answer(folder: Path, path: Path, told: Format = "auto", own: Format = "auto", **groups: Any) -> Reply:
    """Of a client with this file, in its first round. told: the format of the server's terms. own: of the owner."""
    settings = settings_of("fedavg", NAMES, data={"max_length": 40, "format": told}, **groups)
    federation = Federation(folder, settings, owners(3))
    client = federation.clients[NAMES[0]]
    client.records, client.path, client.format = None, str(path), own
    federation.join()
    return federation.exchange.send([federation.request(NAMES[0])])[0]


def assert_same(one: Reply, other: Reply) -> None:
    assert (one.refused, other.refused) == (None, None)
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, other.tensors[name], rtol=1e-5, atol=1e-7)


def assert_moved(reply: Reply, nothing: Reply) -> None:
    assert any((tensor != nothing.tensors[name]).any() for name, tensor in reply.tensors.items())


def write(path: Path, own: Records, broken: bytes | None = None) -> Path:
    """JSON lines, CSV, a JSON list or lines of text; ``broken`` is one more line in the middle."""
    path.parent.mkdir(exist_ok=True)
    texts = [record["text"] for record in own]
    lines, first = [json.dumps(record) for record in own], []
    if path.suffix == ".csv":
        lines, first = [f'"{text}"' for text in texts], ["text"]
    elif path.suffix == ".txt":
        lines = texts
    elif path.suffix == ".json":
        lines = [json.dumps(own)]
    found = [line.encode() for line in first + lines]
    if broken is not None:
        found.insert(3, broken)
    path.write_bytes(b"\n".join(found))
    return path


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("a.jsonl", b'{"text": "Alice'),
        ("a.jsonl", b'"Alice"'),
        ("a.jsonl", b'{"text": "Alice \xe9"}'),
        ("a.csv", b'"Alice'),
        ("a.csv", b"Alice,Bob"),
        ("a.txt", b"Alice \xe9"),
    ],
)
def test_one_broken_line_moves_no_other_record(
    name: str,
    broken: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    without_noise(monkeypatch)
    drawing(monkeypatch, lambda n: list(range(n)))
    plain = answer(tmp_path / "plain", write(tmp_path / name, OWN))
    assert_moved(plain, answer(tmp_path / "none", write(tmp_path / "none.jsonl", [])))
    with caplog.at_level(logging.ERROR):
        caplog.clear()
        found = answer(tmp_path / "broken", write(tmp_path / name, OWN, broken))
    assert_same(found, plain)
    assert "what cannot be read counts as none" in caplog.text
    assert "Alice" not in caplog.text


TOLD: list[Format] = ["auto", "jsonl", "json", "csv", "parquet", "text", "paragraphs"]


KINDS: list[tuple[str, Format]] = [
    ("a.csv", "auto"),
    ("a.CSV", "auto"),
    ("a.jsonl", "auto"),
    ("a.json", "auto"),
    ("a.txt", "auto"),
    ("b.json", "jsonl"),
    ("b.txt", "paragraphs"),
    ("b.unknown", "jsonl"),
]


# Of each file two words of a server at once, and each word with some; all others by the long tests.
@pytest.mark.parametrize(
    ("name", "own", "told"),
    [
        pytest.param(*kind, told, marks=() if (number - at) % len(TOLD) in (0, 3) else pytest.mark.long)
        for number, kind in enumerate(KINDS)
        for at, told in enumerate(TOLD)
    ],
)
def test_only_the_owner_says_what_one_record_is(
    name: str, own: Format, told: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a server says a note of many lines would be as many units."""
    without_noise(monkeypatch)
    drawing(monkeypatch, lambda n: list(range(n)))
    plain = answer(tmp_path / "plain", write(tmp_path / "own" / "a.jsonl", OWN))
    if own == "paragraphs":
        written = write(tmp_path / "b.txt", [{"text": "\n\n".join(record["text"] for record in OWN)}])
    else:
        lines = ".jsonl" if own == "jsonl" else Path(name).suffix.lower()
        written = write(tmp_path / f"c{lines}", OWN).rename(tmp_path / name)
    assert_same(answer(tmp_path / "found", written, told, own), plain)


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("users", [False, True])
def test_a_note_of_many_lines_is_one_unit_whatever_a_server_says(
    users: bool, told: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    units: list[int] = []
    drawing(monkeypatch, lambda n: units.append(n) or range(n))  # type: ignore[func-returns-value]
    note = "\n".join(["abc"] * 30)
    path = tmp_path / "notes.csv"
    path.write_text(f'text,who\n"{note}",a\n"{note}",b\n')
    privacy = {"unit": "user", "user_column": "who"} if users else {}
    assert answer(tmp_path / "run", path, told, privacy=privacy).refused is None
    assert units[0] == 2


def test_an_ending_that_says_nothing_is_refused_before_a_record_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", OWN).rename(tmp_path / "a.unknown")
    settings = settings_of("fedavg", NAMES, data={"max_length": 40, "format": "jsonl"})
    federation = Federation(tmp_path / "run", settings, owners(3))
    client = federation.clients[NAMES[0]]
    client.records, client.path = None, str(path)
    terms = public_settings(federation.settings).to_yaml()
    request = federation.request(NAMES[0], "join", 0, settings=terms)
    assert client.answer(request).refused == NO_RECORDS
    assert not (client.folder / federation.history.run).exists()
    client.format = "jsonl"
    assert client.answer(request).refused is None


def test_clients_of_one_process_are_read_by_their_endings_or_by_the_format_of_data(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, OWN) for name in ("a.csv", "b.json", "c.jsonl")]
    alike = [write(tmp_path / f"{name}.jsonl", OWN).rename(tmp_path / f"{name}.unknown") for name in "def"]

    def settings(format: Format, paths: list[Path]) -> Settings:
        own = [{"name": name, "path": str(path)} for name, path in zip(NAMES, paths, strict=True)]
        return settings_of("fedavg", NAMES, data={"format": format}, federation={"clients": own})

    for found in (settings("auto", paths), settings("jsonl", alike)):
        _refuse_missing_sources(found, None, None)
        assert records_of(found, None) == dict.fromkeys(NAMES, OWN)
    for read in (
        lambda given: _refuse_missing_sources(given, None, None),
        lambda given: records_of(given, None),
    ):
        with pytest.raises(DataError, match="does not say what it is"):
            read(settings("auto", alike))


def test_whatever_a_reader_raises_a_client_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal would tell of what is in its file, and so would words that quote it in a log."""

    def raises(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("Zanzibar")

    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.setattr("privlora.data.records.read_placed", raises)
    told = public_settings(with_local_method(settings_of("tan", NAMES)))
    data = Own(NAMES[0], str(tmp_path / "a.jsonl")).data(told, tiny_model(), tiny_tokenizer())
    assert len(data.units) == 0
    assert "it trains on none: ArithmeticError" in caplog.text
    assert "Zanzibar" not in caplog.text
