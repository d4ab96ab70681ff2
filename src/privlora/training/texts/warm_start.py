"""Ordinary training on generated public texts, which costs no epsilon: before the first private step, for any method,
and after the last round of votes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from privlora.coordinates import SpanSpace
from privlora.mechanisms import MeanMechanism
from privlora.optimizers import SpanOptimizer, learning_rate_at
from privlora.randomness import counter_generator
from privlora.training.assembly import Parts
from privlora.training.state import TrainState
from privlora.training.step import Step

_BATCH: Final = 8
_STREAM: Final = 2**63  # of the public seed: apart from choices of texts, which count up from 1


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
