"""``privlora federate``, and going on with a federation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from privlora.accounting import Plan, read_ledger
from privlora.cli.console import JsonOption, accounting, emit, err, loading, out, quiet_libraries
from privlora.cli.rule_table import show_rules
from privlora.cli.training import OverridesArgument, explained_stops, promised
from privlora.config import FederationSettings, Settings, load_settings
from privlora.errors import ConfigError
from privlora.federated.used import is_over, refuse_used
from privlora.training.files import RunFolder
from privlora.training.sources import refuse_first

if TYPE_CHECKING:
    from privlora.federated.history import Round, RoundObserver
    from privlora.federated.run import Federated


_SUPERLINK = "127.0.0.1:8000"


def federate(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    list_rules: Annotated[
        bool, typer.Option("--list-rules", help="Show how what clients send can be put together.")
    ] = False,
    engine: Annotated[
        Literal["embedded", "simulation"],
        typer.Option(
            help="embedded: all clients in this process. simulation: in workers of Flower's simulation."
        ),
    ] = "embedded",
    app: Annotated[
        Path | None,
        typer.Option(
            "--write-app",
            metavar="FOLDER",
            help="Write a Flower app for machines of their own.",
            show_default=False,
        ),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"With --write-app: where the SuperLink answers, {_SUPERLINK} if not given.",
            show_default=False,
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --write-app: the authority of its certificate.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one adapter from the records of several owners, as the group federation of CONFIG says.

    Each client has a folder of its own, and the server sees nothing but their messages. Leaves an adapter, a report
    and each client's ledger in run.output.
    """
    if list_rules:
        show_rules(as_json)
        return
    given = [
        name
        for name, value in (("--superlink", superlink), ("--root-certificates", root_certificates))
        if value is not None
    ]
    if given and app is None:
        raise ConfigError(
            f"{' and '.join(given)} without --write-app",
            why="all clients of this run are in this process, and nobody is called",
            fix="add --write-app FOLDER, which writes the app for machines of their own",
        )
    if config is None:
        raise ConfigError("no CONFIG is given", fix="`privlora federate run.yaml`, or --list-rules")
    settings = load_settings(config, overrides or ())
    if settings.federation is None:
        raise ConfigError(
            f"{config} has no group federation, so nothing says who its clients are",
            fix=[
                "add one, as federation: {clients: [{name: north, path: north.jsonl}, {name: south, path: "
                "south.jsonl}], rounds: 10, local_steps: 4, rule: tan}, without data.path and privacy.steps",
                "or let `privlora init north.jsonl south.jsonl --clients --model NAME` write such a YAML",
                f"or, to train in one place, `privlora train {config}`",
            ],
        )
    if app is not None:
        _write(app, settings, superlink or _SUPERLINK, root_certificates, as_json)
        return
    folder = RunFolder(Path(settings.run.output))
    refuse_used(folder)
    refuse_first(settings, begins=False)  # as in one place, and before slow imports
    _run(folder, settings, as_json, fresh=True, simulated=engine == "simulation")


def _write(
    app: Path, settings: Settings, superlink: str, root_certificates: Path | None, as_json: bool
) -> None:
    with quiet_libraries(told=True):
        with loading():
            from privlora.federated.flower.app import write_app

        folder = write_app(app, settings, superlink=superlink, root_certificates=root_certificates)
    name = settings.model.name
    if not Path(name).expanduser().is_dir():
        err().print(
            f"note: model.name={name!r} is no folder here, so that the server will ask the hub for it"
        )
    if as_json:
        emit({"app": str(folder)})
        return
    out().print(f"{'app:':<10}{folder}")
    out().print(f"{'next:':<10}{folder / 'README.md'} says what each machine runs")


def federation_in(settings: Settings) -> FederationSettings:
    """The group. Raises ConfigError without one."""
    if settings.federation is None:
        raise ConfigError(
            "these settings have no group federation, so they say of no clients",
            fix="add “federation: {clients: 3, rounds: 20}”, or use `privlora train` for a run in one place",
        )
    return settings.federation


def go_on(folder: RunFolder, settings: Settings, as_json: bool) -> None:
    """Resume a federation, and show what it leaves."""
    over = is_over(folder, settings)
    if over:
        err().print("this federation is over already: no round is left, and what it leaves is written anew")
    with quiet_libraries(told=True):
        with loading():
            from privlora.federated.run import going_on

        if not over and (begun := going_on(folder, settings)) is not None:
            err().print(begun)
    located = settings.run.model_copy(update={"output": str(folder.root)})
    _run(folder, settings.model_copy(update={"run": located}), as_json, fresh=False)


