"""Whether a folder holds a run or a federation already, and whether that is over: asked before slow imports."""

from __future__ import annotations

from privlora.accounting import read_ledger
from privlora.config import Settings, kept_settings
from privlora.federated.history import rounds_begun
from privlora.training import takeover
from privlora.training.files import RunFolder


def is_over(folder: RunFolder, settings: Settings) -> bool:
    """Whether no round is left: by the server's notes of rounds and a trusted server's ledger, never by a report."""
    federation = settings.federation
    assert federation is not None
    done = rounds_begun(folder) >= federation.rounds
    if not (settings.privacy.private and federation.trusted_server):
        return done
    return done and folder.has_plan and read_ledger(folder.ledger).closed


def refuse_used(folder: RunFolder) -> None:
    """Raise RunError where a run is already, or a federation: one that is over is not to be continued."""
    if not (folder.settings.exists() or folder.ledger.exists()):
        return
    settings = kept_settings(folder.settings) if folder.settings.exists() else None
    if settings is None or settings.federation is None:
        if takeover.is_over(folder):
            raise takeover.finished(folder)
    elif is_over(folder, settings):
        raise takeover.finished(folder, kind="federation")
    folder.refuse_if_used()
