"""How good a model is on records that may be shown."""

from privlora.evaluation.next_token import NextTokenResult, evaluate_next_token

__all__ = ["NextTokenResult", "evaluate_next_token"]
