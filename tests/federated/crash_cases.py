"""Tiny federations in memory: run, resumed, and what has to hold of their files after anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.config import Settings, settings_from
from privlora.federated.history import History
from privlora.federated.messages import Exchange, Reply, Request
from privlora.federated.plans import charges_a_round, federation_of
from privlora.federated.run import Federated, federate

RECORDS = [{"text": f"patient {i} came in at {i % 7}."} for i in range(18)]
PRIVATE = {"target_epsilon": 4.0, "delta": 1e-3}
OPEN = {"private": False}
CLIENTS, ROUNDS = 3, 8


@cache
def parts() -> tuple[Any, Any]:
    """One model and its tokenizer for all federations, which must give them back as they were."""
    return tiny_model(), tiny_tokenizer()


def settings_of(folder: Path, rule: str = "tan", *, privacy: Any = None, **federation: Any) -> Settings:
    chosen = {"clients": CLIENTS, "rule": rule, "rounds": ROUNDS, **federation}
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": "(in memory)", "max_length": 40},
            "adapter": {"r": 2},
            "privacy": {"expected_batch_size": 6, "public_dataset_size": 18, **(privacy or PRIVATE)},
            "run": {"output": str(folder), "tokens_per_micro_batch": 120},
            "federation": chosen,
        }
    )


def run(settings: Settings, *, fresh: bool = True, records: Any = None, **options: Any) -> Federated:
    model, tokenizer = parts()
    return federate(
        settings, model=model, tokenizer=tokenizer, records=records or RECORDS, fresh=fresh, **options
    )


def go_on(settings: Settings, **options: Any) -> Federated:
    """What a user does after a crash: resume, or start again if the run had not begun."""
    begun = (Path(settings.run.output) / "private/config.resolved.yaml").exists()
    return run(settings, fresh=not begun, **options)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    found = next(path for path in folder.rglob("adapter_model.safetensors"))
    return load_file(found)


def ledgers(folder: Path) -> dict[str, Path]:
    """Each client's own."""
    return {path.parent.parent.name: path for path in sorted((folder / "clients").glob("*/*/ledger.jsonl"))}


def check_charges(folder: Path, settings: Settings, sent: Sequence[tuple[str, int]]) -> None:
    """What left with noise was charged, once; nobody exceeds its plan. sent: (client, round) of answers that left."""
    federation = federation_of(settings)
    assert len(set(sent)) == len(sent), "a client answered twice in one round"
    for name, path in ledgers(folder).items():
        if b"\n" not in path.read_bytes():
            assert name not in {client for client, _ in sent}
            continue
        summary = read_ledger(path)
        left = sum(client == name for client, _ in sent)
        assert left * charges_a_round(federation) <= summary.charges <= summary.plan.steps


def check_ended(folder: Path, settings: Settings, result: Federated) -> None:
    """The adapter is there, the report says what the ledgers say, and nothing half-written or secret is left."""
    federation = federation_of(settings)
    assert result.rounds == federation.rounds
    assert all(bool(tensor.isfinite().all()) for tensor in adapter(folder).values())
    own = {name: read_ledger(path) for name, path in ledgers(folder).items()}
    assert own.keys() == set(federation.names)
    assert all(summary.closed for summary in own.values())
    for name, path in ledgers(folder).items():
        assert (folder / f"release/ledger-{name}.jsonl").read_bytes() == path.read_bytes()
    most = max(summary.charges for summary in own.values())
    assert result.epsilon is not None
    assert 0 <= result.epsilon <= PRIVATE["target_epsilon"]
    rounds = History(folder / "private/rounds.jsonl").rounds()
    assert [one.step for one in rounds] == list(range(1, federation.rounds + 1))
    assert all(bool(one.answered) == (one.void is None) for one in rounds)
    for name, summary in own.items():
        answered = sum(name in one.answered for one in rounds)
        assert answered * charges_a_round(federation) <= summary.charges <= summary.plan.steps
    leftovers = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.startswith(".")]
    assert leftovers == []
    assert list(folder.rglob("*.secret")) == []
    if not (folder / "release/privacy_report.json").exists():
        return  # left out by a fixture
    stated = json.loads((folder / "release/privacy_report.json").read_text())["statement"]
    assert stated["steps_charged"] == most == read_ledger(folder / "release/ledger.jsonl").charges


class Between:
    """An exchange that a test can change on the way: what is asked, and what is answered."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner

    def names(self) -> list[str]:
        return self.inner.names()

    def send(self, requests: Sequence[Request]) -> Iterable[Reply]:
        for reply in self.inner.send([self.asked(request) for request in requests]):
            yield from self.answered(reply)

    def asked(self, request: Request) -> Request:
        return request

    def answered(self, reply: Reply) -> Iterable[Reply]:
        yield reply
