"""What trains on public texts next to private steps: ordinary training, which costs no epsilon (before the first step
of any method, and after the last round of votes); and the private phase of methods that release votes.

A method of ``methods.VOTE_METHODS`` has an entry in ``POLLS``: a function from a run's ``Parts`` to its ``_Poll``, on
what records vote and what becomes of it. All that such a method changes in its rounds has to be a part of ``Parts``
(the adapter's coordinates, the texts with their generator), since one checkpoint stores them all after every release
and after every use of one. Everything in a _Poll is public but for the records' directions that ``encode`` is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from privlora.accounting import Ledger
from privlora.coordinates import SpanSpace
from privlora.mechanisms import MeanMechanism, NoiseSource
from privlora.optimizers import SpanOptimizer
from privlora.randomness import counter_generator
from privlora.schedules import learning_rate_at
from privlora.synthesis.aug_pe import AugPE
from privlora.synthesis.directions import record_directions
from privlora.synthesis.generators import PromptedGenerator
from privlora.synthesis.popri import POPri
from privlora.synthesis.population import Population
from privlora.synthesis.rounds import Proposer, Rounds, State
from privlora.synthesis.votes import Encoder, NearestVotes, Voters, similarity_scores
from privlora.training.assembly import Parts
from privlora.training.inputs import Data
from privlora.training.state import TrainState
from privlora.training.step import Step
from privlora.training.texts.preferences import PreferenceTuner

_BATCH: Final = 8
_STREAM: Final = 2**63  # of the public seed: apart from choices of texts, which count up from 1


@dataclass(frozen=True, kw_only=True)
class _Poll:
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


def _aug_pe(parts: Parts) -> _Poll:
    """Votes for the nearest texts; ordinary training on the last population."""
    texts, ballot, settings = parts.texts, parts.ballot, parts.settings
    assert texts is not None
    assert ballot is not None
    assert settings.synthesis is not None
    chosen = settings.synthesis
    population = texts.population
    proposer = AugPE(
        population,
        texts.generator,
        ballot.embed,
        keep=chosen.seeds,
        variations=chosen.variations,
        fresh=chosen.evolution == "fresh",
    )
    return _Poll(
        proposer=proposer,
        encode=NearestVotes(),
        texts=lambda: proposer.population.texts,
        finish=lambda: train_on_texts(parts, chosen.epochs),
    )


def popri(parts: Parts) -> _Poll:
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
    rate, seed = chosen.dpo_learning_rate, settings.run.seed
    tuner = PreferenceTuner(parts, texts.tokenizer, learning_rate=rate, chat=generator.chat, seed=seed)
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

    return _Poll(
        proposer=proposer,
        encode=similarity_scores,
        texts=lambda: generator.random(chosen.count) if learns else [],
        finish=finish,
    )


POLLS: dict[str, Callable[[Parts], _Poll]] = {"aug-pe": _aug_pe, "popri": popri}
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


def warm_start(parts: Parts) -> None:
    """Bring a new run's state to where synthesis.warm_start_epochs over its first texts lead.

    Takes the run's optimizer at synthesis.warm_start_learning_rate, or at method.learning_rate, or the row's, without
    clipping or noise, on shuffled batches of 8 texts that follow from run.seed; then the optimizer and the average
    begin anew. Nothing private is read. Without epochs it does nothing.
    """
    chosen = parts.settings.synthesis
    if chosen is None or parts.texts is None or not chosen.warm_start_epochs:
        return
    optimizer = parts.optimizer.inner if isinstance(parts.optimizer, SpanOptimizer) else parts.optimizer
    space = parts.coordinates.inner if isinstance(parts.coordinates, SpanSpace) else parts.coordinates
    state = TrainState(coordinates=space, optimizer=optimizer)
    given = chosen.warm_start_learning_rate or parts.settings.method.learning_rate
    # and not what noise would leave of it
    rate = given or parts.method.rate_of(1, private=False, relative=parts.hyper.relative_rate)
    _ordinary(state, parts, chosen.warm_start_epochs, _STREAM, lambda number, steps: rate)
    parts.optimizer.reset()
    if parts.average is not None:
        parts.average.restart()


def train_on_texts(parts: Parts, epochs: int) -> None:
    """Ordinary training on a run's public texts as they are now, of rows that release votes: post-processing.

    Takes the run's optimizer, schedule and average; batches as of ``warm_start``.
    """
    hyper = parts.hyper

    def rate(number: int, steps: int) -> float:
        return learning_rate_at(number, steps, hyper.learning_rate, hyper.schedule, hyper.warmup_steps)

    _ordinary(parts, parts, epochs, _STREAM + 2**62, rate)


def _ordinary(
    state: TrainState, parts: Parts, epochs: int, stream: int, rate: Callable[[int, int], float]
) -> None:
    """Without clipping or noise. rate: of step 1, 2, … of so many."""
    assert parts.texts is not None
    examples = parts.texts.examples()
    generator = counter_generator(parts.settings.run.seed, stream=stream)
    batches = []
    for _ in range(epochs):
        order = generator.permutation(len(examples)).tolist()
        batches += [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]
    size = min(_BATCH, len(examples))
    step = Step(
        state=state,
        mechanism=MeanMechanism(state.coordinates, expected_batch_size=size, steps=len(batches)),
        examples=examples,
        learning_rate=lambda number: rate(number, len(batches)),
        max_tokens=parts.settings.run.max_tokens,
        masks=generator,
    )
    for done, batch in enumerate(batches, start=1):
        step.take(batch)
        parts.texts.tell("ordinary steps on public texts", done, len(batches))
