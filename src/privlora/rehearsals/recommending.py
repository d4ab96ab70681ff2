"""What a run could be at several sizes and promises: its noise, exactly, and its loss, as far as public records tell.

Nothing private is read. The one number that sizes are compared by is the noise of a run,

    nu = sigma / (b sqrt(T)),

the standard deviation, in units of clip_norm, of the noise in each coordinate of the mean of all T releases (sums
divided by b). More passes over N units lower it towards a limit that N and epsilon set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from privlora.config import Settings
from privlora.config.auto import PASSES, of_few, run_sizes
from privlora.errors import ConfigError
from privlora.mechanisms import noise_in_sums
from privlora.methods import find_method
from privlora.rehearsals.pace import Pace, measure_pace, most_passes
from privlora.rehearsals.settling import public_texts, try_rates
from privlora.rehearsals.trials import Told, start_losses
from privlora.training.misfits import refuse_unrehearsed
from privlora.training.promise import bands_of, plan_privacy

_PASSES = (1.0, 2.0, 5.0, 10.0, 20.0)
_EPSILONS = (0.5, 1.0, 2.0, 3.0, 6.0, 8.0)
_NOISE = "finding the noise of each size"
_REHEARSING = "rehearsing sizes on public records"


@dataclass(frozen=True)
class Size:
    """One run that could be. passes: T b / N. noise: nu. loss: of public records after it, at learning_rate; None where
    nothing was rehearsed. own: whether it is the one that the settings describe. divided: whether as ``auto`` would.
    minutes: of its steps on this machine; None where none was timed."""

    epsilon: float
    passes: float
    steps: int
    batch: float
    noise_multiplier: float
    noise: float
    learning_rate: float
    loss: float | None = None
    own: bool = False
    divided: bool = False
    minutes: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class Recommendation:
    """by_passes: at the settings' epsilon, divided into steps and batch as ``auto`` does, and the settings' own.
    by_epsilon: at their steps and batch. untrained: the loss of the same public records before; None where nothing was
    rehearsed. public: how many public records stood for private ones. rates: which ones were rehearsed for the
    settings' own size, as a report keeps them. bounds: what those of ``run_sizes`` did, in sentences. relative_rate:
    whether learning rates are in the size of the frozen weights. by_noise: whether the run finds its own by noise
    alone, so that those of sizes are the method's defaults. pace: of the steps that were timed. budget: minutes that a
    run may take; fitting: the most passes that it has room for, None where it has room for none."""

    units: float
    delta: float
    by_passes: Sequence[Size]
    by_epsilon: Sequence[Size]
    untrained: float | None = None
    public: int = 0
    rates: Mapping[str, Any] | None = None
    bounds: Sequence[str] = ()
    relative_rate: bool = False
    by_noise: bool = False
    pace: Pace | None = None
    budget: float | None = None
    fitting: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def recommend(
    settings: Settings,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    told: Told = lambda what, done, total: None,
    *,
    budget: float | None = None,
    tokens: int | None = None,
) -> Recommendation:
    """Sizes of runs with these settings. model, tokenizer: for rehearsals, where auto.choose names the learning rate,
    and for a budget. budget: minutes that a run's steps may take; steps are then timed with records of so many tokens,
    data.max_length if that is not said.

    A rehearsed size takes the learning rate that is best for the settings' own, times the root of how many steps more
    or fewer it has. Raises ConfigError where there is no noise, or no target to compare by.
    """
    privacy = settings.privacy
    find_method(settings.method.name)  # refuses methods of votes, and names of several methods
    if not privacy.private or privacy.target_epsilon is None:
        raise ConfigError(
            "sizes are compared at one privacy.target_epsilon, and these settings have none",
            fix="give target_epsilon instead of noise_multiplier or private=false",
        )
    refuse_unrehearsed(settings)
    texts = None
    if settings.auto is not None and settings.auto.rehearses_rate:
        texts = public_texts(settings, tokenizer, told)  # first, since they may be none
    asked = PASSES if settings.auto is None else settings.auto.passes
    pace, fitting = None, None
    if budget is not None:
        assert model is not None
        pace = measure_pace(settings, model, tokenizer, tokens=tokens or settings.data.max_length, told=told)
        fitting = most_passes(pace, privacy.n, budget)
    counts = sorted({*_PASSES, asked, *([] if fitting is None else [fitting])})
    found, total = [_sized(settings, privacy.target_epsilon, own=True)], len(counts) + len(_EPSILONS) + 2
    for count in counts:
        steps, batch = run_sizes(privacy.n, count)
        if (steps, batch) not in {(size.steps, size.batch) for size in found}:  # bounds make some the same
            found.append(_sized(settings, privacy.target_epsilon, steps, batch))
        told(_NOISE, len(found), total)
    found.sort(key=lambda size: (size.passes, size.steps))
    bounded = [of_few(privacy.n, count, *run_sizes(privacy.n, count)) for count in (asked, counts[-1])]
    epsilons = []
    for epsilon in sorted({*_EPSILONS, privacy.target_epsilon}):
        epsilons.append(_sized(settings, epsilon, own=epsilon == privacy.target_epsilon))
        told(_NOISE, len(found) + len(epsilons), total)
    told(_NOISE, total, total)
    rehearsed: dict[str, Any] = {}
    if texts is not None:
        assert model is not None
        settings = settings.model_copy(update={"auto": None})
        untrained = float(start_losses(model, texts).mean())
        first = next(size for size in found if size.own)
        best = try_rates(settings, first.noise_multiplier, texts, model, tokenizer, told, untrained)
        every = [*found, *epsilons]
        for number, size in enumerate(every):
            told(_REHEARSING, number, len(every))
            rate = float(f"{best.learning_rate * math.sqrt(first.steps / size.steps):.3g}")
            at = _of_size(settings, replace(size, learning_rate=rate))
            loss = try_rates(at, size.noise_multiplier, texts, model, tokenizer, _unheard, untrained).loss
            every[number] = replace(size, learning_rate=rate, loss=loss if math.isfinite(loss) else None)
        told(_REHEARSING, len(every), len(every))
        found, epsilons = every[: len(found)], every[len(found) :]
        facts = best.to_dict(settings.method.name, untrained)
        rehearsed = {"public": len(texts.records), "untrained": facts.pop("untrained"), "rates": facts}
    assert privacy.delta is not None
    if pace is not None:
        found, epsilons = (
            [replace(size, minutes=pace.minutes(size.steps, size.batch)) for size in sizes]
            for sizes in (found, epsilons)
        )
    bounds = list(dict.fromkeys(note for note in bounded if note is not None))
    relative = find_method(settings.method.name).is_relative(settings.method.relative_rate)
    by_noise = settings.auto is not None and settings.auto.rate_by_noise
    return Recommendation(
        privacy.n,
        privacy.delta,
        found,
        epsilons,
        bounds=bounds,
        relative_rate=relative,
        by_noise=by_noise,
        pace=pace,
        budget=budget,
        fitting=fitting,
        **rehearsed,
    )


def _unheard(what: str, done: int, total: int) -> None:
    """Of the trials of one size."""


def _of_size(settings: Settings, size: Size) -> Settings:
    sizes = {
        "steps": size.steps,
        "expected_batch_size": size.batch,
        "public_dataset_size": round(settings.privacy.n),
        "sample_rate": None,
        "target_epsilon": size.epsilon,
    }
    bands = settings.privacy.bands
    if isinstance(bands, int):  # a class of units has to hold a batch
        sizes["bands"] = max(1, min(bands, math.floor(settings.privacy.n / size.batch)))
    privacy = settings.privacy.model_copy(update=sizes)
    method = settings.method.model_copy(update={"learning_rate": size.learning_rate})
    return settings.model_copy(update={"privacy": privacy, "method": method})


def _sized(
    settings: Settings,
    epsilon: float,
    steps: int | None = None,
    batch: float | None = None,
    *,
    own: bool = False,
) -> Size:
    privacy, method = settings.privacy, find_method(settings.method.name)
    steps, batch = steps or privacy.steps, batch or privacy.b
    given = settings.method.learning_rate
    passes = steps * batch / privacy.n
    divided = (steps, batch) == run_sizes(privacy.n, passes)
    blank = Size(epsilon, passes, steps, batch, 0.0, 0.0, given or 0.0, own=own, divided=divided)
    plan = plan_privacy(_of_size(settings, blank))
    sigma, bands = plan.event.noise_multiplier, bands_of(plan)
    rate = method.rate_of(steps, relative=method.is_relative(settings.method.relative_rate), bands=bands)
    return replace(
        blank,
        learning_rate=rate if given is None else given,
        noise_multiplier=sigma,
        noise=sigma * noise_in_sums(bands, steps) / (batch * math.sqrt(steps)),
    )
