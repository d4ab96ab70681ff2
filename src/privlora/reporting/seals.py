"""What ties the files of a release to its report: privacy_report.json names the SHA-256 of each, and its own.

They are hashes of what is public, and so public. The card, the page and the annex follow from report and ledger, and
are not among them. Whoever can write a release can also write other hashes, so a run's private/ keeps the report's:
folder and file are its owner's alone, while a release is passed around.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from privlora.errors import PrivacyError, RunError
from privlora.names import ADAPTER_FILES
from privlora.training.files import RunFolder

CARD_NAME, HTML_NAME, REPORT_NAME = "README.md", "report.html", "privacy_report.json"
PAGES: Final = (CARD_NAME, HTML_NAME, REPORT_NAME)
ANNEX: Final = ("annex.json", "annex.html")
MADE_ANEW: Final = (*PAGES, *ANNEX)
"""What follows from the report and the ledger."""
ADAPTER: Final = ADAPTER_FILES
LEDGER: Final = "ledger.jsonl"
TEXTS: Final = "synthetic.jsonl"
_SOMETIMES: Final = (LEDGER, "evaluations.jsonl", "choice.json", "metrics.jsonl")
_OF_CLIENTS: Final = re.compile(r"ledger-[\w.-]+\.jsonl")
_FILES, _OWN = "files", "sha256"
LARGEST: Final = 16 * 1024 * 1024
"""Bytes of what is read as a whole; weights are hashed piece by piece."""


def needed(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Names that the release of this report's run has in any case."""
    return *PAGES, *((TEXTS,) if "texts" in report else ADAPTER)


def belongs(name: str, report: Mapping[str, Any]) -> bool:
    """Whether a file of this name is one that reporting writes for this report's run."""
    of_client = "federation" in report and _OF_CLIENTS.fullmatch(name) is not None
    return name in needed(report) or name in (*_SOMETIMES, *ANNEX) or of_client


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of those of ``names`` that lie in ``folder``. Raises RunError for a file that cannot be read."""
    return {name: _digest(folder / name) for name in sorted(names) if (folder / name).is_file()}


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(
            f"cannot read {str(path)!r}: {error.strerror}", fix="give permission, then `privlora resume`"
        ) from None


def with_files(report: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The report of a run that wrote what lies in ``folder`` now, or that was checked and copied there."""
    found = [path.name for path in folder.iterdir() if belongs(path.name, report)]
    return {**report, _FILES: digests(folder, (name for name in found if name not in MADE_ANEW))}


def text_with_files_of(report: Mapping[str, Any], folder: Path) -> str:
    """privacy_report.json beside an adapter in another form: of all files there."""
    names = [path.name for path in folder.iterdir() if path.name not in PAGES]
    return text_of({**report, _FILES: digests(folder, names)})


def text_of(report: Mapping[str, Any]) -> str:
    """privacy_report.json, of a sealed report."""
    return json.dumps(sealed(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def with_those_again(report: Mapping[str, Any], folder: Path, names: Collection[str]) -> dict[str, Any]:
    """The same of ``names`` alone, which may grow after a release: of the others the report keeps what it says."""
    return {**report, _FILES: {**report[_FILES], **digests(folder, names)}}


def sealed(report: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-ready, with the SHA-256 of all that it says."""
    content = {name: value for name, value in report.items() if name != _OWN}
    content = dict(json.loads(json.dumps(content, allow_nan=False)))
    content[_OWN] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return content


def is_whole(folder: RunFolder, report: Mapping[str, Any]) -> bool:
    """Whether the release is as the run wrote it, as far as hashes tell."""
    try:
        found = digests(folder.release, report.get(_FILES, ()))
        refuse_altered(folder, report, found)
    except (PrivacyError, RunError, TypeError):
        return False
    return found.keys() == report[_FILES].keys()


def refuse_altered(folder: RunFolder, report: Mapping[str, Any], found: Mapping[str, str]) -> None:
    """Raise PrivacyError for a report that the run did not write, or a file, of those ``found`` by name with their
    SHA-256."""
    if not seals_itself(report) or report[_OWN] not in _kept(folder, report):
        raise altered(folder, REPORT_NAME)
    for name, digest in found.items():
        if report[_FILES].get(name) != digest:
            raise altered(folder, name)


def seals_itself(report: Mapping[str, Any]) -> bool:
    """Whether a report, or an annex, has the hash that it names."""
    try:
        return isinstance(report.get(_FILES), Mapping) and sealed(report)[_OWN] == report.get(_OWN)
    except ValueError:  # a number that JSON does not have
        return False


def _kept(folder: RunFolder, report: Mapping[str, Any]) -> Collection[object]:
    """What the run's private folder says of the report: of two, where it was being written when the process ended.

    A release that was taken to another machine has no such folder.
    """
    if not folder.private.exists():
        return (report[_OWN],)
    try:
        return folder.seal.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return ()


def altered(folder: RunFolder, name: str) -> PrivacyError:
    return PrivacyError(
        f"{name} in {str(folder.release)!r} is not as the run wrote it",
        why="it does not match its hash, so the promise of the ledger does not cover it",
        fix=f"restore it, or let `privlora resume {folder.root}` write the release anew",
    )
