"""Gradients of records against autograd, and how far each record moves a clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from counting_ledger import CountingLedger
from tiny_models import VOCAB
from torch import Tensor
from torch.func import functional_call

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured
from privlora.data.batching import MicroBatch, collate
from privlora.data.examples import Example, Examples
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.training.gradients import micro_batch_gradients

CLIP_NORM = 0.7
CLIPPINGS = ("flat", "spectral", "automatic", "per-module")


def batch_of(examples: Examples, units: Sequence[Sequence[int]]) -> MicroBatch:
    return collate([np.array(unit) for unit in units], examples)


def logits_of(model: Any, weights: Mapping[str, Tensor], record: MicroBatch) -> Tensor:
    """With ``weights`` by the names of their modules in the place of the model's own."""
    given = {f"{name}.weight": weight for name, weight in weights.items()}
    inputs = {"input_ids": record.input_ids, "attention_mask": record.attention_mask}
    return functional_call(model, given, kwargs=inputs).logits


def check_gradients(
    model: Any, adapter: Any, examples: Examples, loss_of: Callable[[dict[str, Tensor], MicroBatch], Tensor]
) -> tuple[Captured, Tensor]:
    """What is captured of all records in one micro-batch are P, Q and loss of each by autograd: of ``loss_of`` the
    weights W0 + update of all sites and the record, without any hook of ours."""
    with adapter:
        captured, losses = micro_batch_gradients(
            adapter, batch_of(examples, [[k] for k in range(len(examples))])
        )
        updates = {site.name: (site.left * site.mid) @ site.right.mT for site in adapter.sites}
    assert captured.units == len(examples)
    conv = {site.name for site in adapter.sites if type(site.module).__name__ == "Conv1D"}
    for k in range(len(examples)):
        moved = {
            name: model.get_parameter(f"{name}.weight").detach() + (update.mT if name in conv else update)
            for name, update in updates.items()
        }
        for weight in moved.values():
            weight.requires_grad_(True)
        loss = loss_of(moved, batch_of(examples, [[k]]))
        grads = dict(zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True))
        assert abs(float(losses[k]) - loss.item()) < 1e-9
        for s, site in enumerate(adapter.sites):
            g = grads[site.name].mT if site.name in conv else grads[site.name]
            assert torch.allclose(captured.p[s][k].double(), g @ site.right, atol=1e-9), site.name
            assert torch.allclose(captured.q[s][k].double(), g.mT @ site.left, atol=1e-9), site.name
    return captured, losses


def mechanism_on(coordinates: Any, clipping: str = "flat") -> GaussianMechanism:
    return GaussianMechanism(
        coordinates,
        clip_norm=CLIP_NORM,
        event=StepEvent(PoissonSampling(0.01), 1.0),
        expected_batch_size=1.0,
        ledger=CountingLedger(),
        clipping=clipping,
        noise=NoiseSource(3),
    )


def summed(mechanism: GaussianMechanism, captured: Captured) -> Tensor:
    """The clipped sum, end to end."""
    mechanism.accumulate(captured)
    vector = mechanism.take().spend().vector
    return torch.cat([t.flatten() for parts in vector for t in parts]).double()


def moves(adapter: Any, coordinates: Any, clipping: str, examples: Examples) -> list[float]:
    """By how many clip norms the sum of all records moves where each of them leaves."""
    mechanism = mechanism_on(coordinates, clipping)

    def total(units: Sequence[int]) -> Tensor:
        with adapter:
            captured, _ = micro_batch_gradients(adapter, batch_of(examples, [[k] for k in units]))
        return summed(mechanism, captured)

    everybody = range(len(examples))
    whole = total(everybody)
    assert whole.isfinite().all()
    left = [total([k for k in everybody if k != out]) for out in everybody]
    return [float((whole - others).norm()) / CLIP_NORM for others in left]


def spoiled(example: Example) -> Example:
    """With a token whose embedding is not finite, where a test has made it so."""
    ids = example.input_ids.copy()
    ids[0] = VOCAB - 1
    return replace(example, input_ids=ids)
