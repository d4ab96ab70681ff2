"""What of a federation's report follows from its ledgers: each client's budget, and what clients together may learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Any, Final, cast

from privlora.accounting import LedgerSummary, Plan, epsilon
from privlora.config.federation import colluding_counts, honest_left
from privlora.errors import PrivacyError, named
from privlora.pages.numbers import finite
from privlora.reporting.annex import Book
from privlora.reporting.rows import alike
from privlora.reporting.seals import LEDGER

_ROUNDING: Final = 1e-6  # of an accountant on two machines
Report = Mapping[str, Any]


def check_colluding(report: Report, summary: LedgerSummary) -> None:
    """Raise PrivacyError where the report has another epsilon against clients together than the ledger gives, or none.

    Of t shares of the noise the smallest sum that they can open has `honest_left`, to less than rounding.
    """
    federation, of_clients = report.get("federation"), summary.plan.unit == "client"
    if federation is None:
        if of_clients:
            raise PrivacyError("the ledger protects whole clients, and the report names none")
        return
    if of_clients and federation["noise_by"] != (
        "server" if federation["statement_of"] is None else "shares"
    ):
        raise PrivacyError("the ledger protects whole clients, and the report says that others add the noise")
    size, total, counts = federation["clients_per_round"], federation["threshold"], list[int]()
    if federation["noise_by"] == "shares" or federation["rule"]["name"] == "joint":
        if not (1 < size < 1.5 * total and total <= size <= len(federation["clients"])):
            raise PrivacyError("the report's secure sums do not follow from its clients")
        counts = colluding_counts(size, total)
    if counts != [row["clients"] for row in federation["colluding"]]:
        raise PrivacyError("the report does not say what clients together may learn")
    for row in federation["colluding"]:
        count = row["clients"]
        honest = honest_left(size, total, count)
        left = min(event.noise_multiplier for event, _ in summary.events()) * sqrt(honest / total)
        weaker = [(replace(event, noise_multiplier=left), steps) for event, steps in summary.events()]
        found = finite(epsilon(weaker, summary.plan.delta, adjacency=summary.plan.adjacency))
        _refuse_other(row, {"noise_multiplier": left, "epsilon": found}, f"against {count} clients together")


def ledgers_of_clients(report: Report) -> dict[str, str]:
    """Each client's file, by its name; none where a trusted server has the ledger."""
    federation = report["federation"]
    if federation["statement_of"] is None:
        return {}
    return {row["name"]: f"ledger-{row['name']}.jsonl" for row in federation["clients"]}


def check_clients(report: Report, books: Mapping[str, Book], stated: Book) -> None:
    """Raise PrivacyError where the report says of a client what its ledger does not, or where the statement is not that
    of the client which released most. books: of those that gave theirs. stated: of the statement."""
    federation = report["federation"]
    if len({row["name"] for row in federation["clients"]}) != len(federation["clients"]):
        raise PrivacyError("the report names a client twice")
    for row in federation["clients"]:
        _refuse_other(row, _of_a_client(books.get(row["name"])), f"of {named(row['name'])}")
    of = federation["statement_of"]
    if of not in books or books[of].head != stated.head:
        raise PrivacyError(f"{LEDGER} is not that of {named(of)}")
    spent = [_of_a_client(book)["epsilon"] for book in books.values()]
    most = _of_a_client(stated)["epsilon"]
    if most is None or any(cost is None or cost > most * (1 + _ROUNDING) for cost in spent):
        raise PrivacyError(
            "another client's releases cost more than those of the one that the statement is of"
        )


def _of_a_client(book: Book | None) -> dict[str, Any]:
    names = ("steps_charged", "steps_planned", "epsilon", "epsilon_planned", "delta")
    if book is None:
        return dict.fromkeys(names)
    plan, charges = book.summary.plan, book.summary.charges
    values = (charges, plan.steps, _cost(plan, charges), _cost(plan, plan.steps), plan.delta)
    return dict(zip(names, values, strict=True))


@lru_cache(maxsize=64)
def _cost(plan: Plan, steps: int) -> float | None:
    """It takes tenths of a second, and clients have one plan and mostly as many charges."""
    return cast(float | None, finite(epsilon(plan.events(steps), plan.delta, adjacency=plan.adjacency)))


def _refuse_other(row: Report, true: Report, whose: str) -> None:
    for name, value in true.items():
        if not alike(row[name], value):
            raise PrivacyError(
                f"the report says {name} = {named(row[name])} {whose}, and by the ledger it is {named(value)}"
            )
