"""A federation from settings to what it leaves: where its server starts, who its clients are, what is published."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from privlora.accounting import Ledger, LedgerSummary, Plan, read_ledger
from privlora.config import IN_MEMORY, Settings, kept_settings
from privlora.data.partition import cut
from privlora.data.records import as_records, load_records
from privlora.errors import ConfigError, DataError, PrivacyError, RunError, Together, nearest
from privlora.federated import plans
from privlora.federated.client import Client, answer_all
from privlora.federated.facts import federation_facts, keep_ledgers, refuse_all_void
from privlora.federated.history import ROUNDS, History, RoundObserver, refuse_used, rounds_begun
from privlora.federated.limits import ANYTHING
from privlora.federated.local import scale_of
from privlora.federated.messages import Exchange, InProcess, Reply, Request
from privlora.federated.server import JointServer, Rounds, RuleServer, Server
from privlora.federated.workplace import Workplace
from privlora.geometry.fixed_rank import Point
from privlora.precision import own_context
from privlora.reporting import publish
from privlora.reporting.answers import answers
from privlora.reporting.publication import read_report
from privlora.reporting.seals import HTML_NAME, is_whole
from privlora.reporting.wording import MEND, faults
from privlora.rounding import rounded_up
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.files import RunFolder, write_atomically
from privlora.training.identity import fixed, identify, keep_identity, refuse_other_settings, refuse_others
from privlora.training.inputs import Data, check_sources, load_clients, tokenise
from privlora.training.model_checks import refuse_unknown_tokens
from privlora.training.models import look_at_model, refuse_missing, unchanged_afterwards
from privlora.training.observer import refuse_no_observer

_log = logging.getLogger(__name__)

Records = Sequence[Mapping[str, Any]]

CLIENTS: Final = "clients"
"""Where clients of one process have their folders, beside release/ and private/."""


@dataclass(frozen=True)
class Federated:
    """What a finished federation leaves.

    release: as of a run in one place. ledgers: each client's, as it was given at the end. epsilon: the largest of the
    clients', or the server's; None in the non-private mode. epsilon_against_a_client: the same against another client;
    larger where clients share the noise, since each knows its own share and can take it off.
    """

    release: Path
    rounds: int
    epsilon: float | None
    delta: float | None
    epsilon_against_a_client: float | None = None


def server_of(parts: Parts, plan: Plan | None) -> Server:
    """Where the federation starts, from public inputs alone. parts: freshly built."""
    settings = parts.settings
    federation = plans.federation_of(settings)
    if federation.joint:
        return JointServer(parts, plan)
    chosen = plans.rule_settings(settings)
    kind = plans.rule_of(federation)
    state = parts.coordinates.state_dict()
    groups = range(len(parts.adapter.groups))
    if "0.left" in state:
        start = [(state[f"{g}.left"], state[f"{g}.right"]) for g in groups]
        rule, scale = kind(start, chosen), scale_of(settings)
    else:
        rule, scale = kind(parts.coordinates.factors(), chosen), 1.0
        # Factors of an update that is zero have forgotten its subspaces.
        rule.start_at([Point(*(state[f"{g}.{name}"].double() for name in "USV")) for g in groups])
    return RuleServer(parts, rule, scale)


def _to_the_end(rounds: Rounds, own: Plan | None) -> dict[str, str]:
    """`Rounds.serve`; a trusted server's ledger is closed after it, and a run whose ledger is closed is only loaded.

    own: the plan of a trusted server's ledger.
    """
    if own is None:
        return rounds.serve()
    folder = rounds.folder
    if folder.has_plan and read_ledger(folder.ledger).closed:  # died while publishing, or resumed once more
        rounds.take_up()
        return {}
    with Ledger.open(folder.ledger) if folder.has_plan else Ledger.create(folder.ledger, own) as ledger:
        rounds.ledger = ledger
        given = rounds.serve()
        ledger.finish()
    return given


@own_context()
def federate(
    settings: Settings,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Records | Mapping[str, Records] | None = None,
    evaluation: Records | None = None,
    observer: RoundObserver | None = None,
    fresh: bool = True,
    watch: Callable[[Sequence[Reply]], None] | None = None,
) -> Federated:
    """A federation whose clients are all in this process, side by side on one frozen model.

    Each client has a folder of its own in ``run.output``/clients, and the server sees nothing but their messages.

    model, tokenizer, records, evaluation: in memory; records: of all clients together, to be cut, or each client's by
    its name. fresh: False goes on with the run in ``run.output``. watch: is shown answers as they reach the server, to
    demonstrate what they are.

    Raises PrivloraError subclasses that say what to mend; everything that can be refused is, before there is a folder.
    """
    refuse_no_observer(observer, RoundObserver)
    observer = RoundObserver() if observer is None else observer
    observer.on_phase("loading the model, and reading the clients' records", None, None)
    here = prepare(settings, model, tokenizer, records=records, evaluation=evaluation, fresh=fresh)
    loaded, tokenizer, settings = here.workplace.loaded
    # How many local steps are taken in a round would tell how many clients a trusted server drew.
    told = None if plans.federation_of(settings).trusted_server else observer.on_local_step
    shared = {here.run: Workplace(plans.public_settings(settings), loaded, tokenizer, told)}
    clients = {name: here.client(name, workplaces=shared) for name in here.records}

    def answer(requests: Sequence[Request]) -> Iterator[Reply]:
        for reply in answer_all(clients, requests):
            if watch is not None:
                watch([reply])
            yield reply

    return here.serve(InProcess(clients, answer), evaluation=evaluation, observer=observer)


def _what_it_left(folder: RunFolder, settings: Settings) -> Federated | None:
    """Of a federation that is over: its rounds are done, and all is published that clients can still give. Else None.

    Nobody is asked for anything, and no model is loaded.
    """
    path, federation = folder.private / ROUNDS, plans.federation_of(settings)
    if not (path.exists() and (folder.release / HTML_NAME).exists()):
        return None
    history = History(path)
    try:
        report = read_report(folder.report)
    except RunError:  # of an older version, which is written anew
        return None
    if not is_whole(folder, report):
        return None
    facts, statement = report["federation"], report["statement"]
    if history.begun < federation.rounds:
        return None
    if statement is None:
        return _left(folder, history, None, facts)
    rows = [] if federation.trusted_server else facts["clients"]
    summary = read_ledger(folder.ledger) if folder.has_plan else None
    if summary is None or any(row["steps_charged"] is None for row in rows):
        return None
    return _left(folder, history, summary, facts) if summary.charges == statement["steps_charged"] else None


def going_on(folder: RunFolder, rounds: int, *, protects: bool) -> str | None:
    """Where a federation goes on, in a line, with what the ledgers at hand say; None before its first round."""
    begun = rounds_begun(folder)
    if not begun:
        return None
    run = History(folder.private / ROUNDS).run
    found = [folder.ledger, *(folder.root / CLIENTS).glob(f"*/{run}/ledger.jsonl")]
    written = [read_ledger(each) for each in found if each.exists()]
    most = max((one for one in written if one.charges), key=lambda one: one.charges, default=None)
    spent = ""
    if not protects:
        spent = ", NOT PRIVATE"
    elif most is not None:
        spent = f", epsilon so far {rounded_up(most.epsilon())} (δ {most.plan.delta:g})"
    return f"going on after round {begun} of {rounds}{spent}"


def _left(
    folder: RunFolder, history: History, summary: LedgerSummary | None, facts: Mapping[str, Any]
) -> Federated:
    """summary: of the ledger that the statement is of. facts: the report's."""
    if summary is None or summary.plan.insecure_noise:
        return Federated(folder.release, history.begun, None, None)
    spent, known = summary.epsilon(), facts["colluding"]
    against = known[0]["epsilon"] if known else spent
    return Federated(folder.release, history.begun, spent, summary.plan.delta, against)


