"""What a server sends, what a client answers, and what the server makes of it. Tensors only, all of them public."""

from typing import Final

from privlora.config.federation import RULES as PLACES
from privlora.federated.rules import factors
from privlora.federated.rules.base import Asked, Beginning, Pairs, Rule, RuleSettings, Tensors, Trains

RULES: Final[dict[str, type[Rule]]] = {name: getattr(factors, place) for name, place in PLACES.items()}

__all__ = ["RULES", "Asked", "Beginning", "Pairs", "Rule", "RuleSettings", "Tensors", "Trains"]
