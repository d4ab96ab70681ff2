"""How much memory a run needs, from the model's configuration alone: no weights and no records are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from privlora.adapters.targets import feature_sizes, output_layer
from privlora.config import Settings
from privlora.coordinates import SpanSpace
from privlora.coordinates.span import EncodedSpace, copies_of, units_beside
from privlora.errors import ConfigError
from privlora.methods import Method
from privlora.training.cycles import bands_to_come, kept_bytes
from privlora.training.fitting import Fitted, with_micro_batches
from privlora.training.footprint import resident_bytes, row_tokens
from privlora.training.model_names import device_of
from privlora.training.models import adapter_for, packing_of, set_checkpointing, unchanged_afterwards
from privlora.training.peak import Peak, Unknown, largest_batch, peak_of_a_step

_GRADIENT_BYTES = 4  # per-example gradients are float32
_BLOCK, _BLOCK_OF_SCALES = 64, 256  # bitsandbytes' numbers of one scale, of 4-bit weights and of their scales


@dataclass(frozen=True)
class MemoryEstimate:
    """Sizes of what a run keeps, and of a step at its most.

    Attributes:
        model_parameters: numbers of the frozen base model.
        weight_bytes: their size in the model's dtype, or packed, where settings or its own configuration say so.
        modules: adapted layers.
        trained_numbers: coordinates of a release: of each module r (m + n - r) in tangent space, r (m + n) in
            factors, r m in one factor and through a projection, 1 along a direction. Without those that are one a
            public text.
        adapter_bytes: the exported factors, float32.
        gradient_bytes_per_record: one record's gradients P (m, r) and Q (n, r) over all modules, float32, as often as
            they are held at once; 0 where votes or differences of losses are released, since no gradient is taken.
        records_per_micro_batch: records of max_length tokens that fit; shorter ones are more. Of rows on public texts
            no more than what is left beside the gradients of these. Never more than a batch has.
        records_of_a_batch: as many as are in one, by the public number; in one of 10^9 steps there are more.
        gradient_bytes: per-example gradients of such a micro-batch.
        gradient_bytes_at_most: of one of as many records as fit, if they are of one token each.
        update_bytes: dense updates, float32, and the weights with them, in the model's dtype; 0 for most methods.
        public_bytes: the gradients of public texts that a method leans on, as they are kept: on the device, in the
            machine's memory or in a file, where twice as much is free; 0 for most methods.
        embedding_bytes: of votes, the directions of public_dataset_size records and of the texts, float64, in the base
            model's width; 0 without votes, or where synthesis.embedding names a model.
        kept_noise_bytes: of correlated noise, that of the steps before and the bases in which it is given, at most; 0
            where noise is independent.
        cache_bytes: keys and values of a batch of texts that the model writes; 0 where it writes none.
        peak: of a private step, activations and all (training.peak); None for rows without one, or where peak_unknown
            says why it cannot be told.
        resident_bytes: what Python and its packages hold in this process, before any weight; a run's hold somewhat more
            on top of model and step. 0 where that is not known.
        device: the kind of device that the peak is of.
    """

    model_parameters: int
    weight_bytes: int
    modules: int
    trained_numbers: int
    adapter_bytes: int
    gradient_bytes_per_record: int
    records_per_micro_batch: int
    records_of_a_batch: int
    gradient_bytes: int
    gradient_bytes_at_most: int
    update_bytes: int
    public_bytes: int
    embedding_bytes: int
    cache_bytes: int
    kept_noise_bytes: int = 0
    peak: Peak | None = None
    peak_unknown: str | None = None
    resident_bytes: int = 0
    device: str = "cpu"


def estimate_memory(settings: Settings, method: Method, model: Any) -> MemoryEstimate:
    """model: the base model, with or without weights. Raises ModelError for an adapter that cannot be."""
    privacy, adapter, dtype = settings.privacy, adapter_for(settings, model), _stored(settings, model)
    hyper = method.resolve(settings.method, settings.adapter.init, privacy.steps, private=privacy.private)
    numbers = sum(p.numel() for p in model.parameters())
    factors = sum(part.rank * (site.m + site.n) for part in adapter.parts for site in part.sites)
    dense = sum(site.m * site.n for site in adapter.sites) if method.coordinates.dense else 0
    least, tokens = 0, settings.run.max_tokens
    if not method.coordinates.forward_only:
        with unchanged_afterwards(model):  # short rows count for more where activations are computed again
            set_checkpointing(model, settings.model.gradient_checkpointing)
            least = row_tokens(adapter)
    of_user = settings.rows_of_a_unit
    of_batch = largest_batch(privacy) * of_user
    records, most = (
        max(1, min(of_batch, tokens // max(length, least))) for length in (settings.data.max_length, 1)
    )
    kind = method.coordinates
    votes = method.releases == "votes"
    texts = 0 if settings.synthesis is None else settings.synthesis.count
    directions = public = 0
    held = 0 if votes or kind.forward_only else factors  # numbers of a record's gradient
    if issubclass(kind, SpanSpace) and not votes:
        entries = kind.inner_kind.entries_of(adapter)
        public = texts * entries * max(4, dtype.itemsize)
        if issubclass(kind, EncodedSpace):
            copies = copies_of(kind.inner_kind)
            held += (copies - 1) * entries  # end to end, beside what is captured
            records, most = (min(rows, units_beside(entries, public, copies)) for rows in (records, most))
            # At most, where they are chosen; of them an adapter does not know.
            directions = min(int(hyper.settings.get("top_k", 0)) or texts, texts)
    # A user's records are clipped as one, so they share a micro-batch.
    records, most = (max(rows, of_user) for rows in (records, most))
    each = held * _GRADIENT_BYTES
    body, *others = adapter.parts  # of a classifier, its last layer, which is trained as a whole
    trained = kind.dimension_of(body) + directions + sum(s.m * s.n for part in others for s in part.sites)
    return MemoryEstimate(
        model_parameters=numbers,
        weight_bytes=_weight_bytes(packing_of(settings.model, model), model, dtype),
        modules=len(adapter.sites),
        trained_numbers=trained,
        adapter_bytes=factors * 4,
        gradient_bytes_per_record=each,
        records_per_micro_batch=records,
        records_of_a_batch=of_batch,
        gradient_bytes=each * records,
        gradient_bytes_at_most=each * most,
        update_bytes=dense * (4 + dtype.itemsize),
        public_bytes=public,
        embedding_bytes=_embedding_bytes(settings, model) if votes else 0,
        cache_bytes=_cache_bytes(settings, model, dtype),
        kept_noise_bytes=kept_bytes(bands_to_come(privacy), adapter),
    )


def _weight_bytes(packing: Mapping[str, Any], model: Any, dtype: torch.dtype) -> int:
    """Of all weights: packed numbers and their scales where layers are packed, else the dtype's."""
    head, spared = output_layer(model), packing.get("llm_int8_skip_modules")
    size = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    if not packing:
        return size
    for name, module in model.named_modules():
        features = feature_sizes(module)
        kept = [head is module] if spared is None else (f"{name}.".startswith(f"{key}.") for key in spared)
        if features is None or any(kept) or name.endswith(tuple(spared or ())):
            continue
        rows, entries = features[0], features[0] * features[1]
        size -= entries * dtype.itemsize
        if packing.get("load_in_8bit"):
            size += entries + 4 * rows
        else:
            blocks = math.ceil(entries / _BLOCK)
            nested = packing.get("bnb_4bit_use_double_quant")
            scales = blocks + 4 * math.ceil(blocks / _BLOCK_OF_SCALES) if nested else 4 * blocks
            size += math.ceil(entries / 2) + scales
    return size


