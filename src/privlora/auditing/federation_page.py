"""Writing the audit of a federation: JSON and one page, as of the other audits."""

from __future__ import annotations

from pathlib import Path

from privlora.accounting.events import describe_events
from privlora.auditing.federation import FederationAudit
from privlora.auditing.page import Claim, at_most, write_page
from privlora.pages.numbers import number
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder

_NOTES = (
    "All records were the attacker's own: the federation's were not read, and nothing here is a fact about them.",
    "The canary is a record whose gradient is far longer than the clipping norm, or, where whole clients are hidden, a "
    "client whose update is. The attacker knows it, the state, and all other records.",
    "Clients that collude send zeros without noise: all of them on whose noise the claim does not count.",
    "The claim is for one round whose batches the attacker knows, unless units were drawn at the run's rate; over all "
    "rounds the costs add up as the ledgers say.",
    "A bound below the claim is no proof of privacy, only of an attack that went no further. One above it comes by "
    "chance as well, as often as the confidence allows: repeat the audit with more trials before you believe it.",
)


def write_federation(audit: FederationAudit, root: Path) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora audit CONFIG`` for a federation. Raises RunError if it cannot be written."""
    strongest = audit.strongest
    claim = Claim(audit.events, audit.epsilon_claimed, audit.delta) if audit.events else None
    rows: list[tuple[str, ...]] = [
        (
            view.attacker,
            view.view,
            number(view.epsilon_lower),
            view.statistic,
            f"{view.correct} of {view.judged}",
        )
        for view in audit.views
    ]
    numbers: list[tuple[str, ...]] = [
        ("claimed of one round", f"ε = {rounded_up(audit.epsilon_claimed)} at δ = {number(audit.delta)}"),
        ("a round, by the ledger", describe_events(audit.events) if audit.events else "nothing was charged"),
        ("whose presence is hidden", f"one {audit.unit}"),
        ("noise that the claim counts on", audit.noise),
        ("rounds of a victim in each world", str(audit.trials)),
    ]
    folder = RunFolder(root)
    folder.create(releases=False)
    return write_page(
        folder,
        audit.to_dict(),
        heading="Audit of one round of a federation",
        by=f"{audit.rule} · {root}",
        verdict=_verdict(audit),
        violated=audit.violated,
        claim=claim,
        epsilon_lower=audit.epsilon_lower,
        scores={"canaries": strongest.scores[::-1]},
        private=False,
        keep=True,
        tables=[
            ("Attackers", ("attacker", "sees", "ε at least", "statistic", "right guesses"), rows),
            ("Numbers", ("", ""), numbers),
        ],
        notes=_NOTES,
    )


def _verdict(audit: FederationAudit) -> str:
    claimed = f"ε = {rounded_up(audit.epsilon_claimed)} (δ = {number(audit.delta)})"
    bound = f"at {audit.confidence:.0%} confidence its ε is at least {number(audit.epsilon_lower)}"
    if audit.violated:
        return f"The canary refutes the claimed {claimed} of a round: {bound}. Do not run this federation."
    return f"The canary agrees with the claimed {claimed} of a round: {bound}. {at_most_of_rounds(audit)}".rstrip()


def at_most_of_rounds(audit: FederationAudit) -> str:
    """``at_most`` of guesses about rounds."""
    return at_most(audit.epsilon_most, audit.epsilon_lower, f"{audit.most_judged} rounds")
