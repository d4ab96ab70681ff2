"""Log-likelihoods of answers equal those of one forward pass a prompt and answer, in every family of models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluation_cases import strong_adapter
from tiny_models import FAMILIES, VOCAB, tiny_model, tiny_tokenizer, with_lora

from privlora.errors import ConfigError, ModelError
from privlora.evaluation.likelihood import answer_log_likelihoods

TOKENIZER = tiny_tokenizer()
ANSWERS = ([5, 6, 7], [9], [5, 8], [10, 11, 12, 13])


def random_prompts(lengths: tuple[int, ...] = (7, 1, 12, 3, 12, 20)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, n).astype(np.int32) for n in lengths]


def one_by_one(model: torch.nn.Module, prompts: list[np.ndarray]) -> np.ndarray:
    found = np.empty((len(prompts), len(ANSWERS)))
    for i, prompt in enumerate(prompts):
        for j, answer in enumerate(ANSWERS):
            ids = torch.tensor([[*prompt.tolist(), *answer]])
            with torch.no_grad():
                log_p = torch.log_softmax(model(input_ids=ids).logits[0].float(), dim=-1)
            found[i, j] = sum(log_p[len(prompt) - 1 + k, token] for k, token in enumerate(answer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_tokens", [1, 200, 10**6])
def test_equals_a_plain_loop(family: str, max_tokens: int) -> None:
    model, prompts = tiny_model(family), random_prompts()
    found = answer_log_likelihoods(model, TOKENIZER, prompts, ANSWERS, max_tokens=max_tokens)
    np.testing.assert_allclose(found, one_by_one(model, prompts), atol=1e-5, rtol=0)


def test_answers_of_one_token() -> None:
    model, prompts = tiny_model(), random_prompts()
    found = answer_log_likelihoods(model, TOKENIZER, prompts, [[9], [5]])
    np.testing.assert_allclose(found[:, 0], one_by_one(model, prompts)[:, 1], atol=1e-5)


def test_an_attached_adapter_and_a_peft_model_count() -> None:
    prompts = random_prompts()
    model = tiny_model()
    base = answer_log_likelihoods(model, TOKENIZER, prompts, ANSWERS)
    with strong_adapter(model):
        adapted = answer_log_likelihoods(model, TOKENIZER, prompts, ANSWERS)
        np.testing.assert_allclose(adapted, one_by_one(model, prompts), atol=1e-5)
    assert np.abs(adapted - base).max() > 0.1
    wrapped = with_lora(tiny_model(), init_lora_weights=False, lora_dropout=0.5)
    wrapped.train()
    found = answer_log_likelihoods(wrapped, TOKENIZER, prompts, ANSWERS)
    assert wrapped.training  # given back as it was, and no dropout in between
    wrapped.eval()
    np.testing.assert_allclose(found, one_by_one(wrapped, prompts), atol=1e-5)


def test_double_precision_is_kept() -> None:
    model, prompts = tiny_model(dtype=torch.float64), random_prompts()
    found = answer_log_likelihoods(model, TOKENIZER, prompts, ANSWERS)
    np.testing.assert_allclose(found, one_by_one(model, prompts), atol=1e-4)


@pytest.mark.parametrize("answers", [[], [[5], []]])
def test_empty_answers_are_refused(answers: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="has no token"):
        answer_log_likelihoods(tiny_model(), TOKENIZER, random_prompts(), answers)


def test_a_diverged_model_is_refused() -> None:
    model = tiny_model()
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="not numbers"):
        answer_log_likelihoods(model, TOKENIZER, random_prompts(), ANSWERS)


def test_a_model_without_a_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **k: forward(**{**k, "use_cache": False}))
    with pytest.raises(ModelError, match="keeps no key-value cache"):
        answer_log_likelihoods(model, TOKENIZER, random_prompts(), ANSWERS)


def test_empty_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no token"):
        answer_log_likelihoods(tiny_model(), TOKENIZER, [np.array([], dtype=np.int32)], ANSWERS)
