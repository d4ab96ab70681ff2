"""What several runs on the same data cost together, read from their ledgers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from privlora.accounting.accountants import Adjacency, accountant_versions, epsilon
from privlora.accounting.events import StepEvent
from privlora.accounting.ledger_format import LedgerSummary, Plan, Unit, read_ledger
from privlora.errors import PrivacyError
from privlora.rounding import rounded_up

_T = TypeVar("_T")


@dataclass(frozen=True)
class RunBudget:
    """One run's share.

    Attributes:
        copies: its ledger, or every copy of it that was given.
        events: the plan's different events, each with how many of its releases all copies together show. Of a copy and
            its continuation those of the longer one; copies that were continued apart share their first steps only, and
            the rest of each counts.
        epsilon: of these releases, at the statement's delta and adjacency.
    """

    copies: tuple[LedgerSummary, ...]
    events: tuple[tuple[StepEvent, int], ...]
    epsilon: float

    @property
    def releases(self) -> int:
        """Distinct charged steps of all copies together."""
        return sum(count for _, count in self.events)

    @property
    def plan(self) -> Plan:
        return self.copies[0].plan

    @property
    def run_id(self) -> str:
        return self.copies[0].run_id

    def describe_copies(self) -> str:
        """What became of several copies, in words; empty for one."""
        if len(self.copies) == 1:
            return ""
        named = ", ".join(f"{copy.path} ({copy.charges})" for copy in self.copies)
        if self.releases == max(copy.charges for copy in self.copies):
            what = "they are copies of one run, so the longest counts"
        else:
            what = "continued apart, so what they share counts once and the rest of each counts as well"
        return f"Copies of run {self.run_id}, with their releases: {named}; {what}: {self.releases} releases."


@dataclass(frozen=True)
class BudgetStatement:
    """(epsilon, delta)-DP of all runs together, by composition of their charged steps.

    Attributes:
        runs: each run by itself, in the order in which its first ledger was given.
        epsilon: PLD epsilon of all charged steps together, usually less than the sum over runs.
        delta: total delta of the composition.
        adjacency: which data sets are neighbours.
        unit: "record" or "user".
        versions: what computed it.
    """

    runs: tuple[RunBudget, ...]
    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    versions: dict[str, str]

    @property
    def datasets(self) -> tuple[str, ...]:
        """The distinct public names of the runs' data, sorted."""
        return tuple(sorted({run.plan.dataset for run in self.runs}))

    def describe(self) -> str:
        """The statement in words."""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        subject = "The run is" if len(self.runs) == 1 else f"{len(self.runs)} runs together are"
        text = (
            f"{subject} ({rounded_up(self.epsilon)}, {self.delta:.3g})-DP per {self.unit}, "
            f"adjacency {self.adjacency}, accountant pld ({packages})."
        )
        text += "".join(f" {words}" for run in self.runs if (words := run.describe_copies()))
        if len(self.datasets) > 1:
            text += (
                f" The ledgers name different data ({', '.join(self.datasets)}): "
                f"the total is for a {self.unit} that is in all of them."
            )
        return text


def compose_ledgers(
    paths: Sequence[str | os.PathLike[str]], delta: float | None = None, adjacency: Adjacency | None = None
) -> BudgetStatement:
    """The joint guarantee of the runs whose ledgers are given. Only charged steps count, finished or not.

    Args:
        paths: at least one ledger. Several copies of one run's count as all steps that any of them shows.
        delta: total delta of the statement; None if all plans have the same.
        adjacency: neighbours of the statement; None if all plans have the same.

    Raises:
        RunError: a ledger cannot be read.
        PrivacyError: a ledger was changed; copies of one run have different plans; a run's noise was reproducible;
            the runs protect different units; or they differ in delta or adjacency and none is given.
    """
    if not paths:
        raise PrivacyError("no ledger was given", fix="name the ledgers of all runs on the data")
    ledgers = [read_ledger(path) for path in paths]
    for ledger in ledgers:
        ledger.require_secure_noise()
    plans = [ledger.plan for ledger in ledgers]
    unit = _common("unit", {plan.unit for plan in plans}, "state records and users apart; they do not add up")
    if delta is None:
        delta = _common("delta", {plan.delta for plan in plans}, f"{_WHOLE} --delta (in Python delta=)")
    if adjacency is None:
        adjacencies = {plan.adjacency for plan in plans}
        shared: Adjacency = _common("adjacency", adjacencies, f"{_WHOLE} --adjacency (in Python adjacency=)")
        adjacency = shared
    shown = [(same, _releases(same)) for same in _by_run(ledgers)]
    runs = tuple(RunBudget(same, found, epsilon(found, delta, adjacency=adjacency)) for same, found in shown)
    events = [pair for run in runs for pair in run.events]
    total = epsilon(events, delta, adjacency=adjacency)
    return BudgetStatement(runs, total, delta, adjacency, unit, accountant_versions())


def _releases(copies: Sequence[LedgerSummary]) -> tuple[tuple[StepEvent, int], ...]:
    """Distinct charged steps of the copies of one run's ledger."""
    plan = copies[0].plan
    _refuse_broken_cycles(copies)
    charged = {
        line: plan.event_of(step) for copy in copies for step, line in enumerate(copy.charge_hashes, start=1)
    }
    counts = Counter(charged.values())
    return tuple((event, counts[event]) for event in dict.fromkeys(event for event, _ in plan.phases))


def _refuse_broken_cycles(copies: Sequence[LedgerSummary]) -> None:
    """Raise PrivacyError for copies that were continued apart where steps cost by their place in a cycle."""
    longest = max(copies, key=lambda copy: copy.charges).charge_hashes
    apart = any(copy.charge_hashes != longest[: copy.charges] for copy in copies)
    if apart and any(event.sampling.cycle > 1 for event, _ in copies[0].plan.phases):
        raise PrivacyError(
            f"copies of run {copies[0].run_id}, which samples in cycles, were continued apart",
            why="both went on in the same cycle, so no bound for two runs covers them together",
            fix="go on with one copy alone, and destroy what the other one released",
        )


def _by_run(ledgers: Sequence[LedgerSummary]) -> list[tuple[LedgerSummary, ...]]:
    """The copies of each run's ledger together."""
    runs: dict[str, list[LedgerSummary]] = {}
    for ledger in ledgers:
        copies = runs.setdefault(ledger.run_id, [])
        if copies and ledger.plan != copies[0].plan:
            raise PrivacyError(
                f"{copies[0].path} and {ledger.path} name the same run {ledger.run_id}, with different plans",
                why="one of them is not what was written, so it does not show what was released",
                fix="restore the original ledger",
            )
        copies.append(ledger)
    return [tuple(copies) for copies in runs.values()]


_WHOLE: Final = "give that of the whole statement, as"


def _common(name: str, values: set[_T], fix: str) -> _T:
    if len(values) > 1:
        raise PrivacyError(f"the runs differ in {name}: {', '.join(sorted(map(str, values)))}", fix=fix)
    return values.pop()
