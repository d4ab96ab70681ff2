"""The annex of a release: what a data-protection officer files, as plain JSON and as a page of two sheets of paper.

Both are functions of the report, of the ledger and of the hashes of the files beside them, so they say nothing that is
not published already, and whoever has the release makes them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from privlora.accounting import LedgerSummary
from privlora.accounting.ledger_format import parse_ledger
from privlora.accounting.meaning import posterior
from privlora.errors import PrivacyError
from privlora.pages.numbers import finite
from privlora.ranges import MOST_PHASES
from privlora.reporting import wording
from privlora.reporting.limits import risks_of
from privlora.reporting.parties import against, hidden
from privlora.reporting.seals import ANNEX, belongs, digests, sealed
from privlora.version import __version__

ANNEX_VERSION: Final = 1
JSON_NAME, PAGE_NAME = ANNEX
SIGNATURE: Final = "signature"
TO_FILL: Final = (
    "Purpose of the processing",
    "Necessity and proportionality",
    "Legal basis",
    "Controller and contact",
    "Processors, recipients, transfers",
    "Origin of the records",
    "Special categories (Art. 9)",
    "Impact assessment (DPIA)",
    "Total ε of all releases from these records",
    "Risks to people, and what remains",
    "Access to private/, backups and logs",
    "Retention and deletion of private/",
    "Erasure requests",
    "Is the release personal data?",
    "Advice of the DPO; date of review",
)
OF_RECORDS: Final = "Can one person have several records?"
ATTACKS: Final = "Attacks tried, with dates and bounds"
SIGNED_BY: Final = "Date, name and signature"
_WHAT: Final = {
    "README.md": "the card, as hubs for models show it",
    "adapter_config.json": "the adapter's shape, for peft",
    "adapter_model.safetensors": "the adapter's weights",
    "choice.json": "how settings were found without a private record; its private_epsilon was not spent: it is what "
    "the same search on private records would have cost",
    "evaluations.jsonl": "losses on public records",
    "ledger.jsonl": "what was released, and how often",
    "metrics.jsonl": "epsilon and public losses by step",
    "privacy_report.json": "the statement, settings and results, for machines",
    "report.html": "the same, with figures",
    "synthetic.jsonl": "the texts",
}
_OF_A_CLIENT: Final = "a client's own ledger"
_PRIVATE: Final = (
    "the settings file, which names the files of the records",
    "checkpoints, training losses, and the summary of the records",
    "hashes of the records",
    "results of audits, which are facts about the records",
)


@dataclass(frozen=True)
class Book:
    """A ledger as far as an annex needs it. summary: what it says. head: SHA-256 of its last line."""

    summary: LedgerSummary
    head: str


def read_book(path: Path, content: bytes) -> Book:
    """path: for words alone. Raises RunError or PrivacyError for what is no whole ledger, to its last byte."""
    summary, head, size = parse_ledger(path, content)
    if size != len(content):
        raise PrivacyError(
            f"{path}: something lies behind the last whole line",
            why="a run that is over leaves nothing there",
            fix="restore the original ledger",
        )
    if len(summary.plan.phases) > MOST_PHASES:
        raise PrivacyError(
            f"{path}: the plan has more than {MOST_PHASES} phases",
            why="no settings allow them, and epsilon of each would take seconds",
            fix="restore the original ledger",
        )
    return Book(summary, head)


def annex_of(report: Mapping[str, Any], book: Book, files: Mapping[str, str]) -> dict[str, Any]:
    """annex.json without a signature. report: of a private run that is over. files: SHA-256 of all files of the release
    but the annex's own.

    Raises PrivacyError where there is nothing to file, or what would be filed must not be published.
    """
    if not wording.is_private(report):
        raise nothing_to_file("", str(report["stamp"]["reason"]))
    if report["statement"]["epsilon"] is None:
        raise nothing_to_file("", "its noise is so small that no finite epsilon can be stated")
    statement, summary = report["statement"], book.summary
    known = wording.against_a_client(report)
    return sealed(
        {
            "schema_version": ANNEX_VERSION,
            "written_by": f"privlora {__version__}",
            "subject": _subject(report),
            "to_fill": to_fill(statement["unit"]),
            "statement": {
                **{name: statement[name] for name in _STATED},
                "epsilon_against_another_client": known,
                "noise": "keys of the operating system, never stored",
            },
            "means": _means(report["means"], statement["epsilon"], known),
            "protected": _protected(report),
            "size": size_of(report),
            "public": [{"file": name, "what": _WHAT.get(name, _OF_A_CLIENT)} for name in sorted(files)],
            "private": list(_PRIVATE),
            "attacks": [],
            "risks": risks_of(report),
            "versions": dict(report["versions"]),
            "ledger": {
                "file": "ledger.jsonl",
                "head": book.head,
                "run_id": summary.run_id,
                "created": summary.created,
                "steps_charged": summary.charges,
                "steps_planned": summary.plan.steps,
                "closed": summary.closed,
                "versions": dict(summary.versions),
            },
            "files": dict(sorted(files.items())),
        }
    )


_STATED: Final = (
    "epsilon",
    "delta",
    "epsilon_replace_one",
    "unit",
    "records_per_user",
    "adjacency",
    "accountant",
)


def to_fill(unit: str) -> list[str]:
    """The fields that a data-protection officer fills in, as the page shows them."""
    return [*TO_FILL, *([OF_RECORDS] if unit == "record" else []), ATTACKS, SIGNED_BY]


def size_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """How many units there are, as the run was told and as the report has it: N = b / q of the last phase, or a
    federation's number of clients. of: of whom each."""
    statement, federation = report["statement"], report.get("federation")
    if statement["unit"] == "client":
        assert federation is not None
        return {"units": len(federation["clients"]), "unit": "client", "of": "the federation"}
    units = statement["expected_batch_size"] / wording.rate(wording.phases(statement)[-1]["sampling"])
    whose = "all data"
    if federation is not None and federation["noise_by"] == "client":
        whose = f"each of {len(federation['clients'])} clients"
    return {"units": round(units), "unit": statement["unit"], "of": whose}


