"""The learning rate at which a run's noise, without a single record, moves the model's predictions by a set amount.

What a private run loses to its noise is a matter of the model, the rate and the noise; records have no part in it. It
is measured as the divergence of the model after all T steps of empty batches, p, from the untouched one, p0, on texts
that the untouched model itself writes:

    D(rate) = E_{x ~ p0} [log p0(x) - log p(x)] per token
            = E_{x ~ p0} sum over t of KL(p0(. | x_<t) || p(. | x_<t)) per token,

which for small moves is half of their square in the model's Fisher metric, whatever its width, depth and scale of
weights. The second line is what is computed: over the whole vocabulary, few tokens tell what many do by the first.
One D serves all models as a rate in entries or in norms does not (docs/choosing.md).
No record, private or public, is read, so it costs no epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from privlora.accounting import Plan
from privlora.config import Settings
from privlora.data.batching import MicroBatch
from privlora.data.examples import IGNORED, Example, Examples, pad_token
from privlora.errors import ModelError
from privlora.evaluation.generation import Sampling, generate_tokens, start_of_text
from privlora.evaluation.next_token import record_means
from privlora.losses import LabelLogits, divergences, weighted_cross_entropy
from privlora.rehearsals.kept import AIM, DRAWS, MOST_RATES, TEXTS, once
from privlora.rehearsals.trials import Bench, Noise, trial_step
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.models import unchanged_afterwards
from privlora.training.promise import bands_of

_LENGTH: Final = 32
_NEAR: Final = 1.2  # of the aim: a tenth of a rate, which no run can tell
_FARTHEST: Final = 8.0  # from one rate to the next
_WRITING: Final = "texts that the model writes itself"
_MEASURING: Final = "steps of noise alone at several learning rates"
_USUAL_RATES: Final = 4
_STREAM: Final = 2**63 + 2**61 + 2**58  # of the public seed: apart from those of trials


def rate_by_noise(
    settings: Settings, plan: Plan, bench: Bench, texts: Examples
) -> tuple[float, dict[str, Any]]:
    """(learning rate, facts for a report and the losses of each rate). The model is given back as it was.

    texts: `own_texts`. Raises ModelError where no rate comes near the aim.
    """
    tried: dict[float, Tensor] = {}
    each = DRAWS * settings.privacy.steps
    done = total = 0

    def tick() -> None:
        nonlocal done
        done += 1
        bench.told(_MEASURING, done, total)

    with noise_trials(settings, plan, bench, texts, tick) as trials:

        def rise(rate: float) -> float:
            nonlocal done, total
            done, total = len(tried) * each, max(_USUAL_RATES, len(tried) + 1) * each
            bench.told(_MEASURING, done, total)
            found = once(bench.measured, f"noise at {rate!r}", lambda: trials.losses(rate).tolist())
            tried[rate] = torch.tensor(found, dtype=torch.float64)
            mean = float(tried[rate].mean())
            return mean - trials.untrained if math.isfinite(mean) else math.inf

        taken = _find_rate(trials.start, rise)
    bench.told(_MEASURING, total, total)  # no more are needed
    facts = {"aim": AIM, "of_its_own": len(texts), "untrained": round(trials.untrained, 6)}
    return taken, {**facts, "losses": tried}


@dataclass(frozen=True)
class _NoiseTrials:
    """start: the method's own rate. untrained: the mean loss of the texts before. losses: of each text after a run of
    noise at a rate, its loss before and its divergence, (draws, texts); infinite where it went astray."""

    start: float
    untrained: float
    losses: Callable[[float], Tensor]


@contextmanager
def noise_trials(
    settings: Settings, plan: Plan, bench: Bench, texts: Examples, tick: Callable[[], None] = lambda: None
) -> Iterator[_NoiseTrials]:
    """Runs of noise and of nothing else, on a model that is given back as it was. texts: `own_texts`. tick: called
    after each step."""
    before = _Before(bench.model, texts)
    with unchanged_afterwards(bench.model):
        parts = build_parts(settings, bench.model, PublicStart(bench.tokenizer))
        with parts.adapter:
            states, hyper = parts.states(), parts.hyper
            noise = Noise(
                plan.event.noise_multiplier, settings.privacy, settings.privacy.n, bands=bands_of(plan)
            )

            def losses(rate: float) -> Tensor:
                found = []
                for draw in range(DRAWS):
                    parts.take_states(states)
                    parts.hyper = replace(hyper, learning_rate=rate)
                    found.append(_after_noise(parts, before, noise, draw, tick))
                return torch.stack(found)

            yield _NoiseTrials(hyper.learning_rate, float(before.losses.mean()), losses)


def _find_rate(start: float, rise: Callable[[float], float]) -> float:
    """The rate whose rise is nearest to AIM, of at most MOST_RATES; rises are taken to grow with the rate.

    From ``start`` on by the square law of small moves, and between two rates around the aim by the line through the
    logarithms of both. Where none comes within a factor of two, as on an untrained model, which noise moves little:
    ``start`` if it moves the model by less than the aim, else the largest rate that does. Raises ModelError if none
    does.

    >>> _find_rate(1.0, lambda rate: 60 * rate**2)
    0.05
    """
    rises: dict[float, float] = {}
    rate = _short(start)
    while rate not in rises and len(rises) < MOST_RATES:
        rises[rate] = max(rise(rate), 1e-9)  # on texts that were drawn, a small move may seem to gain
        if 1 / _NEAR < rises[rate] / AIM < _NEAR:
            return rate
        below = max((r for r, d in rises.items() if d < AIM), default=None)
        above = min((r for r, d in rises.items() if d >= AIM), default=None)
        if below is None or above is None or below >= above:
            by_squares = math.sqrt(AIM / rises[rate])
            rate *= min(max(by_squares, 1 / _FARTHEST), _FARTHEST)
        elif math.isinf(rises[above]):
            rate = math.sqrt(below * above)
        else:
            low, high = (math.log(rises[r] / AIM) for r in (below, above))
            rate = below * (above / below) ** (low / (low - high))
        rate = _short(rate)
    best = min(rises, key=lambda r: abs(math.log(rises[r] / AIM)))
    if 0.5 < rises[best] / AIM < 2:
        return best
    smaller = [r for r, d in rises.items() if d < AIM]
    if not smaller:
        raise ModelError(
            f"no learning rate was found at which noise alone moves the model by {AIM} nats a token or less",
            why="learning_rate: auto takes the rate from what noise does to the model",
            fix="give method.learning_rate as a number",
        )
    return _short(start) if _short(start) in smaller else max(smaller)


def own_texts(bench: Bench, seed: int, whole: str = "method.learning_rate") -> Examples:
    """Drawn from the model token by token, from the public seed. Raises ModelError where none has a token.

    whole: the settings that they are for, which its errors name.
    """
    start = start_of_text(bench.tokenizer, fix=f"give {whole} as a number")
    bench.told(_WRITING, 0, TEXTS)

    def write() -> list[list[int]]:
        return generate_tokens(
            bench.model,
            bench.tokenizer,
            [start] * TEXTS,
            max_new_tokens=_LENGTH,
            sampling=Sampling(seed + _STREAM),
            told=lambda done: bench.told(_WRITING, done, TEXTS),
        )

    written = once(bench.measured, "texts", write)
    bench.told(_WRITING, TEXTS, TEXTS)
    rows = [np.concatenate([start, np.array(row, dtype=np.int32)]) for row in written if row]
    if not rows:
        raise ModelError(
            "the model writes no text from nothing: every one that was drawn ended at once",
            why=f"{whole}: auto is measured on the model's own texts",
            fix=f"give {whole} as a number, or public records as auto.file to rehearse on",
        )
    labels = ([IGNORED, *row[1:].tolist()] for row in rows)
    examples = (Example(ids, np.array(of, dtype=np.int32)) for ids, of in zip(rows, labels, strict=True))
    return Examples(examples, pad_token_id=pad_token(bench.tokenizer))


class _Before:
    """The untouched model on texts. losses: of each, in nats a token, (texts,) float64."""

    def __init__(self, model: torch.nn.Module, texts: Examples) -> None:
        self.texts = texts
        self._logits: list[Tensor] = []

        def keep(batch: MicroBatch, found: LabelLogits) -> Tensor:
            self._logits.append(found.logits)
            return weighted_cross_entropy(found, batch.token_weight)[1]

        self.losses = record_means(model, texts, keep)

    def after(self, model: torch.nn.Module) -> Tensor:
        """The same with the divergence of a moved model on top, infinite where it is not a number."""
        logits = iter(self._logits)
        moved = record_means(model, self.texts, lambda _, found: divergences(next(logits), found.logits))
        return self.losses + moved.nan_to_num(nan=math.inf, posinf=math.inf)


def _after_noise(parts: Any, before: _Before, noise: Noise, draw: int, tick: Callable[[], None]) -> Tensor:
    """Of the texts after all steps of empty batches, (texts,); infinite where a matrix had no decomposition."""
    step = trial_step(parts, before.texts, noise, draw)
    try:
        for _ in range(noise.privacy.steps):
            step.take([])
            tick()
    except torch.linalg.LinAlgError:
        return torch.full_like(before.losses, math.inf)
    with parts.exported() as model:
        return before.after(model)


def _short(rate: float) -> float:
    return float(f"{rate:.3g}")
