"""A client's own files: what is broken in them is broken for itself, and their names say what they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from federated_cases import Federation, Records, drawing, owners, records, settings_of, without_noise

from privlora.federated.messages import Reply
from privlora.federated.sources import records_of, refuse_missing_sources

NAMES = ["owner-0", "owner-1", "owner-2"]
OWN = records(1)


def answer(folder: Path, path: Path, **data: object) -> Reply:
    """Of a client with this file, in its first round."""
    settings = settings_of("fedavg", NAMES, data={"max_length": 40, **data})
    federation = Federation(folder, settings, owners(3))
    client = federation.clients[NAMES[0]]
    client.records, client.path = None, str(path)
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


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.csv", "jsonl"),
        ("a.CSV", "text"),
        ("a.jsonl", "csv"),
        ("a.jsonl", "text"),
        ("a.json", "csv"),
        ("a.txt", "jsonl"),
        ("a.csv", "auto"),
        ("a.unknown", "jsonl"),  # only the terms can say what it is
    ],
)
def test_a_file_is_read_by_its_own_name(
    name: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    drawing(monkeypatch, lambda n: list(range(n)))
    plain = answer(tmp_path / "plain", write(tmp_path / "own" / "a.jsonl", OWN))
    written = write(tmp_path / name.lower(), OWN).rename(tmp_path / name)
    assert_same(answer(tmp_path / "found", written, format=format), plain)


def test_what_a_name_leaves_open_is_as_the_terms_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    drawing(monkeypatch, lambda n: list(range(n)))
    plain = answer(tmp_path / "plain", write(tmp_path / "a.jsonl", OWN))
    lines = write(tmp_path / "b.jsonl", OWN).rename(tmp_path / "b.json")
    assert_same(answer(tmp_path / "lines", lines, format="jsonl"), plain)
    whole = write(tmp_path / "c.txt", [{"text": "\n\n".join(record["text"] for record in OWN)}])
    assert_same(answer(tmp_path / "paragraphs", whole, format="paragraphs"), plain)


@pytest.mark.parametrize("format", ["jsonl", "parquet", "paragraphs"])
def test_no_format_of_the_terms_makes_a_client_refuse(format: str, tmp_path: Path) -> None:
    for name in ("a.csv", "a.json"):
        assert (
            answer(tmp_path / name / "run", write(tmp_path / name / name, OWN), format=format).refused is None
        )


def test_clients_of_one_process_are_read_by_their_names_too(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / name, OWN)) for name in ("a.csv", "b.jsonl", "c.json")]
    clients = [{"name": name, "path": path} for name, path in zip(NAMES, paths, strict=True)]
    settings = settings_of("fedavg", NAMES, data={"format": "csv"}, federation={"clients": clients})
    refuse_missing_sources(settings, None, None)
    found = records_of(settings, None)
    assert found == dict.fromkeys(NAMES, OWN)
