"""What a server sends, what a client answers, and what the server makes of it. Tensors only, all of them public."""

from privlora.federated.rules.base import Beginning, Mean, Pairs, Rule, RuleSettings, Tensors, Trains
from privlora.federated.rules.checks import expected, refuse_unfit
from privlora.federated.rules.table import RULES, rule_named

__all__ = [
    "RULES",
    "Beginning",
    "Mean",
    "Pairs",
    "Rule",
    "RuleSettings",
    "Tensors",
    "Trains",
    "expected",
    "refuse_unfit",
    "rule_named",
]
