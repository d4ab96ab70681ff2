"""PRISM in other metrics on the tangent space: coordinates (M, Up, Vp) weighted by functions of Z's singular values.

    python benchmarks/fair/metrics.py --of "stories260K/24/3/by values/math-questions" --out trials.jsonl
    python benchmarks/fair/metrics.py --table --out benchmarks/results/fair_trials.jsonl
    python benchmarks/fair/metrics.py --turning --out benchmarks/results/turning.jsonl

--turning measures what method.right_weight: auto does, on the model's own texts and on records.

With weights a_j of columns of Up and b_i of those of Vp, and sqrt(a_j^2 + b_i^2) of M_ij, a unit has the norm of its
gradients of the factors U diag(b) and V diag(a): so factor training is among these, freed from its gauge. A step moves
Z by the weight times the release, whose noise is the same in every coordinate. U, S and V are releases' alone, so such
weights cost no epsilon. x is S in units of 0.1 ||W||_F / sqrt(r), about what one step's noise makes it.

by values      a = b = S / rms(S), 1 where Z is zero: what method.metric_power of 1 is
by roots       the roots of these
by all values  a = b = x over its root mean square of all modules
right by values     a = 1, b as by values
values, right W     a as by values, b W times as much: what method.right_weight is beside it
values, right grows a as by values, b as below
as factors     a^2 = (1 + sqrt(1 + 4 x^2)) / 2, b^2 = a^2 - 1: what gradient flow keeps of A^T A - B^T B from B = 0 on
right grows    a = 1, b as above; fast: with 0.3 times the unit of x
right grows alike   as that, with the root mean square of x in its place, so that directions have one weight
its own, rising     PRISM as it is, at a rate that rises from zero over the steps, with the same mean
texts P        P and Q through powers P / 2 of the covariances, in each module and on either side, of gradients of
               texts that the model writes itself, at the start: 1 moves most where these are longest, -1 least

"random: METRIC" is METRIC from random subspaces, in the place of the leading ones of the weights.

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
from privlora.data.batching import sequential_batches
from privlora.geometry.fixed_rank import Point, Tangent, nearest_tangent
from privlora.randomness import counter_generator
from privlora.rehearsals.noise_alone import own_texts
from privlora.rehearsals.settling import turning_share
from privlora.rehearsals.trials import Bench
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.footprint import row_tokens
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.models import unchanged_afterwards

Weights = tuple[Tensor, Tensor]
"""a and b, (L, r) each."""
_OF_WEIGHTS = 0.1
_RISING = "its own, rising"
_RANDOM = "random: "


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


def by_roots(s: Tensor, x: Tensor) -> Weights:
    a = by_values(s, x)[0].sqrt()
    return a, a


def values_right(weight: float) -> Callable[[Tensor, Tensor], Weights]:
    return lambda s, x: (by_values(s, x)[0], weight * by_values(s, x)[0])


METRICS: dict[str, Callable[[Tensor, Tensor], Weights] | None] = {
    "its own": None,
    _RISING: None,
    "by values": by_values,
    "by roots": by_roots,
    "by all values": None,
    "right by values": lambda s, x: (torch.ones_like(x), by_values(s, x)[1]),
    "values, right half": values_right(0.5),
    "values, right 0.7": values_right(0.7),
    "values, right grows": lambda s, x: (by_values(s, x)[0], as_factors(s, x)[1]),
    "as factors": as_factors,
    "right grows": right_grows,
    "right grows fast": lambda s, x: right_grows(s, x / 0.3),
    "right grows alike": right_grows_alike,
}
TEXTS = {f"texts {power:g}": power for power in (-0.5, 0.5, 1.0)}


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
        made = []
        for pair, weights in zip(captured.stacked(self.adapter.sizes), self.weights(), strict=True):
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


class ByAllValues(Weighted):
    def weights(self) -> list[Weights]:
        norms, count = self.adapter.weight_norms(), len(self.points[0].S) // len(self.adapter.groups[0].sites)
        xs = [point.S / n.to(point.S)[:, None] for point, n in zip(self.points, norms, strict=True)]
        of_each = torch.cat([x.unflatten(0, (count, -1)).flatten(1) for x in xs], dim=1)
        mean = of_each.square().mean(dim=1).sqrt()
        found = []
        for x in xs:
            own = mean.repeat_interleave(len(x) // count)[:, None]
            a = torch.where(own > 0, x / own.clamp_min(1e-30), 1.0)
            found.append((a, a))
        return found


class ThroughTexts(TangentCoordinates):
    """P and Q through operators, with noise on all their entries; for trials as above."""

    operators: list[tuple[Tensor, Tensor]]

    def encode(self, captured: Captured) -> Captured:
        pairs = zip(captured.stacked(self.adapter.sizes), self.operators, strict=True)
        made = [tuple(t @ o[:, None].to(t) for t, o in zip(pair, ops, strict=True)) for pair, ops in pairs]
        return Captured.of_stacks(made, owners=captured.owners)  # type: ignore[arg-type]

    def evened(self, captured: Captured) -> Evened:
        return even(captured, self.adapter.sizes, scales=[1.0] * len(self.adapter.sites))

    def to_vector(self, sums: Sums) -> Vector:
        return [(p.new_zeros(len(p), p.shape[-1], p.shape[-1]), p, q) for p, q in sums]

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        sides = [(draw(tuple(p.U.shape)), draw(tuple(p.V.shape))) for p in self.points]
        return self.to_vector(sides)

    def move(
        self, directions: list[Tangent], step: float, residuals: list[Point] | None = None
    ) -> list[Point]:
        moved = []
        for each, ops, point in zip(directions, self.operators, self.points, strict=True):
            left, right = (o.to(each.Up).repeat(len(each.Up) // len(o), 1, 1) for o in ops)
            p, q, u, v = left @ each.Up, right @ each.Vp, point.U.to(each.Up), point.V.to(each.Vp)
            along, across = u.mT @ p, v.mT @ q
            moved.append(Tangent(along + across.mT, p - u @ along, q - v @ across))
        return super().move(moved, step, residuals)


def operators_of(table: teams.Table, cell: teams.Cell, power: float) -> list[tuple[Tensor, Tensor]]:
    """Of each group, (sites, m, m) and (sites, n, n): powers of the mean P P^T and Q Q^T, with the mean square 1."""
    settings = table.settings(cell)
    table.load(settings, cell.task)
    texts = own_texts(Bench(table.model, table.tokenizer), 0)
    with unchanged_afterwards(table.model):
        parts = build_parts(settings, table.model, PublicStart(table.tokenizer))
        adapter, total = parts.adapter, [[torch.zeros(())] * 2 for _ in parts.adapter.groups]
        with adapter, training_passes(table.model, counter_generator(0)):
            for batch in sequential_batches(
                texts, max_tokens=4096, max_rows=None, row_tokens=row_tokens(adapter), device=adapter.device
            ):
                captured, _ = micro_batch_gradients(adapter, batch, public=True)
                evened = parts.coordinates.evened(captured)
                weights = evened.norms_squared.reciprocal().nan_to_num(0.0)
                for sums, pair in zip(total, evened.formed().stacked(adapter.sizes), strict=True):
                    for side, t in enumerate(pair):
                        sums[side] = sums[side] + torch.einsum(
                            "surm,surn,u->smn", t.double(), t.double(), weights
                        )
    made = []
    for pair in total:
        ops = []
        for t in pair:
            e, q = torch.linalg.eigh(t)
            e = e + 0.05 * e.mean(dim=-1, keepdim=True)
            ops.append((q * e[:, None, :] ** (power / 2)) @ q.mT)
        made.append(ops)
    rows = sum(o.shape[0] * o.shape[1] for ops in made for o in ops)
    scale = (rows / sum(float(o.square().sum()) for ops in made for o in ops)) ** 0.5
    return [((scale * left).float(), (scale * right).float()) for left, right in made]


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
    order = [name for base in (*METRICS, *TEXTS) for name in (base, _RANDOM + base) if name in found]
    for name in order:
        yield f"| {name} | " + " | ".join(found[name].get(place, "") for place in places) + " |"


def rising(steps: int) -> Callable[[Any], Callable[[int], float]]:
    return lambda parts: lambda step: 2 * (step - 0.5) / steps


def turning(table: teams.Table) -> Iterator[dict[str, Any]]:
    """How long gradients are at the start where V turns, beside within the subspaces."""
    for model in ("stories260K", "reviews1M", "babyllama105"):
        for row in ("prism", "prism, random start"):
            for task in ("its own", "math-questions", "pubmed"):
                cell = teams.Cell(model, TASK if task == "its own" else task, row, 3.0, 24)
                settings = table.settings(cell)
                records, _ = table.load(settings, cell.task)
                texts = own_texts(Bench(table.model, table.tokenizer), 0) if task == "its own" else records
                share = turning_share(settings, texts, Bench(table.model, table.tokenizer))
                yield {"model": model, "row": row, "texts": task, "share": round(share, 4)}


TASK = "math-questions"
_CONSTANT = teams.shape_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="study-data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--of", action="append", default=[], help="MODEL/STEPS/EPSILON/METRIC/TASK")
    parser.add_argument("--table", action="store_true", help="print what is there; run nothing")
    parser.add_argument("--turning", action="store_true")
    parser.add_argument("--powers", default="-1,0,1,2", help="of the root of two, times the default rate")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table_of([json.loads(line) for line in args.out.read_text("utf-8").splitlines()])))
        return
    torch.set_num_threads(1)
    table = Paired(args.data)
    if args.turning:
        with args.out.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in turning(table))
        return
    for spec in args.of:
        model, steps, epsilon, metric, task = spec.split("/")
        row, chosen = "prism", metric.removeprefix(_RANDOM)
        if chosen != metric:
            row = "prism, random start"
        cell = teams.Cell(model, task, row, float(epsilon), int(steps), clip_norm=0.1)
        starts.TangentCoordinates = TangentCoordinates  # type: ignore[misc]
        if chosen in TEXTS:
            own: dict[str, Any] = {"operators": operators_of(table, cell, TEXTS[chosen])}
            kind: type[TangentCoordinates] = type("Of", (ThroughTexts,), own)
        elif chosen == "by all values":
            kind = ByAllValues
        else:
            weights = METRICS[chosen]
            own = {"metric": staticmethod(weights)} if weights else {}
            kind = type("Of", (Weighted,), own) if weights else TangentCoordinates
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
