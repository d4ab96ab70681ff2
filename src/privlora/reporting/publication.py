"""What a run leaves in RUN/release (or RUN/not-private), each file written whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from privlora.accounting import LedgerSummary, read_ledger
from privlora.errors import ConfigError, PrivacyError, RunError, is_shown, named
from privlora.rehearsals.kept import read_choice
from privlora.reporting.annex import (
    JSON_NAME,
    PAGE_NAME,
    annex_of,
    annex_text,
    content_of,
    files_beside,
    read_book,
)
from privlora.reporting.annex_page import render_annex
from privlora.reporting.card import card
from privlora.reporting.page import render
from privlora.reporting.rows import alike
from privlora.reporting.seals import (
    ANNEX,
    CARD_NAME,
    HTML_NAME,
    LEDGER,
    digests,
    refuse_altered,
    sealed,
    text_of,
    with_files,
    with_those_again,
)
from privlora.reporting.signing import is_signed_rightly
from privlora.reporting.statement import PRIVATE, SCHEMA_VERSION, evaluation_rows, privacy_facts, versions
from privlora.training.files import RunFolder, no_run, read_lines, set_times, write_atomically

if TYPE_CHECKING:
    from privlora.training.assembly import Parts

_GROWS: Final = (LEDGER, "evaluations.jsonl")  # in a run that went on after its release was written
_LACKING: Final = object()
_MADE_AGAIN: Final = ("means.", "noise.", "federation.", "clients[", "plan.")
_COMPUTED: Final = re.compile(r"statement\.epsilon(_replace_one)?|epsilon_over_steps\[\d+\]\.epsilon")


def publish(
    folder: RunFolder,
    parts: Parts,
    summary: LedgerSummary | None,
    *,
    federation: Mapping[str, Any] | None = None,
    answers: Mapping[str, Any] | None = None,
) -> None:
    """Write the adapter, privacy_report.json, README.md and report.html of an ended run.

    summary: what the run's ledger says; None in the non-private mode. federation: the report's key of this name, where
    several trained together. answers: the same of `reporting.answers`.

    All that depends on when and how fast the run went is levelled: the folder looks as if written on the ledger's day.

    Raises RunError if a file cannot be written; the old one is then untouched.
    """
    from privlora.reporting.facts import gather  # torch, which whoever reads a release needs not

    parts.write_adapter(folder.release)
    report = gather(parts, summary, read_lines(folder.evaluations), federation, read_choice(folder), answers)
    write_report(folder, with_files(report, folder.release))
    if summary is not None:
        set_times(folder.release, summary.created)


def rewrite_report(folder: RunFolder) -> Path:
    """Make README.md and report.html again from the JSON report, ledger and evaluations; gives the page.

    No model is needed. The ledger decides: if it shows more than the report, the statement is made anew.

    Raises RunError if there is no run, or it has no report, or one of another version or run; PrivacyError if the
    ledger shows less than the report, or a file was altered that a run would have made to grow, or the report itself.
    """
    if not (folder.settings.exists() or folder.ledger.exists() or folder.report.exists()):
        raise no_run(folder.root)
    report = read_report(folder.report)
    statement, summary = report.get("statement"), None
    found: dict[str, str] = {}
    if statement is not None:
        summary = read_ledger(folder.ledger)
        check_same_run(statement, summary)
        if summary.charges == statement.get("steps_charged"):
            found = digests(folder.release, _GROWS)
    refuse_altered(folder, report, found)
    if summary is not None:
        facts = stated(summary)
        if next(differences(report, facts), None) is not None:
            report = {**report, **facts, "versions": versions()}
    if folder.evaluations.exists():
        report = {**report, "evaluation": evaluation_rows(read_lines(folder.evaluations))}
    write_report(folder, with_those_again(report, folder.release, _GROWS))
    if summary is not None:
        set_times(folder.release, summary.created)
    return folder.release / HTML_NAME


def check_statement(report: Mapping[str, Any], summary: LedgerSummary) -> None:
    """Raise PrivacyError where ``report`` promises anything else than its ledger, RunError for that of another run."""
    statement = report.get("statement")
    check_same_run(statement if isinstance(statement, Mapping) else {}, summary)
    for name, said, true in differences(report, stated(summary)):
        raise PrivacyError(
            contradiction(f"the report of {summary.path}", name, said, true, "by the ledger it is"),
            why="whoever reads it would count on a promise that was not kept",
            fix="restore it, or let `privlora resume` write it anew",
        )


def check_same_run(statement: Mapping[str, Any], summary: LedgerSummary) -> None:
    """Raise RunError for a ledger of another run than the statement's, PrivacyError for one that shows less."""
    if summary.run_id != statement.get("run_id"):
        raise RunError(
            f"{summary.path} belongs to another run than its report", fix="restore the run's own files"
        )
    charged = statement.get("steps_charged")
    if isinstance(charged, int) and summary.charges < charged:
        raise PrivacyError(
            f"{summary.path} shows {summary.charges} releases, the report {charged}",
            why="a ledger never loses a release, so this one was cut or replaced",
            fix="restore the original ledger; without it no epsilon can be stated",
        )


