"""How much noise M2 needs by four accountings, at reference points, and how long a calibration takes.

    python benchmarks/projection/accounting.py --out benchmarks/results/projection/accounting.json

Noise multipliers in units of the clip C of the whole gradient: "rank_free" is what privlora prints, "rank_one" the
exact value for linear heads, "theorem_5" the paper's union bound over steps for gradients of rank 1 and 128,
"plain" DP-SGD without projection, "project_then_clip" plain DP-SGD that clips what is left after projecting to
C sqrt(r/d), which is sqrt(r/d) times "plain". "reference" are values of an independent program: rank_free there is
rounded up more coarsely. Seconds are CPU seconds of one thread for a calibration to a relative 1e-6, without cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from privlora.accounting import PoissonSampling, StepEvent, calibrate_noise_multiplier, delta_of
from privlora.accounting.calibration import find_noise
from privlora.accounting.projection.composition import rank_free_delta
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier
from privlora.lab.wishart.bounds.noisy import (
    rank_one_delta,
    rank_one_epsilon,
    rank_one_pld,
    split_noise_multiplier,
    theorem_5_noise_multiplier,
)

# (d, q, steps, delta): {(epsilon, r): (rank one, rank-free, Theorem 5 with gradients of rank 1)}
MANY_STEPS: dict[tuple[int, float, int, float], dict[tuple[float, int], tuple[float, float, float]]] = {
    (2048, 0.02, 500, 1e-5): {
        (0.4, 8): (0.25214, 0.25525, 0.6620),
        (0.4, 16): (0.35480, 0.35709, 0.7564),
        (0.4, 64): (0.70699, 0.70814, 1.0923),
        (0.4, 256): (1.41269, 1.41321, 1.7703),
        (0.4, 1024): (2.82473, 2.82488, 3.0859),
        (2, 8): (0.08464, 0.08501, 0.1947),
        (2, 16): (0.11143, 0.11173, 0.2227),
        (2, 64): (0.21236, 0.21253, 0.3224),
        (2, 256): (0.42032, 0.42040, 0.5238),
        (2, 1024): (0.83855, 0.83857, 0.9146),
        (8, 8): (0.04944, 0.04958, 0.1068),
        (8, 64): (0.11894, 0.11899, 0.1774),
        (8, 256): (0.23304, 0.23306, 0.2888),
    },
    (768, 0.01, 1000, 1e-5): {
        (1, 8): (0.15592, 0.15686, 0.3822),
        (1, 16): (0.21090, 0.21171, 0.4355),
        (1, 64): (0.41113, 0.41156, 0.6224),
        (4, 8): (0.09572, 0.09604, 0.1969),
        (4, 64): (0.21931, 0.21940, 0.3217),
    },
    (4096, 0.005, 2000, 1e-6): {
        (2, 8): (0.05238, 0.05255, 0.1072),
        (2, 64): (0.11328, 0.11335, 0.1727),
        (8, 8): (0.03284, 0.03293, 0.0693),
        (8, 64): (0.07319, 0.07322, 0.1118),
    },
}
# (d, r, epsilon): rank one, Theorem 5 as printed with gradients of rank 1 and of rank 128; delta = 1e-5
ONE_RELEASE = {
    (64, 4, 1): (1.31564, 0.7649, 0.8499),
    (64, 32, 1): (2.74873, 1.1087, 1.1351),
    (256, 32, 1): (1.41880, 0.6530, 0.6975),
    (2048, 16, 1): (0.38140, 0.1984, 0.2192),
    (2048, 64, 0.5): (1.29278, 0.3182, 0.3379),
    (2048, 64, 1): (0.68919, 0.3012, 0.3198),
    (2048, 64, 4): (0.20250, 0.2741, 0.2911),
    (2048, 256, 1): (1.33319, 0.5067, 0.5228),
    (2048, 1843, 1): (3.53961, 1.1566, 1.1600),
    (4096, 8, 1): (0.20996, 0.1196, 0.1352),
    (4096, 64, 4): (0.14333, 0.1946, 0.2069),
}
# (r, d, q, steps, sigma, epsilon): delta exact at rank one, rank-free
FIXED_NOISE = {
    (64, 2048, 0.02, 500, 0.2125, 2): (9.82472e-6, 1.002e-5),
    (256, 2048, 0.02, 500, 0.42, 2): (1.018857e-5, 1.024e-5),
    (16, 768, 0.01, 1000, 0.12, 4): (1.345228e-5, 1.373e-5),
    (16, 256, 1.0, 10, 1.2, 1): (2.96030e-2, 3.0456e-2),
    (8, 64, 0.1, 20, 0.5, 1): (3.08844e-3, 3.194e-3),
}


def rank_one_noise_multiplier(
    sampling: PoissonSampling, steps: int, epsilon: float, delta: float, rank: int, dimension: int
) -> float:
    """The noise multiplier with which `rank_one_epsilon` meets the target: never below, to a relative 1e-5."""

    @lru_cache
    def spent(sigma: float) -> float:
        event = StepEvent(sampling, sigma, ((rank, dimension),))
        return min(rank_one_epsilon(event, steps, delta), 1e3 * epsilon)

    plain = calibrate_noise_multiplier(sampling, steps, epsilon, delta, tolerance=1e-3).noise_multiplier
    start = plain * math.sqrt(rank / dimension)  # a little too low
    sigma = find_noise(spent, epsilon, 0.1 * start, start=start, factor=1.02, rtol=1e-5 / 4)
    while spent(sigma) > epsilon:
        sigma *= 1 + 1e-5 / 2
    return sigma


def many_steps() -> list[dict[str, Any]]:
    rows = []
    for (dimension, q, steps, delta), points in MANY_STEPS.items():
        for (epsilon, rank), (rank_one, rank_free, theorem_5) in points.items():
            target = (PoissonSampling(q), steps, float(epsilon), delta)
            projections = ((rank, dimension),)
            started = time.process_time()
            found = calibrate_noise_multiplier(*target, projections=projections)
            seconds = time.process_time() - started
            plain = calibrate_noise_multiplier(*target).noise_multiplier
            split = {str(k): split_noise_multiplier(*target, projections, gradient_rank=k) for k in (1, 128)}
            row = {
                "dimension": dimension,
                "rank": rank,
                "sample_rate": q,
                "steps": steps,
                "epsilon": epsilon,
                "delta": delta,
                "rank_free": found.noise_multiplier,
                "rank_one": round(rank_one_noise_multiplier(*target, rank, dimension), 7),
                "theorem_5": {k: round(sigma, 6) for k, sigma in split.items()},
                "plain": plain,
                "project_then_clip": round(plain * math.sqrt(rank / dimension), 7),
                "ratio_to_plain": round(found.noise_multiplier / plain, 5),
                "theorem_5_ratio_to_plain": {k: round(sigma / plain, 5) for k, sigma in split.items()},
                "seconds": round(seconds, 2),
                "reference": {"rank_one": rank_one, "rank_free": rank_free, "theorem_5": theorem_5},
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def one_release() -> list[dict[str, Any]]:
    rows = []
    for (dimension, rank, epsilon), (rank_one, printed, printed_128) in ONE_RELEASE.items():
        plain = gaussian_noise_multiplier(epsilon, 1e-5)

        def free(sigma: float, eps: float = epsilon, size: tuple[int, int] = (rank, dimension)) -> float:
            return math.log(float(rank_free_delta([eps], sigma, (size,))[0]) / 1e-5)

        def exact(sigma: float, eps: float = epsilon, size: tuple[int, int] = (rank, dimension)) -> float:
            return math.log(float(rank_one_delta([eps], sigma, *size)[0]) / 1e-5)

        split = {
            form: {
                str(k): round(
                    theorem_5_noise_multiplier(epsilon, 1e-5, rank, dimension, k, form=form) / plain,
                    5,
                )
                for k in (1, 128)
            }
            for form in ("two-sided", "exact")
        }
        row = {
            "dimension": dimension,
            "rank": rank,
            "epsilon": epsilon,
            "delta": 1e-5,
            "rank_free": round(brentq(free, 0.5 * rank_one, 2 * rank_one, xtol=1e-9), 7),
            "rank_one": round(brentq(exact, 0.5 * rank_one, 2 * rank_one, xtol=1e-9), 7),
            "plain": round(plain, 6),
            "project_then_clip": round(plain * math.sqrt(rank / dimension), 6),
            "theorem_5_ratio_to_plain": {
                "printed": split["two-sided"],
                "with_exact_gaussian": split["exact"],
            },
            "reference": {"rank_one": rank_one, "theorem_5_printed": {"1": printed, "128": printed_128}},
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def fixed_noise() -> list[dict[str, Any]]:
    rows = []
    for (rank, dimension, q, steps, sigma, epsilon), (rank_one, rank_free) in FIXED_NOISE.items():
        event = StepEvent(PoissonSampling(q), sigma, ((rank, dimension),))
        exact = rank_one_pld(sigma, rank, dimension, q, 1e-4).self_compose(steps)
        row = {
            **event.to_dict(),
            "steps": steps,
            "epsilon": epsilon,
            "delta_rank_free": delta_of([(event, steps)], epsilon),
            "delta_rank_one": float(exact.get_delta_for_epsilon(epsilon)),
            "reference": {"rank_one": rank_one, "rank_free": rank_free},
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PRIVLORA_CACHE"] = cache  # nothing that an earlier run found
        content = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("dp-accounting", "numpy", "scipy")},
            "one_release": one_release(),
            "fixed_noise": fixed_noise(),
            "many_steps": many_steps(),
        }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
