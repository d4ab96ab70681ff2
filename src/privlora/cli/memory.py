"""How much memory a run needs, from the model's configuration alone: no weights and no records are read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from privlora.config import Settings
from privlora.errors import ConfigError
from privlora.methods import Method
from privlora.training.fitting import Fitted, StepMemory, weight_bytes, with_micro_batches
from privlora.training.footprint import resident_bytes
from privlora.training.preflight import device_of
from privlora.training.promise import bands_to_come, kept_bytes


def estimate_memory(settings: Settings, method: Method, model: Any) -> dict[str, Any]:
    """Sizes of what a run keeps, and of a step at its most, on the settings' device, or on the CPU if that is not here.

    model: the base model, with or without weights; it gets the run's dtype. Raises ModelError for an adapter that
    cannot be.

    Keys:
        model_parameters: numbers of the frozen base model.
        weight_bytes: their size in the model's dtype, or packed, where settings or its own configuration say so.
        modules: adapted layers.
        trained_numbers: coordinates of a release: of each module r (m + n - r) in tangent space, r (m + n) in
            factors, r m in one factor and through a projection, 1 along a direction. Without those that are one a
            public text.
        adapter_bytes: the exported factors, float32.
        gradient_bytes_per_record: one record's gradients P (m, r) and Q (n, r) over all modules, float32, as often as
            they are held at once; 0 where votes or differences of losses are released, since no gradient is taken.
        records_per_micro_batch: records of max_length tokens that fit; shorter ones are more. Of methods on public
            texts no more than what is left next to the gradients of these. Never more than a batch has.
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
        peak: of a private step, activations and all (training.fitting); None for methods without one.
        resident_bytes: what Python and its packages hold in this process, before any weight; a run's hold somewhat more
            on top of model and step. 0 where that is not known.
        device: the kind of device that the peak is of.
    """
    device, model = _device(settings), _in_its_dtype(settings, model)
    step, kind, tokens = StepMemory(settings, model, device), method.coordinates, settings.run.max_tokens
    records, most = (step.rows(length, tokens) for length in (settings.data.max_length, 1))
    directions, embedded, cached, chosen = 0, 0, 0, settings.synthesis
    if step.public_bytes and chosen is not None:
        # At most, where they are chosen; of them an adapter does not know.
        directions = min(int(step.hyper.settings.get("top_k", 0)) or chosen.count, chosen.count)
    if chosen is not None and method.releases == "votes" and chosen.embedding is None:
        texts = chosen.requests * chosen.answers if method.name == "popri" else chosen.count
        embedded = int((settings.privacy.n + texts) * model.config.hidden_size * 8)
    if chosen is not None and chosen.generator == "model":
        # Of as many tokens as a micro-batch has, or those of one text if that is more.
        config, most_tokens = model.config, max(tokens, chosen.max_new_tokens)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cached = int(2 * config.num_hidden_layers * heads * width * most_tokens * model.dtype.itemsize)
    body, *others = step.adapter.parts  # of a classifier, its last layer, which is trained as a whole
    sites = [(part.rank, site) for part in step.adapter.parts for site in part.sites]
    return {
        "model_parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": weight_bytes(settings.model.packing, model),
        "modules": len(sites),
        "trained_numbers": kind.dimension_of(body)
        + directions
        + sum(s.m * s.n for part in others for s in part.sites),
        "adapter_bytes": 4 * sum(rank * (site.m + site.n) for rank, site in sites),
        "gradient_bytes_per_record": step.row_bytes,
        "records_per_micro_batch": records,
        "records_of_a_batch": step.of_batch,
        "gradient_bytes": step.row_bytes * records,
        "gradient_bytes_at_most": step.row_bytes * most,
        "update_bytes": step.update_bytes,
        "public_bytes": step.public_bytes,
        "embedding_bytes": embedded,
        "cache_bytes": cached,
        "kept_noise_bytes": kept_bytes(bands_to_come(settings.privacy), step.adapter),
        "peak": asdict(step.peak(tokens)) if method.releases == "gradients" else None,
        "resident_bytes": resident_bytes(),
        "device": device.type,
    }


def as_planned(settings: Settings, model: Any) -> tuple[Settings, Fitted | None]:
    """What run.tokens_per_micro_batch=auto would choose here and now; changes the model's dtype to that of the run."""
    return with_micro_batches(settings, _in_its_dtype(settings, model), _device(settings), loaded=False)


def _device(settings: Settings) -> torch.device:
    """Where the model will be; the CPU instead of a device that is not here."""
    try:
        return torch.device(device_of(settings.model.device))
    except ConfigError:
        return torch.device("cpu")


def _in_its_dtype(settings: Settings, model: Any) -> Any:
    """As its weights will be loaded."""
    stored = settings.model.dtype if settings.model.dtype != "auto" else model.config.dtype or torch.float32
    return model.to(getattr(torch, stored) if isinstance(stored, str) else stored)
