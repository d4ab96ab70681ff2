"""What several runs on the same data cost together, read from their ledgers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from privlora.accounting.accountants import Adjacency, accountant_versions, epsilon
from privlora.accounting.ledger_format import LedgerSummary, Unit, read_ledger
from privlora.errors import PrivacyError

_T = TypeVar("_T")


@dataclass(frozen=True)
class RunBudget:
    """One run's share: its ledger's summary and its own epsilon at the statement's delta and adjacency."""

    ledger: LedgerSummary
    epsilon: float


@dataclass(frozen=True)
class BudgetStatement:
    """(epsilon, delta)-DP of all runs together, by composition of their charged steps.

    Attributes:
        runs: each run by itself, in the order given.
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
        return tuple(sorted({run.ledger.plan.dataset for run in self.runs}))

    def describe(self) -> str:
        """The statement in words."""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        subject = "The run is" if len(self.runs) == 1 else f"{len(self.runs)} runs together are"
        text = (
            f"{subject} ({self.epsilon:.4g}, {self.delta:.3g})-DP per {self.unit}, "
            f"adjacency {self.adjacency}, accountant pld ({packages})."
        )
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
        paths: at least one ledger.
        delta: total delta of the statement; None if all plans have the same.
        adjacency: neighbours of the statement; None if all plans have the same.

    Raises:
        RunError: a ledger cannot be read.
        PrivacyError: a ledger was changed; a run was given twice; a run's noise was reproducible; the runs
            protect different units; or they differ in delta or adjacency and none is given.
    """
    if not paths:
        raise PrivacyError("no ledger was given", fix="name the ledgers of all runs on the data")
    ledgers = [read_ledger(path) for path in paths]
    _refuse_repeats(ledgers)
    for ledger in ledgers:
        ledger.require_secure_noise()
    plans = [ledger.plan for ledger in ledgers]
    unit = _common("unit", {plan.unit for plan in plans}, "state records and users apart; they do not add up")
    if delta is None:
        delta = _common("delta", {plan.delta for plan in plans}, "give the delta of the whole statement")
    if adjacency is None:
        adjacencies = {plan.adjacency for plan in plans}
        shared: Adjacency = _common("adjacency", adjacencies, "give the adjacency of the whole statement")
        adjacency = shared
    runs = tuple(
        RunBudget(ledger, epsilon(ledger.events(), delta, adjacency=adjacency)) for ledger in ledgers
    )
    together = [pair for ledger in ledgers for pair in ledger.events()]
    total = epsilon(together, delta, adjacency=adjacency)
    return BudgetStatement(runs, total, delta, adjacency, unit, accountant_versions())


def _refuse_repeats(ledgers: Sequence[LedgerSummary]) -> None:
    seen: dict[str, Path] = {}
    for ledger in ledgers:
        if ledger.run_id in seen:
            raise PrivacyError(
                f"{seen[ledger.run_id]} and {ledger.path} are the same run {ledger.run_id}",
                why="it would be counted twice, or an old copy would hide later steps",
                fix="give each run's ledger once, the longest copy",
            )
        seen[ledger.run_id] = ledger.path


def _common(name: str, values: set[_T], fix: str) -> _T:
    if len(values) > 1:
        raise PrivacyError(f"the runs differ in {name}: {', '.join(sorted(map(str, values)))}", fix=fix)
    return values.pop()
