from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import one_batch, random_example

from privlora.data.batching import MicroBatch, collate, micro_batches, sequential_batches
from privlora.data.examples import IGNORED, Answers, Example, Examples
from privlora.errors import ConfigError, PrivacyError

PAD = 99


def example(length: int, prompt: int = 0, first: int = 0) -> Example:
    ids = np.arange(first, first + length, dtype=np.int32)
    labels = ids.copy()
    labels[:prompt] = IGNORED
    return Example(ids, labels)


def records(*lengths: int, prompt: int = 0) -> Examples:
    return padded([example(length, prompt) for length in lengths])


def padded(examples: list[Example]) -> Examples:
    return Examples(examples, pad_token_id=PAD)


def test_collates_exactly() -> None:
    batch = next(micro_batches([1, 0], padded([example(2, first=10), example(4, prompt=2)]), max_tokens=100))
    assert batch.record_index.tolist() == [1, 0]  # longest first
    assert batch.input_ids.tolist() == [[0, 1, 2, 3], [10, 11, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 2, 3], [10, 11, -100, -100]]
    # The label at position 0 is never predicted, so the second row has one label token.
    assert batch.token_weight.tolist() == [[0, 0, 0.5, 0.5], [0, 1, 0, 0]]
    assert batch.row_weight.tolist() == [1, 1]
    assert batch.unit_index.tolist() == [0, 1]
    assert batch.unit_count == 2
    dtypes = (batch.input_ids.dtype, batch.labels.dtype, batch.attention_mask.dtype, batch.token_weight.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.int64, torch.float32)


def test_a_unit_shares_its_weight_among_its_records() -> None:
    examples = records(3, 5, 2, 9)
    batch = next(micro_batches([np.array([0, 1, 2]), np.array([3])], examples, max_tokens=99))
    assert batch.record_index.tolist() == [3, 0, 1, 2]
    assert batch.unit_index.tolist() == [0, 1, 1, 1]
    assert batch.row_weight.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    per_unit = torch.zeros(2).index_add(0, batch.unit_index, batch.token_weight.sum(dim=1))
    assert per_unit.tolist() == pytest.approx([1, 1])


def test_rows_without_labels_or_tokens_stay_and_weigh_nothing() -> None:
    empty = Example(np.zeros(0, np.int32), np.zeros(0, np.int32))
    only_prompt = example(3, prompt=3)
    only_bos = example(1)
    for examples in ([empty], [empty, only_prompt, only_bos]):
        batch = next(micro_batches(range(len(examples)), padded(examples), max_tokens=9))
        assert batch.unit_count == len(examples)
        assert batch.input_ids.shape[1] >= 1
        assert (batch.attention_mask.sum(dim=1) >= 1).all()
        assert (batch.token_weight == 0).all()


def test_an_empty_logical_batch_has_no_micro_batches() -> None:
    assert list(micro_batches(np.zeros(0, np.int64), records(3), max_tokens=9)) == []


