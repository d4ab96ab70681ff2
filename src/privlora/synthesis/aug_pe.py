"""Private evolution of texts (Aug-PE; Xie et al. 2024): a model is asked for variations of what records vote for."""

from __future__ import annotations

import numpy as np

from privlora.errors import ConfigError
from privlora.synthesis.directions import Embedding, Floats, directions
from privlora.synthesis.generators import Generator
from privlora.synthesis.population import Population


class AugPE:
    """Of noisy votes on N texts the ``keep`` with most, of equal ones the first; then ``variations`` of each of them.

    N = keep (1 + variations) stays the same. It is the proposer of ``Rounds`` whose voters encode as ``NearestVotes``;
    everything in it is public, and training on the final population costs nothing more.

    Args:
        population: the first texts, N of them.
        generator: asked for variations.
        embed: the embedding of the records, for generated texts.
        keep: how many texts a round keeps.
        variations: of each kept text.
        fresh: fresh texts instead of variations; those that are kept stay.

    Raises:
        ConfigError: a number is out of range, or the population's size does not fit ``keep`` and ``variations``.
    """

    def __init__(
        self,
        population: Population,
        generator: Generator,
        embed: Embedding,
        *,
        keep: int,
        variations: int = 1,
        fresh: bool = False,
    ) -> None:
        if keep < 1 or variations < 0:
            raise ConfigError(
                f"keep={keep}, variations={variations}: one of them is too small",
                fix="keep at least one text; variations may be 0",
            )
        if len(population.texts) != keep * (1 + variations):
            raise ConfigError(
                f"a population of {len(population.texts)} texts does not keep its size with keep={keep} and "
                f"variations={variations}",
                fix=f"begin with keep (1 + variations) = {keep * (1 + variations)} texts",
            )
        self.population = population
        self._generator, self._embed = generator, embed
        self._keep, self._variations, self._fresh = keep, variations, fresh

    def propose(self) -> Floats:
        return directions(self._embed(self.population.texts))

    def use(self, votes: Floats, number: int) -> None:
        kept = self.kept(votes)
        if self._fresh:
            texts = [self.population.texts[i] for i in kept]
            self.population = Population(texts + self._generator.random(self._keep * self._variations))
        else:
            self.population = self.population.evolve(kept, self._generator, self._variations)

    def kept(self, votes: Floats) -> list[int]:
        """Which texts go on, given (N,) noisy sums of votes; below zero all are alike."""
        counts = np.maximum(votes, 0.0)
        return [int(index) for index in np.argsort(-counts, kind="stable")[: self._keep]]
