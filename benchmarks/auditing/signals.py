"""What the sum of canary signals shows of one run, on the mechanism alone: simulated, canaries orthogonal.

python benchmarks/auditing/signals.py --output benchmarks/results/auditing/signals.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.auditing.bounds import signals_mu

RATE, STEPS, DELTA, CONFIDENCE, RUNS = 0.2, 16, 1e-5, 0.95, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    generator = np.random.default_rng(1)
    rows = []
    for target in (1.0, 3.0, 8.0):
        sigma = float(brentq(lambda sigma, target=target: _epsilon(sigma) - target, 0.3, 12, xtol=1e-3))
        for canaries in (480, 2000):
            honest = [_played(generator, canaries, sigma) for _ in range(RUNS)]
            broken = [_played(generator, canaries, sigma / 4) for _ in range(RUNS)]
            shares = [_epsilon(1 / mu) / target for mu in np.quantile(honest, (0.1, 0.5, 0.9))]
            row = {"target_epsilon": target, "noise_multiplier": sigma, "canaries": canaries}
            row["share_of_claim_at_10_50_90_percent"] = [round(share, 4) for share in shares]
            row["correct_runs_refuted"] = float(np.mean(np.array(honest) > 1 / sigma))
            row["quarter_of_the_noise_refuted"] = float(np.mean(np.array(broken) > 1 / sigma))
            rows.append(row)
            print(json.dumps(row), flush=True)
    facts = {"rate": RATE, "steps": STEPS, "delta": DELTA, "confidence": CONFIDENCE, "runs": RUNS}
    arguments.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def _played(generator: np.random.Generator, canaries: int, sigma: float) -> float:
    """``signals_mu`` of one run, from the laws that orthogonal canaries of norm C give."""
    included = int(generator.binomial(canaries, 0.5))
    counts = generator.binomial(included, RATE, size=STEPS)
    signal = np.sqrt(counts.sum()) + sigma * generator.standard_normal()
    dimensions = int((canaries - counts).sum())
    energy = sigma**2 * generator.chisquare(dimensions)
    return signals_mu(float(signal), float(np.sqrt(counts.sum())), energy, dimensions, CONFIDENCE)


def _epsilon(sigma: float) -> float:
    return epsilon([(StepEvent(PoissonSampling(RATE), sigma), STEPS)], DELTA, grid=1e-3)


if __name__ == "__main__":
    main()
