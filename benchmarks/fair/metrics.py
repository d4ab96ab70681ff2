"""PRISM in other metrics on the tangent space: coordinates (M, Up, Vp) weighted by functions of Z's singular values.

    python benchmarks/fair/metrics.py --of "stories260K/24/3/by values/math-questions" --out trials.jsonl
    python benchmarks/fair/metrics.py --table --out benchmarks/results/fair_trials.jsonl

With weights a_j of columns of Up and b_i of those of Vp, and sqrt(a_j^2 + b_i^2) of M_ij, a unit has the norm of its
gradients of the factors U diag(b) and V diag(a): so factor training is among these, freed from its gauge. A step moves
Z by the weight times the release, whose noise is the same in every coordinate. U, S and V are releases' alone, so such
weights cost no epsilon. x is S in units of 0.1 ||W||_F / sqrt(r), about what one step's noise makes it.

by values      a = b = S / rms(S), 1 where Z is zero
as factors     a^2 = (1 + sqrt(1 + 4 x^2)) / 2, b^2 = a^2 - 1: what gradient flow keeps of A^T A - B^T B from B = 0 on
right grows    a = 1, b as above
right grows alike   as that, with the root mean square of x in its place, so that directions have one weight
its own, rising     PRISM as it is, at a rate that rises from zero over the steps, with the same mean

The choosing seeds on their half of the held-out records, with the same draws for each rate and metric.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import teams
from fair import CHOOSING, machine

from privlora.adapters import Captured
from privlora.coordinates import starts
from privlora.coordinates.base import Sums, Vector
from privlora.coordinates.evened import Evened, even
from privlora.coordinates.tangent import TangentCoordinates
from privlora.geometry.fixed_rank import Point, Tangent, nearest_tangent

Weights = tuple[Tensor, Tensor]
"""a and b, (L, r) each."""
_OF_WEIGHTS = 0.1
_RISING = "its own, rising"


def by_values(s: Tensor, x: Tensor) -> Weights:
    mean = s.square().mean(dim=-1, keepdim=True)
    squares = torch.where(mean > 0, s.square() / mean.clamp_min(1e-30), 1.0)
    return squares.sqrt(), squares.sqrt()


def as_factors(s: Tensor, x: Tensor) -> Weights:
    root = 1 + (1 + 4 * x.square()).sqrt()
    return (root / 2).sqrt(), x * (2 / root).sqrt()


def right_grows(s: Tensor, x: Tensor) -> Weights:
    return torch.ones_like(x), as_factors(s, x)[1]


def right_grows_alike(s: Tensor, x: Tensor) -> Weights:
    return right_grows(s, x.square().mean(dim=-1, keepdim=True).sqrt().expand_as(x))


METRICS: dict[str, Callable[[Tensor, Tensor], Weights] | None] = {
    "its own": None,
    _RISING: None,
    "by values": by_values,
    "as factors": as_factors,
    "right grows": right_grows,
    "right grows alike": right_grows_alike,
}


class Weighted(TangentCoordinates):
    """Coordinates in a metric of the point's own; for trials with spectral clipping and no momentum."""

    metric: Callable[[Tensor, Tensor], Weights]

    def weights(self) -> list[Weights]:
        norms = self.adapter.weight_norms()
        found = []
        for point, of_group in zip(self.points, norms, strict=True):
            unit = _OF_WEIGHTS * of_group.to(point.S)[:, None] / point.rank**0.5
            found.append(type(self).metric(point.S, point.S / unit))
        return found

    def encode(self, captured: Captured) -> Captured:
        stacks = captured.stacked(self.adapter.sizes)
        made = []
        for pair, weights in zip(stacks, self.weights(), strict=True):
            if captured.owners is not None and len(weights[0]) != pair[0].shape[0]:
                count, owners = len(captured.owners), captured.owners.int().argmax(dim=0)
                of_units = [w.unflatten(0, (count, -1))[owners].transpose(0, 1) for w in weights]
            else:
                of_units = [w[:, None] for w in weights]
            made.append(tuple(t * w[..., None].to(t) for t, w in zip(pair, of_units, strict=True)))
        return Captured.of_stacks(made, owners=captured.owners)  # type: ignore[arg-type]

    def evened(self, captured: Captured) -> Evened:
        return even(captured, self.adapter.sizes, scales=[1.0] * len(self.adapter.sites))

    def to_vector(self, sums: Sums) -> Vector:
        """Of the two estimates of each entry of M, one a side, what lies along the tangent space."""
        made: Vector = []
        for point, pair, (a, b) in zip(self.points, sums, self.weights(), strict=True):
            p, q = (t.unflatten(0, (-1, len(point.S))) for t in pair)
            there, left, right = point.to(p), a.to(p)[:, None, :], b.to(p)[:, :, None]
            core = (left * (there.U.mT @ p) + right * (there.V.mT @ q).mT) / (left**2 + right**2).sqrt()
            found = nearest_tangent(there, Tangent(core, p, q))
            made.append(tuple(t.flatten(0, 1) for t in (found.M, found.Up, found.Vp)))
        return made

    def move(
        self, directions: list[Tangent], step: float, residuals: list[Point] | None = None
    ) -> list[Point]:
        moved = []
        for each, (a, b) in zip(directions, self.weights(), strict=True):
            core = (a[:, None, :] ** 2 + b[:, :, None] ** 2).sqrt()
            moved.append(Tangent(core * each.M, a[:, None, :] * each.Up, b[:, None, :] * each.Vp))
        return super().move(moved, step, residuals)


