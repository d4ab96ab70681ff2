"""A sentence-transformers model as it is really loaded: a tiny one in a folder, alone and under both rows of votes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.api import fine_tune
from privlora.synthesis.directions import record_directions
from privlora.synthesis.embeddings import SentenceEmbedding

pytest.importorskip("sentence_transformers", minversion="6")

WIDTH, POSITIONS = 24, 40
RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT over bytes whose tokens are averaged. Its tokenizer adds nothing, so an empty text has no token."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel

    place = tmp_path_factory.mktemp("sentences")
    tokenizer = byte_tokenizer(("<pad>", "</s>"), pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(place / "bert")
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, pad_token_id=0, **shape)
    BertModel(config).save_pretrained(place / "bert")
    parts = [modules.Transformer(str(place / "bert")), modules.Pooling(WIDTH, "mean")]
    SentenceTransformer(modules=parts, device="cpu").save(str(place / "model"))
    return place / "model"


def test_a_text_has_the_vector_of_its_own_tokens(folder: Path) -> None:
    embed = SentenceEmbedding(str(folder), device="cpu")
    found = embed(["hello", "a longer one", "hello"])
    assert (found.shape, found.dtype) == ((3, WIDTH), np.float32)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(found[0], found[2], atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_a_private_text_is_a_function_of_itself_alone(folder: Path) -> None:
    """Also one without a token, one longer than the model reads, and whatever torch's generator stands at."""
    texts = ["hello", "", "x" * 500, "\x00", "hello there, and good bye", " "]
    state = torch.random.get_rng_state()
    embed = SentenceEmbedding(str(folder), device="cpu")
    whole = record_directions(texts, embed)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert whole.shape == (len(texts), WIDTH)
    assert not whole[1].any()  # it has no direction, so it does not vote
    assert np.isfinite(whole).all()
    for i, text in enumerate(texts):
        assert np.array_equal(record_directions([text], embed)[0], whole[i])


@pytest.mark.parametrize("method", ["aug-pe", "popri"])
def test_votes_by_such_a_model(method: str, folder: Path, tmp_path: Path) -> None:
    if method == "popri":
        pytest.importorskip("trl")
    own: dict[str, dict[str, Any]] = {
        "aug-pe": {"seeds": 3},
        "popri": {"requests": 2, "answers": 3, "dpo_learning_rate": 1e-3},
    }
    chosen = {"max_new_tokens": 8, "random_prompt": "note", "samples": 4, "publish": True}
    result = fine_tune(
        tiny_model(),
        RECORDS,
        tokenizer=tiny_tokenizer(),
        privacy={
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            "steps": 2,
            "sample_rate": 1.0,
            "public_dataset_size": 12,
        },
        adapter={"r": 2},
        data={"max_length": 40},
        method=method,
        synthesis={**chosen, **own[method], "embedding": str(folder)},
        output=tmp_path / "run",
    )
    assert read_ledger(result.release / "ledger.jsonl").charges == 2
    assert len((result.release / "synthetic.jsonl").read_text().splitlines()) == 4
    published = b"".join(path.read_bytes() for path in result.release.iterdir())
    assert str(folder).encode() not in published  # where a public model lies is the machine's matter
