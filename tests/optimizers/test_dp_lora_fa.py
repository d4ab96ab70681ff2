"""`ffa` with `sgd` is Algorithm 2 of Hu et al. 2026 (DP-LoRA-FA): against a loop in numpy on a language model."""

from __future__ import annotations

import numpy as np
import torch
from tiny_models import one_batch, tiny_model, uneven_examples

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.coordinates import Coordinates
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.mechanisms.charges import Uncharged
from privlora.mechanisms.noising import grid_width
from privlora.methods import METHODS, build
from privlora.optimizers import Optimizer
from privlora.training.gradients import micro_batch_gradients

CLIP, SIGMA, BATCH, RATE, SCALE = 0.5, 0.7, 4.0, 0.02, 8.0


def start() -> tuple[LowRankAdapter, Coordinates, Optimizer, GaussianMechanism]:
    adapter = LowRankAdapter(tiny_model(dtype=torch.float64), rank=2, target_modules=["q_proj", "down_proj"])
    coordinates, rule = build(METHODS["ffa"], adapter, optimizer="sgd", dtype=torch.float64)
    event = StepEvent(PoissonSampling(1.0), SIGMA)
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=CLIP,
        event=event,
        expected_batch_size=BATCH,
        ledger=Uncharged(),
        noise=NoiseSource(5),
    )
    return adapter, coordinates, rule, mechanism


def test_it_is_algorithm_2() -> None:
    adapter, coordinates, rule, mechanism = start()
    source = NoiseSource(5)
    examples = uneven_examples()[:4]
    dense = tiny_model(dtype=torch.float64)
    weights = [dense.get_submodule(site.name).weight for g in adapter.groups for site in g.sites]
    frozen = [w.detach().clone() for w in weights]
    a = [right.T.copy() for _, right in factors(coordinates)]
    b = [np.zeros(left.shape) for left, _ in factors(coordinates)]
    tau, bound = SIGMA * CLIP / BATCH, CLIP * (1 - mechanism.slack)
    with adapter:
        for _ in range(3):
            captured, _ = micro_batch_gradients(adapter, one_batch(examples, range(4)))
            mechanism.accumulate(captured)
            rule.step(mechanism.release(), RATE)
            coordinates.advance()

            for w, w0, left, right in zip(weights, frozen, b, a, strict=True):
                w.data = w0 + torch.from_numpy(SCALE * left @ right)
            total = [np.zeros_like(left) for left in b]
            for example in examples:
                ids, labels = (
                    torch.from_numpy(t.astype("int64"))[None] for t in (example.input_ids, example.labels)
                )
                loss = dense(input_ids=ids, labels=labels).loss
                gradients = [g.numpy() for g in torch.autograd.grad(loss, weights)]
                g = [SCALE * each @ right.T for each, right in zip(gradients, a, strict=True)]
                norm = np.sqrt(sum((each**2).sum() for each in g))
                total = [t + each * min(1.0, bound / norm) for t, each in zip(total, g, strict=True)]
            drawn = coordinates.standard_normal(source.standard_normal)
            noise = [x.numpy() for parts in drawn for x in parts[0]]
            grid = grid_width(tau)  # on which releases lie
            released = [
                np.round((t + SIGMA * CLIP * n) / BATCH / grid) * grid
                for t, n in zip(total, noise, strict=True)
            ]
            b = [x - RATE / tau * each for x, each in zip(b, released, strict=True)]
    for (found, right), left, kept in zip(factors(coordinates), b, a, strict=True):
        np.testing.assert_allclose(found, SCALE * left, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(right.T, kept)


def factors(coordinates: Coordinates) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(b.numpy(), a.numpy()) for bs, as_ in coordinates.factors() for b, a in zip(bs, as_, strict=True)]