@own_context()
def serve_run(
    settings: Settings, exchange: Exchange, folder: Path, observer: RoundObserver | None = None
) -> Federated:
    """A federation's server without any client's records: begins a run in ``folder``, or goes on with the one there.
    Of one that is over nobody is asked anything.

    settings: of the run; run.output is of no effect. For the rest see `Rounds.serve`.

    Raises PrivloraError subclasses; RunError where ``folder`` holds a run with other settings.
    """
    settings = plans.with_local_method(settings.located())
    settings = settings.changed(run={"output": str(folder)})
    place, workplace = RunFolder(folder), Workplace(settings)
    fresh = not place.settings.exists()
    if not fresh and kept_settings(place.settings) != _as_kept(workplace.loaded[2]):
        why = "its clients have agreed to those, and its ledgers speak of them"
        fix = "go on with the same settings, or set run.output to another folder"
        raise RunError(f"{str(folder)!r} holds a run with other settings", why=why, fix=fix)
    if not fresh:
        refuse_other_settings(place, _fixed(settings))
    left = None if fresh else _what_it_left(place, settings)
    if left is not None:
        _log.info("all rounds of this run were done before, and nobody is asked for anything")
        return left
    here = _opened(place, workplace, {}, None, fresh=fresh)
    return here.serve(exchange, observer=observer)