def files_beside(folder: Path, report: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of all files of a release but the annex's own. Raises RunError."""
    names = (path.name for path in folder.iterdir() if belongs(path.name, report))
    return digests(folder, (name for name in names if name not in ANNEX))


def annex_text(annex: Mapping[str, Any]) -> str:
    """annex.json."""
    return json.dumps(annex, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def content_of(annex: Mapping[str, Any]) -> dict[str, Any]:
    """All but the signature."""
    return {name: value for name, value in annex.items() if name != SIGNATURE}


def nothing_to_file(whose: str, reason: str) -> PrivacyError:
    """whose: run, as " of the run in 'runs/x'"."""
    return PrivacyError(
        f"nothing to file: the release{whose} is NOT PRIVATE",
        why=f"{reason}, so it holds what its records say, and an annex would promise something",
        fix="handle it as the records themselves",
    )


def _subject(report: Mapping[str, Any]) -> dict[str, Any]:
    adapter, method, federation = report["adapter"], report["method"], report.get("federation")
    return {
        "title": wording.heading(report),
        "release": "texts" if "texts" in report else "adapter",
        "base_model": adapter["base_model"],
        "base_is_local": adapter["base_is_local"],
        "base_revision": adapter["base_revision"],
        "task": _task(report),
        "method": method["name"],
        "mechanism": wording.mechanism(report),
        "dataset": report["statement"]["dataset"],
        "clients": None if federation is None else len(federation["clients"]),
        "rule": None if federation is None else federation["rule"]["name"],
    }


def _task(report: Mapping[str, Any]) -> str:
    """What was learned from the records."""
    if "classes" in report:
        count = report["classes"]["num_labels"]
        return f"to tell {count} classes of texts" if count > 1 else "to give texts a score"
    if "preferences" in report:
        return "which of two answers is preferred"
    if wording.releases_votes(report):
        return "which of many public texts are like the records"
    return "to continue texts like the records"


def _protected(report: Mapping[str, Any]) -> dict[str, str]:
    statement, federation = report["statement"], report.get("federation")
    who = wording.unit(statement) if federation is None else hidden(statement)
    whole = "every file of this release, and knows all other records"
    whom = f"whoever has {whole}" if federation is None else against(federation)
    return {"who": who, "against": whom, "adjacency": wording.adjacency(statement)}


def _means(found: Mapping[str, float], epsilon: float, known: float | None) -> dict[str, Any]:
    """What epsilon means to one person; all of them upper bounds for any attack."""
    of_client = None if known is None else posterior(known)
    bounds = {"posterior_at_most": posterior(epsilon), "posterior_of_another_client_at_most": of_client}
    names = ("right_guesses", "found_at_1_percent", "found_at_1_permille")
    return finite({"prior": 0.5, **bounds, **{name: found[name] for name in names}})
