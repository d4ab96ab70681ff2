"""What of a federation's report follows from its ledgers: who adds the noise, each client's budget, and what clients
together may learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Any, cast

from pydantic import ValidationError

from privlora.accounting import LedgerSummary, Plan, epsilon
from privlora.accounting.secure_sums import share_std
from privlora.config import FederationSettings
from privlora.config.base import Wrong
from privlora.config.federation import colluding_counts, honest_left
from privlora.errors import PrivacyError, named
from privlora.pages.numbers import finite
from privlora.reporting.annex import Book
from privlora.reporting.parties import noise_by
from privlora.reporting.publication import contradiction, differences
from privlora.reporting.rows import alike
from privlora.reporting.seals import LEDGER

Report = Mapping[str, Any]
_FINE = 1.05  # by what a lattice enlarges noise, at most


def federation_again(report: Report, summary: LedgerSummary) -> dict[str, Any]:
    """report["federation"] with all that its clients, its rounds and its ledger decide made again.

    Raises PrivacyError where no federation's settings lead to that report and that ledger.
    """
    facts, plan = report["federation"], summary.plan
    terms, whole = _terms(facts, plan), plan.unit == "client"
    by, event = noise_by(terms, private=True), plan.phases[-1][0]
    steps, rate, secure = terms.steps_of_a_client, 1.0, terms.secure or by == "shares"
    if by == "server":
        steps, rate = terms.rounds, terms.per_round / terms.size
    elif whole:
        steps = terms.participations
    of_one_kind = len(plan.phases) == 1 and plan.steps == steps
    if not of_one_kind or (whole and not alike(getattr(event.sampling, "sample_rate", None), rate)):
        raise PrivacyError("the report's clients and rounds do not make the plan of the ledger")
    known = {*terms.names, terms.rule}
    for word in _words({**facts, "noise_by": None}):
        if word not in known:
            raise PrivacyError(f"the report's federation says {named(word)}, which is no client and no rule")
    if facts["ring_bits"] not in ((32, 64) if secure else (None,)):
        raise PrivacyError("the report names a ring that no secure sum has")
    again = {
        **facts,
        "noise_by": by,
        "secure_sums": secure,
        "threshold": terms.threshold if secure else None,
        "clients_per_round": round(plan.expected_batch_size) if whole else terms.per_round,
    }
    if by != "shares":
        return again | {"lattice": None, "share_noise_std": None, "colluding": []}
    lattice: dict[str, Any] = {name: facts["lattice"][name] for name in ("entries", "width")}
    of_sum: dict[str, Any] = {"noise_multiplier": event.noise_multiplier, "clip_norm": plan.clip_norm}
    std = lattice["width"] * share_std(survivors=terms.threshold, **of_sum, **lattice)
    if std > _FINE * event.noise_multiplier * plan.clip_norm / sqrt(terms.threshold):
        raise PrivacyError("the report's lattice is coarser than any on which clients round")
    return again | {"lattice": lattice, "share_noise_std": std, "colluding": _colluding(terms, summary)}


def _terms(facts: Report, plan: Plan) -> FederationSettings:
    """What the clients agreed on, as far as it is in the report or follows from the ledger."""
    whole = plan.unit == "client"
    try:
        return FederationSettings.model_validate(
            {
                "clients": [{"name": row["name"]} for row in facts["clients"]],
                "rule": facts["rule"]["name"],
                "privacy_model": "client" if whole else "record",
                "trusted_server": whole and facts["statement_of"] is None,
                "clients_per_round": facts["clients_per_round"],
                "secure_aggregation": facts["secure_sums"],
                "survivors": facts["threshold"],
                "rounds": facts["rounds"]["planned"],
                "local_steps": facts["local_steps"],
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        wrong = problem.get("ctx", {}).get("error")
        what = wrong.what if isinstance(wrong, Wrong) else problem["msg"]
        raise PrivacyError(f"no settings lead to the report's federation: {what}") from None


def _words(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _words(inner)


def _colluding(terms: FederationSettings, summary: LedgerSummary) -> list[dict[str, Any]]:
    """Of t shares of the noise the smallest sum that clients can open has `honest_left`, to less than rounding."""
    rows, total = [], terms.threshold
    for count in colluding_counts(terms.per_round, total):
        honest = honest_left(terms.per_round, total, count)
        left = summary.plan.event.noise_multiplier * sqrt(honest / total)
        weaker = [(replace(event, noise_multiplier=left), steps) for event, steps in summary.events()]
        found = finite(epsilon(weaker, summary.plan.delta, adjacency=summary.plan.adjacency))
        rows.append({"clients": count, "noise_multiplier": left, "epsilon": found})
    return rows


def ledgers_of_clients(report: Report) -> dict[str, str]:
    """Each client's file, by its name; none where a trusted server has the ledger."""
    federation = report["federation"]
    if federation["noise_by"] == "server":
        return {}
    return {row["name"]: f"ledger-{row['name']}.jsonl" for row in federation["clients"]}


