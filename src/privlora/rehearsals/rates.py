"""Which learning rate does best in trials that differ by chance: in few of them, and so that no chance minimum wins.

Trials of all rates have the same draws of batches and noise in common, so that what one draw adds to all of them
cancels in their differences. A rate that is too large breaks a model in one draw and not in the next, one that is too
small loses little: of rates that their draws cannot tell apart the smaller is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

Attempt = Callable[[float, int], Tensor]
"""(learning rate, draw) -> losses of held-out texts after a trial, (held,); not finite where it went astray."""

MOST_TRIALS: Final = 11
"""Of one choice; six to ten are usual."""

_STEP = 2  # powers of the root of two between rates, until the best lies between two that are worse
_FARTHEST: Final = 4 * _STEP  # powers up or down from the start
_DRAWS: Final = 2  # of the rates that are compared at last
_MORE: Final = 3  # where so many cannot tell them apart
_TOLD = 0.2  # of a rate's gain, which the error of its lead may be: where models break, draws tell little
_STEADY = 0.5  # of the gain in a rate's best draw, which its worst one has to keep


def settle_rate(start: float, attempt: Attempt, untrained: float) -> tuple[float, dict[float, Tensor]]:
    """The rate to take, and of each that was tried, in order, its losses, (draws, held).

    start: tried with its double and its half, and so on with the neighbours of the best, with one draw each, until two
    worse ones lie around it; then a root of two from the best, towards the better neighbour. Then, from the best
    downwards, each rate and the next smaller one are tried with more draws, until the larger is steady, does better in
    their mean, and the standard error of its lead is a small part of its gain. It is taken where it leads by more than
    that error, and else the smaller one. No more than MOST_TRIALS.
    """
    tried = _Tried(start, attempt)
    _bracket(tried)
    top = tried.best()
    while (lower := tried.below(top, untrained)) is not None:
        enough = tried.draw((top, lower), _DRAWS)
        if lower not in tried.all:
            break
        lead, error = tried.lead(top, lower)
        if enough and tried.steady(top, untrained) and abs(lead) <= error:
            tried.draw((top, lower), _MORE)
            lead, error = tried.lead(top, lower)
        erratic = enough and error > _TOLD * tried.gain(top, untrained)
        if erratic or not tried.steady(top, untrained) or (enough and lead < 0):
            top = lower
            continue
        if enough and lead <= error and tried.steady(lower, untrained):
            top = lower
        break
    return tried.rate(top), {tried.rate(power): tried.losses(power) for power in sorted(tried.all)}


def steady(losses: Tensor, untrained: float) -> bool:
    """Whether no draw of (draws, held) broke the model: all are finite, better than untrained, and keep half of the
    best one's gain.

    >>> steady(torch.tensor([[1.0], [1.2]]), 2.0), steady(torch.tensor([[1.0], [1.7]]), 2.0)
    (True, False)
    """
    gains = [untrained - loss for loss in losses.mean(1).tolist()]
    return all(math.isfinite(gain) for gain in gains) and min(gains) > max(0.0, _STEADY * max(gains))


def _paired_lead(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """By how much the first are lower in the mean, in the draws that both have, (draws, held); and its standard error.

    The error is over draws and over texts. Infinite where there is a single draw or text.
    """
    draws = min(len(losses), len(others))
    ahead = others[:draws] - losses[:draws]
    return float(ahead.mean()), paired_error(ahead)


def paired_error(ahead: Tensor) -> float:
    """Of the mean of (draws, held), both of which are drawn; infinite where one of the two is single."""
    if min(ahead.shape) < 2:
        return math.inf
    over = [ahead.mean(dim).var() / ahead.shape[1 - dim] for dim in (0, 1)]
    return float((over[0] + over[1]).sqrt())


def equal_rates(chosen: float, tried: Mapping[float, Tensor], untrained: float) -> tuple[float, float] | None:
    """The smallest and the largest of the rates around ``chosen`` that trials do not tell from it, itself included.

    A rate is separate from it where it is not steady, or its mean differs by more than the lead's standard error, in
    the draws that both have. Where that is a single draw, one draw differs from the next as much as in the pair that
    has most of them. None where every rate had a single draw.
    """
    ahead = {
        rate: losses[: len(tried[chosen])] - tried[chosen][: len(losses)] for rate, losses in tried.items()
    }
    most = max((lead for rate, lead in ahead.items() if rate != chosen), key=len, default=ahead[chosen])
    if len(most) < 2:
        return None
    of_a_draw = float(most.mean(1).var())

    def same(rate: float) -> bool:
        lead = ahead[rate]
        if not steady(tried[rate], untrained):
            return False
        if len(lead) > 1:
            return abs(float(lead.mean())) <= paired_error(lead)
        of_texts = float(lead.mean(0).var()) / lead.shape[1]
        return abs(float(lead.mean())) <= math.sqrt(of_a_draw + of_texts)

    def last(rates: Iterable[float]) -> float:
        reached = chosen
        for rate in rates:
            if not same(rate):
                break
            reached = rate
        return reached

    ordered = sorted(tried)
    at = ordered.index(chosen)
    return last(reversed(ordered[:at])), last(ordered[at + 1 :])


def _bracket(tried: _Tried) -> None:
    """Rates around the best of one draw."""
    for power in (0, _STEP, -_STEP):
        tried.draw((power,), 1)
    while True:
        best = tried.best()
        further = [power for power in (best - _STEP, best + _STEP) if power not in tried.all]
        further = [power for power in further if abs(power) <= _FARTHEST]
        if not further:
            break
        tried.draw((further[0],), 1)
    above = tried.first(best + _STEP) < tried.first(best - _STEP)
    tried.draw((best + 1 if above else best - 1,), 1)


class _Tried:
    """Losses of trials. Rates are ``start`` times a power of the root of two, and named by the power."""

    def __init__(self, start: float, attempt: Attempt) -> None:
        self._start, self._attempt = start, attempt
        self.all: dict[int, list[Tensor]] = {}

    def rate(self, power: int) -> float:
        return float(f"{self._start * 2 ** (power / 2):.3g}")

    def losses(self, power: int) -> Tensor:
        """(draws, held)."""
        return torch.stack(self.all[power])

    def steady(self, power: int, untrained: float) -> bool:
        return steady(self.losses(power), untrained)

    def gain(self, power: int, untrained: float) -> float:
        return untrained - float(self.losses(power).mean())

    def lead(self, power: int, other: int) -> tuple[float, float]:
        return _paired_lead(self.losses(power), self.losses(other))

    def first(self, power: int) -> float:
        """The loss of the first draw; infinite where there is none, or it is not finite."""
        if power not in self.all:
            return math.inf
        loss = float(self.all[power][0].mean())
        return loss if math.isfinite(loss) else math.inf

    def best(self) -> int:
        """By the first draw; of equal ones the smallest."""
        return min(sorted(self.all), key=self.first)

    def below(self, power: int, untrained: float) -> int | None:
        """The next smaller one that was tried; else one to try, where this is not steady; else None."""
        smaller = [other for other in self.all if other < power]
        if not smaller and power > -_FARTHEST and not self.steady(power, untrained):
            return power - _STEP
        return max(smaller, default=None)

    def draw(self, powers: Iterable[int], draws: int) -> bool:
        """Try each with so many draws in all; nothing, and False, where that would be too many trials."""
        missing = [(power, draw) for power in powers for draw in range(len(self.all.get(power, ())), draws)]
        if sum(map(len, self.all.values())) + len(missing) > MOST_TRIALS:
            return False
        for power, draw in missing:
            self.all.setdefault(power, []).append(self._attempt(self.rate(power), draw))
        return True
