"""What a run could be at several sizes and promises: its noise, exactly, and its loss, as far as public records tell.

Nothing private is read. The one number that sizes are compared by is the noise of a run,

    nu = sigma / (b sqrt(T)),

the standard deviation, in units of clip_norm, of the noise in each coordinate of the mean of all T releases (sums
divided by b). More passes over N units lower it towards a limit that N and epsilon set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from privlora.config import Settings
from privlora.config.auto import PASSES, of_few, run_sizes
from privlora.errors import ConfigError
from privlora.mechanisms import noise_in_sums
from privlora.methods import find_method
from privlora.pages.numbers import duration, number
from privlora.rehearsals.kept import of_rates
from privlora.rehearsals.pace import Pace, measure_pace, most_passes
from privlora.rehearsals.settling import public_texts, try_rates
from privlora.rehearsals.trials import Bench, Told, start_losses
from privlora.training.misfits import refuse_unrehearsed
from privlora.training.promise import bands_of, plan_privacy

_PASSES = (1.0, 2.0, 5.0, 10.0, 20.0)
_EPSILONS = (0.5, 1.0, 2.0, 3.0, 6.0, 8.0)
_NOISE = "finding the noise of each size"
_REHEARSING = "rehearsing sizes on public records"
_APART = 2.0  # standard deviations of a draw, by which two losses have to differ
_WORTH = 0.1  # of the noise, that twice the passes or more have to take away to be advised

MEANING: Final = (
    "noise is that of the whole run: the standard deviation, in units of clip_norm, of the noise in each "
    "coordinate of the mean of all its steps, sigma / (batch sqrt(steps))"
)


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

    def table(self, sizes: Sequence[Size]) -> list[list[str]]:
        """Cells of some of its sizes, for a terminal and a page, below a line of heads."""
        heads = ["epsilon", "passes", "steps", "batch", "sigma", "noise", "rate"]
        losses = any(size.loss is not None for size in (*self.by_passes, *self.by_epsilon))
        found = [heads + ["loss"] * losses + ["minutes"] * (self.pace is not None)]
        for size in sizes:
            cells = [number(size.epsilon), number(size.passes, 2), number(size.steps), number(size.batch)]
            cells += [number(size.noise_multiplier), number(size.noise, 3), number(size.learning_rate, 3)]
            if losses:
                cells.append(number(size.loss))
            if size.minutes is not None:
                cells.append(f"{size.minutes:,.{1 if size.minutes < 100 else 0}f}")
            found.append(cells)
        return found


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
    texts, bench = None, Bench(model, tokenizer, told)  # type: ignore[arg-type]  # without a model, nothing is tried
    if settings.auto is not None and settings.auto.rehearses_rate:
        texts = public_texts(settings, bench)  # first, since they may be none
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
        settings = settings.changed(auto=None)
        untrained = float(start_losses(model, texts).mean())
        first = next(size for size in found if size.own)
        best = try_rates(settings, first.noise_multiplier, texts, bench, untrained)
        every = [*found, *epsilons]
        for number, size in enumerate(every):
            told(_REHEARSING, number, len(every))
            rate = float(f"{best.learning_rate * math.sqrt(first.steps / size.steps):.3g}")
            at = _of_size(settings, replace(size, learning_rate=rate))
            loss = try_rates(at, size.noise_multiplier, texts, Bench(model, tokenizer), untrained).loss
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
    return settings.changed(privacy=sizes, method={"learning_rate": size.learning_rate})


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


def advice(found: Recommendation) -> list[str]:
    """Sentences about what the settings' own size is worth next to the others."""
    own = next(size for size in found.by_passes if size.own)
    lines = []
    best = min((s for s in found.by_passes if s.passes <= 1.1 * own.passes), key=lambda size: size.noise)
    if best.noise < 0.95 * own.noise:
        lines.append(
            f"In as many passes or fewer, {_named(best)} would have {1 - best.noise / own.noise:.0%} less noise than "
            f"{_named(own)}: larger batches, fewer steps."
        )
    lines += found.bounds
    if found.pace is not None:
        lines += _of_budget(found)
    if found.relative_rate:
        lines.append("Learning rates are relative (docs/glossary.md).")
    if found.by_noise:
        lines.append(
            "Learning rates are the method's defaults: the run's own is found before it begins, by noise alone on "
            "texts that the model writes."
        )
    more = next((size for size in found.by_passes if size.passes >= 1.9 * own.passes), None)
    by_heart = _learnt_by_heart(found)
    if by_heart is not None:
        best, worse = by_heart
        lines.append(
            f"More passes than {best.passes:.2g} made the loss on public records higher, {worse.loss:.4f} after "
            f"{_named(worse)} and {best.loss:.4f} after {_named(best)}. Noise is not the cause, since it is "
            f"less: long rehearsals learn the {found.public} public records by heart. More passes are not advised on "
            "their account; more public records would tell."
        )
    share = 0.0 if more is None else 1 - more.noise / own.noise
    told_otherwise = by_heart is not None and more is not None and more.passes > by_heart[0].passes
    if more is not None and not (told_otherwise and share > _WORTH):
        lines.append(
            f"{more.passes / own.passes:.2g} times the passes ({_named(more)}) take away {share:.0%} of the noise"
            + (
                "."
                if share > _WORTH
                else ": what is left follows from N and epsilon, and more compute hardly helps."
            )
        )
    rehearsed = [size for size in found.by_passes if size.loss is not None]
    if rehearsed and found.untrained is not None:
        best = min(rehearsed, key=lambda size: size.loss or 0.0)
        lines.append(
            f"On the public records the lowest loss, {best.loss:.4f} nats per token, came of {_named(best)} at "
            f"learning rate {best.learning_rate:.3g}; {found.untrained:.4f} without training."
        )
        if found.rates is not None:
            lines.append(f"Of {_named(own)}: {of_rates(found.rates)}.")
        if best.loss is not None and best.loss >= found.untrained:
            lines.append(
                "No size did better than no training, so these records say little: give some that the base model does "
                "not know by heart, of the kind of the private ones."
            )
        if found.public < found.units / 10:
            lines.append(
                f"The {found.public} public records that stood for {found.units:g} private ones are seen many times in "
                "long rehearsals, which learn them by heart: with many passes these losses are too high."
            )
    lines.append("Noise falls as 1 / N: with twice the units, the same passes leave about half of it.")
    lines.append(
        "Losses of rehearsals are of public records, and say which size does better, not how well it will do on yours."
        if rehearsed
        else "No loss is shown: --public FILE rehearses each size on public records, for their losses."
    )
    return lines


