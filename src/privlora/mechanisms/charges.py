"""What a mechanism charges before noise is drawn: a ledger, several of them, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from privlora.accounting.events import StepEvent


class Charges(Protocol):
    """What a mechanism needs of a ledger."""

    def charge(self, event: StepEvent) -> int:
        """Write the event durably, or raise; returns the number of the step."""


class ChargeAll:
    """Several ledgers at once: each is charged for a release that their runs share."""

    def __init__(self, ledgers: Sequence[Charges]) -> None:
        self._ledgers = ledgers
        self._count = 0

    def charge(self, event: StepEvent) -> int:
        self._count += 1
        for ledger in self._ledgers:
            ledger.charge(event)
        return self._count


class Uncharged(ChargeAll):
    """No ledger: for audits and studies, which use data of their own or publish nothing."""

    def __init__(self) -> None:
        super().__init__(())
