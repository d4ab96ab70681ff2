"""How much memory a step takes, and ``run.tokens_per_micro_batch: auto``: as many tokens as fit in what is free.

The step's most is an estimate from the model's modules and the settings; nothing is run. What each module keeps for the
backward pass is added up (``_saved_bytes``), and all else follows from shapes. Held against steps of five models, the
estimate lies 6 to 23 % above them (docs/performance.md).

The tokens follow from settings, model and device alone, to whose free memory what this process holds is added: how
micro-batches are cut then tells nothing of the records, also of those that were looked at before. It is no part of what
is promised, so a resumed run chooses anew, on whatever machine it is.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.quantised import bits
from privlora.adapters.targets import feature_sizes, output_layer
from privlora.config import Settings
from privlora.config.one_place import MICRO_BATCH
from privlora.coordinates import SpanSpace
from privlora.coordinates.span import EncodedSpace, copies_of, units_beside
from privlora.errors import ConfigError
from privlora.losses import block_rows
from privlora.mechanisms import takes_units_alone
from privlora.methods import find_row
from privlora.pages.numbers import in_one_unit
from privlora.training.footprint import free_bytes, gradient_bytes, item_size, row_tokens
from privlora.training.model_checks import positions_of, routes_tokens, steady_width, text_config
from privlora.training.models import adapter_for, packing_of, set_checkpointing, unchanged_afterwards
from privlora.training.promise import bands_to_come, kept_bytes
from privlora.training.sharding import is_sharded

# Of what is free. On a CPU glibc keeps freed pieces, up to as much again (docs/performance.md).
_PART: Final = {"cpu": 0.45, "cuda": 0.85}
# Beyond these the rounding that micro-batches share was not measured (docs/sharp-edges.md): clipping may not cover it.
_ROWS, _TOKENS = 1024, 65_536
_RECORD_BYTES, _TOKEN_BYTES = 64, 5  # of the records in memory, at most

# A logical batch has more units than are assumed with less than this probability a step.
_RARE = 1e-9
_MORE = 1.1  # of what the formula says: no step that was tried took more
_KERNELS = 24 * 2**20  # what kernels below float32 keep of their own
# Activations that transformers writes out keep three of their widths more than torch's own.
_WRITTEN_OUT = re.compile("New|Fast|Quick|Accurate")
_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class Peak:
    """step_bytes: the largest total that lives during a step, over the loaded model; model_bytes: the model's.

    rows, width: of the micro-batch that takes most.
    """

    step_bytes: int
    model_bytes: int
    rows: int
    width: int


class StepMemory:
    """What a private step takes, of one run.

    model: the base model, with or without weights, in the run's dtype; it is not changed. device: where it will be.

    Attributes: row_bytes, of one row's gradients, as often as they are held at once. update_bytes, of dense updates and
    the weights with them. public_bytes, of the gradients of public texts that are kept. of_batch, rows of a batch.
    least, tokens that a short row counts for. longest, of a row: data.max_length, or what the model reads if that is
    less.
    """

    def __init__(self, settings: Settings, model: Any, device: torch.device) -> None:
        method, privacy = find_row(settings.method.name), settings.privacy
        private = privacy.private
        self.hyper = method.resolve(settings.method, settings.adapter.init, privacy.steps, private=private)
        self.adapter = adapter = adapter_for(settings, model)
        self.settings, self.device, self._kind = settings, device, method.coordinates
        alone = takes_units_alone(self.hyper.clipping) or routes_tokens(model)
        self._at_once = settings.rows_of_a_unit if alone or self._kind.forward_only else None
        self.longest = min(settings.data.max_length, positions_of(model) or settings.data.max_length)
        self._saved, self._item = _saved_bytes(adapter), item_size(model)
        sites = [(part.rank, site.m, site.n) for part in adapter.parts for site in part.sites]
        self._numbers = sum(r * (m + n) for r, m, n in sites)
        self._squares = sum(r * r for r, _, _ in sites) if self.hyper.clipping == "spectral" else 0
        # Of packed weights the largest layer is unpacked as a whole.
        largest = max(m * n for _, m, n in sites)
        self._unpacked = self._item * largest if packing_of(settings.model.packing, model) else 0
        self.update_bytes = self._kind.dense * (4 + self._item) * sum(m * n for _, m, n in sites)
        units = _largest_batch(privacy.n, privacy.q, privacy.max_batch_size)
        self.of_batch = self._beside = units * settings.rows_of_a_unit
        self.public_bytes = self.row_bytes = self.least = 0
        if method.releases == "votes":
            return
        if not self._kind.forward_only:
            self.row_bytes = gradient_bytes(adapter)
            with unchanged_afterwards(model):
                # Short rows count for more where activations are computed again.
                set_checkpointing(model, settings.model.gradient_checkpointing)
                self.least = row_tokens(adapter)
        if issubclass(self._kind, SpanSpace) and settings.synthesis is not None:
            entries = self._kind.inner_kind.entries_of(adapter)
            self.public_bytes = settings.synthesis.count * entries * max(4, self._item)
            if issubclass(self._kind, EncodedSpace):
                copies = copies_of(self._kind.inner_kind)  # end to end, next to what is captured
                self.row_bytes += (copies - 1) * entries * 4
                self._beside = units_beside(entries, self.public_bytes, copies)

    def rows(self, width: int, max_tokens: int) -> int:
        """In a micro-batch of such rows, at most; a unit's rows go through as a whole."""
        fit = min(self.of_batch, self._beside, max_tokens // max(width, self.least))
        return max(self.settings.rows_of_a_unit, fit, 1)

    def peak(self, max_tokens: int, longest: int | None = None) -> Peak:
        """Of the micro-batch of so many tokens that takes most. longest: the longest row's, if not the settings'."""
        longest = longest or self.longest
        shortest = min(max(1, self.least), longest)
        widths = {*range(shortest, longest, 1 + (longest - shortest) // 64), longest}
        sizes = ((self.rows(width, max_tokens), width) for width in widths)
        takes, rows, width = max((self._bytes(rows, width), rows, width) for rows, width in sizes)
        return Peak(takes, weight_bytes(self.settings.model.packing, self.adapter.model), rows, width)

    def _bytes(self, rows: int, width: int) -> int:
        """Of a step whose micro-batches have so many rows."""
        adapter, of_a_unit = self.adapter, self.settings.rows_of_a_unit
        wide = steady_width(adapter, width, self.device) if adapter.reduced_precision else width
        tokens = wide * (self._at_once or rows)  # through the model at once
        kept, logits = tokens * (self._saved[0] + wide * self._saved[1]), self._logits(tokens)
        layers = _number(text_config(adapter.model), "num_hidden_layers") or 1
        state = 16 * self._numbers + self.update_bytes + self.public_bytes  # factors, moments and sums
        gradients = self.row_bytes * (rows if self.settings.privacy.private else 1)
        if self._kind.forward_only:  # without a graph: one layer's tensors at a time
            most = state / 2 + kept / layers + logits * 2 / 3
        elif self._at_once:
            most = state + gradients + kept + logits
        elif self.settings.model.gradient_checkpointing != "none":
            inputs = tokens * _number(text_config(adapter.model), "hidden_size") * layers * self._item
            most = state + inputs + max(logits, kept / layers + gradients)
        else:
            # Their room is taken whole; on a CPU where it is written to, while activations are let go.
            room = gradients if self.device.type != "cpu" else 0.03 * gradients
            most = state + kept + max(logits, room)
        most += self._unpacked
        if not self._kind.forward_only:
            # Clipping has r x r statistics of each unit in float64 where it looks at singular values; units of several
            # rows are added up next to their rows.
            more = max(100 * rows * self._squares, 0.8 * gradients if of_a_unit > 1 else 0)
            clipping = 16 * self._numbers + 1.04 * gradients + more
            release = (24 if self._kind.entrywise else 50) * self._numbers
            most = max(most, state + clipping, state + release)
        return math.ceil(_MORE * most + (_KERNELS if adapter.reduced_precision else 0))

    def _logits(self, tokens: int) -> float:
        """Of the loss: a block of labels at a time, in float32 next to the model's dtype; all of them where the model
        does more to them."""
        if self.settings.data.classes is not None:
            return 0
        config = text_config(self.adapter.model)
        words = _number(config, "vocab_size")
        if any(getattr(config, name, None) not in (None, 1.0) for name in _SCALED_LOGITS):
            return 4.0 * tokens * words * self._item
        return min(tokens, block_rows(words)) * words * 4 * (3 if self._item >= 4 else 2.7)


def _saved_bytes(adapter: LowRankAdapter) -> tuple[float, float]:
    """PUBLIC. What a forward pass keeps for the backward one: bytes of a token, and of a pair of a row's tokens.

    Of linear layers next to each other (attention, feed-forward): the outputs of all but the last, unless that leaves
    the hidden size; what is made of those outputs on the way to the last; and inputs of adapted layers, once. Of norms
    their input, in float32 where they are written out. Attention weights where attention is eager; else a mask.
    """
    model: Any = adapter.model
    config, item, head = text_config(model), item_size(model), output_layer(model)
    names = "hidden_size", "num_attention_heads", "num_hidden_layers"
    hidden, heads, layers = (_number(config, name) for name in names)
    size = _number(config, "head_dim") or hidden // max(1, heads)
    pairs = min(heads, _number(config, "num_key_value_heads") or heads)  # of keys and values
    numbers: float = 2 * hidden + layers * 2 * (heads - pairs) * size  # keys and values are repeated
    floats: float = layers * heads
    adapted = {site.name for part in adapter.parts for site in part.sites}
    for name, module in model.named_modules():
        kind, children = type(module).__name__, dict(module.named_children())
        linear = {n: sizes for n, c in children.items() if c is not head and (sizes := feature_sizes(c))}
        if linear:
            *others, (out, last) = linear.values()
            between = sum(m for m, _ in others)
            numbers += between + out * (out != hidden) + last * (between > last)
            numbers += sum({n for key, (_, n) in linear.items() if f"{name}.{key}".lstrip(".") in adapted})
            numbers += 3 * last * any(_WRITTEN_OUT.match(type(c).__name__) for c in children.values())
            # Scans that are written out, by chunks or by states.
            chunks = _number(module, "chunk_size") * _number(module, "num_heads")
            floats += 4 * (chunks or last * _number(module, "ssm_state_size"))
        if "norm" in kind.lower():
            width = next((p.numel() for p in module.parameters()), hidden)
            width *= (heads + pairs) / 2 if width == size < hidden else 1  # of queries and keys
            numbers += width * isinstance(module, torch.nn.LayerNorm)
            floats += width * (not isinstance(module, torch.nn.LayerNorm))
        if "Expert" in kind:  # stacks of them
            stacks = (p for p in module.parameters(recurse=False) if p.dim() == 3)
            numbers += (_number(config, "num_experts_per_tok") or 1) * sum(sum(p.shape[1:]) for p in stacks)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    weights = 4 + item * ((item < 4) + capped)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return numbers * item + 4 * floats, layers * (heads * weights if eager else item)


def weight_bytes(asked: Mapping[str, Any] | None, model: Any) -> int:
    """Of all weights: packed numbers and their scales where layers are packed, else the dtype's. asked: as of
    `packing_of`."""
    head, packing = output_layer(model), packing_of(asked, model)
    spared, item = packing.get("llm_int8_skip_modules"), item_size(model)
    size = sum(p.nbytes for p in model.parameters())
    for name, module in model.named_modules() if packing else ():
        features = None if bits(module) else feature_sizes(module)
        kept = module is head if spared is None else any(f"{name}.".startswith(f"{s}.") for s in spared)
        if features is None or kept or name.endswith(tuple(spared or ())):
            continue
        entries = math.prod(features)
        blocks = math.ceil(entries / 64)  # bitsandbytes' numbers of one scale; 256 scales share theirs
        if packing.get("load_in_8bit"):
            size += entries + 4 * features[0] - entries * item
        else:
            nested = packing.get("bnb_4bit_use_double_quant")
            size += math.ceil(entries / 2) - entries * item
            size += blocks + 4 * math.ceil(blocks / 256) if nested else 4 * blocks
    return size


def _largest_batch(size: float, q: float, most: int | None) -> int:
    """PUBLIC. Units of a logical batch, at most; with a probability of 1e-9 a step there are more."""
    n = math.ceil(size)
    if most is not None:
        return min(n, most)
    from scipy.stats import binom

    return max(1, min(n, int(binom.isf(_RARE, n, min(1.0, q)))))


def _number(of: Any, name: str) -> int:
    """A field of a model's configuration, or of a module; 0 where it has none."""
    return getattr(of, name, None) or 0


@dataclass(frozen=True)
class Fitted:
    """tokens: of a micro-batch. why: a line for whoever trains; it tells of the machine and of public numbers alone."""

    tokens: int
    why: str


def in_micro_batches(settings: Settings, tokens: int) -> Settings:
    """The settings with micro-batches of so many tokens."""
    run = settings.run.model_copy(update={"tokens_per_micro_batch": tokens})
    return settings.model_copy(update={"run": run})


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
    if find_row(settings.method.name).releases != "gradients":
        found = Fitted(MICRO_BATCH, f"micro-batches of {MICRO_BATCH} tokens")
    elif is_sharded(model):
        why = f"micro-batches of {MICRO_BATCH} tokens: the base is spread over processes"
        found = Fitted(MICRO_BATCH, why)
    else:
        memory = StepMemory(settings, model, device)
        noise = kept_bytes(bands_to_come(settings.privacy), memory.adapter)
        records = (
            settings.privacy.n * (_RECORD_BYTES + _TOKEN_BYTES * memory.longest)
            if device.type == "cpu"
            else 0
        )
        part = _PART.get(device.type, _PART["cpu"])
        room = (
            part * (free - (0 if loaded else weight_bytes(settings.model.packing, model))) - records - noise
        )
        found = _fitted(memory, free, room, part, private=settings.privacy.private)
    return in_micro_batches(settings, found.tokens), found


def _fitted(memory: StepMemory, free: float, room: float, part: float, *, private: bool) -> Fitted:
    """Of powers of two and halves between them: from what one row takes to what a whole batch does, or was measured."""
    length, of_a_batch = memory.longest, memory.of_batch * max(memory.longest, memory.least)
    ceiling, bound = MICRO_BATCH, "larger ones were not tested for rounding"
    if not private:
        ceiling, bound = _TOKENS, "larger ones were not measured"
    elif not memory.adapter.reduced_precision:
        ceiling = max(ceiling, min(_TOKENS, _ROWS * memory.least))
    most = max(length, min(ceiling, of_a_batch))
    if of_a_batch <= ceiling:
        bound = "a batch holds no more"
    elif most == length:
        bound = f"one row of data.max_length={length} is more than others may share"
    steps = {part << power for power in range(20) for part in (2, 3)}
    sizes = {n: memory.peak(n).step_bytes for n in {length, most, *(n for n in steps if length < n < most)}}
    tokens = max((n for n, takes in sizes.items() if takes <= room), default=0)
    if not tokens:
        raise _too_large(memory, sizes[length], free, room, part)
    if tokens < most:
        bound = "larger ones do not fit"
    say = in_one_unit(*(n for n in (sizes[tokens], room, free) if n < math.inf))
    why = f"of {say(room)} that it may use" if free < math.inf else "(what is free is not known)"
    takes = f"micro-batches of {tokens} tokens: a step takes at most about {say(sizes[tokens])}"
    return Fitted(tokens, f"{takes} {why}; {bound}")


def _too_large(memory: StepMemory, whole: int, free: float, room: float, part: float) -> ConfigError:
    """What to lower, and to what: only what makes room by itself."""
    say = in_one_unit(whole, free)
    length, rows = memory.longest, memory.settings.rows_of_a_unit
    unit = f"one user's {rows} records" if memory.settings.privacy.unit == "user" else "a single record"
    remedies = [*_remedies(memory, room), f"free {say((whole - room) / part)}"]
    return ConfigError(
        f"a step takes {say(whole)} with {unit} of data.max_length={length} tokens, and of the "
        f"{say(max(0.0, free))} that are free {say(max(0.0, room))} can be used",
        why="a step with long records would run out of memory",
        fix=" or ".join(remedies),
    )


def _remedies(memory: StepMemory, room: float) -> Iterator[str]:
    settings = memory.settings

    def fits(width: int = memory.longest, **groups: Mapping[str, Any]) -> bool:
        other = (
            StepMemory(settings.changed(**groups), memory.adapter.model, memory.device) if groups else memory
        )
        return other.peak(width, width).step_bytes <= room

    shorter = bisect_left(range(1, memory.longest), True, key=lambda width: not fits(width))
    if shorter:
        yield f"set data.max_length={shorter}"
    for count in (8, 4, 2, 1):
        if count < settings.rows_of_a_unit and fits(privacy={"max_records_per_user": count}):
            yield f"set privacy.max_records_per_user={count}"
            break
    if fits(model={"gradient_checkpointing": "non-reentrant"}):
        yield "set model.gradient_checkpointing=non-reentrant"
    if not memory.adapter.reduced_precision:
        yield "set model.dtype=bfloat16"
