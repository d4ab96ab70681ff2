"""How private records vote on public candidates: for the nearest of them (Aug-PE), or by similarity (POPri).

Classes are not used: their proportions, taken from the records' labels, would be released without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from privlora.accounting.events import Sampling
from privlora.data.sampling import PoissonSampler
from privlora.data.units import Units
from privlora.errors import ConfigError
from privlora.synthesis.directions import Floats

Encoder = Callable[[Floats, Floats], Floats]
"""From the directions (r, d) of one unit's records and the candidates' (N, d), the unit's vote (N,)."""

# Similarities whose deviations from their mean are smaller than this are rounding, which is not blown up to norm 1.
_FLOOR = 1e-6


@dataclass(frozen=True)
class NearestVotes:
    """Each record votes 1 / sqrt(k) for each of its k nearest candidates; a unit's records add up.

    Of equally near candidates the first wins. Neither a record nor a candidate without a direction takes part; only
    where fewer than k candidates have one, others fill up, and where there are fewer than k, all have a vote.
    """

    k: int = 1

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"k={self.k} nearest candidates are none", fix="set k to at least 1")

    def __call__(self, records: Floats, candidates: Floats) -> Floats:
        # The order of squared distances; means of several directions are shorter than 1.
        squares = np.einsum("nd,nd->n", candidates, candidates)
        penalties = np.where(squares > 0, squares / 2, np.inf)
        vote = np.zeros(len(candidates))
        for record in records:
            if record.any():
                scores = _similarities(record, candidates) - penalties
                vote[np.argsort(-scores, kind="stable")[: self.k]] += self.k**-0.5
        return vote


def similarity_scores(records: Floats, candidates: Floats) -> Floats:
    """Cosine similarities to all candidates, summed over a unit's records, less their mean, at norm 1.

    Zero for records without a direction. candidates: rows of norm 1 or zero.
    """
    scores = np.zeros(len(candidates))
    for record in records:
        scores += _similarities(record, candidates)
    scores -= scores.mean()
    centred: Floats = scores / max(float(np.sqrt(np.square(scores).sum())), _FLOOR * len(scores) ** 0.5)
    return centred


def _similarities(record: Floats, candidates: Floats) -> Floats:
    # Not a matrix product: its last digits follow from how many records are in it, and from where they lie in memory.
    products: Floats = np.einsum("nd,d->n", candidates, np.ascontiguousarray(record))
    return products


class Voters:
    """PRIVATE. All records' directions, the units that they belong to, and who votes in a round.

    records: (n, d), of ``record_directions``. encode: what one unit votes. sample_rate: q; each unit votes in a round
    with this probability, all do at 1. insecure_seed: for tests; what is made with it is not private.
    """

    def __init__(
        self,
        records: Floats,
        units: Units,
        encode: Encoder,
        *,
        sample_rate: float = 1.0,
        insecure_seed: int | None = None,
    ) -> None:
        self._records, self._units, self._encode = records, units, encode
        self._sampler = PoissonSampler(len(units), sample_rate, insecure_seed=insecure_seed)

    @property
    def sampling(self) -> Sampling:
        """How a round's voters are drawn, for the event that is charged."""
        return self._sampler.sampling

    @property
    def secure(self) -> bool:
        """Whether nobody can replay how they are drawn."""
        return not self._sampler.insecure

    def votes(self, candidates: Floats) -> Iterator[Floats]:
        """PRIVATE. Draw a round's units; (N,) of each, a function of that unit's records and the candidates alone.

        candidates: (N, d). Raises ConfigError for another d than that of the records.
        """
        if len(self._records) and candidates.shape[1] != self._records.shape[1]:
            raise ConfigError(
                f"candidates have directions of {candidates.shape[1]} numbers, records of {self._records.shape[1]}",
                fix="embed generated texts as the records",
            )
        drawn = self._units.draw_records(self._sampler.draw(), self._sampler.generator)
        for records in drawn:
            yield self._encode(self._records[records], candidates)
