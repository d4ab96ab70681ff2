"""A new start in the folder of one that failed before it released anything.

What it leaves is its settings and a ledger without a charge. Nothing was spent, so nothing has to be remembered, and
whoever mends the settings may begin there again. Whatever else a folder holds may follow from private records, and is
left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from privlora.accounting import locked_charges, read_ledger
from privlora.config import kept_settings
from privlora.disk import remove_emptied, remove_held
from privlora.errors import PrivloraError, RunError
from privlora.training.files import RunFolder, read_lines, temporary

_log = logging.getLogger(__name__)
_WEIGHTS = "adapter_model.safetensors"  # of PEFT, which is slow to import
OVER: Final = "this run is over already: no step is taken, and what it leaves is written anew"


def is_over(folder: RunFolder) -> bool:
    """Whether the run in ``folder`` has taken all of its steps: its ledger says so. Of one that charges nothing, being
    without privacy or made from a finished run's texts, its report. Nothing is changed; False where nothing can be
    read."""
    try:
        if folder.has_plan:
            return read_ledger(folder.ledger).closed
        settings = kept_settings(folder.settings)
    except PrivloraError:
        return False
    free = settings.synthesis is not None and settings.synthesis.source is not None
    return folder.report.exists() and (free or not settings.privacy.private)


def finished(folder: RunFolder, *, kind: str = "run") -> RunError:
    """The error where another one is to begin in the folder of a run that is over."""
    results = f"`privlora resume {folder.root}` writes what it leaves"
    if folder.report.exists():
        results = f"its results are in {folder.release}: report.html says what was promised"
    return RunError(
        f"{str(folder.root)!r} holds a {kind} already, and that is finished",
        why="this run is complete, and its ledger is kept",
        fix=[results, "for another one set run.output to another folder"],
    )


def refuse_if_spent(folder: RunFolder) -> None:
    """Raise the errors of ``make_room``; changes nothing."""
    with _failed_start(folder, (), None):
        return


def make_room(folder: RunFolder, also: Sequence[Path] = (), go_on: str | None = None) -> None:
    """Remove what a start left in ``folder`` that failed before its first charge, and say so; else do nothing.

    also: files that such a start writes beside those of a run. go_on: what an error advises in the place of resuming.

    Raises RunError, with nothing removed, if the ledger shows a charge, is missing or held by another process, or the
    folder holds anything that is not written before the first charge; PrivacyError for a ledger that was changed.
    """
    with _failed_start(folder, also, go_on) as left:
        for path in left:
            try:
                remove_held(path) if path == folder.ledger else path.unlink(missing_ok=True)
            except OSError as error:
                raise RunError(
                    f"cannot remove {str(path)!r}: {error.strerror}",
                    why="it is of a start that failed, and a new one takes its place",
                    fix="give permission, or give another folder",
                ) from None
    if left:
        remove_emptied(folder.ledger)
        _log.warning(
            "%s: an earlier start failed there before anything was charged; this one takes its place",
            folder.root,
        )


@contextmanager
def _failed_start(folder: RunFolder, also: Sequence[Path], go_on: str | None) -> Iterator[list[Path]]:
    """The files to remove, in their order; inside, no process can go on with what is there. Empty: nothing is."""
    ledger = folder.ledger
    if go_on is None and is_over(folder):
        raise finished(folder)
    used = f"{str(folder.root)!r} holds {'a run already' if go_on is None else 'another run'}"
    ways = [go_on] if go_on is not None else folder.ways_on
    # The ledger last: until it is gone, nobody else begins or goes on here.
    first = [folder.settings, folder.identity, folder.data_summary, folder.choice]
    first += [folder.cycles, folder.measured, *also]
    left = [*first, *map(temporary, first), folder.evaluations, ledger]
    if not (folder.settings.exists() or ledger.exists()):
        kept = [folder.checkpoint, folder.private_losses, folder.sampled, folder.texts, folder.report]
        kept += [temporary(folder.checkpoint), folder.release / _WEIGHTS]
        of_a_run = next((path for path in [*kept, ledger] if path.exists() or path.is_symlink()), None)
        if of_a_run is not None:
            raise RunError(
                f"{str(folder.root)!r} holds no ledger, and {str(of_a_run)!r}, which a run left",
                why="what was charged for it must not be forgotten",
                fix="restore the ledger, move that run away, or give another folder",
            )
        yield []
        return
    if not ledger.exists():
        raise RunError(
            f"{used}, and no ledger that shows that nothing was released",
            fix=[*ways, "or remove that folder, if nothing was trained in it and no process works there"],
        )
    with ExitStack() as held:
        try:
            charges = held.enter_context(locked_charges(ledger))
        except RunError as error:
            fix = f"{error.fix}; or give another folder"
            raise RunError(f"{used}: {error.what}", why=error.why, fix=fix) from None
        if charges:
            why = "what was charged must not be forgotten"
            raise RunError(f"{used}: its ledger shows charges", why=why, fix=ways)
        more = _not_of_a_start(folder, left)
        if more is not None:
            raise RunError(
                f"{used}: its ledger shows no charge, but {str(more)!r} is not left by a start that failed",
                why="it may follow from private records, or be needed by somebody",
                fix=ways,
            )
        yield left


def _not_of_a_start(folder: RunFolder, left: Sequence[Path]) -> Path | None:
    """The first thing in the folder that is not written before the first charge."""
    rooms = [folder.root / name for name in ("release", "not-private", "private")]
    for path in sorted(folder.root.rglob("*")):
        if path.is_symlink() or path not in (rooms if path.is_dir() else left):
            return path
    evaluations = folder.evaluations
    if evaluations.exists() and (
        not evaluations.read_bytes().endswith(b"\n") or any(row["step"] for row in read_lines(evaluations))
    ):
        return evaluations
    return None
