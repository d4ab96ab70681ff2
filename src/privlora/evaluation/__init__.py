"""How good a model is on public records."""

import torch

from privlora.data.examples import Examples
from privlora.evaluation.classes import ClassResult, evaluate_classes
from privlora.evaluation.intervals import Difference, Interval, bootstrap_interval, paired_difference
from privlora.evaluation.next_token import NextTokenResult, evaluate_next_token
from privlora.evaluation.task import TaskResult, compare_results, evaluate_task


def evaluate_held_out(model: torch.nn.Module, examples: Examples) -> ClassResult | NextTokenResult:
    """Of labelled texts how well they are classified, of others their next-token loss."""
    if examples.answers is not None:
        return evaluate_classes(model, examples)
    return evaluate_next_token(model, examples)


__all__ = [
    "ClassResult",
    "Difference",
    "Interval",
    "NextTokenResult",
    "TaskResult",
    "bootstrap_interval",
    "compare_results",
    "evaluate_classes",
    "evaluate_held_out",
    "evaluate_next_token",
    "evaluate_task",
    "paired_difference",
]
