"""What a recommendation says in words, for a terminal and for its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from privlora.config.auto import run_sizes
from privlora.pages.numbers import duration
from privlora.rehearsals.kept import of_rates

if TYPE_CHECKING:
    from privlora.rehearsals.recommending import Recommendation, Size

_APART = 2.0  # standard deviations of a draw, by which two losses have to differ
_WORTH = 0.1  # of the noise, that twice the passes or more have to take away to be advised


def meaning_of_noise() -> str:
    return (
        "noise is that of the whole run: the standard deviation, in units of clip_norm, of the noise in each "
        "coordinate of the mean of all its steps, sigma / (batch sqrt(steps))"
    )


def advice(found: Recommendation) -> list[str]:
    """Sentences about what the settings' own size is worth next to the others."""
    own = next(size for size in found.by_passes if size.own)
    lines = []
    better = [
        size for size in found.by_passes if size.passes <= 1.1 * own.passes and size.noise < 0.95 * own.noise
    ]
    if better:
        best = min(better, key=lambda size: size.noise)
        lines.append(
            f"In as many passes or fewer, {_named(best)} would have {_less(best, own)} less noise than "
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
        words = (
            f"On the public records the lowest loss, {best.loss:.4f} nats per token, came of {_named(best)}"
        )
        words += f" at learning rate {best.learning_rate:.3g}; {found.untrained:.4f} without training."
        lines.append(words)
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


def minutes_of(size: Size) -> list[str]:
    """A cell of the tables, where steps were timed."""
    return [] if size.minutes is None else [f"{size.minutes:,.{1 if size.minutes < 100 else 0}f}"]


def _less(size: Size, other: Size) -> str:
    return f"{1 - size.noise / other.noise:.0%}"


def heads(found: Recommendation) -> Sequence[str]:
    """Of the tables of a page."""
    names = ("ε", "passes", "steps", "batch", "σ", "noise of the run", "learning rate")
    return (*names, *(["loss"] if has_losses(found) else []), *(["minutes"] if found.pace else []))


def has_losses(found: Recommendation) -> bool:
    """Whether sizes were rehearsed, on public records."""
    return any(size.loss is not None for size in (*found.by_passes, *found.by_epsilon))
