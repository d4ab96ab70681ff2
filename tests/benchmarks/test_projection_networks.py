"""The networks of the projection study: what many trained at once get is what a plain loop gives each."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

STUDY = Path(__file__).parents[2] / "benchmarks" / "projection"
CLASSES = 3


@pytest.fixture
def convolution(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(STUDY)
    return importlib.import_module("convolution")


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("sklearn", reason="the study's images come with scikit-learn")
    monkeypatch.syspath_prepend(STUDY)
    return importlib.import_module("attacks")


def plain_network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    dense = [nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, CLASSES, bias=False)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


def trained_by_a_loop(
    images: Tensor, labels: Tensor, rows: list[int], seed: int, settings: Any
) -> list[Tensor]:
    """One network, one example at a time, each gradient as a matrix times A^T A with one A for all steps."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))

    network = plain_network()
    weights = list(network.parameters())
    shapes = [(len(weight), weight[0].numel()) for weight in weights]
    for weight, shape in zip(weights, shapes, strict=True):
        weight.data = (normal(*shape) * (2 / shape[1]) ** 0.5).view_as(weight)
    factors = [normal(settings.rank, rest) / settings.rank**0.5 for _, rest in shapes]
    order = np.concatenate([generator.permutation(rows) for _ in range(settings.epochs)])
    momenta = [torch.zeros(shape) for shape in shapes]
    steps = settings.epochs * (len(images) // settings.batch)
    for step in range(steps):
        means = [torch.zeros(shape) for shape in shapes]
        for i in order[step * settings.batch : (step + 1) * settings.batch]:
            loss = nn.functional.cross_entropy(network(images[i][None]), labels[i][None])
            for mean, gradient, a in zip(means, torch.autograd.grad(loss, weights), factors, strict=True):
                mean += (gradient.flatten(1) @ a.T @ a) / settings.batch
        rate = settings.learning_rate * (1 + np.cos(np.pi * step / steps)) / 2
        for weight, momentum, mean in zip(weights, momenta, means, strict=True):
            momentum.mul_(settings.momentum).add_(mean)
            weight.data -= rate * momentum.view_as(weight)
    return [weight.detach().flatten(1) for weight in weights]


def test_networks_trained_together_are_those_of_a_plain_loop(convolution: Any) -> None:
    images, labels = torch.randn(9, 1, 8, 8), torch.arange(9) % CLASSES
    members = torch.ones(2, 9, dtype=torch.bool)
    members[1, -1] = False
    settings = convolution.Training(rank=12, epochs=2, batch=4, learning_rate=0.02)
    found = convolution.train(images, labels, CLASSES, members, settings, [3, 4])
    for n, own in enumerate(members):
        rows = torch.nonzero(own)[:, 0].tolist()
        expected = trained_by_a_loop(images, labels, rows, 3 + n, settings)
        for layer, weight in zip(found, expected, strict=True):
            torch.testing.assert_close(layer[n], weight, rtol=1e-4, atol=1e-5)


def test_the_first_layers_begin_where_they_are_told_to(convolution: Any) -> None:
    settings = convolution.Training(rank=5, epochs=0)
    given = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64), CLASSES)
    members = torch.ones(2, 1, dtype=torch.bool)
    start = [torch.randn(shape) for shape in convolution.layer_shapes(CLASSES)[:-1]]
    random = convolution.train(*given, members, settings, [3, 4])
    found = convolution.train(*given, members, settings, [3, 4], start)
    for layer, common in zip(found, start, strict=False):
        assert torch.equal(layer, torch.stack([common, common]))
    assert torch.equal(found[-1], random[-1])


def test_networks_are_fine_tuned_on_other_digits_than_their_start(attacks: Any) -> None:
    public, private = attacks.other_digits(100)
    assert (public.classes, private.classes, len(private.train)) == (5, 5, 100)
    images = torch.cat([public.train, public.test, private.train, private.test])
    assert len(images) == 1797
    layers, accuracy = attacks.pretrain(public)
    assert len(layers) == 4
    assert accuracy > 0.9
    quick = replace(attacks.NETWORKS, epochs=1)
    row = attacks.attack_networks(private, quick, 5, layers)
    assert (row["members"], row["non_members"]) == (5, 5)
    assert 0 <= row["test_accuracy"] <= 1
