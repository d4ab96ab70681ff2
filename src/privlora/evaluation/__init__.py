"""How good a model is on public records."""

from privlora.evaluation.intervals import Difference, Interval, bootstrap_interval, paired_difference
from privlora.evaluation.next_token import NextTokenResult, evaluate_next_token
from privlora.evaluation.task import TaskResult, compare_results, evaluate_task

__all__ = [
    "Difference",
    "Interval",
    "NextTokenResult",
    "TaskResult",
    "bootstrap_interval",
    "compare_results",
    "evaluate_next_token",
    "evaluate_task",
    "paired_difference",
]