@settings(max_examples=100, deadline=None)
@given(
    units=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), max_size=20),
    max_tokens=st.integers(1, 120),
)
def test_splits_every_batch_whole(units: list[list[int]], max_tokens: int) -> None:
    """Every drawn record occurs once, units are whole, memory is bounded, and the longest come first."""
    examples = records(*(length for unit in units for length in unit))
    numbers = iter(range(len(examples)))
    indices = [np.array([next(numbers) for _ in unit]) for unit in units]
    batches = list(micro_batches(indices, examples, max_tokens=max_tokens))

    found = [b.record_index[b.unit_index == u].tolist() for b in batches for u in range(b.unit_count)]
    assert sorted(found) == sorted(unit.tolist() for unit in indices)
    for batch in batches:
        rows, width = batch.input_ids.shape
        assert rows * width <= max_tokens or batch.unit_count == 1
        assert width == max(1, max(len(examples[int(i)].input_ids) for i in batch.record_index))
    widths = [batch.input_ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=7),
    max_tokens=st.integers(1, 900),
    max_rows=st.one_of(st.none(), st.integers(1, 5)),
    device=st.sampled_from([(None, 96), (torch.device("cpu"), 96), (torch.device("cuda"), 1024)]),
)
def test_no_other_split_takes_less_work(
    lengths: list[int], max_tokens: int, max_rows: int | None, device: tuple[torch.device | None, int]
) -> None:
    """Work is rows x padded length, and what one more micro-batch costs. Against all splits of the sorted units."""
    where, overhead = device
    batches = micro_batches(
        range(len(lengths)), records(*lengths), max_tokens=max_tokens, max_rows=max_rows, device=where
    )
    found = sum(batch.input_ids.numel() + overhead for batch in batches)
    widths = sorted((max(1, length) for length in lengths), reverse=True)

    def cost(cuts: Sequence[int]) -> float:
        total = 0.0
        for start, stop in pairwise([0, *cuts, len(widths)]):
            area, rows = (stop - start) * widths[start], stop - start
            if rows > 1 and (area > max_tokens or (max_rows is not None and rows > max_rows)):
                return float("inf")
            total += area + overhead
        return total

    places = range(1, len(widths))
    assert found == min(cost(cuts) for k in range(len(widths)) for cuts in combinations(places, k))


