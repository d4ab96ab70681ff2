"""The table of aggregation rules. A new rule is a class with a new row."""

from __future__ import annotations

from typing import Final

from privlora.errors import ConfigError, nearest
from privlora.federated.rules.averaging import FedAvg, FedProx, FedSa, Ffa, RoLora, Scaffold
from privlora.federated.rules.base import Rule
from privlora.federated.rules.points import Alt, FedSvd, Tan
from privlora.federated.rules.sketching import FedAsk
from privlora.federated.rules.stacking import FedEx, FlexLora, Flora

RULES: Final[dict[str, type[Rule]]] = {
    rule.name: rule
    for rule in (
        FedAvg,
        FedProx,
        Scaffold,
        Ffa,
        FedSa,
        Flora,
        FedEx,
        FlexLora,
        FedSvd,
        RoLora,
        FedAsk,
        Tan,
        Alt,
    )
}


def rule_named(name: str) -> type[Rule]:
    """Raises ConfigError for a name that is not in the table."""
    if name not in RULES:
        raise ConfigError(f"there is no aggregation rule {name!r}", fix=nearest(name, RULES))
    return RULES[name]
