"""Short private trainings on public texts alone: how a method would do on as many records, before any record is read.

Some public texts stand for records, others span where the method leans on such texts, the rest are held out;
what counts is the held-out loss after all steps of the run, at its noise. Nothing private is read and nothing is
released, so noise and batches follow from the public seed, protect nobody, and are charged to nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from privlora.accounting import StepEvent
from privlora.accounting.events import CyclicPoissonSampling, Sampling
from privlora.config import PrivacySettings, Settings
from privlora.data.examples import Examples
from privlora.data.sampling import PoissonSampler
from privlora.errors import DataError
from privlora.evaluation.next_token import record_losses
from privlora.mechanisms import CorrelatedNoise, GaussianMechanism, NoiseSource, band_coefficients
from privlora.mechanisms.charges import Uncharged
from privlora.methods import find_method
from privlora.randomness import counter_generator, private_generator
from privlora.rehearsals.rates import Attempt
from privlora.synthesis.population import Population, deduplicate
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.models import unchanged_afterwards
from privlora.training.step import Step
from privlora.training.texts.voting import warm_start

Told = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and all of it; public."""

_WIDTH: Final = 3.0  # of the grid of learning rates: powers of it times a method's own
_FARTHEST: Final = 4  # powers up or down
MORE_TEXTS: Final = 400
"""Public texts besides the population: half stand for records, half are held out."""
_FEWEST = 8  # texts of each of the three kinds
_STREAM: Final = 2**63 + 2**61  # of the public seed: apart from choices of texts and from warm starts


@dataclass(frozen=True)
class Bench:
    """On what rehearsals run. told: hears how far they are. measured: see `kept.measuring`."""

    model: torch.nn.Module
    tokenizer: Any
    told: Told = lambda what, done, total: None
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Texts:
    """All public. spanning: the population, where a method leans on one. records:
    instead of private ones. held: what is evaluated."""

    spanning: Sequence[str]
    records: Examples
    held: Examples


@dataclass(frozen=True)
class Noise:
    """A run's mechanism. multiplier: sigma. privacy: its other settings. records: N of the trials. drawn: of them in a
    step of a trial at most, in expectation; None for as many as in the run's. bands: of correlated noise; trials draw
    from all records at every step, which changes no batch's law, only who is in which."""

    multiplier: float
    privacy: PrivacySettings
    records: float
    drawn: int | None = None
    bands: int = 1

    @property
    def batch(self) -> float:
        """b of a run on so many records, at the run's own sampling rate q: sigma stays what it is."""
        return self.privacy.q * self.records

    @property
    def std(self) -> float:
        """Of each coordinate of a step's mean."""
        return self.multiplier * self.privacy.clip_norm / self.batch


@dataclass(frozen=True)
class Outcome:
    """Of one method at one rate. losses: (draws of noise, held-out texts), in nats per token. tried: how many rates
    were, to find this one."""

    row: str
    learning_rate: float
    losses: Tensor

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


