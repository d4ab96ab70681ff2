"""White-box audits of the methods that lean on public texts: one step, whole runs, and ways to be wrong.

    python benchmarks/auditing/few_records.py --output benchmarks/results/auditing/few_records.json

One step: as many trials as ``trials_for`` asks for. Whole runs: 10 steps at q = 0.2, the setting of Zou et al. (2026),
each run from the same state, canaries drawn as other units are. A tiny model of one adapted layer and six public
gradients: the mechanism is the product's, and its privacy does not depend on the size of the model or of the span.
Seconds are CPU seconds of one thread. ``--parts`` says what is done; rows are added to the output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from privlora.accounting.calibration import calibrate_noise_multiplier
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.lab.audits.many_runs import audit_runs
from privlora.lab.audits.one_step import audit_step, trials_for
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier
from privlora.mechanisms import GaussianMechanism

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "auditing"), str(ROOT / "tests")]
from audit_cases import (  # noqa: E402
    columns_not_normalised,
    opposite,
    parts_with_a_charge_each,
    playing,
    quarter_noise,
    realised_divisor,
    residual_not_noised,
    setting,
)

DELTA, RATE, STEPS = 1e-5, 0.2, 10
METHODS = ["pe-sgd", "gep", "b-gep", "pdp-sgd", "span-prism"]
Row = dict[str, Any]


def one_step(name: str, target: float) -> Row:
    sigma = gaussian_noise_multiplier(target, DELTA)
    mechanism, others, canary = setting(name, sigma, others=1, targets=["q_proj"])
    found = audit_step(
        mechanism, mechanism.event, others, canary, delta=DELTA, trials=trials_for(sigma, DELTA)
    )
    return {"method": name, "noise_multiplier": sigma, **asdict(found)}


def whole_runs(name: str, target: float, trials: int) -> Row:
    sigma = calibrate_noise_multiplier(PoissonSampling(RATE), STEPS, target, DELTA).noise_multiplier
    return _runs(name, sigma, trials)


def _runs(name: str, sigma: float, trials: int, *, apart: bool = False) -> Row:
    state, mechanism, canary = playing(name, sigma, rate=RATE)
    claimed = [(mechanism.event, STEPS)]
    if apart:  # as if each part of a release were of a batch of its own
        claimed = [(StepEvent(PoissonSampling(RATE), 2**0.5 * sigma), 2 * STEPS)]
    found = audit_runs(
        state, mechanism, claimed, canary, steps=STEPS, learning_rate=0.01, delta=DELTA, trials=trials
    )
    return {"method": name, "noise_multiplier": sigma, "sample_rate": RATE, **asdict(found)}


Break = Callable[[GaussianMechanism], None]
MUTANTS: list[tuple[str, str, Break | None]] = [
    *((name, "a quarter of the noise", quarter_noise) for name in METHODS),
    *((name, "divided by the realised batch", realised_divisor) for name in METHODS),
    *((name, "column not normalised", columns_not_normalised) for name in ("pe-sgd", "span-prism", "b-gep")),
    ("gep", "residual not noised", residual_not_noised),
    ("gep", "each part bounded by C, one charge", parts_with_a_charge_each),
    *((name, "as it is", None) for name in METHODS),
]


def broken(name: str, what: str, apply: Break | None) -> Row:
    """One step with three others that point away from the canary, sigma 1, 400 trials, 99 % confidence."""
    mechanism, _, canary = setting(name, 1.0, targets=["q_proj"])
    if apply is not None:
        apply(mechanism)
    found = audit_step(
        mechanism, mechanism.event, opposite(canary, 3), canary, delta=DELTA, trials=400, confidence=0.99
    )
    return {"method": name, "mutant": what, "violated": found.violated, **asdict(found)}


def audits(parts: list[str], methods: list[str], runs: int) -> Iterator[tuple[str, Callable[[], Row]]]:
    if "mutants" in parts:
        for mutant in MUTANTS:
            yield "mutants", lambda mutant=mutant: broken(*mutant)
        yield (
            "mutants",
            lambda: {
                "mutant": "parts accounted as two sampled mechanisms",
                **_runs("gep", 0.7707, 1000, apart=True),
            },
        )
    for target in (8.0, 3.0, 1.0):
        for name in METHODS:
            if "steps" in parts:
                yield "one_step", lambda name=name, target=target: one_step(name, target)
    for name in methods:
        if "runs" in parts:
            yield "whole_runs", lambda name=name: whole_runs(name, 8.0, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["mutants", "steps", "runs"])
    parser.add_argument("--runs", type=int, default=3000, help="whole runs in each world")
    parser.add_argument("--methods", nargs="+", default=METHODS[:2], help="of the whole runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"delta": DELTA}
    for table, audit in audits(arguments.parts, arguments.methods, arguments.runs):
        started = time.process_time()
        row = audit()
        row["share"] = row["epsilon_lower"] / row["epsilon_claimed"]
        row["cpu_seconds"] = round(time.process_time() - started, 1)
        tables.setdefault(table, []).append(row)
        print(table, json.dumps(row), flush=True)
        arguments.output.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
