"""Figures on texts, against what is counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from privlora.data.examples import Template, build_examples
from privlora.evaluation.texts import copies_of, distinct, repeated, text_figures, token_losses

TOKENIZER = tiny_tokenizer()


def test_distinct_counts_over_all_texts_together() -> None:
    texts = ["a b a b", "A  b c"]
    assert distinct(texts, 1) == pytest.approx(3 / 7)
    assert distinct(texts, 2) == pytest.approx(3 / 5)  # ab ba ab | ab bc
    assert distinct(texts, 3) == pytest.approx(3 / 3)  # aba bab | abc
    assert distinct(["a b"], 3) is None
    assert distinct([], 1) is None


def test_a_near_copy_shares_half_of_its_runs_with_one_other_text() -> None:
    first = "one two three four five six seven eight"  # four runs of five words
    half = "one two three four five six zebra zoo"  # two of four are the other's
    less = "one two three four five zebra zoo yak"  # one of four
    spread = "one two three four five yak bee cat dog ox"
    assert repeated([first, half, less]) == [False, True, False]
    assert copies_of([half, less, spread], [first]) == [True, False, False]
    assert repeated([first, first.upper(), "other words stand here alone now"]) == [False, True, False]


def test_a_short_text_is_a_copy_where_another_holds_it_whole() -> None:
    assert copies_of(["two three", "two four", "", "three"], ["one two three"]) == [True, False, False, True]
    assert repeated(["hello", "Hello", ""]) == [False, True, False]


def test_perplexity_is_that_of_each_text_alone() -> None:
    model = tiny_model()
    texts = ["hello you", "what is the name of this", ""]
    examples = build_examples([{"t": t} for t in texts], Template(text="t"), TOKENIZER, max_length=40)
    losses, tokens = token_losses(model, examples, max_tokens=200)
    for example, loss, count in zip(examples, losses, tokens, strict=True):
        ids = torch.from_numpy(np.array(example.input_ids, dtype=np.int64))[None]
        if ids.shape[1] < 2:
            assert (loss, count) == (0, 0)
            continue
        with torch.no_grad():
            expected = float(model(input_ids=ids, labels=ids).loss)
        assert count == ids.shape[1] - 1
        assert loss / count == pytest.approx(expected, rel=1e-4)
    found = text_figures(model, examples, texts, {"synthesis.file": ["hello you"]})
    assert found.perplexity == pytest.approx(np.exp(losses.sum() / tokens.sum()))
    assert found.near_public == {"synthesis.file": pytest.approx(1 / 3)}
    assert found.near_copies == 0
    assert (found.perplexities[2] is None) == (tokens[2] == 0)
    assert found.to_dict()["distinct"]["1"] == 1.0
