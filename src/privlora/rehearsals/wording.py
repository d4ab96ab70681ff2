"""What a recommendation says in words, for a terminal and for its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from privlora.rehearsals.recommending import Recommendation, Size

_WORTH = 0.1  # of the noise, that twice the passes or more have to take away to be advised


def meaning_of_noise() -> str:
    return (
        "noise is that of the whole run: the standard deviation, in units of clip_norm, of the noise in each "
        "coordinate of the mean of all its steps, sigma / (batch sqrt(steps))"
    )


def advice(found: Recommendation) -> list[str]:
    """Sentences about what the settings' own size is worth beside the others."""
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
    more = next((size for size in found.by_passes if size.passes >= 1.9 * own.passes), None)
    if more is not None:
        share = 1 - more.noise / own.noise
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
        if best.loss is not None and best.loss >= found.untrained:
            lines.append(
                "No size did better than no training, so these records hardly tell: give some that the base model does "
                "not know by heart, of the kind of the private ones."
            )
        if found.public < found.units / 10:
            lines.append(
                f"The {found.public} public records that stood for {found.units:g} private ones are seen many times in "
                "long rehearsals, which learn them by heart: with many passes these losses are too high."
            )
    lines.append(
        "Noise falls as 1 / N: with twice the units, the same passes leave about half of it. "
        + (
            "Losses of rehearsals are of public records, and say which size does better, not how well it will do on "
            "yours."
            if rehearsed
            else "--public FILE rehearses each size on public records, for their losses."
        )
    )
    return lines


def _named(size: Size) -> str:
    return f"{size.steps} steps of {size.batch:g}"


def _less(size: Size, other: Size) -> str:
    return f"{1 - size.noise / other.noise:.0%}"


def heads() -> Sequence[str]:
    """Of the tables of a page."""
    return ("ε", "passes", "steps", "batch", "σ", "noise of the run", "learning rate", "loss")
