"""Writing the annex of a finished run's release, after all that a push looks at was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from privlora.errors import PrivacyError, RunError
from privlora.reporting.annex import (
    JSON_NAME,
    PAGE_NAME,
    SIGNATURE,
    annex_of,
    files_beside,
    nothing_to_file,
    read_book,
)
from privlora.reporting.publication import read_report, signed_before, write_annex
from privlora.reporting.pushing import checked
from privlora.reporting.seals import CARD_NAME, HTML_NAME, text_of
from privlora.reporting.signing import fingerprint_of, signed
from privlora.reporting.statement import NOT_PRIVATE
from privlora.training.files import RunFolder, set_times, write_atomically


@dataclass(frozen=True)
class Filed:
    """annex: what annex.json says. signed_by: fingerprint of the key; None without a signature."""

    annex: dict[str, Any]
    signed_by: str | None


def file_annex(folder: RunFolder, *, key: Any = None) -> Filed:
    """Write annex.json and annex.html into the release, and card and page anew. key: an Ed25519 private key to sign
    with (`signing.read_private_key`).

    Raises PrivacyError for a run that protects nobody, whose release was changed or must not be published; RunError for
    one that is not finished, or whose release lacks a file or cannot be written.
    """
    _refuse_unprotected(folder)
    with checked(folder) as found:
        lacking = sorted(found.report["files"].keys() - set(found.files))
        if lacking:
            raise RunError(
                f"{str(folder.release)!r} lacks {', '.join(lacking)}, which its report names",
                why="whoever verifies the annex would miss it",
                fix="restore it, or file the annex of what a push makes of the rest",
            )
        if folder.report.read_bytes() != text_of(found.report).encode():
            raise PrivacyError(
                f"{str(folder.report)!r} says the same as the run wrote, in another form",
                why="`privlora verify` rejects it, and so would reject what is filed",
                fix=f"`privlora report {folder.root}` writes it again; then add --annex",
            )
        for name in (CARD_NAME, HTML_NAME):
            write_atomically(folder.release / name, (found.place / name).read_text(encoding="utf-8"))
        book = read_book(folder.ledger, (found.place / folder.ledger.name).read_bytes())
        annex = annex_of(found.report, book, files_beside(folder.release, found.report))
    if key is not None:
        annex = signed(annex, key)
    else:  # one that says the same keeps its signature
        annex = signed_before(folder.release / JSON_NAME, annex) or annex
    write_annex(folder, annex)
    set_times(folder.release, book.summary.created)
    signature = annex.get(SIGNATURE)
    return Filed(annex, None if signature is None else fingerprint_of(signature["public_key"]))


def paths_of(folder: RunFolder) -> tuple[str, str]:
    """Where the annex is: the page, and the JSON."""
    return str(folder.release / PAGE_NAME), str(folder.release / JSON_NAME)


def _refuse_unprotected(folder: RunFolder) -> None:
    """In the words of who wants to file something; what else is wrong `checked` says."""
    if not folder.report.exists():
        return
    stamp = read_report(folder.report).get("stamp")
    if isinstance(stamp, dict) and stamp.get("text") == NOT_PRIVATE:
        raise nothing_to_file(f" of the run in {str(folder.root)!r}", str(stamp.get("reason")))
