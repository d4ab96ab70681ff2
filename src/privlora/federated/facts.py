"""What is said of a federation at its end: the ledgers that clients give, held against what the server knows (their
plan, and who answered when), and what its report says next to that of a run in one place.

Facts are plain JSON from what is public alone: the settings, the server's history of who was asked and who answered,
and the clients' ledgers. No record count, no loss, no norm and no clock is among them. Of a trusted server nothing is
that depends on whom it drew: epsilon counts on nobody knowing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

from privlora.accounting import LedgerSummary, Plan
from privlora.accounting.ledger_format import parse_ledger
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.federated import plans
from privlora.federated.history import History, Round, why_void
from privlora.federated.secure.masks import FIXED_BITS
from privlora.federated.server import Server
from privlora.pages.numbers import finite
from privlora.reporting.parties import noise_by
from privlora.reporting.rows import alike
from privlora.training.files import RunFolder, write_atomically

_log = logging.getLogger(__name__)

# Characters of one line of a ledger, and of its first, at most.
_LINE, _FIRST = 500, 100_000


def keep_ledgers(
    folder: RunFolder,
    names: Sequence[str],
    history: History,
    plan: Plan,
    given: Mapping[str, str],
    takes: int,
) -> dict[str, LedgerSummary]:
    """Write every client's ledger next to the report, whose statement is that of the client which released most.

    names: of all clients. takes: how many releases a round is for a client. Gives what each ledger says. One that
    cannot be right is left out. Raises RunError unless the others' statement covers what clients without one can have
    released: as often as they were asked.
    """
    rounds = history.rounds()

    def shown(name: str, where: str) -> int:
        """What its ledger shows after all rounds where it was "asked", or has "answered"."""
        return takes * sum(name in getattr(one, where) for one in rounds)

    found: dict[str, LedgerSummary] = {}
    for name in names:
        try:
            found[name] = _right(name, given.get(name, ""), plan, shown(name, "answered"))
        except PrivloraError as wrong:
            _log.warning("the ledger of %s is left out: %s", name, wrong)
    runs = Counter(summary.run_id for summary in found.values())
    for name in [name for name, summary in found.items() if runs[summary.run_id] > 1]:
        _log.warning("the ledger of %s is left out: it is that of another client, too", name)
        del found[name]
    most = _most_released(found) if found else None
    missing = [name for name in names if name not in found]
    least = max((shown(name, "asked") for name in missing), default=0)
    if most is None or found[most].charges < least:
        what = f"clients that did not give their ledgers: {', '.join(missing)}"
        why = "without them the report cannot say what was released"
        raise RunError(what, why=why, fix="start them, then `privlora resume`")
    for name in found:
        write_atomically(folder.release / f"ledger-{name}.jsonl", given[name])
    write_atomically(folder.ledger, given[most])
    return found


def refuse_all_void(
    names: Sequence[str],
    history: History,
    plan: Plan | None,
    given: Mapping[str, str],
    own: LedgerSummary | None,
) -> None:
    """Raise RunError where no round came to anything, saying why and what was charged all the same.

    names: of all clients. plan, given: of the clients' ledgers. own: a trusted server's ledger, of which no more is
    told than it shows.
    """
    rounds = history.rounds()
    if any(one.void is None for one in rounds):
        return
    reasons = "" if own else f" ({why_void(rounds)})"
    what = f"all {len(rounds)} rounds are void{reasons}: nothing moved, so there is no adapter"
    why = f"charged all the same: {_charged(names, plan, given, own)}"
    fix = "see what the clients logged, mend it, and start a new federation in another folder"
    raise RunError(what, why=why, fix=fix)


def _charged(
    names: Sequence[str], plan: Plan | None, given: Mapping[str, str], own: LedgerSummary | None
) -> str:
    """How much of what is planned, as the ledgers show."""
    if own is not None:
        return f"{own.charges} of {own.plan.steps} steps in the server's ledger"
    assert plan is not None
    found: list[int] = []
    missing: list[str] = []
    for name in names:
        try:
            found.append(_right(name, given.get(name, ""), plan, 0).charges)
        except PrivloraError:
            missing.append(name)
    if not found:
        return "no client gave its ledger, so its own folder says how much"
    shown = f"at most {max(found)} of {plan.steps} steps in a client's ledger" if max(found) else "nothing"
    return f"{shown}, as far as ledgers were given (not by {', '.join(missing)})" if missing else shown


def _most_released(ledgers: Mapping[str, LedgerSummary]) -> str:
    """The client whose ledger has the most charges, the first of several: its budget bounds all others', since all
    ledgers charge the steps of one plan."""
    return max(ledgers, key=lambda name: ledgers[name].charges)


def _right(name: str, text: str, plan: Plan, least: int) -> LedgerSummary:
    """Raises PrivloraError for a text that is not the ledger of a client which answered so often."""
    if len(text) > _FIRST + _LINE * (plan.steps + 1):
        raise RunError("it is longer than a ledger of this plan can be", fix="look at that client")
    try:
        content = text.encode()
    except UnicodeError:
        raise RunError("it holds half a character", fix="look at that client") from None
    summary, _, size = parse_ledger(Path(name), content)
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    problems = {
        "something lies behind its last whole line": size < len(content),  # it is published as it is given
        "it is of a day to come": date.fromisoformat(summary.created) > tomorrow,
        "it is of another plan than was agreed on": not alike(summary.plan.to_dict(), plan.to_dict()),
        "it is not closed, so that its client could release more": not summary.closed,
        f"it shows {summary.charges} charges, and the client answered after {least}: it was cut, or a copy of the "
        "client's folder answered as well": summary.charges < least,
    }
    for what, found in problems.items():
        if found:
            raise PrivacyError(what, fix="look at that client, and ask its owner")
    return summary


def federation_facts(
    server: Server, rounds: Sequence[Round], ledgers: Mapping[str, LedgerSummary]
) -> dict[str, Any]:
    """The key ``federation`` of a report; docs/federated-report.md says what each name in it means.

    rounds: all that were begun. ledgers: of each client that has one.
    """
    settings = server.parts.settings
    federation = plans.federation_of(settings)
    plan = next(iter(ledgers.values())).plan if ledgers else None
    most = _most_released(ledgers) if ledgers else None
    charged = ledgers[most].events() if most else ()
    expected = server.expected(server.stages[0], 1)
    lattice = plans.lattice_of(federation, plan, expected)
    own, entries = plans.server_plan(settings), sum(map(prod, expected.values()))
    return {
        "rule": plans.rule_in(settings),
        "noise_by": noise_by(federation, private=settings.privacy.private),
        "secure_sums": federation.secure,
        "threshold": federation.threshold if federation.secure else None,
        "ring_bits": None if not federation.secure else FIXED_BITS if lattice is None else lattice.bits,
        "lattice": None if lattice is None else {"entries": lattice.entries, "width": lattice.width},
        "share_noise_std": None if lattice is None else lattice.noise_std(1),
        "colluding": plans.colluding(federation, lattice, plan, charged),
        "update_noise": plans.update_noise(federation, plan or own, entries),
        "clients_per_round": federation.per_round,
        "local_steps": federation.local_steps,
        "statement_of": most,
        "clients": _clients(server, rounds, ledgers),
        "rounds": _rounds(federation.rounds, rounds, secret=federation.trusted_server),
        "bytes": _bytes(server, rounds),
    }


_OF_LEDGERS = ("steps_charged", "steps_planned", "epsilon", "epsilon_planned", "delta")


def _budget(ledger: LedgerSummary) -> tuple[float | None, ...]:
    """In the order of ``_OF_LEDGERS``."""
    plan, steps = ledger.plan, (ledger.charges, ledger.plan.steps)
    if plan.insecure_noise:
        return *steps, None, None, plan.delta
    events = (tuple(plan.events(count)) for count in steps)
    spent = (finite(plans.epsilon_of(each, plan.delta, plan.adjacency)) for each in events)
    return *steps, *spent, plan.delta


def _clients(
    server: Server, rounds: Sequence[Round], ledgers: Mapping[str, LedgerSummary]
) -> list[dict[str, Any]]:
    """Each client's part and budget; numbers of a ledger are None for a client without one."""
    rows, settings = [], server.parts.settings
    federation = plans.federation_of(settings)
    secret = federation.trusted_server  # the statement counts on nobody knowing who was drawn
    for name in federation.names:
        row: dict[str, Any] = {"name": name, "weight": plans.weight_of(settings, name)}
        row["rounds_asked"] = None if secret else sum(name in one.asked for one in rounds)
        row["rounds_answered"] = None if secret else sum(name in one.answered for one in rounds)
        budget = _budget(ledgers[name]) if name in ledgers else (None,) * len(_OF_LEDGERS)
        rows.append(row | dict(zip(_OF_LEDGERS, budget, strict=True)))
    return rows


