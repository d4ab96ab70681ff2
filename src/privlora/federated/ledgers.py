"""The ledgers that clients give at the end, held against what the server knows: their plan, and who answered when."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from privlora.accounting import LedgerSummary, Plan
from privlora.accounting.ledger_format import parse_ledger
from privlora.config import Settings
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.federated.history import History, why_void
from privlora.federated.plans import charged_after, federation_of
from privlora.reporting.rows import alike
from privlora.training.files import RunFolder, write_atomically

_log = logging.getLogger(__name__)

# Characters of one line of a ledger, and of its first, at most.
_LINE, _FIRST = 500, 100_000


def keep_ledgers(
    folder: RunFolder, settings: Settings, history: History, plan: Plan, given: Mapping[str, str]
) -> dict[str, LedgerSummary]:
    """Write every client's ledger beside the report, whose statement is that of the client which released most.

    Gives what each ledger says. One that cannot be right is left out. Raises RunError unless the others' statement
    covers whatever clients without one can have released: as often as they were asked.
    """
    federation = federation_of(settings)
    answered, asked = defaultdict(list), defaultdict(list)
    for one in history.rounds():
        for name in one.asked:
            asked[name].append(one.step)
        for name in one.answered:
            answered[name].append(one.step)

    def shown(rounds: list[int]) -> int:
        return charged_after(federation, settings.privacy, rounds)

    found: dict[str, LedgerSummary] = {}
    for name in federation.names:
        try:
            found[name] = _right(name, given.get(name, ""), plan, shown(answered[name]))
        except PrivloraError as wrong:
            _log.warning("the ledger of %s is left out: %s", name, wrong)
    runs = Counter(summary.run_id for summary in found.values())
    for name in [name for name, summary in found.items() if runs[summary.run_id] > 1]:
        _log.warning("the ledger of %s is left out: it is that of another client, too", name)
        del found[name]
    most = most_released(found) if found else None
    missing = [name for name in federation.names if name not in found]
    least = max((shown(asked[name]) for name in missing), default=0)
    if most is None or found[most].charges < least:
        raise RunError(
            f"clients that did not give their ledgers: {', '.join(missing)}",
            why="without them the report cannot say what was released",
            fix="start them, then `privlora resume`",
        )
    for name in found:
        write_atomically(folder.release / f"ledger-{name}.jsonl", given[name])
    write_atomically(folder.ledger, given[most])
    return found


def refuse_all_void(
    settings: Settings,
    history: History,
    plan: Plan | None,
    given: Mapping[str, str],
    own: LedgerSummary | None,
) -> None:
    """Raise RunError where no round came to anything, saying why and what was charged all the same.

    plan, given: of the clients' ledgers. own: a trusted server's ledger, of which no more is told than it shows.
    """
    rounds = history.rounds()
    if any(one.void is None for one in rounds):
        return
    reasons = "" if own else f" ({why_void(rounds)})"
    raise RunError(
        f"all {len(rounds)} rounds are void{reasons}: nothing moved, so there is no adapter",
        why=f"charged all the same: {_charged(settings, plan, given, own)}",
        fix="see what the clients logged, mend it, and start a new federation in another folder",
    )


def _charged(
    settings: Settings, plan: Plan | None, given: Mapping[str, str], own: LedgerSummary | None
) -> str:
    """How much of what is planned, as the ledgers show."""
    if own is not None:
        return f"{own.charges} of {own.plan.steps} steps in the server's ledger"
    assert plan is not None
    found: list[int] = []
    missing: list[str] = []
    for name in federation_of(settings).names:
        try:
            found.append(_right(name, given.get(name, ""), plan, 0).charges)
        except PrivloraError:
            missing.append(name)
    if not found:
        return "no client gave its ledger, so its own folder says how much"
    shown = f"at most {max(found)} of {plan.steps} steps in a client's ledger" if max(found) else "nothing"
    return f"{shown}, as far as ledgers were given (not by {', '.join(missing)})" if missing else shown


def most_released(ledgers: Mapping[str, LedgerSummary]) -> str:
    """The client whose ledger has the most charges, the first of several: its budget bounds all others', since all
    ledgers charge the phases of one plan in one order."""
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
