"""``run.tokens_per_micro_batch: auto``: as many tokens as fit in what is free, by public facts alone.

Chosen from settings, model and device alone, to whose free memory what this process holds is added: how micro-batches
are cut then tells nothing of the records, also of those that were looked at before. It is no part of what is
promised, so a resumed run chooses anew, on whatever machine it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from privlora.config import Settings
from privlora.config.one_place import MICRO_BATCH
from privlora.errors import ConfigError
from privlora.methods import CHOICES, find_row
from privlora.pages.numbers import in_one_unit
from privlora.training.cycles import bands_to_come, kept_bytes
from privlora.training.footprint import free_bytes
from privlora.training.models import adapter_for
from privlora.training.peak import (
    StepMemory,
    Unknown,
    largest_batch,
    longest_row,
    model_bytes,
    tokens_of_a_row,
)
from privlora.training.sharding import is_sharded

# Of what is free. On a CPU glibc keeps freed pieces, up to as much again (docs/performance.md).
_PART: Final = {"cpu": 0.45, "cuda": 0.85}
# Beyond these the rounding that micro-batches share was not measured (docs/sharp-edges.md): clipping may not cover it.
_ROWS, _TOKENS = 1024, 65_536
_RECORD_BYTES, _TOKEN_BYTES = 64, 5  # of the records in memory, at most


@dataclass(frozen=True)
class Fitted:
    """tokens: of a micro-batch. why: a line for whoever trains; it tells of the machine and of public numbers alone."""

    tokens: int
    why: str


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
) -> tuple[Settings, Fitted | None]:
    """The settings with a number in the place of ``auto``, and why; as they are where they have one.

    model: the base model, not adapted. loaded: whether it lies on the device already; else that takes memory, too.
    sharing: processes that share the device's memory. free: bytes that it has left, from before records were read; None
    for those that it has now.
    Raises ConfigError where not even a single row of data.max_length fits.
    """
    if settings.run.tokens_per_micro_batch != "auto":
        return settings, None
    free = free_bytes(device) if free is None else free
    found = _fitted(settings, model, device, loaded, sharing, free)
    return in_micro_batches(settings, found.tokens), found


def _fitted(
    settings: Settings, model: torch.nn.Module, device: torch.device, loaded: bool, sharing: int, free: float
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
    try:
        memory = StepMemory(settings, model, device)
        candidates, bound = _candidates(settings, model, length)
        sizes = {tokens: memory.peak(tokens).step_bytes for tokens in candidates}
        fits = [tokens for tokens, takes in sizes.items() if takes <= room]
        if not fits:
            raise _too_large(settings, model, device, room, free / sharing, part)
    except Unknown as unknown:
        return Fitted(MICRO_BATCH, f"micro-batches of {MICRO_BATCH} tokens: {unknown}")
    tokens = max(fits)
    if tokens < candidates[-1]:
        bound = "larger ones do not fit"
    if free == float("inf"):
        return Fitted(tokens, f"micro-batches of {tokens} tokens: what is free is not known; {bound}")
    # As `privlora plan` has it next to the model.
    say, own = in_one_unit(room, free), in_one_unit(sizes[tokens])(sizes[tokens])
    kept = [
        *([] if loaded else ["the model"]),
        *(["the records"] if device.type == "cpu" else []),
        *(["noise that is kept"] if noise else []),
    ]
    return Fitted(
        tokens,
        f"micro-batches of {tokens} tokens: a step takes {own} at its most and "
        f"may take {say(room)}, {part:.0%} of the {say(free)} that are free"
        + (f", shared by {sharing} processes" if sharing > 1 else "")
        + (f", less {' and '.join(kept)}" if kept else "")
        + f"; {bound}",
    )


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
    settings: Settings, model: torch.nn.Module, device: torch.device, room: float, free: float, part: float
) -> ConfigError:
    """What to lower, and to what: memory goes with length in a nearly straight line."""

    def takes(length: int) -> int:
        data = settings.data.model_copy(update={"max_length": length})
        return StepMemory(settings.model_copy(update={"data": data}), model, device).peak(length).step_bytes

    length = longest_row(settings, model)
    half = max(1, length // 2)
    whole, less = takes(length), takes(half)
    each = (whole - less) / max(1, length - half)
    fits = int(length - (whole - room) / each) if each > 0 else 0
    say = in_one_unit(whole, free)
    return ConfigError(
        f"a step takes {say(whole)} with a single row of data.max_length={length} tokens, and of the "
        f"{say(max(0.0, free))} that are free {say(max(0.0, room))} can be used",
        why="it would end before it is charged, and only where a long record is drawn",
        fix=(f"set data.max_length to at most {fits}, " if fits >= 1 else "")
        + "set model.gradient_checkpointing=non-reentrant or model.dtype=bfloat16, lower adapter.r, or free "
        f"{say((whole - room) / part)}",
    )
