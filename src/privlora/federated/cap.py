"""An owner's cap on what all federations of one folder may cost together, beyond which its client joins none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from privlora.accounting import Plan, epsilon, read_ledger
from privlora.accounting.events import StepEvent
from privlora.errors import PrivacyError
from privlora.federated.desk import Desk


def refuse_beyond(cap: float, plan: Plan | None, folder: Path, run: str) -> None:
    """Raise PrivacyError if ``plan`` and all other federations of a client's folder together exceed epsilon ``cap``.

    A federation that was left counts with what its ledger shows, any other with its whole plan. Epsilon is at the
    delta of ``plan``.

    plan: of the client's own ledger in ``run``; None where it has none, which a cap refuses.

    Raises:
        PrivacyError: the terms have no ledger here, repeatable noise, or another unit than earlier ones; or they
            exceed the cap.
        RunError: an earlier ledger cannot be read.
    """
    if plan is None or plan.insecure_noise:
        raise _refusal(
            "the federation's terms leave this client without noise of its own", "nothing here bounds it"
        )
    events, units = list(plan.phases), {plan.unit}
    for other, counts in _others(folder, run):
        if other.insecure_noise:
            raise _refusal("an earlier federation had repeatable noise", "no epsilon holds for it")
        events += counts
        units.add(other.unit)
    if len(units) > 1:
        raise _refusal(
            f"federations that protect different units ({', '.join(sorted(units))})",
            "their costs do not add up",
        )
    total = epsilon(events, plan.delta, adjacency=plan.adjacency)
    if not total <= cap:
        raise _refusal(
            f"all federations together would cost epsilon {total:.4g} at delta {plan.delta:g}, above {cap:g}",
            "epsilon counts what all of them release about the same records",
        )


def _others(folder: Path, run: str) -> Iterator[tuple[Plan, list[tuple[StepEvent, int]]]]:
    """The plan of each other federation, and what it counts with."""
    for path in sorted(folder.glob("*/ledger.jsonl")):
        if path.parent.name == run:
            continue
        ledger = read_ledger(path)
        yield ledger.plan, ledger.events() if Desk(path.parent).left else list(ledger.plan.phases)


def _refusal(what: str, why: str) -> PrivacyError:
    return PrivacyError(what, why=why, fix="raise max_epsilon, or leave this federation")
