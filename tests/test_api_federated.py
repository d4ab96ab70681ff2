"""Federations through Python's front door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_cases import record, save_tiny_model, write_records

import privlora
from privlora.accounting import read_ledger
from privlora.config import settings_from
from privlora.errors import ConfigError, DataError, PrivacyError, RunError
from privlora.reporting.pushing import push
from privlora.training.files import RunFolder

PRIVACY = {"noise_multiplier": 2.0, "delta": 1e-3, "expected_batch_size": 8, "public_dataset_size": 32}
ROUNDS = {"rule": "alt", "rounds": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def start(model: Path, data: Any, output: Path, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "federation": ROUNDS,
        "privacy": PRIVACY,
        "adapter": {"r": 2},
        "data": {"max_length": 48},
        "output": output,
        **changes,
    }
    return privlora.federate(str(model), data, **arguments)


def test_clients_by_name_in_memory_and_in_files(model: Path, tmp_path: Path) -> None:
    north = [record(number) for number in range(16)]
    south = write_records(tmp_path / "south.jsonl", 16, first=50)
    run = tmp_path / "run"
    done = start(model, {"north": north, "south": south}, run)
    assert done.epsilon is not None
    assert done.rounds == 2
    for name in ("north", "south"):
        ledger = read_ledger(done.release / f"ledger-{name}.jsonl")
        assert (ledger.charges, ledger.epsilon()) == (2, done.epsilon)
    again = privlora.resume_federation(run, records={"north": north})
    assert again == done
    assert push(RunFolder(run), "me/notes", base_model="a/base", dry_run=True).files
    weights = done.release / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole + b"a patient")
    with pytest.raises(PrivacyError, match=r"safetensors in .* is not as the run wrote it"):
        push(RunFolder(run), "me/notes", base_model="a/base", dry_run=True)
    assert privlora.resume_federation(run, records={"north": north}) == done  # which writes it anew
    assert weights.read_bytes() == whole
    with pytest.raises(ConfigError, match="clients without a path: north"):
        privlora.resume_federation(run)
    for others in (north[1:], north[:1], [record(number) for number in range(90)]):  # however many they are
        with pytest.raises(
            PrivacyError, match="the private records of client north are not those that the run"
        ):
            privlora.resume_federation(run, records={"north": others})
    with pytest.raises(RunError, match="use resume_federation"):
        privlora.resume_run(run)


def test_one_source_is_cut(model: Path, tmp_path: Path) -> None:
    records = [record(number) for number in range(32)]
    done = start(
        model, records, tmp_path / "run", federation={**ROUNDS, "clients": 4, "clients_per_round": 2}
    )
    assert len(list(done.release.glob("ledger-client-*.jsonl"))) == 4
    with pytest.raises(RunError, match="records were in memory"):
        privlora.resume_federation(tmp_path / "run")
    assert privlora.resume_federation(tmp_path / "run", records=records) == done
    with pytest.raises(PrivacyError, match="the private records are not those that the run began with"):
        privlora.resume_federation(tmp_path / "run", records=records[:5])


def test_no_record_moves_to_another_client(model: Path, tmp_path: Path) -> None:
    """Else it takes part in the rounds of two, and neither ledger counts them all."""
    north, south = ([record(first + number) for number in range(16)] for first in (0, 50))
    start(model, {"north": north, "south": south}, tmp_path / "own")
    start(model, [*north, *south], tmp_path / "cut", federation={**ROUNDS, "clients": 2})
    for name, moved in (
        ("own", {"north": south, "south": north}),
        ("own", {"north": [*north[1:], south[0]], "south": [*south[1:], north[0]]}),
        ("cut", [*south, *north]),
    ):
        with pytest.raises(PrivacyError, match="divided among clients otherwise than when the run began"):
            privlora.resume_federation(tmp_path / name, records=moved)
    assert privlora.resume_federation(tmp_path / "own", records={"north": north[::-1], "south": south}).rounds


def test_what_contradicts_itself(model: Path, tmp_path: Path) -> None:
    records = [record(number) for number in range(16)]
    both = {"north": records, "south": records}
    lost, nobody = {"north": records, "south": "lost.jsonl"}, {"north": records, "south": []}
    for data, federation, kind, says in (
        (both, {**ROUNDS, "clients": 2}, ConfigError, "records names the clients, and so does federation"),
        (records, ROUNDS, ConfigError, r"federation\['clients'\] is missing"),
        (both, "tan", ConfigError, "federation is of type str"),
        (both, None, ConfigError, "federation is of type NoneType"),
        (lost, ROUNDS, DataError, r"there is no file lost\.jsonl"),
        (nobody, ROUNDS, DataError, r"records\['south'\]: there are no records"),
    ):
        with pytest.raises(kind, match=says):
            start(model, data, tmp_path / "run", federation=federation)
    assert not (tmp_path / "run").exists()


def test_a_federation_is_no_run_in_one_place(model: Path) -> None:
    groups = {
        "model": {"name": str(model)},
        "data": {"path": "records.jsonl"},
        "privacy": PRIVACY,
        "federation": {**ROUNDS, "clients": 2},
    }
    with pytest.raises(ConfigError, match=r"privlora\.federate"):
        privlora.train_run(settings_from(groups))
