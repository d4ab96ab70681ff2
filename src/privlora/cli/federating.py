"""``privlora federate``, and going on with a federation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from privlora.accounting import Plan, read_ledger
from privlora.cli.console import JsonOption, accounting, argument, emit, named, option, quiet_libraries, show
from privlora.cli.training import OverridesArgument, explained_stops, places_of, promised
from privlora.config import Settings, load_settings
from privlora.consoles import err, loading, out
from privlora.errors import ConfigError
from privlora.federated.history import is_over, refuse_used
from privlora.training.files import RunFolder
from privlora.training.preflight import preflight

if TYPE_CHECKING:
    from privlora.federated.run import Federated


_SUPERLINK = "127.0.0.1:8000"
_NOTES = """\
exact: the server's update is the mean of the clients', before it is cut to rank r; private: only where
clients add noise, or r + p reaches K r for K clients in a round.
two-sided: under privacy both subspaces can move.
hides: what federation.privacy_model can be, records of a client or whole clients.
local method: the default, and in brackets what method.name can be besides.

Numbers of each adapted m x n module, with K clients:
"""


def federate(
    config: Annotated[Path | None, argument("CONFIG", "YAML file of the run.")] = None,
    overrides: OverridesArgument = None,
    list_rules: Annotated[bool, option("Show how answers can be put together.", "--list-rules")] = False,
    engine: Annotated[
        Literal["embedded", "simulation"],
        typer.Option(
            help="embedded: all clients in this process. simulation: in workers of Flower's simulation."
        ),
    ] = "embedded",
    app: Annotated[
        Path | None, option("Write a Flower app for several machines.", "--write-app", metavar="FOLDER")
    ] = None,
    superlink: Annotated[
        str | None,
        option(
            f"With --write-app: where the SuperLink answers, {_SUPERLINK} if not given.", metavar="HOST:PORT"
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None, option("With --write-app: the authority of its certificate.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one adapter from the records of several owners, as the group federation of CONFIG says.

    Each client has a folder of its own, and the server sees nothing but their messages. Leaves an adapter, a report
    and each client's ledger in run.output.
    """
    if list_rules:
        _show_rules(as_json)
        return
    given = {"--superlink": superlink, "--root-certificates": root_certificates}
    named_alone = [name for name, value in given.items() if value is not None]
    if named_alone and app is None:
        raise ConfigError(
            f"{' and '.join(named_alone)} without --write-app",
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
    preflight(settings, begins=False)  # as in one place, and before slow imports
    _run(folder, settings, as_json, fresh=True, simulated=engine == "simulation")


def _show_rules(as_json: bool) -> None:
    """Print the table of rules, or all that is known of them as JSON."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    with quiet_libraries():
        from privlora.federated.rule_facts import EXAMPLE, rule_facts

        rows = rule_facts()
    if as_json:
        emit({"example": vars(EXAMPLE), "rules": rows})
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rule", "exact", "two-sided", "secure sums", "hides", "trips", "down", "up", "local method"):
        table.add_column(name, no_wrap=name != "local method", justify="right" if name == "trips" else "left")
    for row in rows:
        table.add_row(*_cells(row))
    terminal = sys.stdout.isatty()  # else as wide as the table
    Console(file=sys.stdout, highlight=False, markup=False, width=None if terminal else 132).print(table)
    out().print(
        f"down, up: MB of float32 that a client is sent and answers in round 2, for {EXAMPLE.describe()}.\n{_NOTES}"
    )
    for row in rows:
        out().print(
            f"{row['name']}: {row['summary']}\n  down  {row['down']} a module\n  up    {row['up']} a module\n"
            f"  from  {row['reference']}"
        )


def _cells(row: dict[str, Any]) -> list[str]:
    others = [name for name in row["methods"] if name != row["method"]]
    said = {True: "yes", False: "no"}
    return [
        row["name"],
        said[row["exact"]] if row["exact"] == row["exact_without_privacy"] else "private",
        said[row["two_sided"]],
        row["secure_sums"],
        ", ".join(f"{model}s" for model in row["privacy_models"]),
        str(len(row["stages"])),
        f"{4 * row['floats_down'] / 1e6:.3g}",
        f"{4 * row['floats_up'] / 1e6:.3g}",
        " ".join([row["method"], f"({', '.join(others)})" if others else ""]).strip(),
    ]


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
    following = f"{folder / 'README.md'} says what each machine runs"
    show({"app": str(folder)}, named([("app", folder), ("next", following)]), as_json)


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
            from privlora.federated.progress import RoundProgress
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
        progress = RoundProgress(err(), private=settings.privacy.protects)
        with explained_stops(folder, "round"), progress as observer:
            result = start(settings, observer=observer, fresh=fresh)
    _show(folder, settings, result, as_json)


def _entries(settings: Settings) -> int | None:
    """Of a client's answer, where whole clients are hidden and the model is a local folder: the noise grows with it."""
    from privlora.cli.federation_plan import entries_of
    from privlora.cli.planning import local_model
    from privlora.federated.plans import federation_of

    if federation_of(settings).privacy_model != "client":
        return None

    settings, model, _ = local_model(settings)
    return None if model is None else entries_of(settings, model)


def _show(folder: RunFolder, settings: Settings, result: Federated, as_json: bool) -> None:
    from privlora.federated.history import ROUNDS, History
    from privlora.federated.plans import federation_of
    from privlora.reporting.parties import warnings
    from privlora.reporting.wording import spoken

    federation, release = federation_of(settings), result.release
    ledgers = {name: release / f"ledger-{name}.jsonl" for name in federation.names}
    ledgers = {name: path for name, path in ledgers.items() if path.exists()}
    places = places_of(folder, release, adapter=str(release))
    rounds, plan = History(folder.private / ROUNDS).rounds(), _charged(folder)
    report = json.loads((release / folder.report.name).read_text(encoding="utf-8"))
    facts, warned = report["federation"], warnings(report["federation"], report["adapter"]["rank"])
    statement: dict[str, Any] = {"private": result.epsilon is not None}
    if result.epsilon is not None and plan is not None:
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
        ("promise", _promise(settings, result, plan, facts)),
    ]
    show(content, (*spoken(report.get("answers")), *named(rows)), as_json)


def _charged(folder: RunFolder) -> Plan | None:
    """The plan of the ledger that released most, as far as it was charged: rounds may be void, and clients absent."""
    if not folder.ledger.exists():
        return None
    summary = read_ledger(folder.ledger)
    return replace(summary.plan, phases=tuple(summary.events())) if summary.charges else summary.plan


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
