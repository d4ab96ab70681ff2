"""Private evolution of texts (Aug-PE; Xie et al. 2024): a model is asked for variations of what records vote for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from privlora.errors import ConfigError
from privlora.synthesis.directions import Embedding, Floats, directions
from privlora.synthesis.generators import Generator
from privlora.synthesis.population import Population

Selection = Literal["rank", "probability"]


class AugPE:
    """Of noisy votes c on N texts, counts max(c - H, 0); then ``keep`` texts and ``variations`` of each of them.

    N = keep (1 + variations) stays the same. It is the proposer of ``Rounds`` whose voters encode as ``NearestVotes``;
    everything in it is public, and training on the final population costs nothing more.

    Args:
        population: the first texts, N of them.
        generator: asked for variations.
        embed: the embedding of the records, for generated texts.
        keep: how many texts a round keeps.
        variations: of each kept text.
        selection: "rank" keeps the highest counts, of equal ones the first; "probability" draws distinct texts with
            probability proportional to their counts, and some without any where too few have one.
        fresh: fresh texts stand in the place of variations; those that are kept stay.
        public: of each release's number, what draws texts by it; after a crash the same number has to draw the same,
            or texts would tell of the crash. It sees releases alone, so it may have a seed.

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
        selection: Selection = "rank",
        fresh: bool = False,
        public: Callable[[int], np.random.Generator] = np.random.default_rng,
    ) -> None:
        if keep < 1 or variations < 0:
            raise ConfigError(
                f"keep={keep}, variations={variations}: one of them is too small",
                fix="keep at least one text; variations may be 0",
            )
        if selection not in get_args(Selection):
            raise ConfigError(f"unknown selection {selection!r}", fix="rank or probability")
        if len(population.texts) != keep * (1 + variations):
            raise ConfigError(
                f"a population of {len(population.texts)} texts does not keep its size with keep={keep} and "
                f"variations={variations}",
                fix=f"begin with keep (1 + variations) = {keep * (1 + variations)} texts",
            )
        self.population = population
        self._generator, self._embed = generator, embed
        self._keep, self._variations = keep, variations
        self._selection, self._fresh = selection, fresh
        self._public = public

    def propose(self) -> Floats:
        return directions(self._embed(self.population.texts))

    def use(self, votes: Floats, number: int) -> None:
        kept = self.kept(votes, number)
        if self._fresh:
            texts = [self.population.texts[i] for i in kept]
            self.population = Population(texts + self._generator.random(self._keep * self._variations))
        else:
            self.population = self.population.evolve(kept, self._generator, self._variations)

    def kept(self, votes: Floats, number: int) -> list[int]:
        """Which texts go on, given (N,) noisy sums of votes of release ``number``."""
        counts = np.maximum(votes, 0.0)
        if self._selection == "probability":
            return self.population.choose(counts, self._keep, self._public(number))
        return [int(index) for index in np.argsort(-counts, kind="stable")[: self._keep]]
