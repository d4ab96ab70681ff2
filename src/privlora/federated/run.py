"""A federation from settings to what it leaves: where its server starts, who its clients are, what is published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from privlora.accounting import Ledger, LedgerSummary, Plan, read_ledger
from privlora.adapters.peft_files import lora_scaling
from privlora.config import Settings, load_settings
from privlora.data.examples import Examples
from privlora.data.partition import cut
from privlora.data.records import as_records, load_records
from privlora.errors import ConfigError, RunError
from privlora.federated.client import Client, answer_all
from privlora.federated.history import History
from privlora.federated.joint import JointServer
from privlora.federated.messages import Exchange, Reply, Request
from privlora.federated.plans import (
    client_plan,
    federation_of,
    public_settings,
    rule_of,
    rule_settings,
    server_plan,
    with_local_method,
)
from privlora.federated.rounds import RoundObserver, Rounds
from privlora.federated.server import RuleServer, Server
from privlora.federated.workplace import Workplace
from privlora.geometry.fixed_rank import Point
from privlora.reporting import publish
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.files import RunFolder, write_atomically
from privlora.training.identity import identify, keep_identity, refuse_others
from privlora.training.inputs import Data, load_data, tokenise
from privlora.training.models import unchanged_afterwards

Records = Sequence[Mapping[str, Any]]

# Without effect in one process, where nothing is waited for.
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Federated:
    """What a finished federation leaves.

    release: as of a run in one place. ledgers: each client's, as it was given at the end. epsilon: the largest of the
    clients', or the server's; None in the non-private mode.
    """

    release: Path
    rounds: int
    epsilon: float | None
    delta: float | None


def server_of(settings: Settings, parts: Parts, plan: Plan | None) -> Server:
    """Where the federation starts, from public inputs alone. parts: freshly built for ``settings``."""
    federation = federation_of(settings)
    if federation.joint:
        return JointServer(parts, plan)
    chosen, lora = rule_settings(settings), settings.adapter
    kind = rule_of(federation)
    state = parts.coordinates.state_dict()
    groups = range(len(parts.adapter.groups))
    if "0.left" in state:
        start = [(state[f"{g}.left"], state[f"{g}.right"]) for g in groups]
        rule, scale = kind(start, chosen), lora_scaling(lora.lora_alpha, lora.r, lora.use_rslora)
    else:
        rule, scale = kind(parts.coordinates.factors(), chosen), 1.0
        # Factors of an update that is zero have forgotten its subspaces.
        rule.start_at([Point(*(state[f"{g}.{name}"].double() for name in "USV")) for g in groups])
    return RuleServer(parts, rule, scale)


def serve(
    settings: Settings,
    exchange: Exchange,
    folder: RunFolder,
    *,
    workplace: Workplace,
    evaluation: Records | None = None,
    observer: RoundObserver | None = None,
) -> Federated:
    """A federation's server, over whatever carries its messages: all rounds that are left, then what is published.

    settings: those of the run, with its local method. workplace: of the server, with its model. evaluation: PUBLIC
    records in memory, in the place of data.evaluation. For the rest see `Rounds.serve`.
    """
    model, tokenizer, settings = workplace.loaded
    plan, own = client_plan(settings, model), server_plan(settings)
    with unchanged_afterwards(model):
        parts = build_parts(settings, model, PublicStart(tokenizer))
        parts.adapter.detach()  # clients of this process need the model as it is
        server = server_of(settings, parts, plan)
        ledger = None if own is None else _ledger(folder, own)
        try:
            rounds = Rounds(
                settings,
                exchange,
                server,
                folder,
                History(folder.private / "rounds.jsonl"),
                plan=plan,
                ledger=ledger,
                evaluation=_examples(settings, tokenizer, evaluation),
                observer=observer,
            )
            ledgers = rounds.serve()
        finally:
            if ledger is not None:
                ledger.close()
        summary = _keep_ledgers(folder, ledgers) if plan is not None else _own(folder, own)
        folder.hide_settings()
        publish(folder, server.parts, summary)
    if summary is None or summary.plan.insecure_noise:
        return Federated(folder.release, rounds.history.begun, None, None)
    return Federated(folder.release, rounds.history.begun, summary.epsilon(), summary.plan.delta)


def _ledger(folder: RunFolder, plan: Plan) -> Ledger:
    return Ledger.open(folder.ledger) if folder.has_plan else Ledger.create(folder.ledger, plan)


def _own(folder: RunFolder, plan: Plan | None) -> LedgerSummary | None:
    return None if plan is None else read_ledger(folder.ledger)


def _keep_ledgers(folder: RunFolder, ledgers: Mapping[str, str]) -> LedgerSummary:
    """Every client's ledger beside the report, whose statement is that of the client which released most."""
    found = {}
    for name, text in ledgers.items():
        path = folder.release / f"ledger-{name}.jsonl"
        write_atomically(path, text)
        found[name] = read_ledger(path)
    most = max(found, key=lambda name: found[name].charges)
    write_atomically(folder.ledger, ledgers[most])
    return read_ledger(folder.ledger)


def _examples(settings: Settings, tokenizer: Any, evaluation: Records | None) -> Examples | None:
    data = settings.data
    if evaluation is None and data.evaluation is not None:
        evaluation = load_records(data.evaluation, format=data.format)
    return None if evaluation is None else tokenise(evaluation, data, tokenizer)