def stated(summary: LedgerSummary) -> dict[str, Any]:
    """What a ledger decides of a report, as it is read from one."""
    return dict(json.loads(json.dumps(privacy_facts(summary))))


def differences(said: object, true: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Name, value and true value of each field of ``true`` that ``said`` has otherwise, or beside it.

    Of the report itself the keys that a ledger decides. What is computed from the ledger may round otherwise on
    another machine; what stands in it may not.
    """
    if isinstance(said, Mapping) and isinstance(true, Mapping):
        keys = [*true, *(key for key in said if name and key not in true)]
        for key in keys:
            inner = f"{name}.{key}" if name else key
            yield from differences(said.get(key, _LACKING), true.get(key, _LACKING), inner)
    elif isinstance(said, list) and isinstance(true, list) and len(said) == len(true):
        for number, (one, other) in enumerate(zip(said, true, strict=True)):
            yield from differences(one, other, f"{name}[{number}]")
    elif type(said) is not type(true) or not (said == true or _rounded(name, said, true)):
        yield name, said, true


def contradiction(whose: str, name: str, said: object, true: object, by: str) -> str:
    """One of the `differences` in words. by: before the true value, as "by the ledger it is"."""
    if all(value is _LACKING or is_shown(value) or _is_hash(value) for value in (said, true)):
        one, other = ("nothing" if value is _LACKING else _shown(value) for value in (said, true))
        return f"{whose} says {name} = {one}, and {by} {other}"
    return f"{whose} says one thing of {name}, and {by} another (not shown: it may be private)"


def _is_hash(value: object) -> bool:
    """Of what is public."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _shown(value: object) -> str:
    return str(value) if _is_hash(value) else named(value)


def _rounded(name: str, said: object, true: object) -> bool:
    computed = name.startswith(_MADE_AGAIN) or _COMPUTED.fullmatch(name) is not None
    return computed and isinstance(said, float) and alike(said, true)


def read_report(path: Path) -> dict[str, Any]:
    """privacy_report.json of an ended run. Raises RunError if it cannot be read, or is of another schema version."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    return parse_report(path, content)


def parse_report(path: Path, content: bytes) -> dict[str, Any]:
    """The same of what was read. path: for words alone."""
    try:
        report = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(report, dict) or report.get("schema_version") != SCHEMA_VERSION:
        raise RunError(
            f"{str(path)!r} is not a report of schema version {SCHEMA_VERSION}",
            fix="`privlora resume` writes that of a run of an older version anew",
        )
    return report


def _unreadable(path: Path, error: Exception) -> RunError:
    return RunError(
        f"no readable report at {str(path)!r} ({type(error).__name__})",
        fix="`privlora resume` ends the run and writes it",
    )


def write_report(folder: RunFolder, report: Mapping[str, Any]) -> None:
    """privacy_report.json, README.md and report.html, of an adapter or of texts, the annex where there is one, and the
    run's own note of the first one's SHA-256. Raises RunError."""
    report = sealed(report)
    notes = folder.private.exists()
    if notes:  # both, since a crash leaves either of them
        earlier = folder.seal.read_bytes().decode(errors="replace") if folder.seal.exists() else ""
        write_atomically(folder.seal, f"{report['sha256']}\n{earlier}")
    write_atomically(folder.report, text_of(report))
    if notes:
        write_atomically(folder.seal, report["sha256"] + "\n")
    for name, text in pages_of(report).items():
        write_atomically(folder.release / name, text)
    _renew_annex(folder, report)


def pages_of(report: Mapping[str, Any]) -> dict[str, str]:
    """README.md and report.html, by name."""
    return {CARD_NAME: card(report), HTML_NAME: render(report)}


def write_annex(folder: RunFolder, annex: Mapping[str, Any]) -> None:
    """annex.json and annex.html. Raises RunError."""
    write_atomically(folder.release / JSON_NAME, annex_text(annex))
    write_atomically(folder.release / PAGE_NAME, render_annex(annex))


def _renew_annex(folder: RunFolder, report: Mapping[str, Any]) -> None:
    """Where there is an annex, let it say what the report now says, and keep its signature if that is the same; or
    remove it, if there is nothing to file any more."""
    paths = [folder.release / name for name in ANNEX]
    if not any(path.exists() for path in paths):
        return
    book = read_book(folder.ledger, folder.ledger.read_bytes()) if folder.ledger.exists() else None
    if report["stamp"]["text"] != PRIVATE or book is None or not book.summary.closed:
        for path in paths:
            path.unlink(missing_ok=True)
        return
    annex = annex_of(report, book, files_beside(folder.release, report))
    write_annex(folder, signed_before(paths[0], annex) or annex)


def signed_before(path: Path, annex: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same annex as it lies there, if it is signed."""
    try:
        found = json.loads(path.read_bytes().decode())
        same = isinstance(found, dict) and content_of(found) == annex and is_signed_rightly(found)
    except (OSError, ValueError, RecursionError, ConfigError):
        return None
    return found if same else None