class Paired(teams.Table):
    """Whose draws are the same for every rate."""

    def keys(self, rates: int, seeds: Any) -> list[int]:
        return [1000 * seed for _ in range(rates) for seed in seeds]


def table_of(lines: list[dict[str, Any]]) -> Iterator[str]:
    """The least loss of each metric in 24 steps; a star where that is of the largest rate."""
    found: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for line in lines:
        name = line["row"].removeprefix("prism, metric ")
        if name == line["row"] or line["steps"] != 24:
            continue
        loss, rate = min(zip(line["choosing"], line["rates"], strict=True))
        edge = "*" * (rate == max(line["rates"]))
        found[name][line["model"], line["task"].removesuffix("-questions")] = f"{loss:.3f}{edge}"
    places = sorted({place for cells in found.values() for place in cells})
    yield "| metric | " + " | ".join(f"{model}, {task}" for model, task in places) + " |"
    yield "|---" * (1 + len(places)) + "|"
    for name in METRICS:
        yield f"| {name} | " + " | ".join(found[name].get(place, "") for place in places) + " |"


def rising(steps: int) -> Callable[[Any], Callable[[int], float]]:
    return lambda parts: lambda step: 2 * (step - 0.5) / steps


_CONSTANT = teams.shape_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="study-data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--of", action="append", default=[], help="MODEL/STEPS/EPSILON/METRIC/TASK")
    parser.add_argument("--table", action="store_true", help="print what is there; run nothing")
    parser.add_argument("--powers", default="-1,0,1,2", help="of the root of two, times the default rate")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table_of([json.loads(line) for line in args.out.read_text("utf-8").splitlines()])))
        return
    torch.set_num_threads(1)
    table = Paired(args.data)
    for spec in args.of:
        model, steps, epsilon, metric, task = spec.split("/")
        cell = teams.Cell(model, task, "prism", float(epsilon), int(steps), clip_norm=0.1)
        chosen = METRICS[metric]
        kind = (
            TangentCoordinates
            if chosen is None
            else type("Of", (Weighted,), {"metric": staticmethod(chosen)})
        )
        starts.TangentCoordinates = kind  # type: ignore[misc]
        rates = [float(f"{cell.default * 2 ** (int(power) / 2):.4g}") for power in args.powers.split(",")]
        teams.shape_of = rising(cell.steps) if metric == _RISING else _CONSTANT
        found = table.run(cell, rates, CHOOSING)
        line = {
            "model": model,
            "eps": float(epsilon),
            "task": task,
            "row": f"prism, metric {metric}",
            "steps": int(steps),
            "clip_norm": 0.1,
            "rates": rates,
            "choosing": [round(sum(losses) / len(losses), 4) for losses in found["choosing"]],
            "seeds": list(CHOOSING),
            "machine": machine(),
        }
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