def split_texts(
    settings: Settings, model: torch.nn.Module, public: PublicStart, row: str, told: Told
) -> Texts:
    """The first population and `MORE_TEXTS` more, half of them held out.

    Where a file has fewer texts left, the population gives away its last, until half of all texts are outside of it.

    row: a method that leans on public texts. Raises DataError where there are too few.
    """
    assert settings.synthesis is not None
    writing = public.texts(settings, model, find_method(row))
    writing.tell = told
    first, more = writing.texts, writing.more(MORE_TEXTS)
    every = [*first, *more]
    every = [every[i] for i in deduplicate(every)]
    spanning = len(first)
    if len(more) < MORE_TEXTS:
        spanning = min(spanning, len(every) - len(every) // 2)
    beside = writing.as_records(every[spanning:])
    usable = [text for text, count in zip(beside, beside.label_counts, strict=True) if count]
    records, held = usable[: len(usable) // 2], usable[len(usable) // 2 :]
    if min(spanning, len(records)) < _FEWEST:
        raise DataError(
            f"{len(every)} public texts are too few to rehearse on: {spanning} would span, {len(records)} stand for "
            f"records and {len(held)} be held out, and each needs {_FEWEST}",
            why="the choice between methods would follow from single texts",
            fix="give a larger synthesis.file, or name one in method.name",
        )
    return Texts(every[:spanning], beside.like(records), beside.like(held))


def start_losses(model: torch.nn.Module, texts: Texts) -> Tensor:
    """Of the held-out texts before any training, (held,)."""
    return record_losses(model, texts.held)


def try_rows(
    rows: Sequence[Settings],
    noises: Sequence[Noise],
    texts: Texts,
    model: torch.nn.Module,
    public: PublicStart,
    *,
    draws: int,
    told: Told,
) -> list[dict[str, Outcome]]:
    """For each noise: method -> how it did. Everything follows from the texts, the settings and run.seed.

    rows: a run's settings with each method, without texts that evolve. Without a learning rate of the settings, a
    method is tried with the first draw of noise at its own, and at three times and a third of it and so on as long as
    that is better; then at the best with ``draws``. Draws, batches and texts are the same for all methods.
    """
    found: list[dict[str, Outcome]] = [{} for _ in noises]
    # At least so many: more where a method's best learning rate is far from its own.
    trials = len(noises) * sum((3 if row.method.learning_rate is None else 1) + draws - 1 for row in rows)
    done, total = 0, trials * rows[0].privacy.steps
    for settings in rows:
        name = settings.method.name

        def tick(name: str = name) -> None:
            nonlocal done
            done += 1
            told(f"rehearsing {name} on public texts", done, max(done, total))

        with unchanged_afterwards(model):
            parts = build_parts(settings, model, public)
            with parts.adapter:
                if parts.texts is not None:
                    parts.texts.stand(Population(list(texts.spanning)))
                warm_start(parts)
                states = parts.states()
                for outcomes, noise in zip(found, noises, strict=True):
                    outcomes[name] = best_rate(parts, states, texts, noise, draws, tick)
    return found


def best_rate(
    parts: Parts,
    states: Mapping[str, Mapping[str, Tensor]],
    texts: Texts,
    noise: Noise,
    draws: int,
    tick: Callable[[], None],
) -> Outcome:
    """The best rate, with ``draws`` draws of noise: found with one, up or else down as long as that is better.

    parts: attached, and left in another state. states: of the start. A rate of the settings is the only one that is
    tried.
    """
    tried: dict[float, list[Tensor]] = {}
    trial = trials_of(parts, states, texts, noise, tick)

    def attempt(rate: float, draw: int) -> None:
        tried.setdefault(rate, []).append(trial(rate, draw))

    def first(rate: float) -> float:
        if rate not in tried:
            attempt(rate, 0)
        return float(tried[rate][0].mean())

    best = parts.hyper.learning_rate
    first(best)
    for factor in (_WIDTH, 1 / _WIDTH) if parts.settings.method.learning_rate is None else ():
        before = best
        for _ in range(_FARTHEST):
            astray = factor < 1 and math.isinf(first(best))  # of which a smaller rate may be no better yet
            further = float(f"{best * factor:.3g}")
            if first(further) >= first(best) and not astray:
                break
            best = further
        if best != before:
            break
    for draw in range(1, draws):
        attempt(best, draw)
    return Outcome(parts.method.name, best, torch.stack(tried[best]))


def trials_of(
    parts: Parts,
    states: Mapping[str, Mapping[str, Tensor]],
    texts: Texts,
    noise: Noise,
    tick: Callable[[], None],
) -> Attempt:
    """Trials from ``states`` on, which leave the parts in another state. Draws are the same for all rates. tick: called
    after each step."""

    def attempt(rate: float, draw: int) -> Tensor:
        hyper = parts.hyper
        parts.take_states(states)
        parts.hyper = replace(hyper, learning_rate=rate)
        losses = _held_losses(parts, texts, noise, draw, tick)
        parts.hyper = hyper
        return losses

    return attempt


def trial_step(parts: Parts, records: Examples, noise: Noise, draw: int) -> Step:
    """The run's step on public texts instead of its records, drawn and noised by the public seed.

    A step's mean has the noise of the run, whatever the number of texts: with fewer than N of them, batches stay as
    large as the run's as far as there are texts, and sigma shrinks with batches that cannot.
    """
    generator = counter_generator(parts.settings.run.seed, stream=_STREAM + draw)
    count = min(len(records), round(noise.records)) or 1
    stand_ins = generator.permutation(len(records))[:count].tolist()
    batch = min(noise.batch, float(count), *(() if noise.drawn is None else (float(noise.drawn),)))
    key, batches_key, masks_key = (int(k) for k in generator.integers(2**62, size=3))
    draws = PoissonSampler(count, batch / count, insecure_seed=batches_key)
    sigma = noise.std * batch / noise.privacy.clip_norm
    sampling: Sampling = draws.sampling
    correlated = None
    if noise.bands > 1:
        sampling = CyclicPoissonSampling(min(1.0, noise.bands * batch / count), noise.bands)
        correlated = CorrelatedNoise(band_coefficients(noise.bands, noise.privacy.steps), parts.coordinates)
    return Step(
        state=parts,
        mechanism=GaussianMechanism(
            parts.coordinates,
            clip_norm=noise.privacy.clip_norm,
            event=StepEvent(sampling, sigma),
            expected_batch_size=batch,
            ledger=Uncharged(),
            noise=NoiseSource(key),
            clipping=parts.hyper.clipping,
            correlated=correlated,
        ),
        examples=records,
        learning_rate=parts.learning_rate,
        draw=lambda: [stand_ins[i] for i in draws.draw()],
        max_tokens=parts.settings.run.max_tokens,
        dropout=parts.settings.model.dropout,
        masks=private_generator(masks_key),
    )


def _held_losses(parts: Parts, texts: Texts, noise: Noise, draw: int, tick: Callable[[], None]) -> Tensor:
    """Of what the run would export, (held,); infinite where training went astray."""
    try:
        trial_step(parts, texts.records, noise, draw).take_many(noise.privacy.steps, tick)
    except torch.linalg.LinAlgError:  # a matrix that is not finite has no decomposition
        return torch.full((len(texts.held),), float("inf"), dtype=torch.float64)
    with parts.exported() as model:
        losses = record_losses(model, texts.held)
    return losses.nan_to_num(nan=float("inf"))
