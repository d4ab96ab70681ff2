"""What a run tells of itself step by step, from public numbers alone: its plan, its schedule, losses on public records.

The rows of a finished run follow from these, so a crash or a resume leaves no trace in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from privlora.accounting import Plan, epsilon
from privlora.optimizers.rate_units import learning_rate_at
from privlora.pages.numbers import finite


@lru_cache(maxsize=4096)
def spent(plan: Plan | None, step: int) -> float | None:
    """Epsilon after ``step`` steps of training; None where nothing is promised. The first of a plan takes tenths of a
    second, the next ones milliseconds."""
    if plan is None or plan.insecure_noise:
        return None
    charged = plan.before_training + step
    return epsilon(plan.events(charged), plan.delta, adjacency=plan.adjacency) if charged else 0.0


def steps_shown(steps: int, every: int, evaluated: Collection[int] = ()) -> list[int]:
    """The first and last step, every ``every``-th, and those that were evaluated (perhaps 0), in order."""
    return sorted({1, steps, *range(every, steps + 1, every), *evaluated})


def rows_of_report(
    plan: Plan | None,
    report: Mapping[str, Any],
    shown: Iterable[int],
    evaluations: Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """`public_rows` of a run that is over, by what its report says of its method."""
    method = report["method"]
    trains = method.get("releases") != "votes"

    def rate(step: int) -> float | None:
        named = method["learning_rate"], method["schedule"], method["warmup_steps"]
        return learning_rate_at(step, method["steps"], *named) if trains else None

    return public_rows(plan, shown, rate, evaluations)


def public_rows(
    plan: Plan | None,
    shown: Iterable[int],
    learning_rate: Callable[[int], float | None],
    evaluations: Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Of each step in ``shown``: step, epsilon, learning_rate, held_out_loss (nats, mean over records).

    None: no promise; before the first step, or in rounds that train nothing; not evaluated, or not finite.
    evaluations: rows with step and loss_per_example.
    """
    losses = {row["step"]: row["loss_per_example"] for row in evaluations}
    return [
        {
            "step": step,
            "epsilon": spent(plan, step),
            "learning_rate": learning_rate(step) if step else None,
            "held_out_loss": finite(losses.get(step)),
        }
        for step in shown
    ]
