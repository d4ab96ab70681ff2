"""Exposure of planted secrets: how far a model prefers the secret it saw to those that it might have seen.

Carlini, Liu, Erlingsson, Kos and Song, "The Secret Sharer" (USENIX Security 2019), with the rank taken among
a sample: the true secret and R references from its distribution, by their likelihood after the same prefix.

    exposure = log2(R + 1) - log2(rank)      bits; rank 1 is the most likely

Edge cases
    never seen                  the rank is uniform: on average `_chance_exposure(R)`, 1.44 bits and not 0
    memorised                   log2(R + 1): the measure saturates, and more references raise the ceiling
    equal likelihoods           count against the secret: a model that scores everything alike has exposure 0
    a likelihood that is NaN    ModelError: no rank is better than a wrong one

High exposure is evidence of memorising; low exposure is no proof of privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from privlora.auditing.bounds import Floats
from privlora.auditing.text_canaries import scored_end
from privlora.data.examples import Examples
from privlora.errors import DataError, ModelError
from privlora.evaluation.batches import evaluating
from privlora.evaluation.next_token import record_losses


class PlantedSecret(Protocol):
    """A secret that stands in the training data after `prefix`, and `references` that stand nowhere."""

    @property
    def prefix(self) -> str: ...

    @property
    def secret(self) -> str: ...

    @property
    def references(self) -> Sequence[str]: ...


# (prefix, candidates) -> log-likelihood in nats of each candidate after the prefix.
Scorer = Callable[[str, Sequence[str]], Sequence[float]]


@dataclass(frozen=True)
class ExposureReport:
    """Of each secret its rank in 1 … R + 1 among R references, in the order given. exposures, mean: in bits. chance:
    what the mean is expected to be for a model that never saw them. ceiling: if every secret ranked first."""

    ranks: tuple[int, ...]
    references: tuple[int, ...]

    @property
    def exposures(self) -> tuple[float, ...]:
        pairs = zip(self.ranks, self.references, strict=True)
        return tuple(math.log2(references + 1) - math.log2(rank) for rank, references in pairs)

    @property
    def mean(self) -> float:
        return sum(self.exposures) / len(self.ranks)

    @property
    def chance(self) -> float:
        return sum(map(_chance_exposure, self.references)) / len(self.ranks)

    @property
    def ceiling(self) -> float:
        return sum(math.log2(references + 1) for references in self.references) / len(self.ranks)

    def to_dict(self) -> dict[str, float]:
        return {"exposure": self.mean, "chance": self.chance, "ceiling": self.ceiling}


def _chance_exposure(references: int) -> float:
    """Expected exposure in bits when the rank is uniform on 1 … references + 1; tends to log2(e) = 1.4427."""
    candidates = references + 1
    return math.log2(candidates) - math.lgamma(candidates + 1) / math.log(2) / candidates


def exposure_of_scores(members: Floats, others: Floats) -> ExposureReport:
    """Exposure of each of ``members`` by its score's rank among ``others``, scores of what the model never saw.

    Raises DataError where either is empty.
    """
    if not (len(members) and len(others)):
        what = "there is no canary to rank, or none to rank it among"
        raise DataError(what, fix="draw more canaries: a coin decides for each")
    ranks = 1 + len(others) - np.searchsorted(np.sort(others), members, side="left")
    return ExposureReport(tuple(ranks.tolist()), (len(others),) * len(members))


def measure_exposure(secrets: Sequence[PlantedSecret], score: Scorer) -> ExposureReport:
    """Exposure of each secret under `score`, for example `log_likelihood_scorer(model, tokenizer)`.

    Raises DataError without secrets, without references or where a secret is one of its references, and
    ModelError where a likelihood is NaN.
    """
    if not secrets:
        raise DataError("there are no planted secrets to measure", fix="plant one before training")
    ranks = list[int]()
    for number, planted in enumerate(secrets):
        if not planted.references or planted.secret in planted.references:
            what = f"planted secret {number} has no references, or is one of them"
            raise DataError(what, fix="draw references from the secret's distribution, without the secret")
        scores = np.array(score(planted.prefix, [planted.secret, *planted.references]), np.float64)
        if np.isnan(scores).any():
            what = f"the likelihoods for planted secret {number} are not numbers"
            raise ModelError(what, why="the model has diverged")
        ranks += exposure_of_scores(scores[:1], scores[1:]).ranks
    return ExposureReport(tuple(ranks), tuple(len(planted.references) for planted in secrets))


def log_likelihood_scorer(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Scorer:
    """A `Scorer` that sums the model's log-probabilities of each candidate's tokens.

    Prefix and candidate are tokenised together, as they were in training, and the sum begins where some candidate's
    tokens leave the prefix's: a token that spans the boundary is scored in full.
    """

    def score(prefix: str, candidates: Sequence[str]) -> list[float]:
        rows = [_encode(tokenizer, prefix + candidate) for candidate in candidates]
        start = _boundary(_encode(tokenizer, prefix), rows)
        examples = Examples([scored_end(np.array(row), len(row) - start) for row in rows], pad_token_id=0)
        means = record_losses(model, examples).tolist()
        return [-mean * (len(row) - start) for mean, row in zip(means, rows, strict=True)]

    return score


def greedy_extraction(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, secrets: Sequence[PlantedSecret]
) -> list[bool]:
    """Whether greedy decoding, given only the prefix, writes the secret next; one answer a secret.

    Plain argmax: the model's own generation settings (repetition penalty, forced tokens) are not applied.
    """
    return [_extracts(model, tokenizer, planted) for planted in secrets]


def _extracts(model: nn.Module, tokenizer: PreTrainedTokenizerBase, planted: PlantedSecret) -> bool:
    target = _encode(tokenizer, planted.prefix + planted.secret)
    start = _boundary(_encode(tokenizer, planted.prefix), [target])
    written = target[:start]
    with evaluating(model) as device:
        # Another split into tokens may spell the same secret; no token of it is shorter than a byte.
        for _ in range(len(target) - start + len(planted.secret.encode())):
            ids = torch.tensor([written], device=device)  # (1, T)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            written.append(int(logits[0, -1].argmax()))
    expected = tokenizer.decode(target, skip_special_tokens=True)
    return tokenizer.decode(written, skip_special_tokens=True).startswith(expected)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of `text` with the special tokens that the tokenizer puts first, not those it puts last."""
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids: list[int] = encoded["input_ids"]
    special = encoded["special_tokens_mask"]
    while special and special.pop():
        ids = ids[:-1]
    return ids


def _boundary(prefix: list[int], rows: Sequence[list[int]]) -> int:
    """Number of leading tokens that all rows share with the prefix."""
    start = len(prefix)
    for row in rows:
        while prefix[:start] != row[:start]:
            start -= 1
    if start == 0:
        raise DataError("a planted secret has no token before it", fix="give it a longer prefix")
    return start
