"""A ledger that never refuses, for mechanisms by themselves."""

from __future__ import annotations

from privlora.accounting.events import StepEvent


class CountingLedger:
    """Charges in memory, without a limit."""

    def __init__(self) -> None:
        self.events: list[StepEvent] = []

    def charge(self, event: StepEvent) -> int:
        self.events.append(event)
        return len(self.events)
