"""What a promise means to one person: how well anybody can tell whether this person's data took part.

With delta(epsilon) the whole privacy curve of what was released, for any attack (Dong, Roth and Su 2022; Kairouz,
Oh and Viswanath 2015):

    right guesses, at even chances    (1 + delta(0)) / 2
    true positives at a rate a of     min over epsilon of min(e^epsilon a + delta(epsilon),
    false ones                                                1 - e^-epsilon (1 - delta(epsilon) - a))

Both are upper bounds, as delta is.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Final

from privlora.accounting.accountants import Adjacency, Events, delta_curve, merged, rough_epsilon
from privlora.accounting.events import Projections, Sampling, StepEvent
from privlora.errors import PrivacyError

_POINTS: Final = 48
_GRID: Final = 5e-3  # of the losses: coarse, and never too low
_SMALLEST, _LARGEST = 4.0, 100.0  # of the largest epsilon
_SIGMAS: Final = 0.2, 1e3
_TOLERANCE: Final = 1e-5  # relative, of a noise multiplier


@dataclass(frozen=True)
class Meaning:
    """right_guesses: share of right answers to whether a unit took part, where half of those asked about did.
    found_at_1_percent, found_at_1_permille: share of true positives at these rates of false ones. All at most."""

    right_guesses: float
    found_at_1_percent: float
    found_at_1_permille: float

    def to_dict(self) -> dict[str, float]:
        """JSON-ready."""
        return asdict(self)


def meaning(events: Events, adjacency: Adjacency = "add-or-remove-one") -> Meaning:
    """Of these releases together. Raises PrivacyError for what the accountant does not cover."""
    events = list(events)
    largest = max(_SMALLEST, min(_LARGEST, rough_epsilon(merged(events))))
    epsilons = [largest * k / (_POINTS - 1) for k in range(_POINTS)]
    curve = list(zip(epsilons, delta_curve(events, epsilons, adjacency=adjacency, grid=_GRID), strict=True))

    def found(rate: float) -> float:
        below = (math.exp(epsilon) * rate + delta for epsilon, delta in curve)
        above = (1 - math.exp(-epsilon) * (1 - delta - rate) for epsilon, delta in curve)
        return min(1.0, *below, *above)

    return Meaning((1 + curve[0][1]) / 2, found(0.01), found(0.001))


@lru_cache(maxsize=64)
def noise_for(
    phases: tuple[tuple[Sampling, int], ...],
    *,
    right_guesses: float | None = None,
    found_at_1_percent: float | None = None,
    adjacency: Adjacency = "add-or-remove-one",
    projections: Projections = (),
) -> float:
    """The smallest noise multiplier with which the `Meaning` of these phases together has at most these shares.

    phases: (sampling, steps) of each. Raises PrivacyError for shares that no noise, or no guess at all, has: 0.5 and
    0.01 are those of a coin.
    """
    right_guesses = 1.0 if right_guesses is None else right_guesses
    found_at_1_percent = 1.0 if found_at_1_percent is None else found_at_1_percent
    if (
        isinstance(right_guesses, str)
        or isinstance(found_at_1_percent, str)
        or not (0.5 < right_guesses <= 1 and 0.01 < found_at_1_percent <= 1)
    ):
        raise PrivacyError(
            "a share of right guesses or of found units is not between that of a coin and 1",
            fix="give right guesses above 0.5, and found units above 0.01, such as 0.6 and 0.05",
        )

    def beyond(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        means = meaning([(StepEvent(how, sigma, projections), steps) for how, steps in phases], adjacency)
        return max(means.right_guesses - right_guesses, means.found_at_1_percent - found_at_1_percent)

    least, most = (math.log(sigma) for sigma in _SIGMAS)
    if beyond(least) <= 0 or beyond(most) > 0:
        raise PrivacyError(
            "no noise multiplier from 0.2 to 1,000 is the smallest that gives these shares",
            fix="choose shares nearer to 0.6 and 0.05",
        )
    from scipy.optimize import brentq

    found = float(brentq(beyond, least, most, xtol=_TOLERANCE))
    while beyond(found) > 0:
        found += _TOLERANCE
    return float(f"{math.exp(found) * (1 + 1e-6):.7g}")  # as it is printed, and never below


def posterior(epsilon: float) -> float:
    """e^epsilon / (1 + e^epsilon): the most that 50 % can become under (epsilon, 0)-DP.

    Whatever is (epsilon, delta)-DP can be made, for two neighbours, of one answer which with probability delta is the
    truth, said to be so, and else that of randomised response at epsilon (Kairouz, Oh and Viswanath 2015).
    """
    return 1 / (1 + math.exp(-epsilon))


def in_words(means: Meaning, unit: str, epsilon: float | None) -> list[str]:
    """Sentences; shares are rounded up. unit: "record" or "user". epsilon: for the worst case; None leaves it out.

    The worst case is that of (epsilon, 0)-DP. delta comes on top as a leak of that probability (`posterior`). It is not
    how often the bound is passed, which for a Gaussian release is several times delta.
    """
    guesses, found = share_in_words(means.right_guesses), share_in_words(means.found_at_1_percent)
    worst = []
    if epsilon is not None:
        sure = share_in_words(posterior(epsilon))
        worst = [
            f"Worst case, apart from delta: somebody who was 50 % sure that one {unit} took part becomes at most "
            f"{sure} sure."
        ]
    return [
        f"Average: an attacker asks about {unit}s, half of which took part; at most {guesses} of guesses are right "
        "(a coin: 50 %).",
        f"Average: an attacker who wrongly accuses 1 % of outsiders finds at most {found} of the {unit}s that took "
        "part.",
        *worst,
    ]


def share_in_words(value: float) -> str:
    """In percent, never rounded down.

    >>> share_in_words(0.95257), share_in_words(0.5), share_in_words(0.99996)
    ('95.3 %', '50.0 %', '100.0 %')
    """
    return f"{min(100.0, math.ceil(1000 * value - 1e-9) / 10):.1f} %"
