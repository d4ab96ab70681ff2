"""The rows that release votes: on what their records vote, and what becomes of it.

A row of ``methods.VOTE_METHODS`` has an entry in ``POLLS``: a function from a run's ``Parts`` to its ``Poll``. All that
such a row changes in its rounds has to be a part of ``Parts`` (the adapter's coordinates, the texts with their
generator), since one checkpoint stores them all after every release and after every use of one; ``training.voting``
runs the rounds, charges, stores and goes on after a crash. Everything in a Poll is public but for the records'
directions that ``encode`` is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from privlora.randomness import counter_generator
from privlora.synthesis.aug_pe import AugPE
from privlora.synthesis.generators import FileGenerator, PromptedGenerator
from privlora.synthesis.popri import POPri
from privlora.synthesis.rounds import Proposer
from privlora.synthesis.votes import Encoder, NearestVotes, similarity_scores
from privlora.training.assembly import Parts
from privlora.training.texts.preferences import PreferenceSettings, PreferenceTuner
from privlora.training.texts.synthetic_texts import texts_of_rounds
from privlora.training.texts.warm_start import train_on_texts

_CHOICES: Final = 2**63 + 2**60  # streams of the public seed: apart from warm starts and rehearsals


@dataclass(frozen=True, kw_only=True)
class Poll:
    """What a row asks records, on a model.

    proposer: the public half of its rounds; made anew in each process, and told by ``Rounds`` where it stands.
    encode: what one unit votes. texts: those that the last round leaves, which are what `privlora synthesize` releases.
    finish: makes the adapter of them, once they are ``parts.texts``; not called where texts are the release. After a
    crash it is called again, with the state as it was after the last round.
    """

    proposer: Proposer
    encode: Encoder
    texts: Callable[[], list[str]]
    finish: Callable[[], None]


def aug_pe(parts: Parts) -> Poll:
    """Votes for the nearest texts; ordinary training on the last population."""
    texts, ballot, settings = parts.texts, parts.ballot, parts.settings
    assert texts is not None
    assert ballot is not None
    assert settings.synthesis is not None
    chosen = settings.synthesis
    population = texts.population
    if isinstance(texts.generator, FileGenerator) and not ballot.rounds:  # before anything is charged
        texts.generator.refuse_fewer(texts_of_rounds(chosen, settings.privacy.steps))
    proposer = AugPE(
        population,
        texts.generator,
        ballot.embed,
        keep=chosen.seeds,
        variations=chosen.variations,
        selection=chosen.selection,
        fresh=chosen.evolution == "fresh",
        public=lambda number: counter_generator(settings.run.seed, stream=_CHOICES + number),
    )
    return Poll(
        proposer=proposer,
        encode=NearestVotes(chosen.nearest),
        texts=lambda: proposer.population.texts,
        finish=lambda: train_on_texts(parts, chosen.epochs),
    )


def popri(parts: Parts) -> Poll:
    """Scores of the model's own texts, preferences, DPO of the run's factors; then the start of the run learns texts of
    the model that was tuned. Without epochs, what was tuned is the adapter."""
    texts, ballot, settings = parts.texts, parts.ballot, parts.settings
    assert texts is not None
    assert ballot is not None
    assert settings.synthesis is not None
    chosen, generator, start = settings.synthesis, texts.generator, ballot.start
    assert isinstance(generator, PromptedGenerator)
    if not start:
        start.update(parts.states()["coordinates"])
    dpo = PreferenceSettings(learning_rate=chosen.dpo_learning_rate)
    tuner = PreferenceTuner(parts, texts.tokenizer, dpo, chat=generator.chat, seed=settings.run.seed)
    requests = generator.requests(chosen.requests)
    tuner.refuse_long(requests, chosen.max_new_tokens)
    proposer = POPri(
        requests,
        chosen.answers,
        generator.samples,
        tuner.tune,
        ballot.embed,
        rank=max(2, (chosen.answers + 1) // 2),
    )
    learns = chosen.epochs > 0 and not chosen.publish

    def finish() -> None:
        if learns:
            parts.move_to(start, memory="reset")
            train_on_texts(parts, chosen.epochs)

    return Poll(
        proposer=proposer,
        encode=similarity_scores,
        texts=lambda: generator.random(chosen.count) if learns else [],
        finish=finish,
    )


POLLS: dict[str, Callable[[Parts], Poll]] = {"aug-pe": aug_pe, "popri": popri}
"""Name of a row -> its poll."""
