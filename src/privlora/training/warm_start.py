"""Ordinary training on generated public texts before the first private step, for any method: it costs no epsilon."""

from __future__ import annotations

from typing import Final

from privlora.coordinates import SpanSpace
from privlora.mechanisms import MeanMechanism
from privlora.optimizers import SpanOptimizer
from privlora.randomness import counter_generator
from privlora.training.assembly import Parts
from privlora.training.state import TrainState
from privlora.training.step import Step

_BATCH: Final = 8
_STREAM: Final = 2**63  # of the public seed: apart from choices of texts, which count up from 1


def warm_start(parts: Parts) -> None:
    """Bring a new run's state to where synthesis.warm_start_epochs over its first texts lead.

    Takes the run's optimizer at its learning rate, without clipping or noise, on shuffled batches of 8 texts that
    follow from run.seed; then the optimizer and the average begin anew. Nothing private is read. Without epochs it does
    nothing.
    """
    chosen = parts.settings.synthesis
    if chosen is None or parts.texts is None or not chosen.warm_start_epochs:
        return
    optimizer = parts.optimizer.inner if isinstance(parts.optimizer, SpanOptimizer) else parts.optimizer
    examples = parts.texts.examples()
    generator = counter_generator(parts.settings.run.seed, stream=_STREAM)
    batches = []
    for _ in range(chosen.warm_start_epochs):
        order = generator.permutation(len(examples)).tolist()
        batches += [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]
    space = parts.coordinates.inner if isinstance(parts.coordinates, SpanSpace) else parts.coordinates
    step = Step(
        state=TrainState(coordinates=space, optimizer=optimizer),
        mechanism=MeanMechanism(space, expected_batch_size=min(_BATCH, len(examples)), steps=len(batches)),
        examples=examples,
        learning_rate=parts.hyper.learning_rate,
        max_tokens=parts.settings.run.tokens_per_micro_batch,
        masks=generator,
    )
    for done, batch in enumerate(batches, start=1):
        step.take(batch)
        parts.texts.tell("warm start on public texts, steps", done, len(batches))
    parts.optimizer.reset()
    if parts.average is not None:
        parts.average.restart()
