"""Embeddings: a mean over a text's own tokens, of the base model, whatever stands beside the text in a batch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, tiny_model, tiny_tokenizer, with_lora

from privlora.adapters import LowRankAdapter
from privlora.errors import ConfigError
from privlora.synthesis.embeddings import SentenceEmbedding, hidden_states

TEXTS = ["hello", "a", "what is the name of this", "12 and 30"]
TOKENIZER = tiny_tokenizer()


def by_hand(model: Any, text: str) -> np.ndarray:
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        mean = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0].mean(dim=0)
    return (mean / mean.norm()).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_has_no_part_in_it(family: str) -> None:
    model = tiny_model(family)
    together = hidden_states(model, TOKENIZER, TEXTS)
    assert together.dtype == np.float32
    assert together.shape == (len(TEXTS), 16)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(vector, by_hand(model, text), atol=1e-4)
    alone = hidden_states(model, TOKENIZER, TEXTS, max_tokens=1)
    np.testing.assert_allclose(alone, together, atol=1e-4)
    assert np.abs(together[0] - together[1]).max() > 0.05


def test_alone_in_its_batch_a_text_is_a_function_of_itself() -> None:
    model = tiny_model()
    whole = hidden_states(model, TOKENIZER, TEXTS, max_tokens=1)
    for i, text in enumerate(TEXTS):
        assert np.array_equal(hidden_states(model, TOKENIZER, [text], max_tokens=1)[0], whole[i])


def test_texts_without_a_token_and_long_ones() -> None:
    model = tiny_model()
    found = hidden_states(model, TOKENIZER, ["", "hello", "hello there"], max_length=5)
    assert not found[0].any()
    np.testing.assert_allclose(found[1], found[2], atol=1e-5)
    assert hidden_states(model, TOKENIZER, []).shape == (0, 16)


def test_adapters_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError

    model = tiny_model()
    model.train()
    base = hidden_states(model, TOKENIZER, TEXTS)
    assert model.training
    adapter = LowRankAdapter(model, rank=2)
    adapter.attach()
    for group in adapter.groups:
        sites = len(group.sites)
        adapter.install(
            group, torch.randn(sites, group.m, 2), torch.ones(sites, 2), torch.randn(sites, group.n, 2)
        )
    assert np.abs(hidden_states(model, TOKENIZER, TEXTS) - base).max() > 0.01
    assert np.array_equal(hidden_states(model, TOKENIZER, TEXTS, adapter=adapter), base)
    assert adapter.attached
    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", broken)
        with pytest.raises(MemoryError):
            hidden_states(model, TOKENIZER, TEXTS, adapter=adapter)
    assert adapter.attached
    adapter.detach()
    assert np.array_equal(hidden_states(model, TOKENIZER, TEXTS, adapter=adapter), base)
    assert not adapter.attached
    wrapped = with_lora(tiny_model(), init_lora_weights=False)
    assert np.array_equal(hidden_states(wrapped, TOKENIZER, TEXTS), base)


def package(model: Any, version: str = "6.0.0") -> SimpleNamespace:
    """Stands for sentence-transformers."""
    return SimpleNamespace(SentenceTransformer=model, __version__=version)


def test_sentence_transformers_that_trust_a_folder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before version 6 modules.json of a local folder names code that runs."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", package(None, "5.4.1"))
    with pytest.raises(ConfigError, match="from version 6 on"):
        SentenceEmbedding("folder")


def test_sentence_transformers_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match="pip install -U sentence-transformers"):
        SentenceEmbedding("tiny")


def test_sentence_vectors_show_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar would count texts that may be private."""
    loaded: list[tuple[str, str | None]] = []

    class Model:
        def __init__(self, name: str, device: str | None, trust_remote_code: bool) -> None:
            assert not trust_remote_code
            loaded.append((name, device))

        def modules(self) -> list[Any]:
            return []

        def encode(self, texts: list[str], **how: Any) -> np.ndarray:
            assert how == {
                "normalize_embeddings": True,
                "convert_to_numpy": True,
                "show_progress_bar": False,
            }
            return np.ones((len(texts), 3))

    monkeypatch.setitem(sys.modules, "sentence_transformers", package(Model))
    embed = SentenceEmbedding("tiny", device="cpu")
    for _ in range(2):  # loaded once, for private records are embedded one by one
        found = embed(TEXTS)
        assert (found.shape, found.dtype) == ((4, 3), np.float32)
    assert loaded == [("tiny", "cpu")]


def test_a_text_without_a_token_is_not_handed_to_a_sentence_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail on it, and so tell that there is such a record."""

    class Model:
        def __init__(self, name: str, device: str | None, trust_remote_code: bool) -> None: ...

        def modules(self) -> list[Any]:
            return []

        def tokenizer(self, text: str, **how: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text.strip())}

        def encode(self, texts: list[str], **how: Any) -> np.ndarray:
            assert all(text.strip() for text in texts)
            return np.ones((len(texts), 3))

    monkeypatch.setitem(sys.modules, "sentence_transformers", package(Model))
    assert SentenceEmbedding("tiny")(["hello", " ", ""]).tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3]


def test_a_sentence_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, device: str | None, trust_remote_code: bool) -> None:
        raise OSError("long advice of a library\non many lines")

    monkeypatch.setitem(sys.modules, "sentence_transformers", package(fail))
    with pytest.raises(ConfigError, match=r"synthesis.embedding='nowhere' cannot be loaded \(OSError\)"):
        SentenceEmbedding("nowhere")
