"""``privlora annex`` and ``privlora verify``: what is filed of a release, and whether it holds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from privlora.cli.console import CHECKING, JsonOption, emit, out, saying
from privlora.errors import ConfigError, in_one_line
from privlora.training.files import RunFolder, refuse_no_run, refuse_unfinished, release_at

_MARKS = {True: "ok", False: "FAILED", None: "-"}
_ADVICE = "Do not rely on it: get the release again from whoever trained it, and verify it by the filed annex's hash"


def annex(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            metavar="KEY",
            help="PEM file of an Ed25519 private key to sign with.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write annex.html and annex.json into RUN/release: what a data-protection officer files."""
    folder = RunFolder(run)
    refuse_no_run(folder)
    refuse_unfinished(folder)
    key = None
    if sign is not None:
        from privlora.reporting.signing import read_private_key

        key = read_private_key(sign, _passphrase)  # which asks, so before anything is shown
    with saying(CHECKING, piped=True):  # at once: accountants and figures take seconds to import
        from privlora.reporting.filing import file_annex, paths_of

        filed = file_annex(folder, key=key)
    page, data = paths_of(folder)
    head = filed.annex["ledger"]["head"]
    if as_json:
        emit(
            {
                "page": page,
                "json": data,
                "head": head,
                "hash": filed.annex["sha256"],
                "signed_by": filed.signed_by,
            }
        )
        return
    out().print(page)
    out().print(data)
    place = shlex.quote(in_one_line(str(folder.release), 4096))
    out().print(f"verify: privlora verify {place} --hash {filed.annex['sha256']}")
    if filed.signed_by is not None:
        out().print(f"signed by the key with fingerprint {filed.signed_by}")


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
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A release, or the folder of its run.", show_default=False)
    ],
    annex_hash: Annotated[
        str | None,
        typer.Option("--hash", metavar="HASH", help="That of an annex on paper.", show_default=False),
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(
            "--public-key", metavar="FILE", help="Whose signature the annex must have.", show_default=False
        ),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Base model to compare.", show_default=False)] = None,
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
    if as_json:
        checks = [{"name": each.name, "passed": each.passed, "found": each.found} for each in found.checks]
        emit({"verified": found.passed, "epsilon": found.epsilon, "head": found.head, "checks": checks})
    else:
        for each in found.checks:
            out().print(f"{_MARKS[each.passed]:<7} {each.name:<10} {each.found}")
        failed = sum(each.passed is False for each in found.checks)
        out().print(
            "verified"
            if found.passed
            else f"NOT verified: {failed} of {len(found.checks)} checks failed. {_ADVICE}"
        )
    if not found.passed:
        raise typer.Exit(1)