def check_clients(report: Report, books: Mapping[str, Book], stated: Book) -> None:
    """Raise PrivacyError where the report says of a client what its ledger does not, where a client's ledger is not of
    the plan that is stated, or where the statement is not that of the client which released most.

    books: of those that gave theirs. stated: of the statement.
    """
    federation, of = report["federation"], report["federation"]["statement_of"]
    of_all = federation["noise_by"] != "server"
    if of_all and (of not in books or books[of].head != stated.head):
        raise PrivacyError(f"{LEDGER} is not that of {named(of)}")
    plan, owners, charges = stated.summary.plan.to_dict(), dict[str, str](), stated.summary.charges
    _refuse_other_rounds(federation, books, stated.summary)
    for name, file in ledgers_of_clients(report).items():
        if name not in books:
            continue
        summary = books[name].summary
        refuse_other(summary.plan.to_dict(), plan, file, f"in {LEDGER} it is", "plan")
        if not summary.closed:
            raise PrivacyError(f"{file} is not closed, so that client could release more")
        if summary.charges > charges:
            raise PrivacyError(f"{file} has more releases than that of the client that the statement is of")
        if (other := owners.setdefault(summary.run_id, file)) != file:
            raise PrivacyError(f"{file} is the ledger of another client, that of {other}")
    # Epsilon of each takes its time, so it comes last, when all plans are the stated one.
    rows = [{**row, **_of_a_client(books.get(row["name"]))} for row in federation["clients"]]
    refuse_other(federation["clients"], rows, "the report", "by the ledgers it is", "clients")


def _refuse_other_rounds(
    federation: Mapping[str, Any], books: Mapping[str, Book], stated: LedgerSummary
) -> None:
    """Raise PrivacyError where what the report says of its rounds contradicts itself, or the ledgers."""
    rounds, rows, log = federation["rounds"], federation["clients"], federation["rounds"]["log"]
    parts = [(row["rounds_asked"], row["rounds_answered"]) for row in rows]
    begun = rounds["done"] + rounds["void"]
    if federation["noise_by"] == "server":  # whom it drew is nowhere
        right, least = not log and {*parts} <= {(None, None)}, rounds["done"]
        if not (right and rounds["void"] >= 0 and begun <= rounds["planned"] and least <= stated.charges):
            raise PrivacyError("the report's rounds are not those of the server's ledger")
        return
    dropped = Counter(name for one in log for name in one["dropped"])
    sums = (sum(one["asked"] for one in log), sum(one["answered"] for one in log))
    if not (
        begun == len(log) <= rounds["planned"]
        and [one["round"] for one in log] == list(range(1, begun + 1))
        and rounds["void"] == sum(one["void"] for one in log)
        and all(0 <= one["answered"] <= one["asked"] <= federation["clients_per_round"] for one in log)
        and all(one["answered"] + len(one["dropped"]) == (0 if one["void"] else one["asked"]) for one in log)
        and all(0 <= answered <= asked <= begun for asked, answered in parts)
        and all(row["rounds_answered"] + dropped[row["name"]] <= row["rounds_asked"] for row in rows)
        and sums == (sum(asked for asked, _ in parts), sum(answered for _, answered in parts))
    ):
        raise PrivacyError(
            "what the report says of its rounds and of its clients' part in them does not agree"
        )
    for row in rows:
        # Without a ledger it may have released whenever it was asked.
        own = books.get(row["name"])
        took, shown = row["rounds_asked"], stated.charges
        if own is not None:
            took, shown = row["rounds_answered"], own.summary.charges
        each = 1 if stated.plan.unit == "client" else federation["local_steps"]
        if took * each > shown:
            whose = "the stated" if own is None else "its"
            raise PrivacyError(f"{named(row['name'])} took part in more rounds than {whose} ledger has")


def refuse_other(said: object, true: object, whose: str, by: str, name: str = "") -> None:
    """Raise PrivacyError for the first difference of two pieces of JSON."""
    for place, one, other in differences(said, true, name):
        raise PrivacyError(contradiction(whose, place, one, other, by))


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
