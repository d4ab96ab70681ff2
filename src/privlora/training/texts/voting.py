"""The private phase of methods that release votes: all rounds, then what follows from them without privacy.

A method of ``methods.VOTE_METHODS`` has an entry in ``POLLS``: a function from a run's ``Parts`` to its ``Poll``, on
what records vote and what becomes of it. All that such a method changes in its rounds has to be a part of ``Parts``
(the adapter's coordinates, the texts with their generator), since one checkpoint stores them all after every release
and after every use of one. Everything in a Poll is public but for the records' directions that ``encode`` is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from privlora.accounting import Ledger
from privlora.mechanisms import NoiseSource
from privlora.synthesis.aug_pe import AugPE
from privlora.synthesis.directions import record_directions
from privlora.synthesis.generators import FileGenerator, PromptedGenerator
from privlora.synthesis.popri import POPri
from privlora.synthesis.population import Population
from privlora.synthesis.rounds import Proposer, Rounds, State
from privlora.synthesis.votes import Encoder, NearestVotes, Voters, similarity_scores
from privlora.training.assembly import Parts
from privlora.training.inputs import Data
from privlora.training.texts.preferences import PreferenceSettings, PreferenceTuner
from privlora.training.texts.synthetic_texts import texts_of_rounds
from privlora.training.texts.warm_start import train_on_texts


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
        fresh=chosen.evolution == "fresh",
    )
    return Poll(
        proposer=proposer,
        encode=NearestVotes(),
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
"""Name of a method -> its poll."""


def take_votes(parts: Parts, data: Data, ledger: Ledger, save: Callable[[], None]) -> None:
    """Take the rounds that are left, and make of the last one what the run leaves.

    save: stores ``parts`` durably; called after each release and after each use of one, and once at the end. What it
    raises, as after a signal, passes through: everything up to then is stored. Raises GeneratorError where the
    generator fails; the round's release is stored, and used when the run goes on.
    """
    ballot, texts, privacy = parts.ballot, parts.texts, parts.settings.privacy
    assert ballot is not None
    assert texts is not None
    assert parts.settings.synthesis is not None
    if ballot.over:
        return
    poll = POLLS[parts.method.name](parts)
    voters = Voters(
        record_directions(data.texts, ballot.embed),
        data.units,
        poll.encode,
        sample_rate=privacy.q,
        insecure_seed=privacy.insecure_noise_seed,
    )
    rounds = Rounds(
        poll.proposer,
        voters,
        ledger,
        divisor=ledger.plan.expected_batch_size,
        noise=NoiseSource(privacy.insecure_noise_seed),
    )
    if ballot.rounds:
        rounds.load_state_dict(ballot.rounds)

    def keep(state: State) -> None:
        ballot.rounds = state
        save()

    rounds.run(keep)
    texts.stand(Population(poll.texts()))
    if not parts.settings.synthesis.publish:
        poll.finish()
    ballot.over = True
    save()