@dataclass(frozen=True)
class Prepared:
    """A run whose folder is there. records: of each client, where they are at hand. workplace: of the server."""

    folder: RunFolder
    workplace: Workplace
    records: Mapping[str, Records]

    def client(self, name: str, **more: Any) -> Client:
        """A client on this machine, whose owner is also the server. more: of `Client`."""
        model = self.workplace.loaded[2].model
        own: dict[str, Any] = {"records": self.records[name], "model": model.name, "revision": model.revision}
        return Client(name, self.folder.root / CLIENTS / name, limits=ANYTHING, **own, **more)

    @property
    def run(self) -> str:
        """By which clients know the run."""
        return History(self.folder.private / ROUNDS).run

    def serve(
        self, exchange: Exchange, *, evaluation: Records | None = None, observer: RoundObserver | None = None
    ) -> Federated:
        """The server, over whatever carries its messages: all rounds that are left, then what is published.

        evaluation: PUBLIC records in memory, instead of data.evaluation. For the rest see `Rounds.serve`.
        """
        folder, history = self.folder, History(self.folder.private / ROUNDS)
        model, tokenizer, settings = self.workplace.loaded
        federation = plans.federation_of(settings)
        with history.locked(), unchanged_afterwards(model):
            folder.remove_leftovers()
            plan, own = plans.client_plan(settings, model), plans.server_plan(settings)
            parts = build_parts(settings, model, PublicStart(tokenizer))
            parts.adapter.detach()  # clients of this process need the model as it is
            server, data = server_of(parts, plan), settings.data
            if evaluation is None and data.evaluation is not None:
                evaluation = load_records(data.evaluation, format=data.format)
            rounds = Rounds(
                settings, exchange, server, history.run, plan=plan, folder=folder, history=history
            )
            rounds.evaluation = None if evaluation is None else tokenise(evaluation, data, tokenizer)
            rounds.observer = RoundObserver() if observer is None else observer
            ledgers = _to_the_end(rounds, own)
            released = None if own is None else read_ledger(folder.ledger)
            if settings.privacy.private:
                refuse_all_void(federation.names, history, plan, ledgers, released)
            found = {}
            if plan is not None:
                takes = plans.charges_a_round(federation)
                found = keep_ledgers(folder, federation.names, history, plan, ledgers, takes)
            summary = read_ledger(folder.ledger) if found else released
            facts = federation_facts(server, history.rounds(), found)
            with server.parts.exported() as asked, server.parts.adapter:
                said = answers(asked, tokenizer, data, evaluation or (), parts.adapter)
            for odd in faults(said):
                _log.warning("%s. %s", odd, MEND)
            publish(folder, server.parts, summary, federation=facts, answers=said)
            return _left(folder, history, summary, facts)


def prepare(
    settings: Settings,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    *,
    records: Records | Mapping[str, Records] | None = None,
    evaluation: Records | None = None,
    fresh: bool = True,
) -> Prepared:
    """A run whose clients are all on this machine, up to its folder; for the arguments see `federate`."""
    folder = RunFolder(Path(settings.run.output))
    if fresh:
        refuse_used(folder)
    settings = plans.with_local_method(settings.located())
    _refuse_missing_sources(settings, records, evaluation)
    if not fresh:  # before the model is loaded
        refuse_other_settings(folder, _fixed(settings))
    problems = Together()
    none: dict[str, Records] = {}
    own = problems.of(none, records_of, settings, records)
    ready = None
    if fresh and model is None:
        problems.of(None, refuse_missing, settings.model)
        ready = problems.of(None, look_at_model, settings, tokenizer)
    problems.tell()
    early = None if ready is None else load_clients(ready[0], ready[2], own, evaluation)  # before the weights
    workplace = Workplace(settings, model, tokenizer)
    loaded, tokenizer, settings = workplace.loaded
    _warn_of_counts(plans.federation_of(settings).weights or [], own)
    sizes = {name: len(given) for name, given in own.items()}
    whose = None if fresh else lambda data: refuse_others(folder, identify(data, loaded, sizes))
    data = early or load_clients(settings, tokenizer, own, evaluation, whose=whose)
    refuse_unknown_tokens(loaded, data.examples, data.evaluation)
    here = _opened(folder, workplace, own, data, fresh=fresh)
    _refuse_forgotten(folder, here.run)
    return here


def _warn_of_counts(weights: Sequence[float], records: Mapping[str, Records]) -> None:
    """Tell whoever runs it, and holds all records, that weights which are counts would publish them."""
    shares = {weight / len(own) for weight, own in zip(weights, records.values(), strict=False)}
    if len(set(weights)) > 1 and len(shares) == 1:
        _log.warning(
            "federation.weights are proportional to the clients' numbers of records, which the report would publish. "
            "Fix: give weights that do not follow from them, such as rounded public figures; or none"
        )