def as_planned(settings: Settings, model: Any) -> tuple[Settings, Fitted | None]:
    """What run.tokens_per_micro_batch=auto would choose here and now; changes the model's dtype to that of the run."""
    return with_micro_batches(settings, model.to(_stored(settings, model)), _device(settings), loaded=False)


def with_peak(estimate: MemoryEstimate, settings: Settings, model: Any) -> MemoryEstimate:
    """The same with the peak of a step on the device that the settings name, as far as that is here."""
    device, model = _device(settings), model.to(_stored(settings, model))
    estimate = replace(estimate, resident_bytes=resident_bytes(), device=device.type)
    try:
        return replace(
            estimate, peak=peak_of_a_step(settings, model, device, max_tokens=settings.run.max_tokens)
        )
    except Unknown as unknown:
        return replace(estimate, peak_unknown=str(unknown))


def _device(settings: Settings) -> torch.device:
    """Where the model will be; the CPU instead of a device that is not here."""
    try:
        return torch.device(device_of(settings.model))
    except ConfigError:
        return torch.device("cpu")


def _stored(settings: Settings, model: Any) -> torch.dtype:
    """What the weights are loaded in."""
    stored = settings.model.dtype if settings.model.dtype != "auto" else model.config.dtype or torch.float32
    return getattr(torch, stored) if isinstance(stored, str) else stored


def _embedding_bytes(settings: Settings, model: Any) -> int:
    chosen = settings.synthesis
    if chosen is None or chosen.embedding is not None:
        return 0
    texts = chosen.requests * chosen.answers if settings.method.name == "popri" else chosen.count
    return int((settings.privacy.n + texts) * model.config.hidden_size * 8)


def _cache_bytes(settings: Settings, model: Any, dtype: torch.dtype) -> int:
    """Of as many tokens as a micro-batch has, or those of one text if that is more."""
    chosen = settings.synthesis
    if chosen is None or chosen.generator != "model":
        return 0
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = max(settings.run.max_tokens, chosen.max_new_tokens)
    return int(2 * config.num_hidden_layers * heads * width * tokens * dtype.itemsize)
