"""Who cannot train does not join: records and the model are looked up before, and the server gets fixed words."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fact_cases import rounds_with
from federated_cases import settings_of

from privlora.config import Settings
from privlora.errors import RunError
from privlora.federated.client import Client
from privlora.federated.limits import ANYTHING
from privlora.federated.messages import (
    BAD_CONFIG,
    NO_MODEL,
    NO_RECORDS,
    OTHER_NAME,
    REFUSED,
    Reply,
    Request,
    refuse_unlisted,
)
from privlora.federated.plans import public_settings, with_local_method
from privlora.federated.server import _shortfall

NAMES = ["a", "b"]


def terms(**groups: Any) -> Settings:
    return settings_of("tan", NAMES, **groups)


def join(client: Client, settings: Settings) -> Reply:
    text = public_settings(with_local_method(settings)).to_yaml()
    return client.answer(Request(client.name, "join", 0, values={"run": "r1", "settings": text}))


def model_folder(root: Path, *files: str) -> str:
    root.mkdir(exist_ok=True)
    for name in files:
        (root / name).write_text("{}")
    return str(root)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that no loader would take: nothing of it is read."""
    return model_folder(tmp_path / "model", "config.json", "tokenizer.json")


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_client_that_has_everything_joins(tmp_path: Path, model: str, compressed: bool) -> None:
    path = write(tmp_path / "records.jsonl", {"text": "one"})
    if compressed:
        (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        path += ".gz"
    client = Client("a", tmp_path / "a", path=path, model=model, limits=ANYTHING)
    assert join(client, terms()).refused is None
    assert join(client, terms()).refused is None  # again, after its server stopped
    memory = Client("b", tmp_path / "b", records=[{"text": "one"}], model=model, limits=ANYTHING)
    assert join(memory, terms()).refused is None


@pytest.mark.parametrize("path", [None, "nowhere.jsonl"])
def test_records_that_are_not_there(path: str | None, tmp_path: Path, model: str) -> None:
    given = None if path is None else str(tmp_path / path)
    reply = join(Client("a", tmp_path / "a", path=given, model=model, limits=ANYTHING), terms())
    assert reply == Reply("a", "join", 0, refused=NO_RECORDS)
    assert not (tmp_path / "a/r1").exists()


@pytest.mark.parametrize(
    "content", ["", "no JSON\n", "[1]\n", '{"note": "about Alice"}\n{"text": "of Bob"}\n']
)
def test_records_that_cannot_be_read(
    content: str, tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server, which chose the columns, gets the same answer; the client's own log says more, but no content."""
    path = tmp_path / "records.jsonl"
    path.write_text(content)
    reply = join(Client("a", tmp_path / "a", path=str(path), model=model, limits=ANYTHING), terms())
    assert reply == Reply("a", "join", 0)
    assert "first record cannot be read" in caplog.text
    assert "Alice" not in caplog.text


def test_the_column_of_units_is_looked_up_too(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    privacy = {"unit": "user", "user_column": "who", "max_records_per_user": 2}
    for record, told in (({"text": "x", "who": "y"}, False), ({"text": "x"}, True)):
        client = Client("a", tmp_path / str(told), records=[record], model=model, limits=ANYTHING)
        assert join(client, terms(privacy=privacy)).refused is None
        assert ("first record cannot be read" in caplog.text) == told


@pytest.mark.parametrize("files", [None, (), ("config.json",), ("tokenizer.json",)])
def test_a_model_that_is_not_there(files: tuple[str, ...] | None, tmp_path: Path) -> None:
    name = str(tmp_path / "m") if files is None else model_folder(tmp_path / "m", *files)
    client = Client("a", tmp_path / "a", records=[{"text": "x"}], model=name, limits=ANYTHING)
    assert join(client, terms()) == Reply("a", "join", 0, refused=NO_MODEL)
    assert not (tmp_path / "a/r1").exists()


def test_a_name_of_the_hub_is_not_asked_for(tmp_path: Path) -> None:
    client = Client("a", tmp_path / "a", records=[{"text": "x"}], model="owner/model", limits=ANYTHING)
    assert join(client, terms()).refused is None


def test_terms_beyond_the_limits_learn_nothing_of_the_machine(tmp_path: Path) -> None:
    reply = join(Client("a", tmp_path / "a", path="nowhere.jsonl", model="/nowhere"), terms())
    assert reply.refused == REFUSED


def test_words_of_a_refusal_are_listed() -> None:
    for words in (REFUSED, BAD_CONFIG, OTHER_NAME):
        for kind in ("join", "train", "leave"):
            refuse_unlisted(Reply("a", kind, 1, refused=words), secure=False)
    for words in (NO_RECORDS, NO_MODEL):
        refuse_unlisted(Reply("a", "join", 0, refused=words), secure=False)
        with pytest.raises(RunError, match="more than a refusal"):  # of a round it may follow from a record
            refuse_unlisted(Reply("a", "train", 1, refused=words), secure=False)
    with pytest.raises(RunError, match="more than a refusal"):
        refuse_unlisted(Reply("a", "join", 0, refused="a record about Alice"), secure=False)


# --- what the server's log says at the end ---


@pytest.mark.parametrize(
    ("answered", "says"),
    [
        ((2, 4, 2), "None"),
        ((3, 3, 3), "never an answer from client-4"),
        ((4, 1, 4), r"fewer than half .* in rounds: 2 \(of 3\)"),
        ((4, 0, 4), "1 of 3 rounds are void"),
        ((1,) * 12, r"in rounds: 12 \(of 12\)"),
    ],
)
def test_what_rounds_lacked(answered: tuple[int, ...], says: str) -> None:
    assert re.search(says, str(_shortfall(rounds_with(*answered))))
