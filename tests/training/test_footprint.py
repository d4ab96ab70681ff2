"""What a row takes beside its tokens, and that micro-batches are cut by it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import set_checkpointing, tiny_llama

from privlora.adapters import LowRankAdapter
from privlora.data.batching import micro_batches
from privlora.data.examples import Example, Examples
from privlora.training.footprint import gradient_bytes, row_tokens, token_bytes


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float64, 1)])
def test_a_row_takes_what_r_tokens_take(dtype: torch.dtype, times: int) -> None:
    adapter = LowRankAdapter(tiny_llama().to(dtype), rank=4)
    assert row_tokens(adapter) == 4 * times


def test_gradients_are_counted_as_they_are_captured() -> None:
    adapter = LowRankAdapter(tiny_llama(), rank=4)
    assert gradient_bytes(adapter) == 4 * sum(4 * (site.m + site.n) for site in adapter.sites)
    adapter.columns = (slice(2), slice(3, None))
    assert gradient_bytes(adapter) == 4 * sum(2 * site.m + site.n for site in adapter.sites)


def test_with_checkpoints_a_token_takes_less_and_a_row_more_tokens() -> None:
    model = tiny_llama(num_hidden_layers=8)
    adapter = LowRankAdapter(model, rank=4)
    whole = token_bytes(model)
    set_checkpointing(model, reentrant=False)
    assert token_bytes(model) == whole // 8 + 4 * 8 * 16
    assert row_tokens(adapter) == -(-4 * whole // token_bytes(model))


def test_short_rows_are_as_many_as_their_gradients_allow() -> None:
    examples = Examples([Example([1, 2], [-100, 2])] * 100, pad_token_id=0)
    for beside, most in ((0, 50), (2, 50), (10, 10), (100, 1), (1000, 1)):
        found = [b.unit_count for b in micro_batches(range(100), examples, max_tokens=100, row_tokens=beside)]
        assert max(found) == most
        assert sum(found) == 100
