"""How PRISM's update alone grows with the size of the weights and with the rank.

    python benchmarks/update_scaling.py --out benchmarks/results/update_scaling.json

The update is what follows the backward pass and the clipped sum: noise, release, the default optimizer,
retraction, transport of the momentum, averaging; on 4 modules of m = n, with one thread. Its cost should be
O((m + n) r^2) with nothing that grows as m n: slope at most 1 in m + n and at most 2 in r, from a straight line
through log seconds. CPU seconds of the fastest repetition, as the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.data.examples import Examples
from privlora.mechanisms import GaussianMechanism
from privlora.methods import build, find_method
from privlora.optimizers import IterateAverage
from privlora.training.state import TrainState
from privlora.training.step import Step

MODULES = 4
SIZES = (512, 1024, 2048, 4096, 8192)  # m = n, at RANK
RANK = 16
RANKS = (8, 16, 32, 64, 128)  # at SIZE
SIZE = 2048


class Unlimited:
    """Takes every charge: the ledger's one line a step does not depend on the sizes."""

    def charge(self, event: StepEvent) -> int:
        return 1


class Update:
    """PRISM's update of ``modules`` linear layers (size x size) without any model around them."""

    def __init__(self, size: int, rank: int) -> None:
        layers = torch.nn.ModuleDict(
            {f"layer{k}": torch.nn.Linear(size, size, bias=False, device="meta") for k in range(MODULES)}
        )
        layers.to_empty(device="cpu")  # the weights themselves are never read
        adapter = LowRankAdapter(layers, rank=rank, target_modules=list(layers))
        coordinates, optimizer = build(find_method("prism"), adapter, init="random")
        event = StepEvent(PoissonSampling(0.01), noise_multiplier=1.0)
        self.mechanism = GaussianMechanism(
            coordinates, clip_norm=1.0, event=event, expected_batch_size=8.0, ledger=Unlimited()
        )
        average = IterateAverage(coordinates, 0.99)
        self.step = Step(
            state=TrainState(coordinates=coordinates, optimizer=optimizer, average=average),
            mechanism=self.mechanism,
            examples=Examples([], pad_token_id=0),
            learning_rate=lambda _: 1e-3,
        )
        generator = torch.Generator().manual_seed(0)
        self.gradients = [torch.randn(1, size, rank, generator=generator) for _ in range(2 * MODULES)]

    def seconds(self) -> float:
        """CPU seconds of one update."""
        self.mechanism.accumulate(Captured(self.gradients[:MODULES], self.gradients[MODULES:]))
        start = time.process_time()
        self.step.release()
        return time.process_time() - start


def measure(shapes: list[tuple[int, int]], repetitions: int) -> list[float]:
    """Fastest CPU seconds of every (size, rank), in interleaved repetitions."""
    updates = [Update(size, rank) for size, rank in shapes]
    for update in updates:
        update.seconds()  # the first average is a copy
    times = [[update.seconds() for update in updates] for _ in range(repetitions)]
    return [float(t) for t in np.min(times, axis=0)]


def summary(x: list[int], seconds: list[float]) -> dict[str, Any]:
    """Slope of log seconds over log x: of the line through all points, and between the last two."""
    log_x, log_s = np.log(x), np.log(seconds)
    return {
        "x": x,
        "seconds": seconds,
        "exponent": float(np.polyfit(log_x, log_s, 1)[0]),
        "last_exponent": float(np.diff(log_s)[-1] / np.diff(log_x)[-1]),
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    lines = []
    for name, label in (("size", f"m + n (r = {RANK})"), ("rank", f"r (m = n = {SIZE})")):
        found = result[name]
        lines += [
            f"| {label} | " + " | ".join(str(x) for x in found["x"]) + " | exponent | at the end |",
            "|---" * (len(found["x"]) + 3) + "|",
            "| ms an update | "
            + " | ".join(f"{1e3 * s:.1f}" for s in found["seconds"])
            + f" | **{found['exponent']:.2f}** | {found['last_exponent']:.2f} |",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--repetitions", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    by_size = measure([(size, RANK) for size in SIZES], chosen.repetitions)
    by_rank = measure([(SIZE, rank) for rank in RANKS], chosen.repetitions)
    sums, ranks = [2 * size for size in SIZES], list(RANKS)
    result = {
        "machine": describe_machine(),
        "modules": MODULES,
        "optimizer": find_method("prism").optimizer,
        "size": {"rank": RANK, **summary(sums, by_size)},
        "rank": {"m": SIZE, "n": SIZE, **summary(ranks, by_rank)},
    }
    print(markdown(result))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
