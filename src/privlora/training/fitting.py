"""``run.tokens_per_micro_batch: auto``: as many tokens as fit in what is free, by public facts alone.

Chosen from settings, model and device alone, to whose free memory what this process holds is added: how micro-batches
are cut then tells nothing of the records, also of those that were looked at before. It is no part of what is
promised, so a resumed run chooses anew, on whatever machine it is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
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
from privlora.training.peak import StepMemory, longest_row, weight_bytes
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
    """The settings with the default number instead of ``auto``, for steps of other memory than it counts."""
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
    """The settings with a number instead of ``auto``, and why; as they are where they have one.

    model: the base model, not adapted. loaded: whether it lies on the device already; else that takes memory, too.
    sharing: processes that share the device's memory. free: bytes that it has left, from before records were read; None
    for those that it has now.
    Raises ConfigError where not even a single row of data.max_length fits.
    """
    if settings.run.tokens_per_micro_batch != "auto":
        return settings, None
    free = (free_bytes(device) if free is None else free) / sharing
    if settings.method.name in CHOICES or find_row(settings.method.name).releases != "gradients":
        found = Fitted(MICRO_BATCH, f"micro-batches of {MICRO_BATCH} tokens")
    elif is_sharded(model):
        found = Fitted(
            MICRO_BATCH, f"micro-batches of {MICRO_BATCH} tokens: the base is spread over processes"
        )
    else:
        memory, length = StepMemory(settings, model, device), longest_row(settings, model)
        noise = kept_bytes(bands_to_come(settings.privacy), memory.adapter)
        records = settings.privacy.n * (_RECORD_BYTES + _TOKEN_BYTES * length) if device.type == "cpu" else 0
        part = _PART.get(device.type, _PART["cpu"])
        room = part * (free - (0 if loaded else weight_bytes(settings, model))) - records - noise
        found = _fitted(settings, memory, length, free, room, part)
    return in_micro_batches(settings, found.tokens), found


def _fitted(
    settings: Settings, memory: StepMemory, length: int, free: float, room: float, part: float
) -> Fitted:
    """Of powers of two and halves between them: from what one row takes to what a whole batch does, or was measured."""
    of_a_batch = memory.of_batch * max(length, memory.least)
    ceiling, bound = MICRO_BATCH, "how larger ones round was not measured"
    if not settings.privacy.private:
        ceiling, bound = _TOKENS, "larger ones were not measured"
    elif not memory.adapter.reduced_precision:
        ceiling = max(ceiling, min(_TOKENS, _ROWS * memory.least))
    most = max(length, min(ceiling, of_a_batch))
    if of_a_batch <= ceiling:
        bound = "a batch holds no more"
    elif most == length:
        bound = f"one row of data.max_length={length} is more than others may share"
    steps = {part << power for power in range(20) for part in (2, 3)}
    candidates = sorted({length, most, *(n for n in steps if length < n < most)})
    sizes = {tokens: memory.peak(tokens).step_bytes for tokens in candidates}
    fits = [tokens for tokens, takes in sizes.items() if takes <= room]
    if not fits:
        raise _too_large(memory, length, sizes[length], free, room, part)
    tokens = max(fits)
    if tokens < most:
        bound = "larger ones do not fit"
    say = in_one_unit(*(n for n in (sizes[tokens], room, free) if n < math.inf))
    known = free < math.inf
    why = f"of {say(room)} that it may use"
    return Fitted(
        tokens,
        f"micro-batches of {tokens} tokens: a step takes at most about {say(sizes[tokens])} "
        f"{why if known else '(what is free is not known)'}; {bound}",
    )


def _too_large(
    memory: StepMemory, length: int, whole: int, free: float, room: float, part: float
) -> ConfigError:
    """What to lower, and to what."""
    fits = bisect_right(range(1, length), room, key=lambda width: memory.peak(width, width).step_bytes)
    say = in_one_unit(whole, free)
    return ConfigError(
        f"a step takes {say(whole)} with a single row of data.max_length={length} tokens, and of the "
        f"{say(max(0.0, free))} that are free {say(max(0.0, room))} can be used",
        why="it would end before it is charged, and only where a long record is drawn",
        fix=(f"set data.max_length to at most {fits}, " if fits else "")
        + "set model.gradient_checkpointing=non-reentrant or model.dtype=bfloat16, lower adapter.r, or free "
        f"{say((whole - room) / part)}",
    )
