"""Norms of whole per-example gradients: never too small, hardly too large, in both ways of computing them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, uneven_examples

from privlora.adapters import LowRankAdapter
from privlora.adapters.lowrank import dense_norms
from privlora.data.batching import micro_batches
from privlora.data.examples import Examples
from privlora.training.gradients import micro_batch_gradients


def truth(e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.norm(e.double().mT @ x.double(), dim=(-2, -1))


@pytest.mark.parametrize(("tokens", "m", "n"), [(3, 40, 50), (200, 8, 12), (1, 5, 5), (64, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_are_the_norms_of_the_gradients(tokens: int, m: int, n: int, dtype: torch.dtype) -> None:
    e, x = torch.randn(7, tokens, m).to(dtype), torch.randn(7, tokens, n).to(dtype)
    found = dense_norms(e, x)
    assert found.dtype == torch.float64
    assert bool((found >= truth(e, x)).all())
    torch.testing.assert_close(found, truth(e, x), rtol=1e-3, atol=0)


def test_tokens_that_cancel_do_not_come_out_too_small() -> None:
    # Each gradient is 1e-6 of its terms, below what float32 resolves.
    e = torch.randn(50, 1, 300).repeat(1, 2, 1)
    x = torch.randn(50, 1, 400).repeat(1, 2, 1)
    e[:, 1] *= -1
    x[:, 1] += 1e-6 * torch.randn(50, 400)
    assert bool((dense_norms(e, x) >= truth(e, x)).all())


def test_rows_are_split_where_gradients_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    e, x = torch.randn(5, 60, 8), torch.randn(5, 60, 9)
    whole = dense_norms(e, x)
    monkeypatch.setattr("privlora.adapters.lowrank._CHUNK", 1)
    torch.testing.assert_close(dense_norms(e, x), whole)


def test_bad_rows_are_bad_alone() -> None:
    e, x = torch.randn(4, 3, 40), torch.randn(4, 3, 50)
    e[1, 0, 0], x[2, 1, 1] = float("nan"), float("inf")
    assert torch.isfinite(dense_norms(e, x)).tolist() == [True, False, False, True]


@pytest.mark.parametrize("units", [None, [[0, 2], [1], [3, 4, 5]]], ids=["records", "users"])
def test_an_adapter_keeps_them(units: list[list[int]] | None) -> None:
    """Against autograd's gradient of each layer's weight; a user's norm is bounded by the sum of its records'."""
    model = tiny_model(dtype=torch.float64)
    adapter = LowRankAdapter(model, rank=2)
    adapter.dense_norms = True
    examples = uneven_examples()
    chosen = range(len(examples)) if units is None else units
    with adapter:
        for group in adapter.groups:
            adapter.install(
                group,
                torch.zeros(len(group.sites), group.m, 2),
                torch.zeros(len(group.sites), 2),
                torch.randn(len(group.sites), group.n, 2),
            )
        squares = [squares_of(model, adapter, [unit], examples) for unit in chosen]
        together = squares_of(model, adapter, chosen, examples)
    torch.testing.assert_close(together.sort().values, torch.cat(squares).sort().values)
    for found, unit in zip(squares, chosen, strict=True):
        exact = _gradient_squares(model, adapter, [unit] if units is None else unit, examples)
        assert float(found) >= exact * (1 - 1e-6)  # losses are weighted in float32
        if units is None or len(unit) == 1:
            assert float(found) == pytest.approx(exact, rel=1e-6, abs=1e-20)


def squares_of(model: torch.nn.Module, adapter: LowRankAdapter, units: Any, examples: Any) -> torch.Tensor:
    chosen = [np.asarray(unit) for unit in units]
    (batch,) = micro_batches(chosen, Examples(examples, pad_token_id=0), max_tokens=10**6)
    captured, _ = micro_batch_gradients(adapter, batch)
    assert captured.dense_squares is not None
    return captured.dense_squares


def _gradient_squares(
    model: torch.nn.Module, adapter: LowRankAdapter, unit: list[int], examples: list
) -> float:
    """||gradient of the unit's mean loss by the adapted weights||^2, by autograd on each record alone."""
    weights = [site.weight for site in adapter.sites]
    total = [torch.zeros_like(w) for w in weights]
    for index in unit:
        ids = torch.as_tensor(examples[index].input_ids.astype("int64"))[None]
        labels = torch.as_tensor(examples[index].labels.astype("int64"))[None]
        if len(ids[0]) < 2 or not bool((labels[:, 1:] >= 0).any()):
            continue
        for w in weights:
            w.requires_grad_(True)
        loss = model(input_ids=ids, labels=labels).loss
        for t, g in zip(total, torch.autograd.grad(loss, weights), strict=True):
            t += g / len(unit)
        for w in weights:
            w.requires_grad_(False)
    return float(sum(t.square().sum() for t in total))
