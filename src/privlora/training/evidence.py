"""What a run's files prove that it released, held against its ledger.

By itself a ledger cannot tell that it was cut, replaced by an older copy, or comes from a copy of the run that went on
apart. The files beside it can: each says after how many releases it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from privlora.accounting import LedgerSummary
from privlora.errors import PrivacyError
from privlora.training.checkpoint import read_mark
from privlora.training.files import RunFolder, read_lines


def refuse_lost_charges(folder: RunFolder, ledger: LedgerSummary | None) -> None:
    """Raise PrivacyError if a file of the run proves a release that ``ledger`` does not show; None: there is none."""
    hashes = () if ledger is None else ledger.charge_hashes
    before = 0 if ledger is None else ledger.plan.before_training
    for path, releases in _proofs(folder, before):
        if releases > len(hashes):
            raise PrivacyError(
                f"{folder.ledger} shows {len(hashes)} releases, but {path} was written after {releases}",
                why="the run would release more than its ledger, and so its epsilon, says",
                fix="restore the run's latest ledger; without it no epsilon can be stated",
            )
    for path, step, charge in () if ledger is None else _marks(folder, ledger.run_id):
        if charge is not None and hashes[step - 1] != charge:
            raise PrivacyError(
                f"{folder.ledger} and {path} come from copies of the run that went on apart",
                why="neither copy's ledger shows what both released",
                fix="resume each copy with its own files; `privlora budget` composes the ledgers of both",
            )


def _marks(folder: RunFolder, run_id: str) -> Iterator[tuple[Path, int, str | None]]:
    """Files of the run, each with a step and the hash of the ledger's line that charged it, where it is known."""
    if folder.checkpoint.exists():
        mark = read_mark(folder.checkpoint)
        if mark.run_id == run_id:
            yield folder.checkpoint, mark.step, mark.charge
    for row in read_lines(folder.private_losses):
        yield folder.private_losses, row["step"], row.get("charge")


def _proofs(folder: RunFolder, before: int) -> Iterator[tuple[Path, int]]:
    """Files of the run, each with a number of releases that must have happened before it was written.

    before: releases of the phases before training, whose steps evaluations count from 1.
    """
    if folder.checkpoint.exists():
        yield folder.checkpoint, read_mark(folder.checkpoint).step
    losses = read_lines(folder.private_losses)  # one line for each release
    yield folder.private_losses, max(len(losses), _last_step(losses))
    evaluations = read_lines(folder.evaluations)
    yield folder.evaluations, before + _last_step(evaluations) if evaluations else 0
    yield folder.report, _reported(folder.report)


def _last_step(rows: list[dict[str, int]]) -> int:
    return max((row["step"] for row in rows), default=0)


def _reported(path: Path) -> int:
    """Releases that the report states. One that cannot be read states nothing, and is written anew."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["statement"]["steps_charged"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
