"""What a run leaves in RUN/release (or RUN/not-private), each file written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privlora.accounting import LedgerSummary, read_ledger
from privlora.errors import PrivacyError, RunError
from privlora.rehearsals.choosing import read_choice
from privlora.reporting.card import card
from privlora.reporting.facts import SCHEMA_VERSION, evaluation_rows, gather, privacy_facts, versions
from privlora.reporting.page import render
from privlora.reporting.texts_card import texts_card, texts_page
from privlora.training.assembly import Parts
from privlora.training.files import RunFolder, no_run, read_lines, set_times, write_atomically

CARD_NAME, HTML_NAME = "README.md", "report.html"


def publish(
    folder: RunFolder,
    parts: Parts,
    summary: LedgerSummary | None,
    *,
    federation: Mapping[str, Any] | None = None,
) -> None:
    """Write the adapter, privacy_report.json, README.md and report.html of an ended run.

    summary: what the run's ledger says; None in the non-private mode. federation: the report's key of this name, where
    several trained together.

    All that depends on when and how fast the run went is levelled: the folder looks as if written on the ledger's day.

    Raises RunError if a file cannot be written; the old one is then untouched.
    """
    parts.write_adapter(folder.release)
    write_report(
        folder, gather(parts, summary, read_lines(folder.evaluations), federation, read_choice(folder))
    )
    if summary is not None:
        set_times(folder.release, summary.created)


def rewrite_report(folder: RunFolder) -> Path:
    """Make README.md and report.html again from the JSON report, ledger and evaluations; gives the page.

    No model is needed. The ledger decides: if it shows more than the report, the statement is made anew.

    Raises RunError if there is no run, or it has no report, or one of another version or run; PrivacyError if the
    ledger shows less than the report.
    """
    if not (folder.settings.exists() or folder.ledger.exists() or folder.report.exists()):
        raise no_run(folder.root)
    report = read_report(folder.report)
    statement, summary = report["statement"], None
    if statement is not None:
        summary = read_ledger(folder.ledger)
        check_same_run(statement, summary)
        if summary.charges != statement["steps_charged"]:
            report = {**report, **privacy_facts(summary), "versions": versions()}
    if folder.evaluations.exists():
        report = {**report, "evaluation": evaluation_rows(read_lines(folder.evaluations))}
    write_report(folder, report)
    if summary is not None:
        set_times(folder.release, summary.created)
    return folder.release / HTML_NAME


def check_same_run(statement: Mapping[str, Any], summary: LedgerSummary) -> None:
    """Raise RunError for a ledger of another run than the statement's, PrivacyError for one that shows less."""
    if summary.run_id != statement["run_id"]:
        raise RunError(
            f"{summary.path} belongs to another run than its report", fix="restore the run's own files"
        )
    if summary.charges < statement["steps_charged"]:
        raise PrivacyError(
            f"{summary.path} shows {summary.charges} releases, the report {statement['steps_charged']}",
            why="a ledger never loses a release, so this one was cut or replaced",
            fix="restore the original ledger; without it no epsilon can be stated",
        )


def read_report(path: Path) -> dict[str, Any]:
    """privacy_report.json of an ended run. Raises RunError if it cannot be read, or is of another schema version."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"no readable report at {str(path)!r} ({type(error).__name__})",
            fix="`privlora resume` ends the run and writes it",
        ) from None
    if not isinstance(report, dict) or report.get("schema_version") != SCHEMA_VERSION:
        raise RunError(
            f"{str(path)!r} is not a report of schema version {SCHEMA_VERSION}",
            fix="`privlora resume` writes that of a run of an older version anew",
        )
    return report


def write_report(folder: RunFolder, report: Mapping[str, Any]) -> None:
    """privacy_report.json, README.md and report.html, of an adapter or of texts. Raises RunError."""
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder.report, text)
    as_card, as_page = (texts_card, texts_page) if "texts" in report else (card, render)
    write_atomically(folder.release / CARD_NAME, as_card(report))
    write_atomically(folder.release / HTML_NAME, as_page(report))
