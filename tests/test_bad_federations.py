"""What a new user of federations gets wrong: one line says so, exit code 2, no traceback, and no file is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Outcome, call, check, record, refuses, save_tiny_model, write_config, write_records
from federation_cases import federation_settings, write_clients

from privlora.config import load_settings
from privlora.errors import PrivacyError
from privlora.federated.run import prepare
from privlora.training.files import RunFolder
from privlora.training.identity import Identity, keep_identity, refuse_others

Groups = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path / "records.jsonl")
    return tmp_path


Refused = Callable[..., Outcome]


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Called with a command and words of its one line: it refuses, and no file in ``folder`` changes."""
    return partial(refuses, partial(call, capsys), folder)


JOINT = {"rule": "joint", "local_steps": 1}
# What each of the settings may be is in test_federation_settings.py.
SETTINGS: dict[str, tuple[Groups, str]] = {
    "joint by projections": ({"federation": JOINT, "method": {"name": "projected"}}, "method.name=projected"),
    "joint along a direction": ({"federation": JOINT, "method": {"name": "dp-zo"}}, "a secret direction"),
    "secure sums of a rule that cannot": (
        {"federation": {"rule": "flora", "secure_aggregation": True}},
        "rule=flora cannot be summed securely",
    ),
    "a method of another space": (
        {"federation": {"rule": "fedavg"}, "method": {"name": "prism"}},
        "federation.rule=fedavg cannot train by method.name=prism",
    ),
    "a start that clients lack": (
        {"federation": {"rule": "fedavg"}, "adapter": {"init": "spectral-split"}},
        "does not go with a federation",
    ),
    "a method that starts so": (
        {"federation": JOINT, "method": {"name": "prism-paper"}},
        "does not go with a fed",
    ),
    "no clients": ({"federation": {"clients": None}}, "federation.clients is missing"),
    "nobody's records": ({"federation": {"clients": ["north"]}}, "federation.clients"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, model: Path, folder: Path, refused: Refused) -> None:
    groups, word = SETTINGS[name]
    settings = federation_settings(model, folder, **groups)
    refused(["train", write_config(folder, settings)], word)
    refused(["plan", folder / "run.yaml"], word)


def test_what_the_configuration_tells_is_told_before_the_weights_with_lines(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("privlora.training.models._from_files", loaded)
    clients, held_out = write_clients(folder), folder / "held-out.jsonl"
    held_out.write_text(Path(clients[0]["path"]).read_text().splitlines()[0] + "\n")
    data = {"path": None, "evaluation": str(held_out)}
    for rank, said in ((999, "adapter.r=999 "), (2, "the same as private ones in text")):
        groups = {"data": data, "federation": {"clients": clients}, "adapter": {"r": rank}}
        settings = federation_settings(model, folder, **groups)
        refused(["train", write_config(folder, settings)], said, quiet=False)


RECORDS_OF_SOUTH: dict[str, tuple[list[Groups], str]] = {
    "no records": ([], "no records in"),
    "another column later": (
        [*({"text": f"case {number}"} for number in range(16)), {"note": "case 0"}],
        "south.jsonl, line 17: has no column 'text'",
    ),
    "no JSON": (["half a line"], "south.jsonl, line 1: this is a JSON str"),
    "nothing to train on": ([{"text": " "} for _ in range(50)], "nothing to train on"),
}


@pytest.mark.parametrize("name", RECORDS_OF_SOUTH)
def test_whose_records_are_wrong(name: str, model: Path, folder: Path, refused: Refused) -> None:
    records, word = RECORDS_OF_SOUTH[name]
    clients = write_clients(folder)
    Path(clients[1]["path"]).write_text("\n".join(map(json.dumps, records)))
    settings = federation_settings(model, folder, data={"path": None}, federation={"clients": clients})
    argv: list[object] = ["train", write_config(folder, settings)]
    refused(argv, "error: client south: ", word, quiet=False)


def test_more_records_than_was_said_are_of_all_clients(model: Path, folder: Path, refused: Refused) -> None:
    settings = federation_settings(
        model,
        folder,
        data={"path": None},
        privacy={"public_dataset_size": 15},
        federation={"clients": write_clients(folder)},
    )
    words = "all clients together hold more than twice as many records as the 15", "check federation.clients"
    refused(["train", write_config(folder, settings)], *words, quiet=False)


@pytest.mark.parametrize(("weights", "warned"), [([16, 8, 16], True), ([2, 1, 2], True), ([1, 1, 1], False)])
def test_weights_that_are_counts_are_warned_of(
    weights: list[int], warned: bool, model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients = write_clients(folder)
    write_records(Path(clients[1]["path"]), 8, first=9000)
    settings = federation_settings(
        model, folder, data={"path": None}, federation={"clients": clients, "weights": weights}
    )
    prepare(load_settings(write_config(folder, settings)))
    assert ("federation.weights are proportional" in caplog.text) == warned


def test_whose_records_are_others_than_before(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    clients = write_clients(folder)
    settings = federation_settings(model, folder, data={"path": None}, federation={"clients": clients})
    assert call(capsys, "train", write_config(folder, settings)).code == 0
    write_records(Path(clients[1]["path"]), 16, first=9000)
    words = "the private records of client south are not those that the run began with"
    refused(["resume", folder / "run"], words, quiet=False)


@pytest.mark.parametrize(
    ("kept", "found", "whose"),
    [
        ({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "c": "3"}, " of client b"),
        ({"a": "1", "b": "2", "c": "3"}, {"a": "x", "b": "2", "c": "x"}, " of client a, c"),
        ({"a": "1", "b": "2"}, {"a": "x", "b": "x"}, ""),
        ({}, {"a": "1", "b": "2"}, ""),
        ({}, {}, ""),
    ],
)
def test_whose_records_are_others(
    kept: dict[str, str], found: dict[str, str], whose: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    run.private.mkdir()
    keep_identity(run, Identity("before", "m", kept, settings={"adapter.r": 2}))
    with pytest.raises(PrivacyError, match=f"the private records{whose} are not those"):
        refuse_others(run, Identity("now", "m", found))


def test_a_client_that_does_not_join_says_why(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(folder, federation_settings(model, folder))
    assert call(capsys, "train", config).code == 0
    next((folder / "run/clients/client-2").glob("*/ledger.jsonl")).unlink()
    outcome = call(capsys, "resume", folder / "run")
    check(outcome, "did not join: client-2", "Fix: mend what each of them said")
    assert "client-2 refuses 'join'" in caplog.text


def test_a_clients_records_are_never_public(model: Path, folder: Path, refused: Refused) -> None:
    clients = write_clients(folder)
    data = {"path": None, "evaluation": f"{folder}/./south.jsonl"}
    settings = federation_settings(model, folder, data=data, federation={"clients": clients})
    refused(["train", write_config(folder, settings)], "data.evaluation names", "which is private")
    start = {"init": "public-gradient", "public_text": clients[2]["path"]}
    settings = federation_settings(
        model, folder, data={"path": None}, adapter=start, federation={"clients": clients}
    )
    refused(["train", write_config(folder, settings)], "which is private")


def test_a_used_folder(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    config = write_config(folder, federation_settings(model, folder))
    assert call(capsys, "train", config).code == 0
    outcome = refused(["train", config], "holds a federation already, and that is finished")
    assert "privlora resume" not in outcome.err


def test_errors_never_quote_a_record(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "the code is 481502"
    clients = write_clients(folder)
    lines = [json.dumps(record(0)), f'{{"text": "{secret}"', json.dumps({"text": [secret]})]
    for content in ("\n".join(lines[:2]), lines[2], secret):
        Path(clients[1]["path"]).write_text(content)
        settings = federation_settings(model, folder, data={"path": None}, federation={"clients": clients})
        outcome = call(capsys, "train", write_config(folder, settings))
        check(outcome)
        assert "481502" not in outcome.err
    for wrong in ([{"name": secret}], [{"name": "a", "path": {"text": secret}}], [secret], {"text": secret}):
        settings = federation_settings(model, folder, data={"path": None}, federation={"clients": wrong})
        outcome = call(capsys, "train", write_config(folder, settings))
        check(outcome)
        assert "481502" not in outcome.err
