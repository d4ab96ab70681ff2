"""``run.tokens_per_micro_batch: auto``: as many tokens as fit in what is free, by public facts alone.

Chosen from settings, model and device alone, to whose free memory what this process holds is added: how micro-batches
are cut then tells nothing of the records, also of those that were looked at before. It is no part of what is
promised, so a resumed run chooses anew, on whatever machine it is, from what it counted when it began (`counted`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from privlora.config import Settings
from privlora.config.one_place import MICRO_BATCH
from privlora.errors import ConfigError
from privlora.methods import CHOICES, find_row
from privlora.sizes import in_one_unit
from privlora.training.cycles import bands_to_come, kept_bytes
from privlora.training.footprint import free_bytes
from privlora.training.models import adapter_for
from privlora.training.peak import (
    Peak,
    Told,
    Unknown,
    bound_of_a_step,
    largest_batch,
    longest_row,
    model_bytes,
    peak_of_a_step,
    tokens_of_a_row,
)
from privlora.training.sharding import is_sharded

# Of what is free. On a CPU glibc keeps freed pieces, up to as much again (docs/performance.md).
_PART: Final = {"cpu": 0.45, "cuda": 0.85}
# Beyond these the rounding that micro-batches share was not measured (docs/sharp-edges.md): clipping may not cover it.
_ROWS, _TOKENS = 1024, 65_536
_RECORD_BYTES, _TOKEN_BYTES = 64, 5  # of the records in memory, at most


_ROUGH: Final = " (a rough bound, several times what it takes, which `privlora plan` counts)"


@dataclass(frozen=True)
class Fitted:
    """tokens: of a micro-batch. why: a line for whoever trains; it tells of the machine and of public numbers alone.
    peak: of a step with as many; None where it was not asked, or a bound did."""

    tokens: int
    why: str
    peak: Peak | None = None


def in_default_micro_batches(settings: Settings) -> Settings:
    """The settings with the default number in the place of ``auto``, for steps of other memory than it counts."""
    return in_micro_batches(settings, settings.run.max_tokens)


def in_micro_batches(settings: Settings, tokens: int) -> Settings:
    """The settings with micro-batches of so many tokens."""
    return settings.model_copy(
        update={"run": settings.run.model_copy(update={"tokens_per_micro_batch": tokens})}
    )


def with_micro_batches(
    settings: Settings,
    model: torch.nn.Module,
    device: torch.device,
    *,
    loaded: bool = True,
    sharing: int = 1,
    free: float | None = None,
    exactly: bool = False,
    told: Told = lambda *_: None,
    known: dict[int, Peak] | None = None,
) -> tuple[Settings, Fitted | None]:
    """The settings with a number in the place of ``auto``, and why; as they are where they have one.

    model: the base model, not adapted. loaded: whether it lies on the device already; else that takes memory, too.
    sharing: processes that share the device's memory. free: bytes that it has left, from before records were read; None
    for those that it has now.
    exactly: whether steps are taken on paper also where a bound on them is below what they may take, and so the choice
    is known. told: how many of those are done. known: tokens -> what is known of such steps; what is counted is added.
    Raises ConfigError where not even a single row of data.max_length fits.
    """
    if settings.run.tokens_per_micro_batch != "auto":
        return settings, None
    free = free_bytes(device) if free is None else free
    found = _fitted(
        settings,
        model,
        device,
        loaded,
        sharing,
        free,
        exactly,
        in_one_count(told),
        {} if known is None else known,
    )
    run = settings.run.model_copy(update={"tokens_per_micro_batch": found.tokens})
    return settings.model_copy(update={"run": run}), found


def _fitted(
    settings: Settings,
    model: torch.nn.Module,
    device: torch.device,
    loaded: bool,
    sharing: int,
    free: float,
    exactly: bool,
    told: Told,
    known: dict[int, Peak],  # seconds each
) -> Fitted:
    if settings.method.name in CHOICES or find_row(settings.method.name).releases != "gradients":
        return Fitted(MICRO_BATCH, f"micro-batches of {MICRO_BATCH} tokens")
    if is_sharded(model):
        return Fitted(
            MICRO_BATCH, f"micro-batches of {MICRO_BATCH} tokens: the base is spread over processes"
        )
    length = longest_row(settings, model)
    part = _PART.get(device.type, _PART["cpu"])
    room = part * (free / sharing - (0 if loaded else model_bytes(model)))
    if device.type == "cpu":
        room -= settings.privacy.n * (_RECORD_BYTES + _TOKEN_BYTES * length)
    noise = kept_bytes(bands_to_come(settings.privacy), adapter_for(settings, model))
    room -= noise

    def peak(tokens: int, of: Settings = settings) -> Peak:
        found = peak_of_a_step(of, model, device, max_tokens=tokens, told=told)
        assert found is not None
        return found

    def size(tokens: int) -> int:
        if tokens not in known:
            known[tokens] = peak(tokens)
        return known[tokens].step_bytes

    try:
        candidates, bound = _candidates(settings, model, length)
        most = bound_of_a_step(settings, model, max_tokens=candidates[-1]) if not exactly else math.inf
        if most < room:
            tokens, takes, found = candidates[-1], most, None
        else:
            fits = largest_fitting(size, room, candidates)
            if fits is None:
                raise _too_large(settings, length, room, free / sharing, part, peak)
            tokens, takes, found = fits, known[fits].step_bytes, known[fits]
    except Unknown as unknown:
        return Fitted(MICRO_BATCH, f"micro-batches of {MICRO_BATCH} tokens: {unknown}")
    if tokens < candidates[-1]:
        bound = "larger ones do not fit"
    if free == float("inf"):
        return Fitted(tokens, f"micro-batches of {tokens} tokens: what is free is not known; {bound}", found)
    say, own = (
        in_one_unit(room, free),
        in_one_unit(takes)(takes),
    )  # as `privlora plan` has it beside the model
    kept = [
        *([] if loaded else ["the model"]),
        *(["the records"] if device.type == "cpu" else []),
        *(["noise that is kept"] if noise else []),
    ]
    what = f"less than {own}{_ROUGH}" if found is None else f"{own} at its most"
    return Fitted(
        tokens,
        f"micro-batches of {tokens} tokens: a step takes {what} and "
        f"may take {say(room)}, {part:.0%} of the {say(free)} that are free"
        + (f", shared by {sharing} processes" if sharing > 1 else "")
        + (f", less {' and '.join(kept)}" if kept else "")
        + f"; {bound}",
        found,
    )


def in_one_count(told: Told) -> Told:
    """For work in parts, of which nobody knows before how many there are: each counts from 0 on, and ``told`` hears of
    all that is done, of all that is known to be to do.

    >>> tell = in_one_count(lambda done, total: print(f"{done} of {total}"))
    >>> for done, total in ((0, 4), (4, 4), (0, 1), (1, 1)):
    ...     tell(done, total)
    0 of 4
    4 of 4
    4 of 5
    5 of 5
    """
    before = last = 0

    def tell(done: int, total: int) -> None:
        nonlocal before, last
        if done == 0:
            before, last = before + last, total
        told(before + done, before + total)

    return tell


def largest_fitting(size: Callable[[int], int], room: float, candidates: Sequence[int]) -> int | None:
    """The largest of ascending ``candidates`` whose ``size``, which grows with them, is within ``room``; None: none.

    Sizes are asked for few of them: they grow in a nearly straight line.
    """
    most = len(candidates) - 1
    highest = size(candidates[most])
    if highest <= room:
        return candidates[most]
    least, lowest = 0, size(candidates[0])
    if lowest > room:
        return None
    while most - least > 1:
        share = (room - lowest) / max(1, highest - lowest)
        guess = candidates[least] + share * (candidates[most] - candidates[least])
        at = min(most - 1, max(least + 1, bisect_right(candidates, guess) - 1))
        found = size(candidates[at])
        if found <= room:
            least, lowest = at, found
        else:
            most, highest = at, found
    return candidates[least]


def _candidates(settings: Settings, model: torch.nn.Module, length: int) -> tuple[list[int], str]:
    """Powers of two and halves between them: from what one row takes to what a whole batch does, or was measured; and
    which of these ends them."""
    adapter = adapter_for(settings, model)
    least = tokens_of_a_row(settings, adapter)
    ceiling = MICRO_BATCH
    if not settings.privacy.private:
        ceiling = _TOKENS
    elif not adapter.reduced_precision:
        ceiling = max(ceiling, min(_TOKENS, _ROWS * least))
    of_units = settings.rows_of_a_unit
    of_a_batch = largest_batch(settings.privacy) * of_units * max(length, least)
    most = max(length, min(ceiling, of_a_batch))
    steps = {part << power for power in range(20) for part in (2, 3)}
    bound = "a batch holds no more"
    if ceiling < of_a_batch:
        bound = (
            f"one row of data.max_length={length} is more than others may share"
            if most == length
            else "larger ones were not measured"
            if not settings.privacy.private
            else "how larger ones round was not measured"
        )
    return [length, *sorted(n for n in steps if length < n < most), *([most] if most > length else [])], bound


def _too_large(
    settings: Settings, length: int, room: float, free: float, part: float, peak: Callable[..., Peak]
) -> ConfigError:
    """What to lower, and to what: memory goes with length in a nearly straight line."""
    takes, half = peak(length).step_bytes, max(1, length // 2)
    shorter = settings.model_copy(update={"data": settings.data.model_copy(update={"max_length": half})})
    less = peak(half, shorter).step_bytes
    each = (takes - less) / max(1, length - half)
    fits = int(length - (takes - room) / each) if each > 0 else 0
    say = in_one_unit(takes, free)
    return ConfigError(
        f"a step takes {say(takes)} with a single row of data.max_length={length} tokens, and of the "
        f"{say(max(0.0, free))} that are free {say(max(0.0, room))} can be used",
        why="it would end before it is charged, and only where a long record is drawn",
        fix=(f"set data.max_length to at most {fits}, " if fits >= 1 else "")
        + "set model.gradient_checkpointing=non-reentrant or model.dtype=bfloat16, lower adapter.r, or free "
        f"{say((takes - room) / part)}",
    )
