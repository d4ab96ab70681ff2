"""The public texts of a run: generated, tokenised as its private records are, and chosen from by what was released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from privlora.config import Settings, SynthesisSettings
from privlora.coordinates import PublicGradients
from privlora.data.examples import Examples
from privlora.data.records import HUB
from privlora.errors import DataError, GeneratorError
from privlora.methods import Method
from privlora.randomness import counter_generator
from privlora.synthesis.generators import FileGenerator, build_generator
from privlora.synthesis.population import Population, deduplicate, start
from privlora.training.inputs import tokenise
from privlora.training.public_form import PublicForm

_GENERATOR, _POPULATION = "generator.", "population."
_FEWEST: Final = 2
"""Distinct texts: one alone spans one direction, has all votes, and teaches itself."""


class SyntheticTexts:
    """Texts that a generator writes at first, and that evolve with the scores of releases: ``PublicTexts`` of a span.

    They are public: the generator sees fixed words, earlier texts, and the model as releases have made it. Everything
    that is drawn follows from run.seed. A text stands where a record would, as ``public_form`` says.

    model: asked as it is at that moment, with the adapter as trained so far, where it writes. method: along whose
    steps texts are chosen and varied, or stay those of the first. Where it releases gradients copies are left out, so
    that there may be fewer texts than settings say; votes go to as many texts in every round. own: instead of
    synthesis.callable, in Python.

    tell: set by who shows how far the work on them is, which takes most of a step: (what, done, all), all public.
    warn: set by who shows what is odd about them, a public sentence; said once.

    Raises ConfigError for settings that cannot be followed.
    """

    def __init__(
        self,
        settings: Settings,
        model: torch.nn.Module,
        tokenizer: Any,
        method: Method,
        own: Any = None,
    ) -> None:
        assert settings.synthesis is not None
        self.tell: Callable[[str, int, int], None] = _unheard
        self.warn: Callable[[str], None] = _unheard
        self._warned = False
        self._chosen: SynthesisSettings = settings.synthesis
        self._data, self.tokenizer = settings.data, tokenizer
        self._form = PublicForm(settings)
        self._form.refuse_none()
        self._seed = settings.run.seed
        self._fresh = settings.synthesis.evolution == "fresh"
        self._distinct = method.releases == "gradients"
        self._evolves = self._distinct and _evolve(self._chosen, method)
        self._needed = self._chosen.count + _later_texts(self._chosen, method, settings.privacy.steps)
        self.generator = build_generator(
            self._chosen,
            seed=self._seed,
            model=model,
            tokenizer=tokenizer,
            own=own,
            max_tokens=settings.run.max_tokens,
            texts=self._form.file_texts(),
            template=self._form.template,
        )
        self.generator.told = lambda written, total: self.tell("writing public texts", written, total)
        self._population = Population([])
        self._steps = 0  # that were asked for texts after the first

    @property
    def texts(self) -> list[str]:
        """As they are now, in order; those of the first step where none was asked for."""
        return list(self.population.texts)

    @property
    def distinct(self) -> int:
        """How many of those that stand differ in more than blanks and capitals; 0 where none was asked for."""
        return len(deduplicate(self._population.texts))

    @property
    def population(self) -> Population:
        """Of the same texts. Raises what the generator does, and GeneratorError where it gave no two that differ."""
        if not len(self._population):
            if isinstance(self.generator, FileGenerator):
                self.generator.refuse_fewer(self._needed)
            if self._fresh:
                first = Population(self.generator.random(self._chosen.count))
            else:
                first = start(self.generator, seeds=self._chosen.seeds, variations=self._chosen.variations)
            self._take(first)
        return self._population

    def stand(self, population: Population) -> None:
        """Let these texts stand in the place of all others."""
        kept = deduplicate(population.texts)
        if kept:
            self._warn_of_few(len(kept))
        texts = [population.texts[i] for i in kept] if self._distinct else list(population.texts)
        self._population = Population(texts)

    def more(self, count: int) -> list[str]:
        """So many fresh texts beside the population, or as many as a file has left."""
        left = getattr(self.generator, "left", count)
        return self.generator.random(min(count, left))

    def as_records(self, texts: Sequence[str]) -> Examples:
        """Any texts, as records are tokenised."""
        return tokenise(self._form.records(texts), self._data, self.tokenizer)

    def examples(self) -> Examples:
        """The texts as records are tokenised. Raises DataError where none of them has something to predict."""
        found = self.as_records(self.texts)
        if not found.label_counts.any():
            fix = "change synthesis.random_prompt or preset, or raise synthesis.max_new_tokens"
            raise DataError("no generated text leaves a token to predict", fix=fix)
        return found

    def __call__(self, scores: Tensor | None) -> Examples:
        """Those of the next step, see ``PublicTexts``."""
        if scores is not None and len(self._population):
            self._steps += 1
            if self._evolves:
                self._evolve(scores)
        return self.examples()

    def evolve_once_more(self, scores: Tensor | None) -> None:
        """By the last release of a run, after which no step asks; scores: as of a step."""
        if scores is not None and len(self._population):
            self._steps += 1
            self._evolve(scores)

    def without_copies(self, found: PublicGradients) -> PublicGradients:
        """Leave out texts whose gradients are nearly those of an earlier one; found: of the present texts.

        Raises GeneratorError where so few are left of the first ones; later, when steps were charged, it warns.
        """
        limit = self._chosen.similarity_limit
        if limit is None:
            return found
        kept = deduplicate(self.texts, similarity=found.cosines().cpu().numpy(), limit=limit)
        if self._steps == 0 and len(kept) < _FEWEST:
            raise GeneratorError(
                f"the gradients of {_texts(len(self._population))} are all alike",
                why="they span one direction, whatever the records say",
                fix="mend the generator or its prompts so that texts differ in more than a few words, or set "
                "synthesis.similarity_limit=null",
            )
        self._warn_of_few(len(kept))
        if len(kept) == len(self._population):
            return found
        self._population = Population([self._population.texts[i] for i in kept])
        found.keep(kept)
        return found

    def tell_of_gradients(self, done: int, total: int) -> None:
        """Of so many of the texts the gradients are there."""
        self.tell("gradients of public texts", done, total)

    def state_dict(self) -> dict[str, Tensor]:
        parts = {_GENERATOR: self.generator.state_dict(), _POPULATION: self._population.state_dict()}
        tensors = {prefix + name: t for prefix, part in parts.items() for name, t in part.items()}
        return tensors | {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for prefix, part in ((_GENERATOR, self.generator), (_POPULATION, self._population)):
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            part.load_state_dict(own)
        self._steps = int(tensors["steps"])

    def _evolve(self, scores: Tensor) -> None:
        if self._fresh:  # the model has moved by the scores' step; texts of the old one are given up
            self._take(Population(self.generator.random(self._chosen.count)))
            return
        generator = counter_generator(self._seed, stream=self._steps)  # 0 is that of the masks
        keep = min(self._chosen.seeds, len(self._population))
        kept = self._population.choose(scores.double().cpu().numpy(), keep, generator)
        self._take(self._population.evolve(kept, self.generator, self._chosen.variations))

    def _take(self, population: Population) -> None:
        """Let what the generator gave stand. Raises GeneratorError where there are no two texts that differ."""
        distinct = len(deduplicate(population.texts))
        if distinct < _FEWEST:
            raise GeneratorError(
                f"the generator was asked for {_texts(self._chosen.count)}, and gave {distinct} distinct",
                why="with one text nothing that records say is told apart, and budget would be spent on it",
                fix="mend the generator or its prompts, raise synthesis.temperature, or synthesis.seeds where it is 1; "
                "a run that has begun goes on with `privlora resume`",
            )
        self.stand(population)

    def _warn_of_few(self, distinct: int) -> None:
        if not self._warned and 2 * distinct <= self._chosen.count:
            self._warned = True
            self.warn(
                f"of {_texts(self._chosen.count)} that were asked for {distinct} differ; the others are copies of "
                "these, in their words or in their gradients, and are no help"
            )


def _evolve(chosen: SynthesisSettings, method: Method) -> bool:
    return method.public_texts == "evolving" and chosen.evolution != "none"


def _later_texts(chosen: SynthesisSettings, method: Method, steps: int) -> int:
    """Texts that a run of so many steps or rounds asks for after its first ones."""
    varied = chosen.seeds * chosen.variations
    if method.releases == "votes":
        return steps * varied
    times = (steps - 1 + chosen.publish) * _evolve(chosen, method)
    return times * (chosen.count if chosen.evolution == "fresh" else varied)


def refuse_unusable_texts(settings: Settings, method: Method) -> None:
    """Raise what a new run would of its public texts, as far as that shows without the model: of a local file its
    column and how many texts it has, of a function whether it is there. No text is written and no server asked."""
    chosen = settings.synthesis
    assert chosen is not None
    form = PublicForm(settings)
    form.refuse_none()
    files = [chosen.file] if isinstance(chosen.file, str) else chosen.file or []
    if chosen.generator == "model" or any(file.startswith(HUB) for file in files):
        return
    seed, texts = settings.run.seed, form.file_texts()
    generator = build_generator(chosen, seed=seed, texts=texts, template=form.template)
    if isinstance(generator, FileGenerator):
        generator.refuse_fewer(chosen.count + _later_texts(chosen, method, settings.privacy.steps))


def _texts(count: int) -> str:
    return f"{count} public text{'' if count == 1 else 's'}"


def _unheard(*_: object) -> None:
    """Where nobody watches."""
