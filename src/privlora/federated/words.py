"""A federation in words: who trains together, what is hidden and from whom, and what the server sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from privlora.accounting import Plan, epsilon
from privlora.config import FederationSettings, Settings
from privlora.federated.plans import colluding, federation_of, lattice_of, rule_in, update_noise
from privlora.reporting import parties
from privlora.rounding import rounded_up

_WHEN_SECRET = (
    "In which rounds each one answers is the server's secret, which epsilon counts on; whoever watches the network "
    "learns it."
)
NOT_PRIVATE = "NOT PRIVATE: nothing is promised about the records"


def against_whom(spent: float | None, rows: Sequence[Mapping[str, Any]]) -> str:
    """Epsilon, rounded up, and beside it what it is for clients that know a part of the noise.

    rows: of `plans.colluding`; without any epsilon is one number.

    >>> against_whom(3.0, [{"clients": 1, "epsilon": 4.705}, {"clients": 2, "epsilon": 7.1}])
    '3.000 against the server and whoever gets the adapter; also with the server: 4.705 against another client, which \
knows its own share of the noise; 7.100 against 2 clients that collude'
    """
    if not rows:
        return rounded_up(spent)
    first, *others = (f"{rounded_up(row['epsilon'])} against {row['clients']}" for row in rows)
    server = f"{rounded_up(spent)} against the server and whoever gets the adapter"
    client = f"also with the server: {first[:-1]}another client, which knows its own share of the noise"
    return "; ".join([server, client, *(f"{other} clients that collude" for other in others)])


@dataclass(frozen=True)
class InWords:
    """settings: with their local method. plan: of a client's ledger. own: of a trusted server's."""

    settings: Settings
    plan: Plan | None = None
    own: Plan | None = None

    @cached_property
    def federation(self) -> FederationSettings:
        return federation_of(self.settings)

    @cached_property
    def colluding(self) -> list[dict[str, Any]]:
        """Of all that is planned: see `plans.colluding`."""
        phases = () if self.plan is None else self.plan.phases
        lattice = lattice_of(self.federation, self.plan)
        return colluding(self.federation, lattice, self.plan, phases)

    def who_trains(self) -> str:
        """Clients, rounds, and how often one of them trains."""
        federation = self.federation
        all_of_them, some = f"{federation.size} clients train together", federation.per_round
        rounds = f"each of {federation.rounds} round{'s' * (federation.rounds != 1)}"
        if federation.trusted_server and self.settings.privacy.private:
            return f"{all_of_them}, {some} of them in expectation in {rounds}, drawn in secret by the server"
        if some == federation.size:
            return f"{all_of_them}, all of them in {rounds}"
        return f"{some} of {all_of_them} in {rounds}, a client in {federation.participations} at most"

    def how_it_is_put_together(self) -> str:
        """The rule, the local method and the local steps."""
        federation, method = self.federation, self.settings.method.name
        if federation.joint:
            return f"rule joint: each round is one step of {method} on a batch spread over the clients"
        steps = f"{federation.local_steps} local step{'s' * (federation.local_steps != 1)}"
        return f"rule {federation.rule}: {steps} of {method} in a round"

    def who_is_protected(self) -> str:
        """What is hidden, and from whom."""
        federation, privacy = self.federation, self.settings.privacy
        if not privacy.private:
            return "NOT PRIVATE: no clipping, no noise"
        if not privacy.protects:
            return "NOT PRIVATE: the noise is repeatable, so that whoever knows its seed can subtract it"
        whole = federation.privacy_model == "client"
        unit = "all records of any one client" if whole else f"any one {privacy.unit}"
        # A client can take its own share of the noise off a sum, so for what it sees itself it is not one of the t.
        honest = (
            f"This holds while each sum has the noise of {federation.threshold} clients that tell it to nobody. "
            "Clients know their own noise: against them, and a server that works with them, count without it"
        )
        if not whole and not federation.joint:
            return f"hidden: {unit}, from the server, the other clients and whoever gets the adapter"
        if federation.trusted_server:
            return f"hidden: {unit}, from the other clients and whoever gets the adapter, NOT from the server"
        return f"hidden: {unit}, from whoever sees the sums and what follows, the server too. {honest}"

    def what_the_server_sees(self) -> str:
        """Sums, or each client's message."""
        federation = self.federation
        if not federation.secure:
            return "no secure sums: the server sees each client's message"
        n, t = federation.per_round, federation.threshold
        return (
            f"secure sums: the server sees the sum of at least {t} of {n} clients' messages, and no single message. "
            f"If it works with c of them, it sees the sum of at least {t} - c others, as long as c is below {2 * t - n}"
        )

    def what_it_costs(self) -> str:
        """Epsilon of each client, rounded up."""
        whole = self.own or self.plan
        if whole is None or whole.insecure_noise:
            return NOT_PRIVATE
        spent = epsilon(whole.phases, whole.delta, adjacency=whole.adjacency)
        whose = f"{whole.unit}{' of each client' * (whole.unit != 'client')}"
        if not self.colluding:
            return f"at most ε {rounded_up(spent)} (δ {whole.delta:g}) per {whose}"
        return f"at most ε {against_whom(spent, self.colluding)}. Per {whose}, at δ {whole.delta:g}"

    def warnings(self, entries: int | None) -> list[str]:
        """What would disappoint whoever runs it, a line each. entries: of a client's answer; None if unknown."""
        facts = {
            "rule": rule_in(self.settings),
            "clients_per_round": self.federation.per_round,
            "update_noise": entries and update_noise(self.federation, self.own or self.plan, entries),
        }
        return parties.warnings(facts, self.settings.adapter.r)

    def in_a_line(self) -> str:
        """All of it, in sentences."""
        parts = [self.who_trains(), self.how_it_is_put_together(), self.who_is_protected()]
        if self.settings.privacy.protects:
            parts.append(self.what_it_costs())
        parts.append(self.what_the_server_sees())
        return ". ".join(part[0].upper() + part[1:] for part in parts)

    def what_is_not_hidden(self) -> list[str]:
        """Sentences beside those that hold of any run."""
        federation, privacy = self.federation, self.settings.privacy
        secret = federation.trusted_server and privacy.protects
        found = [
            "Who takes part: names of clients and their weights. "
            + (_WHEN_SECRET if secret else "Also in which rounds each one answers, and how long it takes."),
            "The run's settings. Every client gets them, but for files and folders of the server.",
        ]
        if not privacy.protects:
            return found
        if isinstance(federation.clients, int) and (
            federation.column is None or federation.alpha is not None
        ):
            found.append(
                "How one set of records was cut into clients. Where a record goes can depend on all others, and the "
                "statement is about the clients' records as they were cut. For one about the whole set, cut by a "
                "column, or give each client a file of its own."
            )
        if federation.privacy_model == "client":
            found += [
                "A client's records from that client's own machine. The unit is the client, and it trains on its own "
                "records without noise.",
                "Which of two sets of records a client has, at the same epsilon. Compared are its records and none, "
                "with which it sends an update of zero, so that a sum moves by the clipping norm at most; between two "
                "sets of records it moves by twice that.",
            ]
            if federation.trusted_server:
                found.append("Each client's update from the server, which adds the noise and is trusted.")
        else:
            found += [
                f"That a client has records of some kind at all. The unit is one {privacy.unit}.",
                f"A {privacy.unit} that several clients have: what their ledgers say adds up.",
            ]
        if federation.distributed:
            found.append(
                f"Anything, in a round where fewer than {federation.threshold} clients add their noise honestly; "
                "rounds with fewer answers are void, but nobody can see who cheats."
            )
        return found
