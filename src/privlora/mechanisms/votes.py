"""Votes: vectors of bounded norm that privacy units cast on public candidates, summed with Gaussian noise."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from privlora.accounting.events import StepEvent
from privlora.errors import PrivacyError
from privlora.mechanisms.charges import Charges
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.noising import Noising
from privlora.mechanisms.release import Release
from privlora.ranges import BATCHES, NOISE_MULTIPLIERS, refuse_outside

VOTE_NORM = 1.0
"""The bound on one unit's vote in norm, C of a plan of votes."""

# A norm is taken in float64; what is bounded stays below 1 by more than its rounding.
_SLACK = 1e-9
# Entries are multiples of this, so that float64 adds up two million votes exactly, in whatever order.
_UNIT = 2.0**-32


class VoteMechanism:
    """sum_u v_u min(1, 1 / ||v_u||) + N(0, sigma^2 I), divided by a public number.

    Guarantee: adding or removing one unit moves the sum by at most 1 in norm (replacing one, by 2), so one release is
    ``event``: a Gaussian mechanism of noise_multiplier sigma. The ledger is charged before noise is drawn. Whoever
    hands in a vote answers for its being a function of one unit and of public state alone.

    divisor: public, as the number of units that are expected; never how many there are.

    | edge case                               | what happens                                      |
    |-----------------------------------------|---------------------------------------------------|
    | no unit                                 | zero sum, full noise, charged                     |
    | an entry, or the norm, is NaN or inf    | that unit counts as zero                          |
    | a vote with other than N entries        | refused, before anything is charged               |
    | the ledger refuses                      | its error passes through; nothing is released     |
    | no noise (sigma below 1e-6)             | refused: exact counts are never made              |
    """

    def __init__(
        self, *, event: StepEvent, divisor: float, ledger: Charges, noise: NoiseSource | None = None
    ) -> None:
        refuse_outside("noise_multiplier", event.noise_multiplier, NOISE_MULTIPLIERS)
        refuse_outside("expected_batch_size", divisor, BATCHES)
        if event.projections:
            raise PrivacyError("votes are not projected", fix="charge an event without projections")
        self.event, self.divisor = event, divisor
        self.noising = Noising(ledger, noise or NoiseSource())
        plan = getattr(ledger, "plan", None)
        if plan is None:
            return
        if plan.insecure_noise == self.noising.noise.secure:
            raise PrivacyError(
                "the ledger's plan and the source of noise do not agree on whether the noise can be replayed",
                why="whoever knows the seed subtracts the noise, so no epsilon holds",
                fix="give a source of noise without a seed, or a plan with insecure_noise",
            )
        # Where training follows, both numbers are those of its gradients.
        if len(plan.phases) == 1 and (plan.clip_norm, plan.expected_batch_size) != (VOTE_NORM, divisor):
            raise PrivacyError(
                f"the ledger's plan has clip_norm={plan.clip_norm:g} and "
                f"expected_batch_size={plan.expected_batch_size:g}, the votes {VOTE_NORM:g} and {divisor:g}",
                why="the ledger would state what was not done",
                fix="give the plan clip_norm=mechanisms.VOTE_NORM",
            )

    @property
    def noise_std(self) -> float:
        """tau = sigma / divisor, the standard deviation of the noise in each entry of a release."""
        return self.event.noise_multiplier * VOTE_NORM / self.divisor

    def sensitivity(self, adjacency: str = "add-or-remove-one") -> float:
        if adjacency == "add-or-remove-one":
            return VOTE_NORM
        if adjacency == "replace-one":
            return 2 * VOTE_NORM
        raise PrivacyError(f"unknown adjacency {adjacency!r}", fix="add-or-remove-one or replace-one")

    def clipped_sum(self, votes: Iterable[NDArray[np.float64]], entries: int) -> NDArray[np.float64]:
        """PRIVATE. (entries,) the exact sum of all votes, each of norm at most 1; zeros without any."""
        total = np.zeros(entries)
        for vote in votes:
            if vote.shape != (entries,):
                raise PrivacyError(
                    f"a vote of shape {vote.shape} is cast on {entries} candidates",
                    why="it would be copied into entries that its bound does not count",
                    fix="give one entry a candidate",
                )
            total += _bounded(vote)
        return total

    def release(self, votes: Iterable[NDArray[np.float64]], entries: int) -> Release:
        """The noisy mean vote, ((entries,),) float64. votes: PRIVATE, (entries,) of each unit that was drawn.

        entries: N, the number of candidates; public.
        """
        total = torch.from_numpy(self.clipped_sum(votes, entries))
        charged = self.noising.charge(self.event)
        scale = self.event.noise_multiplier * VOTE_NORM
        mean = charged.tensor(total, scale=scale, divisor=self.divisor, dtype=torch.float64)
        return Release([(mean,)], self.noise_std, charged.step, VOTE_NORM)


def _bounded(vote: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of norm at most 1, in multiples of 2^-32, each entry rounded towards zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.sqrt(np.square(vote, dtype=np.float64).sum()))
    if not norm < float("inf"):
        return np.zeros(vote.shape)
    bounded = vote * min(1.0, VOTE_NORM * (1 - _SLACK) / norm) if norm > 0 else vote
    units: NDArray[np.float64] = np.trunc(bounded / _UNIT) * _UNIT
    return units
