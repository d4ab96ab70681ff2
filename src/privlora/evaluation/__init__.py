"""How good a model is on public records."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from privlora.data.examples import Examples
from privlora.evaluation.classes import ClassResult, evaluate_classes
from privlora.evaluation.intervals import Difference, Interval, bootstrap_interval, paired_difference
from privlora.evaluation.next_token import NextTokenResult, evaluate_next_token
from privlora.evaluation.preferences import PreferenceResult, evaluate_preferences
from privlora.evaluation.task import TaskResult, compare_results, evaluate_suite, evaluate_task


def evaluate_held_out(
    model: torch.nn.Module,
    examples: Examples,
    reference: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ClassResult | NextTokenResult | PreferenceResult:
    """Of labelled texts how well they are classified, of preferences how often the model shares them, of other texts
    their next-token loss. reference: inside what it returns, ``model`` is the base model; of preferences alone."""
    if examples.preferences is not None:
        return evaluate_preferences(model, examples, reference)
    if examples.answers is not None:
        return evaluate_classes(model, examples)
    return evaluate_next_token(model, examples)


__all__ = [
    "ClassResult",
    "Difference",
    "Interval",
    "NextTokenResult",
    "PreferenceResult",
    "TaskResult",
    "bootstrap_interval",
    "compare_results",
    "evaluate_classes",
    "evaluate_held_out",
    "evaluate_next_token",
    "evaluate_preferences",
    "evaluate_suite",
    "evaluate_task",
    "paired_difference",
]
