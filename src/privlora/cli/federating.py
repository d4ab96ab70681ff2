"""``privlora train`` and ``privlora resume`` of a federation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privlora.accounting import Plan, read_ledger
from privlora.cli.console import accounting, named, quiet_libraries, show
from privlora.cli.training import explained_stops, places_of, promised
from privlora.config import Settings
from privlora.consoles import err, loading
from privlora.federated.history import is_over, refuse_used
from privlora.training.files import RunFolder
from privlora.training.preflight import preflight

if TYPE_CHECKING:
    from privlora.federated.run import Federated


def start(settings: Settings, as_json: bool, *, simulated: bool) -> None:
    """Train a federation, and show what it leaves. simulated: in workers of Flower's simulation."""
    folder = RunFolder(Path(settings.run.output))
    refuse_used(folder)
    preflight(settings, begins=False)  # as in one place, and before slow imports
    _run(folder, settings, as_json, fresh=True, simulated=simulated)


def write(
    app: Path, settings: Settings, superlink: str, root_certificates: Path | None, as_json: bool
) -> None:
    """The app of a federation for several machines. superlink: HOST:PORT."""
    with quiet_libraries(told=True):
        with loading():
            from privlora.federated.flower.app import write_app

        folder = write_app(app, settings, superlink=superlink, root_certificates=root_certificates)
    name = settings.model.name
    if not Path(name).expanduser().is_dir():
        err().print(
            f"note: model.name={name!r} is no folder here, so that the server will ask the hub for it"
        )
    following = f"{folder / 'README.md'} says what each machine runs"
    show({"app": str(folder)}, named([("app", folder), ("next", following)]), as_json)


def go_on(folder: RunFolder, settings: Settings, as_json: bool) -> None:
    """Resume a federation, and show what it leaves."""
    over = is_over(folder, settings)
    if over:
        err().print("this federation is over already: no round is left, and what it leaves is written anew")
    with quiet_libraries(told=True):
        with loading():
            from privlora.federated.plans import federation_of
            from privlora.federated.run import going_on

        rounds, protects = federation_of(settings).rounds, settings.privacy.protects
        if not over and (begun := going_on(folder, rounds, protects=protects)) is not None:
            err().print(begun)
    _run(folder, settings.changed(run={"output": str(folder.root)}), as_json, fresh=False)


def _run(
    folder: RunFolder, settings: Settings, as_json: bool, *, fresh: bool, simulated: bool = False
) -> None:
    with quiet_libraries(told=fresh):  # a resume said so already
        federate: Callable[..., Federated]
        with loading():
            from privlora.cli.federation_plan import entries_of
            from privlora.cli.planning import local_model
            from privlora.federated.plans import client_plan, federation_of, server_plan, with_local_method
            from privlora.federated.progress import RoundProgress
            from privlora.federated.words import InWords

            if simulated:
                from privlora.federated.flower.simulation import simulate as federate
            else:
                from privlora.federated.run import federate

        settings = with_local_method(settings)
        with accounting(settings.privacy.steps):
            said = InWords(settings, client_plan(settings), server_plan(settings))
            shown = said.in_a_line()
        err().print(f"plan: {shown}")
        entries = None
        if federation_of(settings).privacy_model == "client":  # whose noise grows with a client's answer
            located, model, _ = local_model(settings)
            entries = None if model is None else entries_of(located, model)
        for text in said.warnings(entries):
            err().print(f"WARNING: {text}")
        progress = RoundProgress(err(), private=settings.privacy.protects)
        with explained_stops(folder, "round"), progress as observer:
            result = federate(settings, observer=observer, fresh=fresh)
    _show(folder, settings, result, as_json)


def _show(folder: RunFolder, settings: Settings, result: Federated, as_json: bool) -> None:
    from privlora.federated.history import ROUNDS, History
    from privlora.federated.plans import federation_of
    from privlora.federated.words import NOT_PRIVATE, InWords, against_whom
    from privlora.reporting.parties import warnings
    from privlora.reporting.wording import spoken
    from privlora.rounding import rounded_up

    federation, release = federation_of(settings), result.release
    ledgers = {name: release / f"ledger-{name}.jsonl" for name in federation.names}
    ledgers = {name: path for name, path in ledgers.items() if path.exists()}
    places = places_of(folder, release, adapter=str(release))
    rounds, plan = History(folder.private / ROUNDS).rounds(), _charged(folder)
    report = json.loads((release / folder.report.name).read_text(encoding="utf-8"))
    facts, warned = report["federation"], warnings(report["federation"], report["adapter"]["rank"])
    statement, promise = dict[str, Any](private=result.epsilon is not None), NOT_PRIVATE
    if result.epsilon is not None and plan is not None:
        stated = f"({rounded_up(result.epsilon)}, {result.delta:.3g})-DP for each client"
        if facts["colluding"]:
            stated += f": ε {against_whom(result.epsilon, facts['colluding'])}"
        promise = f"{stated}; {plan.conditions()}; {InWords(settings).who_is_protected()}"
        statement |= {
            "epsilon": result.epsilon,
            "epsilon_against_another_client": result.epsilon_against_a_client,
            "colluding": facts["colluding"],
            "delta": result.delta,
            **promised(plan),
        }
    told = not federation.trusted_server  # else it would say how many clients the server drew
    content = {
        **places,
        "ledgers": {name: str(path) for name, path in ledgers.items()},
        "clients": federation.names,
        "rule": federation.rule,
        "method": settings.method.name,
        "privacy_model": federation.privacy_model,
        "secure_sums": federation.secure,
        "threshold": federation.threshold if federation.secure else None,
        "rounds": len(rounds),
        "void_rounds": [one.step for one in rounds if one.void is not None],
        "bytes_down": sum(one.down for one in rounds) if told else None,
        "bytes_up": sum(one.up for one in rounds) if told else None,
        "warnings": warned,
        **statement,
    }
    void = len(content["void_rounds"])
    rows = [
        *places.items(),
        ("ledgers", f"{release}/ledger-*.jsonl, one of each of {len(ledgers)} clients" if ledgers else None),
        ("rounds", f"{void} of {len(rounds)} are void: nothing moved in them" if void else None),
        *(("WARNING", text) for text in warned),
        ("promise", promise),
    ]
    show(content, (*spoken(report.get("answers")), *named(rows)), as_json)


def _charged(folder: RunFolder) -> Plan | None:
    """The plan of the ledger that released most, as far as it was charged: rounds may be void, and clients absent."""
    if not folder.ledger.exists():
        return None
    summary = read_ledger(folder.ledger)
    return replace(summary.plan, phases=tuple(summary.events())) if summary.charges else summary.plan
