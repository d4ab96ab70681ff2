"""Membership attacks on heads and small networks trained by LoRA-FA, M2 and M1: Tables 1-3 of Hu et al. 2026, smaller.

    python benchmarks/projection/attacks.py --work WORK --out benchmarks/results/projection/attacks.json

Protocol F.1: a static poison canary (a random image with the label that a reference model finds least likely), as
many models trained with it (IN) as without (OUT), the canary's loss as score. Every model has its own projections,
batches and noise. WORK keeps finished cells, so a stopped study goes on. Needs scikit-learn (its 8 x 8 digits).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import convolution
import torch
from cells import Cells, write
from features import RandomRelu, Split, digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from privlora.auditing.membership import judge_membership
from privlora.lab import HeadData, HeadSettings, TrainedHeads, static_poison, train_heads
from privlora.lab.wishart.bounds.matrix import examine

DIMENSIONS = 512  # of the heads' features
RECORDS = {"lora-fa": 200, "m2": 1000, "m1": 1000, "networks": 100, "one update": 200}
RANKS = {
    "lora-fa": (16, 32, 128, 256, 512),
    "m2": (16, 64, 128, 256, 384, 512),
    "m1": (32, 64, 128, 512, 800, 1000),
    "one update": (1, 16, 128, 512),
    "networks": (16, 32, 128, 256, 512),
}
LORA_FA = HeadSettings("lora-fa", 40, 5.0, rank=16, momentum=0.9, schedule="cosine")
NOISY = HeadSettings("m2", 20, 20.0, clip_norm=1.0, rank=16, projection="wishart")
NOISES = {"m2": (0.1, 0.5, 4.0), "m1": (0.5,)}
REFERENCES = (
    8  # networks from random starts disagree on which class is least likely: the mean of several decides
)
NETWORKS = convolution.Training(rank=16, epochs=40, learning_rate=0.02)
PRETRAINING = convolution.Training(rank=None, epochs=20, learning_rate=0.02)


def judged(scores: Tensor) -> dict[str, Any]:
    """Of scores (2 N,): N members, then N non-members."""
    half = len(scores) // 2
    found = judge_membership(scores[:half].double().numpy(), scores[half:].double().numpy())
    return {
        "auc": round(found.area.value, 4),
        "auc_interval": [round(found.area.low, 4), round(found.area.high, 4)],
        "balanced_accuracy": round(found.balanced_accuracy, 4),
        "held_out_balanced_accuracy": round(found.held_out_balanced_accuracy, 4),
        "tpr_at_1_percent_fpr": found.true_positive_rates[0][1],
    }


def in_and_out(each: int, records: int) -> Tensor:
    """(2 each, records) bool: the last record, the canary, belongs to the first half of the models only."""
    members = torch.ones(2 * each, records, dtype=torch.bool)
    members[each:, -1] = False
    return members


def attack_heads(
    data: Split, settings: HeadSettings, each: int, *, sample_rate: float, known_factors: bool = False
) -> dict[str, Any]:
    """known_factors: also score against a reference head that has the same frozen A and never saw the canary."""
    embed = RandomRelu(64, DIMENSIONS)
    features, labels, records = embed(data.train), data.train_labels, len(data.train)

    def train(x: Tensor, y: Tensor, members: Tensor, first_seed: int) -> TrainedHeads:
        return train_heads(
            HeadData(x, y, classes=10, dataset_size=records),
            settings,
            members=members,
            sample_rate=sample_rate,
            seeds=range(first_seed, first_seed + len(members)),
        )

    reference = train(features, labels, torch.ones(1, records, dtype=torch.bool), 10**6)
    canary = static_poison(
        lambda x: reference.logits(embed(x))[0], (1, 8, 8), torch.Generator().manual_seed(0)
    )
    features = torch.cat([features, embed(canary.inputs[None])])
    labels = torch.cat([labels, torch.tensor([canary.label])])
    members = in_and_out(each, records + 1)
    heads = train(features, labels, members, 0)
    losses = heads.losses(features[-1:], labels[-1:])[:, 0]
    found = judged(-losses)
    if known_factors:
        without = members.clone()
        without[:, -1] = False
        references = train(features, labels, without, 2 * 10**6)
        found["known_factors"] = judged(references.losses(features[-1:], labels[-1:])[:, 0] - losses)
    found["test_accuracy"] = round(float(heads.accuracy(embed(data.test), data.test_labels)[each:].mean()), 4)
    return found | {"members": each, "non_members": each}


def attack_one_update(data: Split, rank: int, each: int) -> dict[str, Any]:
    """The first update alone, by the symmetry that Proposition 2 rests on: no noise, no loss, no knowledge of A."""
    embed = RandomRelu(64, DIMENSIONS)
    features = torch.cat(
        [embed(data.train), embed(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)))]
    )
    features, labels = features.double(), torch.cat([data.train_labels, torch.tensor([0])])
    residuals = torch.full((len(labels), 10), 0.1, dtype=torch.float64)  # of a head that is zero
    residuals[torch.arange(len(labels)), labels] -= 1.0
    candidates = [(features[:rows].T @ residuals[:rows]).numpy() for rows in (len(labels), len(labels) - 1)]
    settings = HeadSettings("lora-fa", 1, 1.0, rank=rank)
    heads = train_heads(
        HeadData(features, labels, classes=10, dataset_size=len(data.train)),
        settings,
        members=in_and_out(each, len(labels)),
        sample_rate=1.0,
        seeds=range(2 * each),
    )
    scores = []
    for weights in heads.weights:
        with_canary, without = (examine(v, -weights.T.numpy(), rank).asymmetry for v in candidates)
        scores.append(without - with_canary)
    return judged(torch.tensor(scores)) | {"members": each, "non_members": each}


def other_digits(records: int) -> tuple[Split, Split]:
    """Digits 5 to 9, which are public, all but 200 to train on; 0 to 4, ``records`` to train on. Labels from 0."""
    data = digits(records)
    images, labels = torch.cat([data.train, data.test]), torch.cat([data.train_labels, data.test_labels])
    halves = []
    for first, count in ((5, -200), (0, records)):
        own = (labels >= first) & (labels < first + 5)
        x, y = images[own], labels[own] - first
        halves.append(Split(x[:count], y[:count], x[count:], y[count:]))
    return halves[0], halves[1]


def pretrain(data: Split) -> tuple[list[Tensor], float]:
    """The layers of one network but its last one, trained on ``data`` with whole gradients; its test accuracy."""
    everyone = torch.ones(1, len(data.train), dtype=torch.bool)
    weights = convolution.train(
        data.train, data.train_labels, data.classes, everyone, PRETRAINING, [2 * 10**6]
    )
    found = convolution.logits(weights, data.test)[0].argmax(-1)
    accuracy = float((found == data.test_labels).float().mean())
    return [weight[0] for weight in weights[:-1]], round(accuracy, 4)


def attack_networks(
    data: Split, settings: convolution.Training, each: int, start: Sequence[Tensor] = ()
) -> dict[str, Any]:
    """start: public weights that the first layers of every network, references too, begin with."""
    records, classes = len(data.train), data.classes
    without = torch.ones(REFERENCES, records, dtype=torch.bool)
    seeds = range(10**6, 10**6 + REFERENCES)
    references = convolution.train(data.train, data.train_labels, classes, without, settings, seeds, start)

    def reference(x: Tensor) -> Tensor:
        found = convolution.logits(references, convolution.same_images(x, REFERENCES))
        return torch.log_softmax(found, -1).mean(0)

    canary = static_poison(reference, (1, 8, 8), torch.Generator().manual_seed(0))
    images = torch.cat([data.train, canary.inputs[None]])
    labels = torch.cat([data.train_labels, torch.tensor([canary.label])])
    scores, right = [], []
    members = in_and_out(each, records + 1)
    for first in range(0, 2 * each, 50):  # the groups of one convolution
        own = members[first : first + 50]
        seeds = range(first, first + len(own))
        weights = convolution.train(images, labels, classes, own, settings, seeds, start)
        on_canary = convolution.logits(weights, convolution.same_images(canary.inputs[None], len(own)))
        scores.append(-cross_entropy(on_canary[:, 0], labels[-1].expand(len(own)), reduction="none"))
        on_test = convolution.logits(weights, convolution.same_images(data.test[:400], len(own)))
        right.append((on_test.argmax(-1) == data.test_labels[:400]).float().mean(1))
    accuracy = round(float(torch.cat(right)[each:].mean()), 4)
    return judged(torch.cat(scores)) | {"test_accuracy": accuracy, "members": each, "non_members": each}


def speed(count: int = 2000, repetitions: int = 3, looped: int = 20) -> dict[str, Any]:
    """CPU seconds of ``count`` dp-sgd heads trained together, and how many times faster that is than two loops.

    one at a time: the same code, head by head. torch: a loop of torch models whose per-example gradients come from
    vmap(grad), as they would for any model. Interleaved, so that the machine's load cancels.
    """
    data = digits(500)
    embed = RandomRelu(64, DIMENSIONS)
    features, labels = embed(data.train), data.train_labels
    records = HeadData(features, labels, classes=10, dataset_size=450)
    settings = HeadSettings("dp-sgd", 20, 5.0, noise_multiplier=0.5, clip_norm=1.0)
    members = torch.rand(count, len(features), generator=torch.Generator().manual_seed(0)) < 0.9

    def train(first: int, last: int) -> None:
        train_heads(records, settings, members=members[first:last], sample_rate=1.0, seeds=range(first, last))

    def one_at_a_time() -> None:
        for head in range(looped):
            train(head, head + 1)

    def with_torch() -> None:
        gradient_of = torch.func.vmap(
            torch.func.grad(lambda w, x, y: cross_entropy(w @ x, y)), in_dims=(None, 0, 0)
        )
        for own in members[:looped]:
            weight = torch.zeros(10, DIMENSIONS)
            for _ in range(settings.steps):
                gradients = gradient_of(weight, features[own], labels[own])
                factors = (1.0 / gradients.flatten(1).norm(dim=1)).clamp(max=1.0)
                total = torch.einsum("n,ncd->cd", factors, gradients) + 0.5 * torch.randn(10, DIMENSIONS)
                weight -= settings.learning_rate * total / 450

    def seconds(run: Callable[[], None]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    ratios: dict[str, list[float]] = {"one at a time": [], "torch": []}
    for _ in range(repetitions):
        together = seconds(partial(train, 0, 200)) / 200
        ratios["one at a time"].append(round(seconds(one_at_a_time) / looped / together, 1))
        ratios["torch"].append(round(seconds(with_torch) / looped / together, 1))
    return {
        "heads": count,
        "cpu_seconds_together": round(seconds(partial(train, 0, count)), 1),
        "times_faster": ratios,
        "settings": asdict(settings),
        "records": len(features),
        "dimensions": DIMENSIONS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps finished cells")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=200, help="heads with and heads without the canary")
    parser.add_argument(
        "--networks", type=int, default=100, help="networks with and networks without the canary"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    cells = Cells(args.work / "attacks.jsonl")
    data = {name: digits(records) for name, records in RECORDS.items()}

    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in (*RANKS, "fine-tuned")}
    for method, noises in NOISES.items():
        for noise in noises:
            for rank in RANKS[method]:
                settings = replace(NOISY, method=method, noise_multiplier=noise, rank=rank)
                cell = {"table": method, "settings": asdict(settings), "each": args.each}
                attack = partial(attack_heads, data[method], settings, args.each, sample_rate=1.0)
                tables[method].append(cells(cell, attack))
    for rank in RANKS["lora-fa"]:
        settings = replace(LORA_FA, rank=rank)
        cell = {"table": "lora-fa", "settings": asdict(settings), "each": args.each}
        attack = partial(
            attack_heads, data["lora-fa"], settings, args.each, sample_rate=0.25, known_factors=True
        )
        tables["lora-fa"].append(cells(cell, attack))
    for rank in RANKS["one update"]:
        attack = partial(attack_one_update, data["one update"], rank, args.each)
        tables["one update"].append(cells({"table": "one update", "rank": rank, "each": args.each}, attack))
    for rank in RANKS["networks"]:
        trained = replace(NETWORKS, rank=rank)
        cell = {
            "table": "networks",
            "settings": asdict(trained),
            "each": args.networks,
            "references": REFERENCES,
        }
        tables["networks"].append(
            cells(cell, partial(attack_networks, data["networks"], trained, args.networks))
        )
    public, private = other_digits(RECORDS["networks"])
    layers, accuracy = pretrain(public)
    for name, start in (("pre-trained", layers), ("from scratch", [])):
        for rank in RANKS["networks"]:
            trained = replace(NETWORKS, rank=rank)
            cell = {
                "table": "fine-tuned",
                "start": name,
                "settings": asdict(trained),
                "each": args.networks,
                "references": REFERENCES,
            }
            attack = partial(attack_networks, private, trained, args.networks, start)
            tables["fine-tuned"].append(cells(cell, attack))
    timing = cells({"table": "speed", "heads": 2000}, speed)
    pretraining = {"settings": asdict(PRETRAINING), "images": len(public.train), "test_accuracy": accuracy}
    content = {"records": RECORDS, "dimensions": DIMENSIONS, "pretraining": pretraining, "tables": tables}
    write(args.out, content | {"speed": timing})


if __name__ == "__main__":
    main()
