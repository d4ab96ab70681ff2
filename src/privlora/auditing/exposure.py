"""Exposure of planted secrets: how far a model prefers the secret it saw to those that it might have seen.

Carlini, Liu, Erlingsson, Kos and Song, "The Secret Sharer" (USENIX Security 2019), with the rank taken among
a sample: the true secret and R references from its distribution, by their likelihood after the same prefix.

    exposure = log2(R + 1) - log2(rank)      bits; rank 1 is the most likely

Edge cases
    never seen                  the rank is uniform: on average `chance_exposure(R)`, 1.44 bits and not 0
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
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from privlora.auditing.membership import Floats
from privlora.errors import DataError, ModelError
from privlora.evaluation.batches import evaluating


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
class SecretExposure:
    """One secret: `rank` in 1 … R + 1, `exposure` in bits, `log_likelihood` (or score) of the true secret in nats."""

    rank: int
    exposure: float
    log_likelihood: float
    references: int


@dataclass(frozen=True)
class ExposureReport:
    """Exposures in the order of the secrets given."""

    secrets: tuple[SecretExposure, ...]

    @property
    def mean(self) -> float:
        """Mean exposure in bits."""
        return sum(secret.exposure for secret in self.secrets) / len(self.secrets)

    @property
    def ceiling(self) -> float:
        """What `mean` would be if every secret ranked first."""
        return sum(math.log2(secret.references + 1) for secret in self.secrets) / len(self.secrets)

    @property
    def chance(self) -> float:
        """What `mean` is expected to be for a model that never saw the secrets."""
        return sum(chance_exposure(secret.references) for secret in self.secrets) / len(self.secrets)


def chance_exposure(references: int) -> float:
    """Expected exposure in bits when the rank is uniform on 1 … references + 1; tends to log2(e) = 1.4427."""
    candidates = references + 1
    return math.log2(candidates) - math.lgamma(candidates + 1) / math.log(2) / candidates


def exposure_of_scores(members: Floats, others: Floats) -> ExposureReport:
    """Exposure of each of ``members`` by its score's rank among ``others``, scores of what the model never saw.

    Raises DataError where either is empty.
    """
    if not (len(members) and len(others)):
        raise DataError(
            "there is no canary to rank, or none to rank it among",
            fix="draw more canaries: a coin decides for each",
        )
    ranks = 1 + len(others) - np.searchsorted(np.sort(others), members, side="left")
    bits = math.log2(len(others) + 1)
    return ExposureReport(
        tuple(
            SecretExposure(rank, bits - math.log2(rank), float(score), len(others))
            for rank, score in zip(ranks.tolist(), members, strict=True)
        )
    )


def measure_exposure(secrets: Sequence[PlantedSecret], score: Scorer) -> ExposureReport:
    """Exposure of each secret under `score`, for example `log_likelihood_scorer(model, tokenizer)`.

    Raises DataError without secrets, without references or where a secret is one of its references, and
    ModelError where a likelihood is NaN.
    """
    if not secrets:
        raise DataError(
            "there are no planted secrets to measure", fix="plant at least one canary before training"
        )
    return ExposureReport(tuple(_expose(index, planted, score) for index, planted in enumerate(secrets)))


def _expose(index: int, planted: PlantedSecret, score: Scorer) -> SecretExposure:
    if not planted.references or planted.secret in planted.references:
        raise DataError(
            f"planted secret {index} has no references, or is one of them",
            why="exposure ranks the secret among others that the model never saw",
            fix="draw the references from the secret's distribution and leave the secret out",
        )
    own, *others = (float(value) for value in score(planted.prefix, [planted.secret, *planted.references]))
    if any(math.isnan(value) for value in (own, *others)):
        raise ModelError(
            f"the likelihoods for planted secret {index} are not numbers", why="the model has diverged"
        )
    rank = 1 + sum(other >= own for other in others)
    return SecretExposure(rank, math.log2(len(others) + 1) - math.log2(rank), own, len(others))


def log_likelihood_scorer(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 64
) -> Scorer:
    """A `Scorer` that sums the model's log-probabilities (float32) of each candidate's tokens.

    `model` is a causal LM: called with input_ids and attention_mask, it returns `.logits` of shape (rows, T,
    vocabulary). Prefix and candidate are tokenised together, as they were in training, and the sum begins
    where some candidate's tokens leave the prefix's: a token that spans the boundary is scored in full.
    """

    def score(prefix: str, candidates: Sequence[str]) -> list[float]:
        rows = [_encode(tokenizer, prefix + candidate) for candidate in candidates]
        start = _boundary(_encode(tokenizer, prefix), rows)
        with evaluating(model):
            parts = [
                _suffix_log_likelihoods(model, rows[at : at + batch_size], start)
                for at in range(0, len(rows), batch_size)
            ]
        values: list[float] = torch.cat(parts).tolist()
        return values

    return score


def greedy_extraction(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, secrets: Sequence[PlantedSecret]
) -> list[bool]:
    """Whether greedy decoding, given only the prefix, writes the secret next; one answer a secret.

    Plain argmax: the model's own generation settings (repetition penalty, forced tokens) are not applied.
    """
    with evaluating(model):
        return [_extracts(model, tokenizer, planted) for planted in secrets]


def _extracts(model: nn.Module, tokenizer: PreTrainedTokenizerBase, planted: PlantedSecret) -> bool:
    target = _encode(tokenizer, planted.prefix + planted.secret)
    start = _boundary(_encode(tokenizer, planted.prefix), [target])
    written = target[:start]
    # Another split into tokens may spell the same secret; no token of it is shorter than a byte.
    for _ in range(len(target) - start + len(planted.secret.encode())):
        ids = torch.tensor([written], device=_device(model))  # (1, T)
        written.append(int(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1].argmax()))
    expected = tokenizer.decode(target, skip_special_tokens=True)
    return tokenizer.decode(written, skip_special_tokens=True).startswith(expected)


def _suffix_log_likelihoods(model: nn.Module, rows: Sequence[list[int]], start: int) -> Tensor:
    """(rows,) float32 on the CPU: sum over positions >= `start` of log p(token | tokens before it)."""
    length = max(map(len, rows))
    device = _device(model)
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)  # (rows, length)
    keep = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
    logits = model(input_ids=ids, attention_mask=keep).logits[:, start - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)  # (rows, length - start)
    return chosen.masked_fill(keep[:, start:] == 0, 0.0).sum(-1).cpu()


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


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
