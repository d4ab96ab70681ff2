"""How long a run's steps take on this machine, and the largest run that a number of minutes has room for.

Steps of the run are timed on texts of random tokens, all of one length, so nothing follows from a record. A step of k
records takes a + c k seconds: a for what is done once (noise, the optimizer, the average), c for a record.

The clock decides about nothing but what is proposed: a run's steps and batch are numbers that the user writes, or
``auto.passes``, for they stand in its ledger and its release.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from privlora.config import Settings
from privlora.config.auto import run_sizes
from privlora.data.examples import Example, Examples, pad_token
from privlora.errors import ConfigError
from privlora.randomness import counter_generator
from privlora.rehearsals.trials import Noise, Told, trial_step
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.models import unchanged_afterwards
from privlora.training.promise import bands_to_come

_TIMING: Final = "timing steps on random tokens"
_MOST_RECORDS: Final = 32  # in the larger of the two steps that are compared
_REPEATS: Final = 3
_SLOW: Final = 10.0  # seconds, after which a step is not taken again
_STREAM: Final = 2**63 + 2**61 + 2**57  # of the public seed: apart from those of trials
_BISECTIONS: Final = 40
_MOST_PASSES: Final = 100.0


@dataclass(frozen=True)
class Pace:
    """tokens: of each record that was timed. step, record: seconds that a step takes besides its records, and more for
    each of them."""

    tokens: int
    step: float
    record: float

    def minutes(self, steps: int, batch: float) -> float:
        """Of so many steps with so many records in expectation, without loading, evaluations and checkpoints.

        >>> Pace(128, 0.5, 0.02).minutes(60, 50)
        1.5
        """
        return steps * (self.step + self.record * batch) / 60


def most_passes(pace: Pace, units: float, minutes: float) -> float | None:
    """The most passes over N units, to two digits, whose run takes ``minutes`` at most when it is divided as ``auto``
    divides it; at most 100. None where the fewest steps take longer.

    >>> most_passes(Pace(128, 0.5, 0.02), 10_000, 60)
    17.0
    """

    def fits(passes: float) -> bool:
        return pace.minutes(*run_sizes(units, passes)) <= minutes

    low, high = 0.01, _MOST_PASSES
    if not fits(low):
        return None
    if fits(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    digits = float(f"{low:.2g}")
    return digits if fits(digits) else float(f"{0.95 * low:.2g}")


def measure_pace(
    settings: Settings,
    model: torch.nn.Module,
    tokenizer: Any,
    *,
    tokens: int,
    told: Told = lambda what, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Pace:
    """Times steps of the run's method, adapter and micro-batches on records of ``tokens`` tokens each. The model is
    given back as it was.

    Raises ConfigError for units whose number of tokens does not follow from one record's.
    """
    for name, found in {
        "unit=user": settings.privacy.unit == "user",
        "data.chunk": settings.data.chunk,
        "data.label": settings.data.label is not None,
        "data.chosen": settings.data.chosen is not None,
    }.items():
        if found:  # a unit is more than one text, or no text that the model goes on with
            raise ConfigError(
                f"--minutes does not go with {name}",
                why="how many tokens such a unit has does not follow from public numbers",
                fix="leave out --minutes, and time a step of records like yours with privlora train --profile",
            )
    settings = settings.changed(auto=None)  # a step takes as long at every rate
    few = max(1, min(_MOST_RECORDS // 2, settings.run.max_tokens // tokens))
    with unchanged_afterwards(model):
        parts = build_parts(settings, model, PublicStart(tokenizer))
        with parts.adapter:
            records = _random_texts(model, tokenizer, 2 * few, tokens, settings.run.seed)
            noise = Noise(1.0, settings.privacy, settings.privacy.n, bands=bands_to_come(settings.privacy))
            step = trial_step(parts, records, noise, 0)
            done, total = 0, 1 + 2 * _REPEATS

            def timed(count: int) -> float:
                nonlocal done
                told(_TIMING, done, total)
                began = clock()
                step.take(list(range(count)))
                if parts.adapter.device.type != "cpu":
                    torch.accelerator.synchronize(parts.adapter.device)
                done += 1
                return clock() - began

            timed(2 * few)  # memory and kernels are found in the first one
            smaller, larger = [timed(few)], [timed(2 * few)]
            while len(larger) < _REPEATS and larger[-1] < _SLOW:
                smaller.append(timed(few))
                larger.append(timed(2 * few))
            told(_TIMING, total, total)
    of_few, of_all = statistics.median(smaller), statistics.median(larger)
    record = min(max((of_all - of_few) / few, 0.0), of_all / (2 * few))
    return Pace(tokens, of_all - 2 * few * record, record)


def _random_texts(model: torch.nn.Module, tokenizer: Any, count: int, tokens: int, seed: int) -> Examples:
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = counter_generator(seed, stream=_STREAM).integers(vocabulary, size=(count, tokens), dtype="int32")
    return Examples((Example(row, row) for row in ids), pad_token_id=pad_token(tokenizer))
