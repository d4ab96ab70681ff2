"""Canaries that are records: texts that nobody else has, and the loss on each of some records.

random-tokens   ids drawn uniformly from the vocabulary: as far from any text as a record can be
codes           "Reference code 3f9c…": text that a tokenizer knows, with 128 bits that only memory can supply
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from privlora.data.batching import sequential_batches
from privlora.data.examples import Example, Examples
from privlora.data.units import Units
from privlora.errors import ConfigError, ModelError
from privlora.evaluation.batches import evaluating
from privlora.evaluation.next_token import row_losses

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def _random_tokens(count: int, length: int, tokenizer: Any, generator: np.random.Generator) -> list[Example]:
    special = set(tokenizer.all_special_ids)
    usable = np.array([token for token in range(len(tokenizer)) if token not in special])
    return [_example(generator.choice(usable, size=length)) for _ in range(count)]


def _codes(count: int, length: int, tokenizer: Any, generator: np.random.Generator) -> list[Example]:
    texts = [f"Reference code {generator.bytes(16).hex()}." for _ in range(count)]
    return [_example(np.array(ids)[:length]) for ids in tokenizer(texts)["input_ids"]]


TEXT_CANARIES: dict[str, Callable[..., list[Example]]] = {"random-tokens": _random_tokens, "codes": _codes}


def text_canaries(kind: str, count: int, length: int, tokenizer: Any, seed: int) -> list[Example]:
    """``count`` records of at most ``length`` tokens, a function of ``seed``. Raises ConfigError for another kind."""
    if kind not in TEXT_CANARIES:
        raise ConfigError(f"unknown canaries {kind!r}", fix=f"one of {', '.join(TEXT_CANARIES)}")
    return TEXT_CANARIES[kind](count, length, tokenizer, np.random.default_rng(seed))


def add_records(examples: Examples, units: Units, more: list[Example]) -> tuple[Examples, Units]:
    """The records with ``more`` behind them, each a unit of its own."""
    unit_of_record = np.empty(len(examples) + len(more), dtype=np.int64)
    for unit in range(len(units)):
        unit_of_record[units[unit]] = unit
    unit_of_record[len(examples) :] = len(units) + np.arange(len(more))
    return examples.like([*examples, *more]), Units(unit_of_record, units.max_records_per_unit)


def record_losses(model: torch.nn.Module, examples: Examples, *, max_tokens: int = 8192) -> Floats:
    """Mean next-token loss of each record in nats per label token, (records,) float64; 0 where nothing is predicted.

    Raises ModelError where a loss is not finite.
    """
    losses = np.zeros(len(examples))
    with evaluating(model) as device:
        for batch in sequential_batches(examples, max_tokens=max_tokens, device=device):
            losses[batch.record_index.numpy()] = row_losses(model, batch.to(device)).cpu()
    if not np.isfinite(losses).all():
        raise ModelError("the loss of a record is not a number", why="the model has diverged")
    return losses


def _example(ids: np.ndarray) -> Example:
    ids = ids.astype(np.int32)
    return Example(ids, ids.copy())