def test_short_records_are_not_padded_to_the_longest() -> None:
    """64 lengths as of short reviews, all of which would fit into one micro-batch."""
    lengths = [4 + 60 * k**3 // 63**3 for k in range(64)]
    batches = list(micro_batches(range(64), records(*lengths), max_tokens=4096))
    assert sum(batch.input_ids.numel() for batch in batches) < 1.35 * sum(lengths) < 0.5 * 64 * 64


def test_units_of_one_width_are_together_and_one_that_fills_it_is_by_itself() -> None:
    """By itself it has no padding, and beside a shorter one it would have some, which another kernel computes."""
    lengths = (64, 64, 60, 57, 30, 29, 25)

    def own_width(length: int) -> int:
        return min(64, (length // 8 + 1) * 8)

    batches = list(micro_batches(range(7), records(*lengths), max_tokens=10_000, own_width=own_width))
    assert [batch.record_index.tolist() for batch in batches] == [[0], [1], [2, 3], [4, 5, 6]]
    halves = micro_batches(range(7), records(*lengths), max_tokens=60, own_width=own_width)
    assert [batch.record_index.tolist() for batch in halves] == [[0], [1], [2], [3], [4, 5], [6]]


def test_weights_do_not_depend_on_the_other_rows() -> None:
    examples = records(5, 17, 3, 40, 11, prompt=2)

    def weights_of_first(batches: list[MicroBatch]) -> list[float]:
        for batch in batches:
            for row in (batch.record_index == 0).nonzero().flatten():
                return batch.token_weight[row][:5].tolist()
        raise AssertionError("record 0 was lost")

    alone = weights_of_first(list(micro_batches([0], examples, max_tokens=5)))
    for max_tokens in (1, 45, 1000):
        others = list(micro_batches([4, 0, 3, 1, 2], examples, max_tokens=max_tokens))
        assert weights_of_first(others) == alone == [0, 0, *[pytest.approx(1 / 3)] * 3]


def test_sequential_batches_lead_back_to_the_order() -> None:
    examples = records(4, 9, 1, 9, 6)
    batches = list(sequential_batches(examples, max_tokens=18))
    lengths = torch.zeros(5, dtype=torch.int64)
    for batch in batches:
        lengths[batch.record_index] = batch.attention_mask.sum(dim=1)
    assert lengths.tolist() == [4, 9, 1, 9, 6]
    assert len(batches) == 2


def test_what_a_model_reads_is_moved_and_nothing_else() -> None:
    """What is found out about labels and units on the CPU need not be read back from a device."""
    batch = next(micro_batches([0], records(3), max_tokens=9)).to("meta")
    values = {name: getattr(batch, name) for name in MicroBatch.__slots__}
    places = {name: t.device.type for name, t in values.items() if isinstance(t, torch.Tensor)}
    assert len(places) == 7
    assert {name for name, place in places.items() if place == "meta"} == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("indices", [[0, 0], [np.array([0, 1]), np.array([1])]])
def test_refuses_a_record_twice(indices: list[int]) -> None:
    with pytest.raises(PrivacyError, match="twice"):
        next(micro_batches(indices, records(3, 3), max_tokens=9))


@pytest.mark.parametrize("units", [[True], [np.array([True, False])]])
def test_refuses_a_mask_of_units(units: list[object]) -> None:
    examples = Examples([random_example(np.random.default_rng(0), 4)] * 3, pad_token_id=0)
    with pytest.raises(PrivacyError, match="no number of a record"):
        list(micro_batches(units, examples, max_tokens=64))  # type: ignore[arg-type]


def test_refuses_settings() -> None:
    with pytest.raises(ConfigError, match="max_tokens=0"):
        next(micro_batches([0], records(3), max_tokens=0))
    with pytest.raises(ConfigError, match="max_rows=0"):
        next(micro_batches([0], records(3), max_tokens=9, max_rows=0))


def test_rows_can_be_bounded_by_themselves() -> None:
    units = [np.array([0, 1, 2]), np.array([3]), np.array([4]), np.array([5])]
    batches = list(micro_batches(units, records(*[3] * 6), max_tokens=99, max_rows=2))
    assert [len(b.record_index) for b in batches] == [3, 2, 1]  # a unit stays whole
    with pytest.raises(ConfigError, match="pad_token_id=-1"):
        Examples([], pad_token_id=-1)


def test_parts_and_others_are_filled_up_with_the_same_token() -> None:
    whole = records(3, 5, 2)
    part, other = whole[1:], whole.like([example(1), example(4)])
    assert [len(e.input_ids) for e in part] == [5, 2]
    for found in (part, other, part[:1], other.like([])):
        assert found.pad_token_id == PAD
    assert next(sequential_batches(part, max_tokens=99)).input_ids.tolist()[1] == [0, 1, PAD, PAD, PAD]


def test_each_unit_is_cut_to_its_own_longest_row() -> None:
    examples = [random_example(np.random.default_rng(0), n) for n in (9, 4, 2, 0)]
    units = [[0], [1, 2], [3]]
    whole = one_batch(examples, units, pad=3)
    for unit, found in zip(units, whole.each_unit(), strict=True):
        alone = one_batch(examples, [unit])
        for name in MicroBatch.__slots__:
            assert np.array_equal(getattr(found, name), getattr(alone, name)), name


def test_a_wider_micro_batch_holds_the_same() -> None:
    rng = np.random.default_rng(0)
    batch = one_batch([random_example(rng, n) for n in (7, 3)])
    wide = batch.widened(12)
    assert wide.input_ids.shape == (2, 12)
    for name in ("input_ids", "attention_mask", "labels", "token_weight"):
        assert torch.equal(getattr(wide, name)[:, :7], getattr(batch, name))
    assert not wide.attention_mask[:, 7:].any()
    assert not wide.token_weight[:, 7:].any()
    assert bool((wide.labels[:, 7:] == IGNORED).all())
    assert batch.widened(7) is batch


def test_wider_batches_are_filled_up_with_padding() -> None:
    examples = Examples([Example(np.array([4, 5], np.int32), np.array([4, 5], np.int32))], pad_token_id=7)
    wide = collate([np.array([0])], examples).widened(5)
    assert wide.input_ids.tolist() == [[4, 5, 7, 7, 7]]
    assert wide.attention_mask.tolist() == [[1, 1, 0, 0, 0]]


def test_padding_is_of_no_second_text() -> None:
    """Padded places have the type 0, as tokenizers give it, so that no row depends on how wide its batch is."""
    answers = Answers(np.zeros(2), np.array([1, 2], np.int32), 2, typed=True)
    both = padded([example(2), example(4)])
    both.answers = answers
    found = collate([np.array([0]), np.array([1])], both)
    assert found.token_type_ids.tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]
