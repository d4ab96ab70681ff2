"""What follows a release: retraction and averaging, by matrix products and by Householder QR, and the noise before it.

    python benchmarks/moves.py --out benchmarks/results/moves.json

Both ways take turns in one process with one thread; milliseconds of thread time are medians, and ratios medians over
rounds. Errors are those of float32 steps against the truncated SVD of the dense sum in float64, the worst of 500
steps. Normals are counted a second of wall time and a second of CPU time, with as many threads as given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from machine import describe_machine
from torch import Tensor

from privlora.geometry import bases
from privlora.geometry.fixed_rank import (
    Point,
    Tangent,
    average,
    average_all,
    random_point,
    retract,
    retract_all,
    standard_normal_tangent,
)
from privlora.mechanisms import NoiseSource

RANK = 16
# Name -> (modules, m, n) of each group.
SHAPES = {
    "40 modules of 512": [(40, 512, 512)],
    "one layer of 7B": [(4, 4096, 4096), (2, 11008, 4096), (1, 4096, 11008)],
}
STEPS = 500
NORMALS = 2**23


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "machine": describe_machine(),
        "milliseconds": {name: times(shapes, arguments.rounds) for name, shapes in SHAPES.items()},
        "errors_float32": {way: errors(way) for way in ("products", "reflections")},
        "million_normals": {str(threads): normals(threads, arguments.rounds) for threads in (1, 2)},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


def draws(seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda shape: torch.randn(shape, generator=generator)


def times(shapes: list[tuple[int, int, int]], rounds: int) -> dict[str, Any]:
    """Of one retraction of all modules, with and without a residual of rank r, and of one average."""
    generator, draw = torch.Generator().manual_seed(0), draws(1)
    points = [random_point(*shape, RANK, generator, torch.float32) for shape in shapes]
    tangents = [standard_normal_tangent(point, draw) for point in points]
    moved = [(p.U, p.S, p.V) for p in retract_all(points, tangents, -0.03)]
    whole = retract_all([point.extended(RANK) for point in points], tangents, -0.03)
    there = [standard_normal_tangent(point.split(RANK)[0], draw) for point in whole]
    return {
        "retraction": compared(lambda: retract_all(points, tangents, -0.03), rounds),
        "retraction with a residual": compared(lambda: retract_all(whole, there, -0.03), rounds),
        "average": compared(lambda: average_all(points, moved, 0.1), rounds),
    }


def compared(move: Callable[[], list[Point]], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {"products": [], "reflections": []}
    for _ in range(rounds):
        for way, seconds in taken.items():
            with patch.object(bases, "_fits", bases._fits if way == "products" else never):
                start = time.thread_time()
                move()
                seconds.append(time.thread_time() - start)
    ratios = [b / a for a, b in zip(*taken.values(), strict=True)]
    medians = {way: round(1e3 * statistics.median(seconds), 2) for way, seconds in taken.items()}
    return medians | {"times faster": round(statistics.median(ratios), 2)}


def never(first: Tensor, new: Tensor) -> bool:
    return False


def errors(way: str) -> dict[str, float]:
    """The worst of all steps: of Z and of the average, relative (Frobenius), and of U^T U and V^T V, entrywise."""
    draw = draws(2)
    point = mean = random_point(2, 256, 192, RANK, torch.Generator().manual_seed(3), torch.float32)
    worst = {"Z": 0.0, "average": 0.0, "orthonormality": 0.0}
    with patch.object(bases, "_fits", bases._fits if way == "products" else never):
        for _ in range(STEPS):
            tangent = standard_normal_tangent(point, draw)
            target = dense(point) - 0.03 * dense_tangent(point, tangent)
            point = retract(point, tangent, -0.03)
            worst["Z"] = max(worst["Z"], distance(point, target))
            target = 0.9 * dense(mean) + 0.1 * dense(point)
            mean = average((mean, point), 0.1)
            worst["average"] = max(worst["average"], distance(mean, target))
            off = [
                float((q.double().mT @ q.double() - torch.eye(RANK)).abs().max())
                for q in bases_of(point, mean)
            ]
            worst["orthonormality"] = max(worst["orthonormality"], *off)
    return {name: float(f"{value:.2g}") for name, value in worst.items()}


def bases_of(*points: Point) -> list[Tensor]:
    return [basis for point in points for basis in (point.U, point.V)]


def dense(point: Point) -> Tensor:
    return Point(point.U.double(), point.S.double(), point.V.double()).embedding()


def dense_tangent(point: Point, tangent: Tangent) -> Tensor:
    exact = Point(point.U.double(), point.S.double(), point.V.double())
    return Tangent(tangent.M.double(), tangent.Up.double(), tangent.Vp.double()).embedding(exact)


def distance(point: Point, target: Tensor) -> float:
    """From the best approximation of the target."""
    u, s, vh = torch.linalg.svd(target, full_matrices=False)
    best = (u[..., :RANK] * s[:, None, :RANK]) @ vh[:, :RANK]
    return float((dense(point) - best).norm() / target.norm())


def normals(threads: int, rounds: int) -> dict[str, float]:
    """Millions a second."""
    torch.set_num_threads(threads)
    source = NoiseSource()
    wall, cpu = [], []
    for _ in range(rounds):
        start, started = time.perf_counter(), time.process_time()
        source.standard_normal((NORMALS,))
        cpu.append(NORMALS / 1e6 / (time.process_time() - started))
        wall.append(NORMALS / 1e6 / (time.perf_counter() - start))
    return {
        "a second": round(statistics.median(wall), 1),
        "a CPU second": round(statistics.median(cpu), 1),
        "a CPU second, best": round(max(cpu), 1),
    }


if __name__ == "__main__":
    main()
