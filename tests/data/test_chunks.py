"""Texts that are longer than max_length, divided: nothing is lost, and a text is one unit however long it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promises import promise, small_settings
from tiny_models import tiny_model, tiny_tokenizer

from privlora.adapters import LowRankAdapter
from privlora.config import Settings
from privlora.data.assembling import divided, frame_of
from privlora.data.batching import collate
from privlora.data.units import Units
from privlora.errors import ConfigError
from privlora.methods import METHODS, build
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import Data, load_data

LONG = "abcdefghij" * 6
RECORDS = [{"text": "abc", "who": "a"}, {"text": LONG, "who": "b"}, {"text": "", "who": "a"}]


def settings_of(privacy: Mapping[str, Any] = {}, **data: Any) -> Settings:
    own = promise(steps=2, batch=1, records=3, noise_multiplier=1.0, delta=1e-5)
    given = {"path": "x.jsonl", "text": "text", "max_length": 16, "chunk": True, **data}
    return small_settings(privacy=own | dict(privacy), data=given)


def loaded(**data: Any) -> Data:
    return load_data(settings_of(**data), tiny_tokenizer(), RECORDS)


@settings(max_examples=200, deadline=None)
@given(count=st.integers(0, 200), max_length=st.integers(2, 40), eos=st.booleans(), ends=st.booleans())
def test_parts_are_the_text_in_like_lengths(count: int, max_length: int, eos: bool, ends: bool) -> None:
    tokenizer = tiny_tokenizer()
    frame = dataclasses.replace(
        frame_of(tokenizer, max_length, True, eos, False, "keep_start"), max_length=max_length
    )
    ids = [5] * count + ([tokenizer.eos_token_id] if ends else [])
    parts = divided(ids, frame)
    whole = [token for part in parts for token in part]
    assert whole == ids + ([tokenizer.eos_token_id] if eos and not ends else [])
    lengths = [len(part) for part in parts]
    assert max(lengths) + frame.adds_bos <= max_length
    assert max(lengths) - min(lengths) <= 1


def test_a_text_is_one_unit_of_all_its_chunks() -> None:
    data = loaded()
    assert data.examples.chunks.tolist() == [1, 4, 1]
    assert [len(unit) for unit in data.units] == [1, 4, 1]
    assert int(data.examples.lengths.max()) <= 16
    assert not data.examples.dropped.any()
    assert data.summary.records == 3
    assert data.summary.chunks == 6
    tokenizer = tiny_tokenizer()
    ends = [example.input_ids[-1] == tokenizer.eos_token_id for example in data.examples]
    assert ends == [True, False, False, False, True, True]  # where the texts end, and nowhere else


def test_as_many_chunks_as_are_allowed_take_part_in_a_step() -> None:
    data = loaded(max_length=4)
    (drawn,) = data.units.draw_records([1], np.random.default_rng(0))
    assert len(drawn) == 8 < len(data.units[1])
    seen = {int(k) for _ in range(60) for k in data.units.draw_records([1], np.random.default_rng())[0]}
    assert seen == set(data.units[1])  # drawn anew each time


def test_a_users_chunks_are_the_users() -> None:
    privacy = {"unit": "user", "user_column": "who", "max_records_per_user": 3, "public_dataset_size": 2}
    data = load_data(settings_of(privacy), tiny_tokenizer(), RECORDS)
    assert sorted(len(unit) for unit in data.units) == [2, 4]
    assert max(len(rows) for rows in data.units.draw_records([0, 1], np.random.default_rng(0))) == 3


def test_a_long_text_moves_the_sum_by_no_more_than_a_short_one() -> None:
    """The unit is clipped, not its chunks: the gradient of one is the mean over its chunks, and has one norm."""
    model = tiny_model("llama", dtype=torch.float64)
    data = loaded()
    adapter = LowRankAdapter(model, rank=2)
    coordinates, _ = build(METHODS["dp-adamw"], adapter, dtype=torch.float64)
    with adapter:
        captured, losses = micro_batch_gradients(adapter, collate(data.units[:], data.examples))
        each, of_each = micro_batch_gradients(
            adapter, collate([np.array([k]) for k in range(len(data.examples))], data.examples)
        )
    assert captured.units == 3
    assert coordinates.norms_squared(captured).shape == (3,)
    assert torch.allclose(losses[1], of_each[1:5].mean())
    assert torch.allclose(captured.p[0][1], each.p[0][1:5].mean(dim=0))


def test_neighbours_differ_in_one_unit() -> None:
    """Without the long text, all other units are as they were."""
    with_it = loaded()
    without = load_data(settings_of(), tiny_tokenizer(), [RECORDS[0], RECORDS[2]])

    def of(data: Data) -> list[set[bytes]]:
        return [{data.examples[k].digest for k in unit} for unit in data.units]

    assert [unit for unit in of(with_it) if len(unit) == 1] == of(without)


def test_what_a_unit_brings_is_public() -> None:
    assert settings_of().rows_of_a_unit == 8
    assert settings_of(chunk=False).rows_of_a_unit == 1
    assert isinstance(loaded().units, Units)


@pytest.mark.parametrize(
    "data",
    [
        {"text": None, "prompt": "p", "completion": "c"},
        {"text": None, "messages": "m"},
        {"text": None, "task": "sst2"},
        {"label": "l", "labels": 2},
    ],
)
def test_only_whole_texts_are_divided(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="chunk divides whole texts"):
        settings_of(**data)
