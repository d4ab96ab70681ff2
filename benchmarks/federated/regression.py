"""Federated private regression: how near the aggregation rules come to a matrix of rank 4.

    python benchmarks/federated/regression.py --out benchmarks/results/federated/regression.json

Ten clients with 400 records each learn a 48 x 48 matrix W of rank 4 from y = W x + noise. Every record is protected
from the server and from other clients, at delta 1e-4: each client takes 5 private steps a round, for 40 rounds, at
sampling rate 0.1, and the server puts messages together by the rules of ``privlora.federated.rules``. ``joint`` is the
tangent step taken together: one step a round, whose noise is that of one mechanism over all clients, so the server must
see sums alone. It takes 200 rounds, for equal computing, or 40.

Reported is |W - W*| / |W*| over three seeds; 10 stands for divergence. Learning rate and clipping norm of each cell
are tuned on two other seeds by the same measure, without charging that to epsilon, alike for all; the rate falls
linearly to zero over the rounds. All start from left = 0 and a random orthonormal right. Columns: without privacy
(where fedask trains both factors); epsilon 10, 3 and 1; epsilon 1 where each client's inputs have a mean of their own
("shift"), and where the rows of W lie in the span of the start's right, so that it need not move ("inside").
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from local_steps import Steps, Trained, train
from torch import Tensor

from privlora.accounting import PoissonSampling, calibrate_noise_multiplier
from privlora.federated.rules import RULES, Asked, Beginning, Rule, RuleSettings

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """size: m = n. rank: of W, whose singular values are 2. label_noise: standard deviation in y. shift: norm of the
    mean of a client's inputs. inside: whether the rows of W lie in the span of the start's right.
    """

    size: int = 48
    rank: int = 4
    clients: int = 10
    records: int = 400
    label_noise: float = 0.5
    shift: float = 0.0
    inside: bool = False


@dataclass(frozen=True)
class Data:
    """x, y (K, N, size); target and the start's right, of orthonormal columns."""

    x: Tensor
    y: Tensor
    target: Tensor
    right: Tensor


@dataclass(frozen=True)
class Method:
    """rule: of the table. together: whether all records are in one mechanism. rounds, local_steps: how many."""

    rule: str
    together: bool = False
    rounds: int = 40
    local_steps: int = 5


@dataclass(frozen=True)
class Column:
    epsilon: float
    problem: Problem


METHODS = {
    "fedavg": Method("fedavg"),
    "ffa": Method("ffa"),
    "fedask": Method("fedask"),
    "fedsvd": Method("fedsvd"),
    "rolora": Method("rolora"),
    "tan": Method("tan"),
    "alt": Method("alt"),
    "joint": Method("tan", together=True, rounds=200, local_steps=1),
    "joint, 40 rounds": Method("tan", together=True, rounds=40, local_steps=1),
}
COLUMNS = {
    "no DP": Column(math.inf, Problem()),
    "eps 10": Column(10.0, Problem()),
    "eps 3": Column(3.0, Problem()),
    "eps 1": Column(1.0, Problem()),
    "eps 1, shift": Column(1.0, Problem(shift=2.0)),
    "eps 1, inside": Column(1.0, Problem(inside=True)),
}
SAMPLE_RATE, DELTA = 0.1, 1e-4
SEEDS, TUNING_SEEDS = (0, 1, 2), (3, 4)
FIRST_RATE, FIRST_CLIP = 0.125, 2.0
DIVERGED = 10.0
_TRIALS = 40  # of a cell's tuning


