"""Federations that nobody ran: their settings, servers, ledgers and rounds, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_llama

from privlora.accounting import Ledger, LedgerSummary, Plan, read_ledger
from privlora.config import Settings, settings_from
from privlora.federated.facts import federation_facts
from privlora.federated.history import Round
from privlora.federated.plans import client_plan, with_local_method
from privlora.federated.run import server_of
from privlora.federated.server import Server
from privlora.training.assembly import Parts, build_parts

NAMES = ("client-1", "client-2", "client-3", "client-4")
ROUNDS = 3


def settings_for(privacy: dict[str, Any] | None = None, **federation: Any) -> Settings:
    """Four clients and three rounds; ``privacy`` None is the non-private mode."""
    public = {"expected_batch_size": 8, "public_dataset_size": 80}
    mode = {"private": False} if privacy is None else {"delta": 1e-3, **privacy}
    return with_local_method(
        settings_from(
            {
                "model": {"name": "acme/tiny"},
                "data": {"path": "secret-records.jsonl"},
                "privacy": {**public, **mode},
                "adapter": {"r": 3, "lora_alpha": 6},
                "run": {"label": "letters"},
                "federation": {"clients": len(NAMES), "rounds": ROUNDS, **federation},
            }
        )
    )


def server_for(settings: Settings, plan: Plan | None) -> Server:
    model = tiny_llama(vocab_size=32, num_key_value_heads=1)
    return server_of(build_parts(settings, model), plan)


def ledger_of(path: Path, plan: Plan, charges: int) -> LedgerSummary:
    with Ledger.create(path, plan) as ledger:
        for step in range(1, charges + 1):
            ledger.charge(plan.event_of(step))
    return read_ledger(path)


def rounds_with(*answered: int) -> list[Round]:
    """So many of the first clients answer in each round; 0 is a void one."""
    return [
        Round(number, NAMES, NAMES[:count], 4000, 1000 * count, None if count else "too few answered")
        for number, count in enumerate(answered, start=1)
    ]


def facts_of(
    settings: Settings, folder: Path, charges: tuple[int, ...], rounds: list[Round]
) -> tuple[dict[str, Any], Parts, LedgerSummary | None]:
    """Facts of the federation, its parts, and the ledger that its statement is of."""
    plan = client_plan(settings)
    server = server_for(settings, plan)
    ledgers = {}
    if plan is not None:
        ledgers = {
            name: ledger_of(folder / f"{name}.jsonl", plan, count)
            for name, count in zip(NAMES, charges, strict=True)
        }
    facts = federation_facts(server, rounds, ledgers)
    return facts, server.parts, ledgers.get(facts["statement_of"] or "")