def _opened(
    folder: RunFolder, workplace: Workplace, records: Mapping[str, Records], data: Data | None, *, fresh: bool
) -> Prepared:
    """The run's folder: made, or found to be of the same model and records."""
    model, _, settings = workplace.loaded
    identity = identify(data, model, {name: len(given) for name, given in records.items()})
    plans.client_plan(settings, model)  # refuses settings under which nothing can be planned
    if fresh:
        folder.create(protects=settings.privacy.protects)
        keep_identity(folder, replace(identity, settings=_fixed(settings)))
        write_atomically(folder.settings, _as_kept(settings).to_yaml())
    else:
        refuse_others(folder, identity)
    return Prepared(folder, workplace, records)


def _fixed(settings: Settings) -> dict[str, Any]:
    return fixed(settings, plans.resolved(settings).to_dict())


def _as_kept(settings: Settings) -> Settings:
    """With what the learning rate is in, which another version's default must not change."""
    return settings.changed(method={"relative_rate": plans.resolved(settings).relative_rate})


def _refuse_forgotten(folder: RunFolder, run: str) -> None:
    """Raise PrivacyError if clients of this folder have released something in a run that its server forgot."""
    others = [path for path in (folder.root / CLIENTS).glob("*/*/ledger.jsonl") if path.parent.name != run]
    if others:
        what = f"{str(others[0])!r} is of another run than {str(folder.private)!r} knows"
        why = "the clients' budget would be spent twice, and stated once"
        fix = "restore the folder's own files, or set run.output to another folder"
        raise PrivacyError(what, why=why, fix=fix)


def _refuse_missing_sources(
    settings: Settings, records: Records | Mapping[str, Records] | None, evaluation: Records | None
) -> None:
    """Refuse records that are not there, before a model is loaded. Raises ConfigError, DataError or RunError.

    records, evaluation: in memory, as for `records_of`.
    """
    clients, data = plans.federation_of(settings).clients, settings.data
    given = {"records": (data.path, records), "evaluation": (data.evaluation, evaluation)}
    lost = [name for name, (place, held) in given.items() if place == IN_MEMORY and held is None]
    if lost:
        fix = f"go on in Python: privlora.resume_federation(root, {lost[0]}=...)"
        raise RunError(f"this federation's {lost[0]} were in memory", fix=fix)
    cut_up = isinstance(clients, int)
    if cut_up and isinstance(records, Mapping):
        fix = "give a list of clients with these names, or one list of records"
        raise ConfigError("records of each client, and a number of clients to cut records into", fix=fix)
    if not cut_up:
        _by_client(settings, records)
    check_sources(settings, records, evaluation)


def records_of(settings: Settings, records: Records | Mapping[str, Records] | None) -> dict[str, Records]:
    """Each client's records, by name. records: in memory; of all clients together, or by name. Raises ConfigError."""
    federation, data = plans.federation_of(settings), settings.data
    if isinstance(federation.clients, int):
        if records is None:
            records = load_records(data.path, format=data.format)
        user = settings.privacy.user_column
        return dict(cut(as_records(records), federation, seed=settings.run.seed, user_column=user))
    given, found = _by_client(settings, records), dict[str, Records]()
    for client in federation.clients:
        name, path = client.name, client.path or ""
        try:
            found[name] = as_records(given[name]) if name in given else load_records(path, format=data.format)
        except DataError as error:
            raise error.of(f"client {name}") from None
    return found


def _by_client(settings: Settings, records: Records | Mapping[str, Records] | None) -> dict[str, Records]:
    """Records in memory by client. Raises ConfigError for names of nobody, and for clients without records."""
    clients = plans.federation_of(settings).clients
    assert not isinstance(clients, int)
    if records is not None and not isinstance(records, Mapping):
        fix = "give a mapping from each client's name to its records, or a number of clients"
        raise ConfigError("one list of records, and clients that have records of their own", fix=fix)
    given: dict[str, Records] = dict(records or {})
    names = [client.name for client in clients]
    for name in given:
        if name not in names:
            raise ConfigError("records of a client that is not of the federation", fix=nearest(name, names))
    missing = [client.name for client in clients if client.path is None and client.name not in given]
    if missing:
        fix = "give each a path; clients on machines of their own: docs/federated-deployment.md"
        raise ConfigError(f"clients without a path: {', '.join(missing)}", fix=fix)
    return given
