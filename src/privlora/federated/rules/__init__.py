"""What a server sends, what a client answers, and what the server makes of it. Tensors only, all of them public."""

from privlora.federated.rules.base import Mean, Pairs, Rule, RuleSettings, Tensors, Trains

__all__ = ["Mean", "Pairs", "Rule", "RuleSettings", "Tensors", "Trains"]
