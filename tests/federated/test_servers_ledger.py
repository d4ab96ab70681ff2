"""A trusted server's own ledger: closed when all rounds are over, and charged no more after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crash_cases import adapter, run, settings_of

from privlora.accounting import Ledger, read_ledger
from privlora.config import Settings
from privlora.errors import RunError
from privlora.federated.server import Rounds, Turn

ROUNDS = 3


def trusted(folder: Path) -> Settings:
    return settings_of(folder, "fedavg", privacy_model="client", trusted_server=True, rounds=ROUNDS)


def state(folder: Path) -> tuple[int, bool]:
    summary = read_ledger(folder / "release/ledger.jsonl")
    return summary.charges, summary.closed


def test_it_is_closed_at_the_end(tmp_path: Path) -> None:
    done = run(trusted(tmp_path / "run"))
    assert state(tmp_path / "run") == (ROUNDS, True)
    with pytest.raises(RunError, match="this run is over"):
        Ledger.open(done.release / "ledger.jsonl")


def test_it_is_open_until_then_and_closed_after_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, take = trusted(tmp_path / "run"), Turn.take

    def dies(self: Turn, *given: Any) -> Any:
        if self.number == 2:
            raise KeyboardInterrupt
        return take(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Turn, "take", dies)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert state(tmp_path / "run") == (1, False)
    run(settings, fresh=False)
    assert state(tmp_path / "run") == (ROUNDS - 1, True)


def test_a_run_that_is_over_is_only_published_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it died before anything was published; no client is asked."""
    settings, folder = trusted(tmp_path / "run"), tmp_path / "run"

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("privlora.federated.run.publish", die)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert state(folder) == (ROUNDS, True)
    content = (folder / "release/ledger.jsonl").read_bytes()
    monkeypatch.setattr(Rounds, "serve", die)
    first = run(settings, fresh=False)
    before = adapter(folder)
    again = run(settings, fresh=False)
    assert first == again
    assert first.rounds == ROUNDS
    assert (folder / "release/ledger.jsonl").read_bytes() == content
    assert all((adapter(folder)[name] == tensor).all() for name, tensor in before.items())
    assert any(tensor.any() for name, tensor in before.items() if "lora_B" in name)