def _of_budget(found: Recommendation) -> list[str]:
    """What the minutes have room for, and what was timed."""
    assert found.pace is not None
    assert found.budget is not None
    minutes = f"{found.budget:g} minutes on this machine"
    if found.fitting is None:
        room = f"{minutes} have no room for the fewest steps of a run."
    else:
        size = next(s for s in found.by_passes if (s.steps, s.batch) == run_sizes(found.units, found.fitting))
        room = (
            f"{minutes} have room for {found.fitting:g} passes, {_named(size)}: steps: auto, expected_batch_size: auto "
            f"and auto.passes: {found.fitting:g}."
        )
    return [
        room,
        f"Steps were timed with random tokens, {found.pace.tokens} a record: {duration(found.pace.record)} a record "
        f"and {duration(found.pace.step)} a step. Shorter records take less (--tokens); loading, evaluations and "
        "checkpoints are left out.",
    ]


def _learnt_by_heart(found: Recommendation) -> tuple[Size, Size] | None:
    """The size of least loss, and the worst of more passes, where draws do not account for its lead.

    Noise does not, since more passes have less of it. None where no size did better than no training.
    """
    rehearsed = [size for size in found.by_passes if size.loss is not None]
    if not rehearsed or found.untrained is None:
        return None
    spread = 0.0 if found.rates is None else found.rates["rows"][0]["spread"] or 0.0
    best = min(rehearsed, key=lambda size: size.loss or 0.0)
    longer = [size for size in rehearsed if size.passes > best.passes and size.noise < best.noise]
    worst = max(longer, key=lambda size: size.loss or 0.0, default=best)
    assert best.loss is not None
    assert worst.loss is not None
    told = best.loss < found.untrained and worst.loss - best.loss > _APART * spread
    return (best, worst) if told else None


def _named(size: Size) -> str:
    return f"{size.steps} steps of {size.batch:g}"
