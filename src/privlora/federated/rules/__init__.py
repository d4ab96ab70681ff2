"""What a server sends, what a client answers, and what the server makes of it. Tensors only, all of them public."""

from importlib import import_module
from typing import Final

from privlora.config.federation import RULES as PLACES
from privlora.federated.rules.base import Asked, Beginning, Pairs, Rule, RuleSettings, Tensors, Trains


def _class_at(place: str) -> type[Rule]:
    module, _, name = place.partition(".")
    found: type[Rule] = getattr(import_module(f"privlora.federated.rules.{module}"), name)
    return found


RULES: Final = {name: _class_at(place) for name, place in PLACES.items()}


__all__ = [
    "RULES",
    "Asked",
    "Beginning",
    "Pairs",
    "Rule",
    "RuleSettings",
    "Tensors",
    "Trains",
]
