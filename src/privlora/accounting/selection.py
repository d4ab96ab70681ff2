"""What choosing costs: the best of several private runs, chosen by looking at all of them.

Two honest ways to pay for it. *Composition*: all runs are charged, so all of them may be looked at and kept.
*Repeat and select* (Papernot and Steinke 2022, arXiv:2110.03620): the number of runs K is itself random, each
run draws its settings at random from the grid, and only the best run's output is ever shown. Under the first two
laws its cost grows about with the logarithm of E[K], so it wins over composition where there are many runs.

| law of K     | bound                                                     | K may be 0 |
|--------------|-----------------------------------------------------------|------------|
| geometric    | Theorem 2 with eta = 1                                    | no         |
| logarithmic  | Theorem 2 with eta = 0                                    | no         |
| poisson      | Theorem 6                                                 | yes, then nothing may be shown |

Choosing by a score that is a function of the released adapter (a loss on public records) is covered; choosing
by a score on the private records is not, unless the score is released privately as part of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from privlora.accounting.accountants import check_delta, epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.errors import PrivacyError

Law = Literal["geometric", "logarithmic", "poisson"]
# Shape eta of the truncated negative binomial law of K; infinity stands for Poisson (dp_accounting's convention).
_SHAPES: Mapping[str, float] = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}


@dataclass(frozen=True)
class TuningCost:
    """Epsilons at one delta, under add-or-remove-one, of choosing the best of ``runs`` runs.

    one_run: PLD epsilon of a run whose settings were fixed beforehand.
    composition: PLD epsilon of all ``runs`` runs together; None above what the accountant computes (500).
    repeat_and_select: epsilon by law of the number of runs, whose mean is ``runs``; empty if the events are not
        known to the RDP accountant (truncated Poisson sampling).
    """

    runs: int
    delta: float
    one_run: float
    composition: float | None
    repeat_and_select: Mapping[str, float]

    @property
    def smallest(self) -> tuple[str, float] | None:
        """The cheapest way and its epsilon; None if no way has a number."""
        ways = {**({} if self.composition is None else {"composition": self.composition})}
        ways |= self.repeat_and_select
        return min(ways.items(), key=lambda way: way[1]) if ways else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "smallest": self.smallest}


@lru_cache(maxsize=256)
def tuning_cost(event: StepEvent, steps: int, runs: int, delta: float) -> TuningCost:
    """What it costs to choose among ``runs`` runs of ``steps`` steps each.

    Raises:
        PrivacyError: ``steps`` or ``runs`` is below 1, or delta is not in (0, 1).
    """
    for name, value in (("steps", steps), ("runs", runs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PrivacyError(f"{name}={value!r} is not a positive integer", fix="give a whole number >= 1")
    check_delta(delta)
    laws: tuple[Law, ...] = get_args(Law) if isinstance(event.sampling, PoissonSampling) else ()
    return TuningCost(
        runs,
        delta,
        epsilon([(event, steps)], delta),
        _composition(event, steps, runs, delta),
        {law: repeat_and_select_epsilon(event, steps, runs, delta, law=law) for law in laws},
    )


def repeat_and_select_epsilon(
    event: StepEvent, steps: int, mean_runs: float, delta: float, *, law: Law
) -> float:
    """Epsilon of showing the best of K runs of ``steps`` steps, E[K] = ``mean_runs``, by RDP (add-or-remove-one).

    Raises:
        PrivacyError: ``mean_runs`` < 1, an unknown law, delta out of range, or truncated Poisson sampling.
    """
    check_delta(delta)
    if law not in _SHAPES:
        raise PrivacyError(f"law={law!r} is unknown", fix=f"choose one of {', '.join(_SHAPES)}")
    if not mean_runs >= 1:
        raise PrivacyError(f"mean_runs={mean_runs} is below 1", fix="give the mean number of runs")
    if not isinstance(event.sampling, PoissonSampling):
        raise PrivacyError(
            "repeat-and-select accounting supports plain Poisson sampling alone",
            why="accounted as plain Poisson sampling, epsilon would be understated",
            fix="compose all runs instead",
        )
    if event.sampling.sample_rate == 0:
        return 0.0
    if event.noise_multiplier == 0:
        return math.inf
    from dp_accounting import dp_event, rdp

    step = dp_event.PoissonSampledDpEvent(
        event.sampling.sample_rate, dp_event.GaussianDpEvent(event.noise_multiplier)
    )
    run = dp_event.SelfComposedDpEvent(step, steps)
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_event.RepeatAndSelectDpEvent(run, mean_runs, _SHAPES[law]))
    return max(0.0, float(accountant.get_epsilon(delta)))


def _composition(event: StepEvent, steps: int, runs: int, delta: float) -> float | None:
    try:
        return epsilon([(event, steps)] * runs, delta)  # run by run: cycles of one do not go on in the next
    except PrivacyError:  # its only refusal here: so little noise that the number would mean nothing
        return None
