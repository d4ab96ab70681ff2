"""The embedded model as a generator: seeds, adapters, chat templates, small contexts."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama, tiny_tokenizer
from written_cases import demo_model

from privlora.adapters import LowRankAdapter
from privlora.config.synthesis import SynthesisSettings
from privlora.errors import ConfigError
from privlora.synthesis.generators import build_generator
from privlora.synthesis.population import start
from privlora.synthesis.prompts import beginning
from privlora.synthesis.writers import ModelWriter

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
CHAT += "{% if add_generation_prompt %}[reply]{% endif %}"


def texts_of(seed: int, **settings: Any) -> list[str]:
    model, tokenizer = demo_model()
    short = SynthesisSettings(**{"max_new_tokens": 24, **settings})
    generator = build_generator(short, seed=seed, model=model, tokenizer=tokenizer)
    return start(generator, seeds=4, variations=1).texts


def test_the_public_seed_decides_and_torch_is_left_alone() -> None:
    torch.manual_seed(1)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = texts_of(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)
    torch.manual_seed(2)
    assert texts_of(5) == first
    assert not set(texts_of(6)) & set(first)


def test_texts_are_whole_and_variations_keep_a_beginning() -> None:
    texts = texts_of(0)
    assert len(set(texts)) == 8
    assert all(text == text.strip() and " " in text for text in texts)
    for seed, varied in zip(texts[:4], texts[4:], strict=True):
        assert varied.startswith(beginning(seed))


def test_the_cap_counts_tokens() -> None:
    _, tokenizer = demo_model()
    for text in texts_of(0, max_new_tokens=5)[:4]:  # variations begin with a half
        assert 1 <= len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= 6


def test_the_adapted_model_writes() -> None:
    model, _ = demo_model()
    plain = texts_of(3)
    adapter = LowRankAdapter(model, rank=2)
    with adapter:
        assert texts_of(3) == plain
        rng = torch.Generator().manual_seed(0)
        for group in adapter.groups:
            sites = len(group.sites)
            left, right = (torch.randn(sites, d, 2, generator=rng) for d in (group.m, group.n))
            adapter.install(group, left, torch.full((sites, 2), 0.02), right)
        assert texts_of(3) != plain
    assert texts_of(3) == plain


def test_a_lead_in_is_not_in_the_text() -> None:
    model, tokenizer = demo_model()
    settings = SynthesisSettings(random_prompt="Reminder from Hugo:", max_new_tokens=12)
    generator = build_generator(settings, seed=0, model=model, tokenizer=tokenizer)
    assert all("Hugo:" not in text for text in generator.random(4))
    assert model.training is False


@pytest.fixture
def chatty() -> Any:
    tokenizer = deepcopy(demo_model()[1])
    tokenizer.chat_template = CHAT
    return tokenizer


def asked_of(writer: ModelWriter, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The token ids that the model is given."""
    seen: list[list[int]] = []

    def caught(model: Any, tokenizer: Any, ids: Any, **_: Any) -> list[list[int]]:
        seen.extend(row.tolist() for row in ids)
        return [[5]] * len(ids)

    monkeypatch.setattr("privlora.synthesis.writers.generate_tokens", caught)
    writer.write(prompts, 0)
    return seen


def test_a_chat_template_is_one_user_turn(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = demo_model()
    writer = ModelWriter(model, chatty)
    assert writer.chat
    (ids,) = asked_of(writer, ["a note"], monkeypatch)
    assert (
        chatty.decode(ids) == "[user] a note [reply]"
    )  # templates write a BOS themselves, where there is one
    assert not ModelWriter(model, chatty, chat=False).chat
    (ids,) = asked_of(ModelWriter(model, chatty, chat=False), ["a note"], monkeypatch)
    assert ids[0] == plain.bos_token_id
    assert plain.decode(ids[1:]) == "a note"


def test_a_chat_without_a_template_is_refused(chatty: Any) -> None:
    model, tokenizer = demo_model()
    with pytest.raises(ConfigError, match="no chat template"):
        ModelWriter(model, tokenizer, chat=True)
    chatty.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ConfigError, match="refuses"):
        ModelWriter(model, chatty).write(["a"], 0)


def test_a_small_context_is_shared() -> None:
    """64 positions and 60 new tokens: a long prompt is cut on its left, and what is left is written on."""
    model, tokenizer = tiny_llama(vocab_size=61, max_position_embeddings=64), tiny_tokenizer()
    writer = ModelWriter(model, tokenizer, max_new_tokens=60)
    short, long = writer.write(["ab", "a" * 500], 0)
    assert len(short) <= 62
    assert len(writer.write(["a" * 500], 0)[0]) <= 32
    assert long is not None


def test_a_tokenizer_without_any_beginning() -> None:
    model, tokenizer = tiny_llama(vocab_size=61), tiny_tokenizer()
    tokenizer.bos_token = None
    assert len(ModelWriter(model, tokenizer, max_new_tokens=3).write([""], 0)) == 1  # begins after EOS
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither BOS nor EOS"):
        ModelWriter(model, tokenizer, max_new_tokens=3).write([""], 0)


def test_a_word_that_goes_on_keeps_its_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tokenizer that decodes a first word without the blank before it."""

    class Metaspace:
        chat_template = None
        words = ("", "▁one", "▁two", "▁three")

        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(self.words[t] for t in tokens).replace("▁", " ").removeprefix(" ")

    monkeypatch.setattr(
        "privlora.synthesis.writers.encode_prompts",
        lambda prompts, *_, **__: [np.array([1, 2])] * len(prompts),
    )
    monkeypatch.setattr("privlora.synthesis.writers.generate_tokens", lambda *_, **__: [[3]])
    assert ModelWriter(tiny_llama(vocab_size=61), Metaspace()).write(["one two"], 0) == [" three"]


def test_numbers_out_of_range() -> None:
    model, tokenizer = demo_model()
    for wrong in ({"temperature": 0.0}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError):
            ModelWriter(model, tokenizer, **wrong)  # type: ignore[arg-type]
