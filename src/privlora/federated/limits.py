"""What a client's owner lets a server ask for: terms beyond these are refused before the client joins.

The terms of a federation come from its server, which may be anybody. What a client does under them is charged to its
ledger whatever they say; the limits say how much of that its owner accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from privlora.accounting import LedgerSummary, Plan
from privlora.accounting.accountants import within
from privlora.accounting.ledger_format import Unit
from privlora.config import Settings
from privlora.errors import PrivacyError
from privlora.federated.messages import refusal
from privlora.federated.plans import epsilon_of, federation_of, server_plan

ANY_COLUMN: Final = "*"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """max_epsilon: of this run and of all others in the client's folder together, as if each went to the end of its
    plan, or to where the client left it; of a trusted server's run all that it stated at joining. max_delta: of one
    run. least_clients: in a round, and in a secure sum that is opened. must_be_private: refuse runs without noise, or
    whose noise comes from a seed that the server chose. needs_secure_sums: whether the server may see sums only.
    trusts_server: whether it may see this client's update as it is, and add the noise itself. unit: whose presence has
    to be hidden; None: whatever the terms say. user_column: the column that tells users apart, or ANY_COLUMN: by
    another one a user would be many. pins_model: whether the owner has to say where the base model lies; else it is
    loaded from the hub, by the name that the server gives.
    """

    max_epsilon: float = 8.0
    max_delta: float = 1e-4
    least_clients: int = 2
    must_be_private: bool = True
    needs_secure_sums: bool = False
    trusts_server: bool = False
    unit: Unit | None = None
    user_column: str | None = None
    pins_model: bool = True

    def refuse_terms(
        self, settings: Settings, plan: Plan | None, others: Sequence[LedgerSummary] = ()
    ) -> None:
        """Raise PrivacyError for terms beyond the limits.

        plan: of this client's ledger; None where it adds no noise. others: ledgers of the client's other runs, and of
        what trusted servers stated.
        """
        federation, privacy = federation_of(settings), settings.privacy
        fewest = federation.threshold if federation.secure else federation.per_round
        if fewest < self.least_clients:
            raise _beyond(f"{'sums' if federation.secure else 'rounds'} of {fewest} clients", "least_clients")
        if self.needs_secure_sums and not federation.secure:
            raise _beyond("answers that the server sees one by one", "needs_secure_sums")
        if federation.trusted_server and not self.trusts_server:
            raise _beyond("updates that the server sees before there is noise", "trusts_server")
        if not privacy.protects and self.must_be_private:
            noise = "noise that the server can repeat" if privacy.private else "no noise"
            raise _beyond(noise, "must_be_private")
        if privacy.unit == "user" and self.user_column not in (ANY_COLUMN, privacy.user_column):
            raise _beyond("users told apart by a column that its owner has not named", "user_column")
        plan = plan or server_plan(settings)  # else what a trusted server says that it will release
        if plan is not None:
            self._refuse_plan(plan, [each for each in others if not each.plan.insecure_noise])

    def _refuse_plan(self, plan: Plan, others: Sequence[LedgerSummary]) -> None:
        if self.unit is not None and plan.unit != self.unit:
            raise _beyond(f"protection of a {plan.unit}", "unit")
        if plan.delta > self.max_delta:
            raise _beyond(f"delta={plan.delta:g}", "max_delta")
        if plan.insecure_noise or self.max_epsilon == float("inf"):
            return
        if any(other.plan.unit != plan.unit for other in others):
            raise _beyond("another unit than an earlier run's, with which it does not add up", "max_epsilon")
        events = [*plan.events(plan.steps)]
        for other in others:
            events += other.plan.events(other.charges if other.closed else other.plan.steps)
        with within():
            total = epsilon_of(tuple(events), plan.delta, plan.adjacency)
        # What was calibrated to a target ends within the grid's width of it.
        if total > self.max_epsilon * (1 + 1e-3):
            raise _beyond(f"epsilon={total:.3g} with {len(others)} other runs", "max_epsilon")


ANYTHING: Final = Limits(
    max_epsilon=float("inf"),
    max_delta=1.0,
    least_clients=1,
    must_be_private=False,
    trusts_server=True,
    pins_model=False,
    user_column=ANY_COLUMN,
)
"""For an owner who is also the server, and has written the settings."""


def _beyond(what: str, limit: str) -> PrivacyError:
    why = f"the client's owner does not allow it (limits.{limit})"
    return refusal(f"the terms ask for {what}", why, "ask for other terms, or let the owner raise the limit")
