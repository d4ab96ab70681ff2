"""A private run none of whose rounds came to anything publishes nothing, and says what happened and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from crash_cases import Between, ledgers, run, settings_of

from privlora.accounting import read_ledger
from privlora.errors import RunError
from privlora.federated import run as running
from privlora.federated.messages import REFUSED, InProcess, Reply

ROUNDS = 2
Change = Callable[[Reply], Iterable[Reply]]


def refuses(reply: Reply) -> Iterable[Reply]:
    """Training."""
    yield Reply(reply.client, "train", reply.round, refused=REFUSED) if reply.kind == "train" else reply


def silent(reply: Reply) -> Iterable[Reply]:
    """After having joined."""
    return [reply] if reply.kind == "join" else []


def one_is_silent(reply: Reply) -> Iterable[Reply]:
    return silent(reply) if reply.client == "client-2" else refuses(reply)


def through(patch: pytest.MonkeyPatch, change: Change) -> None:
    class Changed(Between):
        def answered(self, reply: Reply) -> Iterable[Reply]:
            return change(reply)

    patch.setattr(running, "InProcess", lambda *given: Changed(InProcess(*given)))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "cost"),
    [
        (refuses, "at most 2 of 2 steps in a client's ledger"),
        (one_is_silent, r"at most 2 of 2 steps .*\(not by client-2\)"),
        (silent, "no client gave its ledger"),
    ],
)
def test_what_happened_is_said_and_nothing_is_published(
    change: Change, cost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client trained and was charged; its answer did not arrive."""
    through(monkeypatch, change)
    settings = settings_of(tmp_path / "run", "fedavg", rounds=ROUNDS)
    with pytest.raises(RunError, match=rf"^all 2 rounds are void.*{cost}") as first:
        run(settings)
    assert {read_ledger(path).charges for path in ledgers(tmp_path / "run").values()} == {ROUNDS}
    left = files(tmp_path / "run")
    assert "adapter_model.safetensors" not in left
    assert "privacy_report.json" not in left
    with pytest.raises(RunError) as again:  # nobody is asked to train, and nothing is charged
        run(settings, fresh=False)
    assert str(again.value) == str(first.value)
    assert files(tmp_path / "run") == left
    assert {read_ledger(path).charges for path in ledgers(tmp_path / "run").values()} == {ROUNDS}


def test_where_nothing_was_charged_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RunError("this machine cannot train", fix="mend it")

    monkeypatch.setattr("privlora.federated.local.train_locally", fail)
    with pytest.raises(RunError, match=r"all 2 rounds are void .*Charged all the same: nothing\. Fix"):
        run(settings_of(tmp_path / "run", "fedavg", rounds=ROUNDS))


def test_a_trusted_server_says_what_its_own_ledger_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: Any) -> None:
        raise RunError("the sum of client-1 does not fit", fix="look")

    monkeypatch.setattr("privlora.federated.server.RuleServer.close", stops)
    trusted = {"privacy_model": "client", "trusted_server": True}
    with pytest.raises(RunError, match="2 of 2 steps in the server's ledger") as caught:
        run(settings_of(tmp_path / "run", "fedavg", rounds=ROUNDS, **trusted))
    assert "client-1" not in str(caught.value)
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").closed


def test_a_run_that_one_round_moved_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through(monkeypatch, lambda reply: refuses(reply) if reply.round == 1 else [reply])
    done = run(settings_of(tmp_path / "run", "fedavg", rounds=ROUNDS))
    assert (done.release / "adapter_model.safetensors").exists()