def make_data(problem: Problem, seed: int) -> Data:
    """Inputs are standard normal, plus the client's mean."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    right, U, V = (torch.linalg.qr(normal(problem.size, problem.rank))[0] for _ in range(3))
    target = 2 * U @ (right if problem.inside else V).mT
    x = normal(problem.clients, problem.records, problem.size)
    means = torch.nn.functional.normalize(normal(problem.clients, 1, problem.size), dim=-1)
    x = x + problem.shift * means
    y = x @ target.mT + problem.label_noise * normal(problem.clients, problem.records, problem.size)
    return Data(x, y, target, right)


def noise_multiplier(epsilon: float, method: Method) -> float:
    """Of each step of a client or, together, of all; 0 for an infinite epsilon."""
    if math.isinf(epsilon):
        return 0.0
    steps = method.rounds * method.local_steps
    return calibrate_noise_multiplier(PoissonSampling(SAMPLE_RATE), steps, epsilon, DELTA).noise_multiplier


def run(method: Method, data: Data, steps: Steps, seed: int) -> float:
    """The relative error after all rounds, at most DIVERGED."""
    generator = torch.Generator().manual_seed(1000 + seed)
    right = data.right[None]
    settings = RuleSettings(rank=right.shape[-1], private=steps.noise > 0, seed=seed)
    rule = RULES[method.rule]([(torch.zeros_like(right), right)], settings)
    x, y = data.x, data.y
    if method.together:
        x, y = x.flatten(0, 1)[None], y.flatten(0, 1)[None]
    kept: list[dict[str, Tensor]] = [{} for _ in x]
    for number in range(1, method.rounds + 1):
        # A linear schedule, alike for all: at small epsilon it is worth more than the choice among good rules.
        now = replace(steps, learning_rate=steps.learning_rate * (1 - (number - 1) / method.rounds))
        one_round(rule, number, kept, x, y, now, generator)
        left, right = rule.factors()[0]
        error = float((left[0] @ right[0].mT - data.target).norm() / data.target.norm())
        if not error < DIVERGED:  # also not a number
            return DIVERGED
    return error


def one_round(
    rule: Rule,
    number: int,
    kept: list[dict[str, Tensor]],
    x: Tensor,
    y: Tensor,
    steps: Steps,
    generator: torch.Generator,
) -> None:
    """All stages of a round; ``kept`` is what each client keeps and is written to."""
    settings = rule.settings
    travelled = steps.count * steps.learning_rate
    for stage in rule.stages:
        sent = rule.broadcast(stage)
        ends: list[dict[str, Tensor]] = [{} for _ in kept]
        if stage == "train":
            begun = [rule.begin(Asked(number, sent, own, settings)) for own in kept]
            ends = _train_all(begun, rule.trains(number, settings), x, y, steps, generator)
        for k, end in enumerate(ends):
            message, kept[k] = rule.answer(stage, Asked(number, sent, kept[k], settings), end, travelled)
            rule.add(stage, message, 1.0)
        rule.close(stage)


def _train_all(
    begun: list[Beginning],
    trained: Trained,
    x: Tensor,
    y: Tensor,
    steps: Steps,
    generator: torch.Generator,
) -> list[dict[str, Tensor]]:
    names = list(begun[0].state)
    state = {name.removeprefix("0."): torch.cat([b.state[name] for b in begun]) for name in names}
    end = train(state, trained, x, y, steps, generator)
    return [{f"0.{name}": value[k : k + 1] for name, value in end.items()} for k in range(len(begun))]


def tuned(error_of: Callable[[Steps], float], steps: Steps) -> tuple[Steps, int]:
    """The best learning rate and clipping norm, in factors of two, and how many were tried.

    From where ``steps`` stands to the best neighbour, and on from there until no neighbour is better.
    """
    private = math.isfinite(steps.clip_norm)
    seen: dict[tuple[int, int], float] = {}

    def at(place: tuple[int, int]) -> Steps:
        rate, clip = place
        return replace(
            steps, learning_rate=steps.learning_rate * 2.0**rate, clip_norm=steps.clip_norm * 2.0**clip
        )

    def error(place: tuple[int, int]) -> float:
        if place not in seen:
            seen[place] = error_of(at(place))
        return seen[place]

    best = (0, 0)
    error(best)
    moves = [(1, 0), (-1, 0), *([(0, 1), (0, -1), (1, -1), (-1, 1)] if private else [])]
    while len(seen) < _TRIALS:
        around = [(best[0] + a, best[1] + b) for a, b in moves]
        better = min(around, key=error)
        if min(seen[best], seen[better]) >= DIVERGED:
            better = (best[0] - 2, best[1])
            error(better)
        elif seen[better] >= seen[best]:
            break
        best = better
    return at(best), len(seen)


def cell(method: Method, column: Column, near: dict[str, Any] | None = None) -> dict[str, Any]:
    """One method in one column: tuned, from the finished cell ``near`` on if there is one, then reported."""
    started = time.process_time()
    noise = noise_multiplier(column.epsilon, method)
    first = Steps(
        count=method.local_steps,
        sample_rate=SAMPLE_RATE,
        clip_norm=(near["clip_norm"] if near else FIRST_CLIP) if noise else math.inf,
        noise=noise,
        learning_rate=near["learning_rate"] if near else FIRST_RATE,
    )

    def errors_of(steps: Steps, seeds: tuple[int, ...]) -> list[float]:
        return [run(method, make_data(column.problem, seed), steps, seed) for seed in seeds]

    steps, trials = tuned(lambda steps: mean(errors_of(steps, TUNING_SEEDS)), first)
    errors = errors_of(steps, SEEDS)
    return {
        "error": mean(errors),
        "errors": errors,
        "noise_multiplier": noise,
        "learning_rate": steps.learning_rate,
        "clip_norm": steps.clip_norm if noise else None,
        "trials": trials,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Errors, a line a method; ±: half the range over seeds."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(row["method"] for row in rows):
        of_name = {row["column"]: row for row in rows if row["method"] == name}
        cells = [_shown(of_name[column]["errors"]) if column in of_name else "" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(errors: list[float]) -> str:
    return f"{mean(errors):.3f} ± {(max(errors) - min(errors)) / 2:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    last: dict[str, dict[str, Any]] = {}
    for column in chosen.columns:
        for name in chosen.methods:
            found = cell(METHODS[name], COLUMNS[column], last.get(name))
            if found["clip_norm"] is not None:
                last[name] = found
            rows.append({"method": name, "column": column, **found})
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if chosen.out is not None:
        _write(chosen.out, rows)


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    settings = {"sample_rate": SAMPLE_RATE, "delta": DELTA, "seeds": SEEDS, "tuning_seeds": TUNING_SEEDS}
    result = {"machine": describe_machine(), **settings, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
