"""``privlora report`` and ``privlora verify``: what is said of a release, and whether it holds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from privlora.cli.console import CHECKING, JsonOption, argument, finished_run, option, refuse_given, show
from privlora.consoles import saying
from privlora.errors import ConfigError, in_one_line
from privlora.training.files import release_at

_MARKS = {True: "ok", False: "FAILED", None: "-"}
_ADVICE = "Do not rely on it: get the release again from whoever trained it, and verify it by the filed annex's hash"


def report(
    run: Annotated[Path, argument("RUN", "Folder of a finished run.")],
    annex: Annotated[bool, option("Also the annex that a data-protection officer files.", "--annex")] = False,
    sign: Annotated[Path | None, option("Ed25519 private key (PEM) of the annex.", metavar="KEY")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's report.html and README.md again, from its own files; with --annex, the annex too."""
    if not annex:
        refuse_given({"--sign": sign}, "signs an annex", fix="add --annex, or leave it out")
    folder = finished_run(run)
    if not annex:
        with saying(CHECKING, piped=True):
            from privlora.reporting import rewrite_report

            written = rewrite_report(folder)
        show({"report": str(written)}, [str(written)], as_json)
        return
    key = None
    if sign is not None:
        from privlora.reporting.signing import read_private_key

        key = read_private_key(sign, _passphrase)  # which asks, so before anything is shown
    with saying(CHECKING, piped=True):  # at once: accountants and figures take seconds to import
        from privlora.reporting.filing import file_annex, paths_of

        filed = file_annex(folder, key=key)
    page, data = paths_of(folder)
    signed, sha = filed.signed_by, filed.annex["sha256"]
    place = shlex.quote(in_one_line(str(folder.release), 4096))
    lines = [page, data, f"verify: privlora verify {place} --hash {sha}"]
    if signed is not None:
        lines.append(f"signed by the key with fingerprint {signed}")
    head = filed.annex["ledger"]["head"]
    show({"page": page, "json": data, "head": head, "hash": sha, "signed_by": signed}, lines, as_json)


def _passphrase() -> str:
    """Raises ConfigError where nobody can be asked."""
    try:
        return str(typer.prompt("passphrase of the key", hide_input=True, err=True))
    except typer.Abort:
        if _has_terminal():
            raise
        raise ConfigError(
            "the key of --sign is encrypted, and there is no terminal to ask for its passphrase",
            fix="sign on a terminal; or with a key without a passphrase, which its owner alone may read (chmod 600)",
        ) from None


def _has_terminal() -> bool:
    """As whoever asks for passphrases looks for one."""
    try:
        with open("/dev/tty"):
            return True
    except OSError:
        return sys.stdin.isatty()


def verify(
    path: Annotated[Path, argument("PATH", "A release, or the folder of its run.")],
    annex_hash: Annotated[str | None, option("That of an annex on paper.", "--hash", metavar="HASH")] = None,
    public_key: Annotated[Path | None, option("Who must have signed the annex.", metavar="FILE")] = None,
    base: Annotated[str | None, option("Base model to compare.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a release's epsilon from its ledger again, and hold every file and the annex against it; no records.

    Ends with 0 where every check passes, with 1 where one fails.
    """
    release_at(path)  # at once, before seconds of imports
    with saying(CHECKING, piped=True):
        from privlora.reporting.signing import read_public_key
        from privlora.reporting.verifying import verify as verified

        key = None if public_key is None else read_public_key(public_key)
        found = verified(path, annex_hash=annex_hash, public_key=key, base=base)
    checks = [{"name": each.name, "passed": each.passed, "found": each.found} for each in found.checks]
    content = {"verified": found.passed, "epsilon": found.epsilon, "head": found.head, "checks": checks}
    failed = sum(each.passed is False for each in found.checks)
    verdict = f"NOT verified: {failed} of {len(checks)} checks failed. {_ADVICE}"
    lines = [f"{_MARKS[each.passed]:<7} {each.name:<10} {each.found}" for each in found.checks]
    if found.passed:
        no_annex = any(each.name == "annex" and each.passed is None for each in found.checks)
        verdict = "verified; no annex was checked" if no_annex else "verified"
    show(content, [*lines, verdict], as_json)
    if not found.passed:
        raise typer.Exit(1)
