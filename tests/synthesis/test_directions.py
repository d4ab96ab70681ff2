"""What a private text's direction depends on: that text, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import tiny_model, tiny_tokenizer
from vote_cases import count_letters

from privlora.errors import ConfigError
from privlora.synthesis.directions import directions, record_directions
from privlora.synthesis.embeddings import hidden_states

GPT2, TOKENIZER = tiny_model("gpt2"), tiny_tokenizer()
TEXTS = ["a", "abc", "hh", "abcdefgh" * 5, "bba", "c" * 30]


def coupled(texts: Sequence[str]) -> NDArray[np.float64]:
    """An embedding as bad as there are: centred on its batch, and padded to its longest text."""
    rows = count_letters(texts) + max(map(len, texts))
    found: NDArray[np.float64] = rows - rows.mean(axis=0) / 2
    return found


def padded(texts: Sequence[str]) -> NDArray[np.float64]:
    """A language model's hidden states, padded on the left to the longest text and without positions."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + [ord(c) - 96 for c in text] for text in texts])
    with torch.no_grad():
        found: NDArray[np.float64] = GPT2.transformer(ids).last_hidden_state.mean(1).numpy()
    return found


def of_the_model(texts: Sequence[str]) -> NDArray[np.float32]:
    """The room's own embedding, which pads as well."""
    found: NDArray[np.float32] = hidden_states(GPT2, TOKENIZER, texts)
    return found


@pytest.mark.parametrize("embed", [count_letters, coupled, padded, of_the_model])
def test_a_direction_has_no_bit_of_its_batch_mates(embed: Any) -> None:
    alone = [record_directions([text], embed)[0] for text in TEXTS]
    for others in (TEXTS, TEXTS[::-1], [TEXTS[3], *TEXTS, *TEXTS], TEXTS[2:4]):
        together = record_directions(others, embed)
        for text, row in zip(others, together, strict=True):
            assert row.tobytes() == alone[TEXTS.index(text)].tobytes()
    assert len({row.tobytes() for row in alone}) == len(TEXTS)


def test_directions_have_norm_one_or_none() -> None:
    rows = np.array(
        [
            [3.0, 4.0],
            [1e-100, 0.0],
            [0.0, 0.0],
            [np.nan, 1.0],
            [np.inf, 1.0],
            [1e200, 1e200],
            [5e-324, 0.0],
        ]
    )
    made = directions(rows)
    assert made.tolist() == [[0.6, 0.8], [1.0, 0.0], *[[0.0, 0.0]] * 5]
    assert directions(rows.astype(np.float32)).dtype == np.float64
    assert np.isnan(rows[3, 0])  # its argument stays


def test_embeddings_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="shape"):
        directions(np.ones(3))
    with pytest.raises(ConfigError, match="several lengths"):
        record_directions(TEXTS, lambda texts: np.ones((1, len(texts[0]))))
    with pytest.raises(ConfigError, match="one row"):
        record_directions(TEXTS, lambda texts: np.ones((2, 3)))


def test_no_text_has_no_rows() -> None:
    assert record_directions([], count_letters).shape[0] == 0