def federate(
    settings: Settings,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Records | None = None,
    evaluation: Records | None = None,
    observer: RoundObserver | None = None,
    fresh: bool = True,
) -> Federated:
    """A federation whose clients are all in this process, side by side on one frozen model.

    Each client has a folder of its own in ``run.output``/clients, and the server sees nothing but their messages.

    model, tokenizer, records, evaluation: in memory; records: of all clients together, to be cut. fresh: False goes on
    with the run in ``run.output``.

    Raises PrivloraError subclasses that say what to mend; everything that can be refused is, before there is a folder.
    """
    here = prepare(settings, model, tokenizer, records=records, evaluation=evaluation, fresh=fresh)
    loaded, tokenizer, settings = here.workplace.loaded
    run = History(here.folder.private / "rounds.jsonl").run
    shared = {run: Workplace(public_settings(settings), loaded, tokenizer)}
    clients = {
        name: Client(name, here.place_of(name), records=own, workplaces=shared)
        for name, own in here.records.items()
    }
    exchange = embedded(list(clients), lambda requests: answer_all(clients, requests))
    return here.serve(exchange, evaluation=evaluation, observer=observer)


def serve_run(
    settings: Settings, exchange: Exchange, folder: Path, observer: RoundObserver | None = None
) -> Federated:
    """A federation's server without any client's records: begins a run in ``folder``, or goes on with the one there.

    settings: of the run; run.output is of no effect. For the rest see `Rounds.serve`.

    Raises PrivloraError subclasses; RunError where ``folder`` holds a run with other settings.
    """
    settings = with_local_method(settings.located())
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"output": str(folder)})})
    place, workplace = RunFolder(folder), Workplace(settings)
    fresh = not place.settings.exists()
    if not fresh and load_settings(place.settings) != workplace.loaded[2]:
        raise RunError(
            f"{str(folder)!r} holds a run with other settings",
            why="its clients have agreed to those, and its ledgers speak of them",
            fix="go on with the same settings, or set run.output to another folder",
        )
    here = _opened(place, workplace, {}, None, fresh=fresh)
    return here.serve(exchange, observer=observer)


@dataclass(frozen=True)
class Prepared:
    """A run whose folder is there. records: of each client, where they are at hand. workplace: of the server."""

    folder: RunFolder
    workplace: Workplace
    records: Mapping[str, Records]

    def place_of(self, client: str) -> Path:
        """The folder of a client that is on this machine."""
        return self.folder.root / "clients" / client

    def serve(
        self,
        exchange: Exchange,
        *,
        evaluation: Records | None = None,
        observer: RoundObserver | None = None,
    ) -> Federated:
        """See `serve`."""
        return serve(
            self.workplace.loaded[2],
            exchange,
            self.folder,
            workplace=self.workplace,
            evaluation=evaluation,
            observer=observer,
        )


def prepare(
    settings: Settings,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    *,
    records: Records | None = None,
    evaluation: Records | None = None,
    fresh: bool = True,
) -> Prepared:
    """A run whose clients are all on this machine, up to its folder; for the arguments see `federate`."""
    folder = RunFolder(Path(settings.run.output))
    if fresh:
        folder.refuse_if_used()
    settings = with_local_method(settings.located())
    workplace = Workplace(settings, model, tokenizer)
    loaded, tokenizer, settings = workplace.loaded
    own = _records_of(settings, records)
    union = [record for records in own.values() for record in records]
    data = load_data(settings, tokenizer, union, evaluation, model=loaded)
    return _opened(folder, workplace, own, data, fresh=fresh)


def _opened(
    folder: RunFolder, workplace: Workplace, records: Mapping[str, Records], data: Data | None, *, fresh: bool
) -> Prepared:
    """The run's folder: made, or found to be of the same model and records."""
    model, _, settings = workplace.loaded
    identity = identify(data, model)
    client_plan(settings, model)  # refuses settings under which nothing can be planned
    if fresh:
        folder.create(protects=settings.privacy.protects)
        keep_identity(folder, identity)
        write_atomically(folder.settings, settings.to_yaml())
    else:
        refuse_others(folder, identity)
    return Prepared(folder, workplace, records)


def _records_of(settings: Settings, records: Records | None) -> dict[str, Records]:
    """Each client's records: cut from all, or its own."""
    federation, data = federation_of(settings), settings.data
    if isinstance(federation.clients, int):
        if records is None:
            records = load_records(data.path, format=data.format, limit=data.limit)
        user = settings.privacy.user_column
        return dict(cut(as_records(records), federation, seed=settings.run.seed, user_column=user))
    own = {client.name: client.path for client in federation.clients}
    missing = [name for name, path in own.items() if path is None]
    if missing:
        raise ConfigError(
            f"clients without a path: {', '.join(missing)}",
            fix="give each a path, or let each run on a machine of its own (`privlora federate --write-app`)",
        )
    return {name: load_records(path, format=data.format) for name, path in own.items() if path is not None}


def embedded(names: Sequence[str], answer: Callable[[Sequence[Request]], list[Reply]]) -> Exchange:
    """Messages through Flower's Grid interface, in this process. Raises ConfigError without flwr."""
    from privlora.federated.flower.grid import EmbeddedGrid, GridExchange

    return GridExchange(EmbeddedGrid(names, answer), timeout=_TIMEOUT, invited=names)