def _run(
    folder: RunFolder, settings: Settings, as_json: bool, *, fresh: bool, simulated: bool = False
) -> None:
    with quiet_libraries(told=fresh):  # a resume said so already
        start: Callable[..., Federated]
        with loading():
            from privlora.federated.plans import client_plan, server_plan, with_local_method
            from privlora.federated.words import in_a_line, warnings

            if simulated:
                from privlora.federated.flower.simulation import simulate as start
            else:
                from privlora.federated.run import federate as start

        settings = with_local_method(settings)
        with accounting(settings.privacy.steps):
            plan, own = client_plan(settings), server_plan(settings)
            shown = in_a_line(settings, plan, own)
        err().print(f"plan: {shown}")
        for text in warnings(settings, plan, own, _entries(settings)):
            err().print(f"WARNING: {text}")
        result = _observed(folder, settings, lambda observer: start(settings, observer=observer, fresh=fresh))
    _show(folder, settings, result, as_json)


def _entries(settings: Settings) -> int | None:
    """Of a client's answer, where whole clients are hidden and the model is a local folder: the noise grows with it."""
    if federation_in(settings).privacy_model != "client":
        return None
    from privlora.cli.federation_plan import entries_of
    from privlora.cli.planning import local_model

    settings, model, _ = local_model(settings)
    return None if model is None else entries_of(settings, model)


def _observed(
    folder: RunFolder, settings: Settings, start: Callable[[RoundObserver], Federated]
) -> Federated:
    from privlora.federated.progress import RoundProgress

    progress = RoundProgress(err(), private=settings.privacy.protects)
    with explained_stops(folder, "round"), progress as observer:
        return start(observer)


def _show(folder: RunFolder, settings: Settings, result: Federated, as_json: bool) -> None:
    from privlora.federated.history import ROUNDS, History
    from privlora.reporting.parties import warnings

    federation = federation_in(settings)
    ledgers = {
        name: str(path)
        for name in federation.names
        if (path := result.release / f"ledger-{name}.jsonl").exists()
    }
    places: dict[str, str | None] = {
        "adapter": str(result.release),
        "ledger": str(folder.ledger) if folder.ledger.exists() else None,
        "report": str(result.release / "report.html"),
    }
    rounds = History(folder.private / ROUNDS).rounds()
    plan = _charged(folder)
    report = json.loads((result.release / folder.report.name).read_text(encoding="utf-8"))
    facts = report["federation"]
    warned = warnings(facts, report["adapter"]["rank"])
    if as_json:
        statement: dict[str, Any] = {"private": result.epsilon is not None}
        if result.epsilon is not None and plan is not None:
            statement |= {
                "epsilon": result.epsilon,
                "epsilon_against_another_client": result.epsilon_against_a_client,
                "colluding": facts["colluding"],
                "delta": result.delta,
                **promised(plan),
            }
        emit(
            {
                **places,
                "ledgers": ledgers,
                **_facts(settings, rounds),
                "warnings": warned,
                **statement,
            }
        )
        return
    from privlora.reporting.wording import spoken

    for line in spoken(report.get("answers")):
        out().print(line)
    if ledgers:
        places["ledgers"] = f"{result.release}/ledger-*.jsonl, one of each of {len(ledgers)} clients"
    for name, place in places.items():
        if place is not None:
            out().print(f"{name + ':':<10}{place}")
    void = sum(one.void is not None for one in rounds)
    if void:
        out().print(f"{'rounds:':<10}{void} of {len(rounds)} are void: nothing moved in them")
    for text in warned:
        out().print(f"{'WARNING:':<10}{text}")
    out().print(f"{'promise:':<10}{_promise(settings, result, plan, facts)}")


def _charged(folder: RunFolder) -> Plan | None:
    """The plan of the ledger that released most, as far as it was charged: rounds may be void, and clients absent."""
    if not folder.ledger.exists():
        return None
    summary = read_ledger(folder.ledger)
    return replace(summary.plan, phases=tuple(summary.events())) if summary.charges else summary.plan


def _facts(settings: Settings, rounds: list[Round]) -> dict[str, Any]:
    federation = federation_in(settings)
    told = not federation.trusted_server  # else it would say how many clients the server drew
    return {
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
    }


def _promise(settings: Settings, result: Federated, plan: Plan | None, facts: Mapping[str, Any]) -> str:
    """facts: of the report, whose numbers these are."""
    from privlora.federated.words import NOT_PRIVATE, against_whom, who_is_protected
    from privlora.rounding import rounded_up

    if result.epsilon is None or plan is None:
        return NOT_PRIVATE
    stated = f"({rounded_up(result.epsilon)}, {result.delta:.3g})-DP for each client"
    if facts["colluding"]:
        stated += f": ε {against_whom(result.epsilon, facts['colluding'])}"
    return f"{stated}; {plan.describe()}; {who_is_protected(settings)}"
