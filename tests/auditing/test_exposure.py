"""Exposure: the rank arithmetic, the likelihoods behind it, and both ends of the scale on tiny models."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from tiny_models import byte_tokenizer, tiny_llama
from tokenizers import processors

from privlora.auditing.exposure import (
    _chance_exposure,
    greedy_extraction,
    log_likelihood_scorer,
    measure_exposure,
)
from privlora.errors import DataError, ModelError


@dataclass(frozen=True)
class Planted:
    prefix: str
    secret: str
    references: tuple[str, ...]


def planted(count: int = 1, references: int = 15, seed: int = 0) -> list[Planted]:
    rng = random.Random(seed)
    secrets = []
    for index in range(count):
        codes = [f"{code:04d}" for code in rng.sample(range(10_000), references + 1)]
        secrets.append(Planted(f"code {'abcdefgh'[index]} ", codes[0], tuple(codes[1:])))
    return secrets


def tokenizer_of(*merges: tuple[str, str]) -> hf.PreTrainedTokenizerFast:
    """Bytes and the given merges; writes <s> before and </s> after each text."""
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    return byte_tokenizer(("<s>", "</s>"), merges=merges, template="<s> $A </s>", **ends)


def tiny_model(vocabulary: int = 300, seed: int = 0) -> hf.LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": vocabulary}
    return tiny_llama(seed=seed, **sizes, max_position_embeddings=64, initializer_range=0.2)


@torch.no_grad()
def sequence_log_likelihood(model: hf.LlamaForCausalLM, ids: list[int]) -> float:
    logits = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return float(sum(logits[at, token] for at, token in enumerate(ids[1:])))


@pytest.mark.parametrize(("rank", "exposure"), [(1, 4.0), (2, 3.0), (4, 2.0), (16, 0.0)])
def test_exposure_follows_from_the_rank(rank: int, exposure: float) -> None:
    def score(prefix: str, candidates: Sequence[str]) -> list[float]:
        return [-float(rank) + 0.5, *(-float(at) for at in range(1, len(candidates)))]

    report = measure_exposure(planted(), score)
    assert report.ranks[0] == rank
    assert report.exposures[0] == pytest.approx(exposure)
    assert report.ceiling == 4.0


def test_chance_is_the_mean_over_uniform_ranks() -> None:
    by_hand = sum(math.log2(16) - math.log2(rank) for rank in range(1, 17)) / 16
    assert _chance_exposure(15) == pytest.approx(by_hand)
    assert _chance_exposure(10**7) == pytest.approx(math.log2(math.e), abs=1e-4)


def test_a_random_scorer_has_exposure_near_chance() -> None:
    rng = random.Random(0)
    report = measure_exposure(planted(8) * 250, lambda prefix, candidates: [rng.random() for _ in candidates])
    assert report.mean == pytest.approx(report.chance, abs=0.12)


def test_likelihoods_equal_those_of_single_unpadded_sequences() -> None:
    tokenizer, model = tokenizer_of(), tiny_model()
    candidates = ["12", "3456", "7", "890123"]  # of unequal lengths: padding must not count
    values = log_likelihood_scorer(model, tokenizer)("the code is ", candidates)
    prefix = tokenizer("the code is ")["input_ids"][:-1]
    for value, candidate in zip(values, candidates, strict=True):
        whole = tokenizer("the code is " + candidate)["input_ids"][:-1]
        expected = sequence_log_likelihood(model, whole) - sequence_log_likelihood(model, prefix)
        assert value == pytest.approx(expected, abs=1e-4)


def test_a_token_across_the_boundary_is_scored_in_full() -> None:
    tokenizer, model = tokenizer_of(("Ġ", "4")), tiny_model()
    candidates = ["42", "52"]
    score = log_likelihood_scorer(model, tokenizer)
    start = tokenizer("is")["input_ids"][:-1]
    for value, candidate in zip(score("is ", candidates), candidates, strict=True):
        whole = tokenizer("is " + candidate)["input_ids"][:-1]
        expected = sequence_log_likelihood(model, whole) - sequence_log_likelihood(model, start)
        assert value == pytest.approx(expected, abs=1e-4)


def test_memorised_secrets_reach_the_ceiling_and_are_extracted() -> None:
    tokenizer, model, secrets = tokenizer_of(), tiny_model(), planted(4, references=63)
    before = measure_exposure(secrets, log_likelihood_scorer(model, tokenizer))
    assert before.mean < before.ceiling - 2
    assert not any(greedy_extraction(model, tokenizer, secrets))

    ids = torch.tensor([tokenizer(secret.prefix + secret.secret)["input_ids"] for secret in secrets])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    after = measure_exposure(secrets, log_likelihood_scorer(model, tokenizer))
    assert after.mean == after.ceiling == 6.0
    assert greedy_extraction(model, tokenizer, secrets) == [True] * 4
    assert greedy_extraction(model, tokenizer, [Planted(secrets[0].prefix, "????", ("0000",))]) == [False]


def test_the_mode_of_every_module_is_restored() -> None:
    tokenizer, model = tokenizer_of(), tiny_model().train()
    model.lm_head.eval()
    log_likelihood_scorer(model, tokenizer)("is ", ["1", "2"])
    greedy_extraction(model, tokenizer, planted())
    assert model.model.training
    assert not model.lm_head.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_diverged_model_has_no_rank() -> None:
    tokenizer, model = tokenizer_of(), tiny_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(ModelError, match="not numbers"):
        measure_exposure(planted(), log_likelihood_scorer(model, tokenizer))


def test_useless_secrets_are_refused() -> None:
    def score(prefix: str, candidates: Sequence[str]) -> list[float]:
        return [0.0] * len(candidates)

    with pytest.raises(DataError, match="no planted secrets"):
        measure_exposure([], score)
    with pytest.raises(DataError, match="no references"):
        measure_exposure([Planted("code ", "1234", ())], score)
    with pytest.raises(DataError, match="one of them"):
        measure_exposure([Planted("code ", "1234", ("1234", "5678"))], score)


def test_a_secret_without_context_is_refused() -> None:
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(DataError, match="no token before it"):
        log_likelihood_scorer(tiny_model(), tokenizer)("", ["12", "34"])