def _rounds(planned: int, rounds: Sequence[Round], *, secret: bool) -> dict[str, Any]:
    void = [one for one in rounds if one.void is not None]
    told = () if secret else rounds  # else it would say whom the server drew
    return {
        "planned": planned,
        "done": len(rounds) - len(void),
        "void": len(void),
        "log": [
            {
                "round": one.step,
                "asked": len(one.asked),
                "answered": len(one.answered),
                # Of a void round it is not known whose answers would have counted.
                "dropped": [] if one.void else [name for name in one.asked if name not in one.answered],
                "bytes_down": one.down,
                "bytes_up": one.up,
                "void": one.void is not None,
            }
            for one in told
        ],
    }


def _bytes(server: Server, rounds: Sequence[Round]) -> dict[str, Any]:
    """Of a client in a round, the mean over rounds that are not void; and how many numbers the rule's formula asks.

    down: of those who were sent tensors: who had dropped out before was not. Of a trusted server the formula alone,
    over all rounds, also those for which it drew nobody.
    """
    federation = plans.federation_of(server.parts.settings)
    secret = federation.trusted_server
    done = [one for one in rounds if one.void is None and (secret or one.asked)]
    if not done:
        return dict.fromkeys(("down", "up", "formula_down", "formula_up"))
    present = [federation.per_round if secret else max(1, len(one.answered)) for one in done]
    sizes = [server.message_sizes(one.step, count) for one, count in zip(done, present, strict=True)]
    return {
        "down": None if secret else fmean(one.down / (one.sent or len(one.asked)) for one in done),
        "up": None if secret else fmean(one.up / len(one.answered or one.asked) for one in done),
        "formula_down": fmean(down for down, _ in sizes),
        "formula_up": fmean(up for _, up in sizes),
    }
