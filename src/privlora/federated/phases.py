"""Rounds of several kinds: what each samples and charges, and where its releases stand in a client's ledger.

A ledger charges its plan's phases in their order. A client that missed rounds of an earlier phase has releases of it
left, which are of no use in a later one. Before it trains there they are charged and not made: so a ledger may show
more than was released, never less.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from privlora.accounting import Ledger
from privlora.config import FederationSettings, PhaseSettings, PrivacySettings
from privlora.errors import PrivacyError


def privacy_of(privacy: PrivacySettings, kind: PhaseSettings) -> PrivacySettings:
    """Of all clients together in rounds of one kind: their batch b, and q = b / N."""
    b = kind.expected_batch_size
    if b is None:
        return privacy
    rate = None if privacy.public_dataset_size is not None else b / privacy.n
    return privacy.model_copy(update={"expected_batch_size": b, "sample_rate": rate})


def charges_a_round(federation: FederationSettings, number: int) -> int:
    """How many releases a client's ledger is charged for in round ``number``."""
    return 1 if federation.privacy_model == "client" else federation.kind_of(number).local_steps


@dataclass(frozen=True)
class Span:
    """Releases number ``start`` + 1 to ``end`` of a client's ledger, which are of one event."""

    start: int
    end: int


def span_of(federation: FederationSettings, privacy: PrivacySettings, number: int) -> Span:
    """Where the releases of round ``number`` stand. Neighbouring phases of one batch size are one, as in the plan."""
    return _spans(federation, privacy)[federation.place_of(number)]


def _spans(federation: FederationSettings, privacy: PrivacySettings) -> list[Span]:
    """Of each phase."""
    if federation.privacy_model == "client":
        return [Span(0, federation.participations)] * len(federation.kinds)
    rates = [privacy_of(privacy, kind).q for kind in federation.kinds]
    spans: list[Span] = []
    start = 0
    for _, run in groupby(zip(rates, federation.steps_of_a_client, strict=True), key=lambda pair: pair[0]):
        counts = [count for _, count in run]
        spans += [Span(start, start + sum(counts))] * len(counts)
        start += sum(counts)
    return spans


def charged_after(federation: FederationSettings, privacy: PrivacySettings, rounds: Iterable[int]) -> int:
    """What a client's ledger shows after it has trained in these rounds, which rise; more than is planned where they
    are more than the timetable's."""
    firsts = federation.first_rounds
    phases = [
        (span.start, charges_a_round(federation, first))
        for span, first in zip(_spans(federation, privacy), firsts, strict=True)
    ]
    done = 0
    for number in rounds:
        start, charges = phases[bisect(firsts, number) - 1]
        done = max(done, start) + charges
    return done


def reach(ledger: Ledger, federation: FederationSettings, privacy: PrivacySettings, number: int) -> None:
    """Charge what is left of earlier phases, which nothing will be released for, so that round ``number`` is next.

    Raises PrivacyError if its phase has fewer releases left than the round takes; then nothing is charged.
    """
    span, takes = span_of(federation, privacy, number), charges_a_round(federation, number)
    left = span.end - max(span.start, ledger.charges)
    if left < takes:
        raise PrivacyError(
            f"the budget has {max(0, left)} releases left, and a round takes {takes}",
            why="more releases than planned would exceed the stated epsilon",
            fix="end the federation; the next one can plan more rounds",
        )
    for step in range(ledger.charges + 1, span.start + 1):
        ledger.charge(ledger.plan.event_of(step))
