"""How much memory a run needs, from the model's configuration alone: no weights and no records are read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from privlora.config import Settings
from privlora.coordinates import SpanSpace
from privlora.coordinates.span import EncodedSpace
from privlora.methods import Method
from privlora.training.models import adapter_for

_GRADIENT_BYTES = 4  # per-example gradients are float32


@dataclass(frozen=True)
class MemoryEstimate:
    """Sizes of what privlora adds to a forward and backward pass; activations are not in it.

    Attributes:
        model_parameters: numbers of the frozen base model.
        weight_bytes: their size in the model's dtype.
        modules: adapted layers.
        trained_numbers: coordinates of a release: of each module r (m + n - r) in tangent space, r (m + n) in
            factors, r m in one factor and through a projection. Without those that are one a public text.
        adapter_bytes: the exported factors, float32.
        gradient_bytes_per_record: one record's gradients P (m, r) and Q (n, r) over all modules, float32.
        records_per_micro_batch: records of max_length tokens that fit; shorter ones are more.
        gradient_bytes: per-example gradients of such a micro-batch.
        update_bytes: dense updates, float32, and the weights with them, in the model's dtype; 0 for most methods.
        public_bytes: the gradients of public texts that a method leans on, as they are kept; 0 for most methods.
    """

    model_parameters: int
    weight_bytes: int
    modules: int
    trained_numbers: int
    adapter_bytes: int
    gradient_bytes_per_record: int
    records_per_micro_batch: int
    gradient_bytes: int
    update_bytes: int
    public_bytes: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def estimate_memory(settings: Settings, method: Method, model: Any) -> MemoryEstimate:
    """model: the base model, with or without weights. Raises ModelError for an adapter that cannot be."""
    lora = settings.adapter
    hyper = method.resolve(
        settings.method, lora.init, settings.privacy.steps, private=settings.privacy.private
    )
    adapter = adapter_for(settings, model)
    stored = settings.model.dtype if settings.model.dtype != "auto" else model.config.dtype or torch.float32
    dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    numbers = sum(p.numel() for p in model.parameters())
    factors = sum(lora.r * (site.m + site.n) for site in adapter.sites)
    dense = sum(site.m * site.n for site in adapter.sites) if method.coordinates.dense else 0
    records = max(1, settings.run.tokens_per_micro_batch // settings.data.max_length)
    if settings.privacy.unit == "user":  # a user's records are clipped as one, so they share a micro-batch
        records = max(records, settings.privacy.max_records_per_user)
    kind = method.coordinates
    texts = 0 if settings.synthesis is None else settings.synthesis.count
    directions = 0
    if issubclass(kind, EncodedSpace):  # of them an adapter does not know
        directions = min(
            int(hyper.settings.get("top_k", 0)) or texts, texts
        )  # at most, where they are chosen
    number = 2 if settings.run.public_gradient_dtype == "bfloat16" else 4
    public = texts * kind.inner_kind.entries_of(adapter) * number if issubclass(kind, SpanSpace) else 0
    return MemoryEstimate(
        model_parameters=numbers,
        weight_bytes=numbers * dtype.itemsize,
        modules=len(adapter.sites),
        trained_numbers=kind.dimension_of(adapter) + directions,
        adapter_bytes=factors * 4,
        gradient_bytes_per_record=factors * _GRADIENT_BYTES,
        records_per_micro_batch=records,
        gradient_bytes=factors * _GRADIENT_BYTES * records,
        update_bytes=dense * (4 + dtype.itemsize),
        public_bytes=public,
    )
