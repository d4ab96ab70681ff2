"""Private preferences (POPri; Hou et al. 2025): of samples of each prompt, which one the records find themselves in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from privlora.errors import ConfigError
from privlora.synthesis.directions import Embedding, Floats, directions
from privlora.synthesis.population import Population

Preference = dict[str, str]
"""{"prompt": ..., "chosen": ..., "rejected": ...}, as trainers of preferences take it."""

Sample = Callable[[Sequence[str], int], Sequence[Sequence[str]]]
"""From prompts and a number J, J samples of each prompt from the model as it is now."""


class POPri:
    """Of each of R prompts, J samples are scored; the best noisy score is chosen over rank l, and a model is tuned.

    It is the proposer of ``Rounds`` whose voters encode as ``similarity_scores``; everything in it is public. Where the
    chosen and the rejected sample are the same text, there is no preference.

    Args:
        prompts: R of them, public.
        samples: J.
        sample: the model.
        tune: the model's step on a round's preferences, as one of DPO. After a crash it may be called again with the
            same ones, so whoever stores the rounds' state stores the model's with it, and restores both.
        embed: the embedding of the records, for samples.
        rank: l, from 2 for the second best to J for the worst.

    Raises:
        ConfigError: there is no prompt, or no rank l among J samples.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        samples: int,
        sample: Sample,
        tune: Callable[[list[Preference]], None],
        embed: Embedding,
        *,
        rank: int,
    ) -> None:
        if not prompts or not 2 <= rank <= samples:
            raise ConfigError(
                f"{len(prompts)} prompts of {samples} samples give no preference over rank {rank}",
                fix="give a prompt, and a rank between 2 and the number of samples",
            )
        self.population = Population([])
        self._prompts, self._samples, self._rank = list(prompts), samples, rank
        self._sample, self._tune, self._embed = sample, tune, embed

    def propose(self) -> Floats:
        drawn = self._sample(self._prompts, self._samples)
        if [len(texts) for texts in drawn] != [self._samples] * len(self._prompts):
            raise ConfigError(
                f"the model did not give {self._samples} samples for each of {len(self._prompts)} prompts",
                fix="draw again what is empty or missing",
            )
        self.population = Population([text for texts in drawn for text in texts])
        return directions(self._embed(self.population.texts))

    def use(self, votes: Floats, number: int) -> None:
        self._tune(self.preferences(votes))

    def preferences(self, votes: Floats) -> list[Preference]:
        """Of the latest samples, given (R J,) noisy sums of scores; at most one a prompt, in the prompts' order."""
        found = []
        for number, prompt in enumerate(self._prompts):
            first = number * self._samples
            order = first + np.argsort(-votes[first : first + self._samples], kind="stable")
            chosen, rejected = (self.population.texts[order[place - 1]] for place in (1, self._rank))
            if chosen != rejected:
                found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        return found
