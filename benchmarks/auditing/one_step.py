"""How near the white-box one-step audit comes to the claim: PRISM, DP-AdamW and M2 at epsilon 1, 3 and 8.

    python benchmarks/auditing/one_step.py --output benchmarks/results/auditing/one_step.json

As many trials as ``trials_for`` asks for, on a tiny model of one adapted layer: the mechanism is the product's, and its
privacy does not depend on the size of the model. Seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from privlora.accounting.calibration import calibrate_noise_multiplier
from privlora.accounting.events import PoissonSampling
from privlora.lab.audits.one_step import audit_step, trials_for

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "auditing"))
from audit_cases import setting  # noqa: E402

DELTA = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 3.0, 1.0])
    parser.add_argument("--methods", nargs="+", default=["dp-adamw", "prism", "wishart-m2"])
    parser.add_argument("--repeats", type=int, default=1, help="audits of each; rows are added to the output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    for target in arguments.epsilons:
        plain = calibrate_noise_multiplier(PoissonSampling(1.0), 1, target, DELTA).noise_multiplier
        trials = trials_for(plain, DELTA)
        for name in arguments.methods * arguments.repeats:
            event = setting(name, plain, targets=["q_proj"])[0].event
            sigma = plain
            if event.projections:
                sigma = calibrate_noise_multiplier(
                    PoissonSampling(1.0), 1, target, DELTA, projections=event.projections
                ).noise_multiplier
            mechanism, others, canary = setting(name, sigma, others=1, targets=["q_proj"])
            started = time.process_time()
            found = audit_step(mechanism, mechanism.event, others, canary, delta=DELTA, trials=trials)
            row = {"method": name, "target_epsilon": target, "noise_multiplier": sigma, **asdict(found)}
            row["share"] = found.epsilon_lower / found.epsilon_claimed
            row["cpu_seconds"] = round(time.process_time() - started, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
            arguments.output.write_text(json.dumps({"delta": DELTA, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
