"""The group of a federated run: who trains together, and how what they send is put together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from privlora.config.base import Countable, Group, Wrong, all_of, countable
from privlora.errors import echoed, named, nearest
from privlora.ranges import MOST_CLIENTS, MOST_TURNS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_NAME_IN_WORDS = "letters a to z and A to Z, digits, - and _, at most 63, the first a letter or a digit"

JOINT: Final = "joint"
"""The rule of a federation that names none."""

RULES: Final = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "Scaffold",
    "ffa": "Ffa",
    "fedsa": "FedSa",
    "flora": "Flora",
    "fedex": "FedEx",
    "flexlora": "FlexLora",
    "fedsvd": "FedSvd",
    "rolora": "RoLora",
    "fedask": "FedAsk",
    "tan": "Tan",
    "alt": "Alt",
}
"""The table of aggregation rules: name -> its class in federated.rules.factors. A new rule is a class and a line."""
RULE_NAMES: Final = (*RULES, JOINT)
"""And joint, which is training itself."""

OF_ONE_RULE: Final = {"oversampling": "fedask", "warm_sketch": "fedask", "proximal": "fedprox"}
"""Settings of the group federation that belong to one rule."""


def honest_left(clients: int, threshold: int, colluding: int) -> int:
    """How many honest clients are in the smallest sum that a server opens with the help of ``colluding`` of a round's
    clients; 1 where it opens single answers.

    A list of survivors takes the signatures of threshold - colluding honest clients. Two lists of one sum, which open
    single answers, take twice as many, and there are clients - colluding.
    """
    return threshold - colluding if 2 * threshold > clients + colluding else 1


def colluding_counts(clients: int, threshold: int) -> list[int]:
    """For how many colluding clients of a round a report states what they learn."""
    return sorted({1, 2, 3, clients - threshold, clients - 1} & set(range(1, clients)))


class ClientSettings(Group):
    """One owner of records."""

    name: str
    """Public; letters a to z and A to Z, digits, - and _."""
    path: str | list[str] | None = None
    """Its records, as data.path; null where the client itself knows (deployment)."""

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise Wrong(f"{named(name)} is not a name that a folder may have", _NAME_IN_WORDS)
        return name


_OF_A_ROUND: Final = 10  # clients whose draws take as long as a round by itself


class FederationSettings(Group):
    """Who trains together, and how what they send is put together.

    In privacy, public_dataset_size and expected_batch_size are of all clients together: with every client's sampling
    rate q = b / N, a client's share of a step has the expected size b / clients. privacy.steps follows from rounds.
    """

    clients: int | list[ClientSettings] = Field(union_mode="left_to_right")
    """Each client's name and path; or into how many parts data.path is cut, for studies and rehearsals. They are cut at
    random, or by column."""
    column: str | None = None
    """Cut data.path by this column: one client for each of its values, in their order; clients is their number."""
    alpha: float | None = Field(default=None, gt=0)
    """With column: each client gets shares of its values from Dirichlet(alpha) instead; small ones give it few
    values."""
    rounds: Countable = Field(ge=1)
    """How many."""
    local_steps: Countable = Field(default=1, ge=1)
    """Private steps of a client in a round; rule joint takes one."""
    clients_per_round: int | None = Field(default=None, ge=1)
    """How many train in a round, each equally often; null: all. With trusted_server: how many it draws in secret on
    average, each with the same probability."""
    rule: str = JOINT
    """How what clients send is put together (``privlora methods --rules``)."""
    privacy_model: Literal["record", "client"] = "record"
    """Whose presence is hidden. record: a record of a client, from the server and other clients. client: all records of
    a client, from whoever sees the sum of all updates and what follows."""
    trusted_server: bool = False
    """privacy_model=client: the server sees each clipped update and adds the noise itself."""
    secure_aggregation: bool | None = None
    """Whether the server sees sums only; null: where the rule or the privacy model needs it."""
    survivors: int | None = Field(default=None, ge=1)
    """t: how many clients of a round have to be in a secure sum, else the round is void; null: all. The statement
    counts on their noise. More than two thirds, so that no server can open single answers with the help of the
    others."""
    weights: list[float] | None = None
    """PUBLIC weights of the clients, in their order; null: equal. Never the private numbers of records."""
    oversampling: int = Field(default=0, ge=0)
    """fedask: p, columns of a sketch beyond adapter.r."""
    warm_sketch: bool = True
    """fedask: start sketches from the last round's subspace, at no privacy cost."""
    proximal: float = Field(default=0.01, ge=0)
    """fedprox: mu."""

    @property
    def names(self) -> list[str]:
        """Of all clients, in their order."""
        if isinstance(self.clients, int):
            return [f"client-{number:0{len(str(self.clients))}d}" for number in range(1, self.clients + 1)]
        return [client.name for client in self.clients]

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def per_round(self) -> int:
        """How many clients train in a round."""
        return self.clients_per_round or self.size

    @property
    def participations(self) -> int:
        """The largest number of rounds in which one client trains."""
        return -(-self.rounds * self.per_round // self.size)

    @property
    def steps(self) -> int:
        """Private steps of a client that trains in all rounds."""
        return self.rounds * self.local_steps

    @property
    def steps_of_a_client(self) -> int:
        """The largest number of steps that one client takes."""
        return self.participations * self.local_steps

    @property
    def threshold(self) -> int:
        """t of the clients of a round."""
        return self.survivors or self.per_round

    @property
    def colluding(self) -> int:
        """Clients of a round that may work for the server, without which it could open no single answer."""
        return self.per_round - self.threshold

    @property
    def of_other_rules(self) -> list[str]:
        """Settings that are without effect, because they belong to another rule."""
        return [name for name, rule in OF_ONE_RULE.items() if rule != self.rule]

    @property
    def joint(self) -> bool:
        return self.rule == JOINT

    @property
    def distributed(self) -> bool:
        """Whether each client adds a share of the noise, which protects only in a sum."""
        return self.joint or (self.privacy_model == "client" and not self.trusted_server)

    @property
    def secure(self) -> bool:
        """Whether the server sees sums only."""
        return self.distributed if self.secure_aggregation is None else self.secure_aggregation

    @field_validator("clients", mode="before")
    @classmethod
    def _number_or_owners(cls, clients: Any) -> Any:
        owners = isinstance(clients, list | tuple) and all(
            isinstance(client, Mapping | ClientSettings) for client in clients
        )
        if not owners and type(clients) is not int:
            what = "it is neither a number of clients nor a list of them"
            if isinstance(clients, Mapping):
                what = "it is a mapping, and clients are a list, in which each has its name and its path"
            raise Wrong(what, "write clients: 3, or one line “- {name: north, path: north.jsonl}” for each")
        return clients

    @field_validator("rule")
    @classmethod
    def _is_in_the_table(cls, rule: str) -> str:
        if rule not in RULE_NAMES:
            raise Wrong(f"unknown rule {echoed(rule, RULE_NAMES)}", nearest(rule, RULE_NAMES), "rule")
        return rule

    @field_validator("clients")
    @classmethod
    def _several(cls, clients: int | list[ClientSettings]) -> int | list[ClientSettings]:
        names = [] if isinstance(clients, int) else [client.name for client in clients]
        number = clients if isinstance(clients, int) else len(clients)
        if number < 2:
            raise Wrong("a federation has at least 2 clients", "`privlora train` serves one", "clients")
        if number > MOST_CLIENTS:
            raise Wrong(f"more than {MOST_CLIENTS} clients", "fewer")
        if len({name.lower() for name in names}) < len(names):
            what = (
                "two clients have the same name, but for capital letters: one would be charged for the other"
            )
            raise Wrong(what, "rename one", "clients")
        return clients

    @model_validator(mode="after")
    def _takes_so_many_steps(self) -> FederationSettings:
        countable(self.steps)
        # Each client works out the whole timetable.
        if self.per_round < self.size and self.rounds * (self.size + _OF_A_ROUND) > MOST_TURNS:
            what = f"rounds times clients are more than {MOST_TURNS}"
            raise Wrong(what, "fewer rounds, or fewer clients", "rounds")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> FederationSettings:
        all_of([*self._wrong_split(), *self._wrong_rule(), *self._wrong_sums()])
        return self

    def _wrong_split(self) -> Iterator[Wrong]:
        """What does not go with how records are cut into clients."""
        if self.column is not None and not isinstance(self.clients, int):
            what = "column cuts data.path, and clients have paths of their own"
            yield Wrong(what, "remove either", "column")
        if self.alpha is not None and self.column is None:
            yield Wrong("alpha draws shares of a column's values", "name it, as column: label", "alpha")
        if self.per_round > self.size:
            what = f"clients_per_round={self.clients_per_round} exceeds the {self.size} clients"
            fix = f"at most {self.size}; removed, all of them train in each round"
            yield Wrong(what, fix, "clients_per_round")

    def _wrong_rule(self) -> Iterator[Wrong]:
        """What does not go with the rule, or with who is protected."""
        by_client = self.privacy_model == "client"
        for name in self.of_other_rules:
            if name in self.model_fields_set:
                whose = OF_ONE_RULE[name]
                what = f"{name} belongs to rule={whose}, and rule={self.rule} would ignore it"
                yield Wrong(what, f"remove it, or set rule: {whose}", "rule")
        if self.joint and self.local_steps != 1:
            what = (
                "rule=joint takes one step a round: other clients' noise protects no step that one does alone"
            )
            yield Wrong(what, "local_steps: 1, or another rule", "rule")
        if self.joint and by_client:
            fix = "remove privacy_model, or choose another rule"
            yield Wrong("rule=joint hides records, not clients", fix, "rule")
        if self.trusted_server and not by_client:
            what = (
                "trusted_server goes with privacy_model=client, and records are hidden by the client itself"
            )
            yield Wrong(what, "remove either", "trusted_server")
        if self.trusted_server and self.secure_aggregation:
            fix = "remove it, so that clients add their shares"
            yield Wrong("trusted_server adds noise to updates that it sees", fix, "trusted_server")

    def _wrong_sums(self) -> Iterator[Wrong]:
        """What is wrong with weights, and with sums that open single answers."""
        if self.weights is not None:
            if len(self.weights) != self.size or min(self.weights) <= 0:
                what = f"weights must be {self.size} positive numbers, one for each client"
                fix = f"write {self.size} numbers above 0 in the order of clients; removed, all count alike"
                yield Wrong(what, fix, "weights")
            if self.joint or self.privacy_model == "client":
                alike = "rule=joint" if self.joint else "privacy_model=client"
                what = f"{alike} counts all clients alike, so they have no weights"
                yield Wrong(what, "remove weights", "clients")
            if self.secure and max(self.weights) > 100 * min(self.weights):
                what = "secure sums whose weights differ by more than a factor of 100 are nearly one client's update"
                yield Wrong(what, "make them more alike", "weights")
        if self.survivors is not None and not self.secure:
            fix = "remove it, or add secure_aggregation: true"
            yield Wrong("survivors goes with secure sums", fix, "survivors")
        if not 2 * self.per_round < 3 * self.threshold <= 3 * self.per_round:
            what = (
                f"survivors must be above two thirds of a round's {self.per_round} clients, and at most all: with "
                "less, a server could open single answers with the help of the others"
            )
            fix = f"survivors: {2 * self.per_round // 3 + 1}, or more; removed, it is all {self.per_round}"
            yield Wrong(what, fix, "survivors")
