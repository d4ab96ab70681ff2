"""The embedded model: small, loadable, fluent in the public texts, ignorant of the private ones."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from demo_model import encode, mean_loss

from privlora.auditing.exposure import greedy_extraction, log_likelihood_scorer, measure_exposure
from privlora.demo import make_canaries, model_path, private_records, public_texts


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerBase:
    return hf.AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def model() -> hf.LlamaForCausalLM:
    return hf.AutoModelForCausalLM.from_pretrained(model_path()).eval()


def notes(count: int, seed: int) -> list[str]:
    return [record["text"] for record in private_records(count, seed)]


def test_the_folder_is_small_and_loads_as_float32(model: hf.LlamaForCausalLM) -> None:
    assert sum(path.stat().st_size for path in model_path().iterdir()) <= 4_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_notes_are_short_and_survive_the_tokenizer(tokenizer: hf.PreTrainedTokenizerBase) -> None:
    texts = [*notes(2000, 0), *(text for canary in make_canaries(50, 0) for text in canary.texts)]
    rows = encode(tokenizer, texts)
    assert max(map(len, rows)) <= 80
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in rows] == texts


def test_each_digit_of_a_secret_is_a_token(tokenizer: hf.PreTrainedTokenizerBase) -> None:
    for canary in make_canaries(20, 0):
        prefix, whole = (
            tokenizer(text)["input_ids"] for text in (canary.prefix, canary.prefix + canary.secret)
        )
        assert whole[: len(prefix)] == prefix
        assert len(whole) == len(prefix) + len(canary.secret)


def test_it_knows_the_public_texts_and_has_private_ones_to_learn(
    model: hf.LlamaForCausalLM, tokenizer: hf.PreTrainedTokenizerBase
) -> None:
    public = mean_loss(model, encode(tokenizer, public_texts(150, 1)))
    private = mean_loss(model, encode(tokenizer, notes(100, 1)))
    assert public < 1.0
    assert private > 2 * public


def test_it_writes_texts_with_known_words(
    model: hf.LlamaForCausalLM, tokenizer: hf.PreTrainedTokenizerBase
) -> None:
    known = set(" ".join(public_texts(20_000, 2)).split())
    torch.manual_seed(0)
    start = torch.full((20, 1), tokenizer.bos_token_id)
    rows = model.generate(start, do_sample=True, top_k=0, max_new_tokens=80)
    written = tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert len(set(written)) == 20
    words = [word for text in written for word in text.split() if not any(c.isdigit() for c in word)]
    assert sum(word in known for word in words) > 0.98 * len(words)


@pytest.mark.long
def test_it_has_never_seen_the_secrets(
    model: hf.LlamaForCausalLM, tokenizer: hf.PreTrainedTokenizerBase
) -> None:
    canaries = make_canaries(24, 0, repetitions=1, references=31)
    report = measure_exposure(canaries, log_likelihood_scorer(model, tokenizer))
    # The standard deviation of one exposure is below 1.5 bits, so that of the mean is below 0.31.
    assert report.mean == pytest.approx(report.chance, abs=0.93)
    assert not any(greedy_extraction(model, tokenizer, canaries))
