"""How near the one-run audit of whole training runs comes to the claim, on the embedded model and generated notes.

    python benchmarks/auditing/one_run.py --output benchmarks/results/auditing/one_run.json --work runs/audits

White box, canaries in gradient space, Poisson sampling as planned. ``--broken`` adds a run with a quarter of the noise.
Each run is judged twice: by guesses alone at the whole error probability, as before there were signals, and by both.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from privlora.accounting import read_ledger
from privlora.auditing.canary_run import audit_run
from privlora.auditing.canary_scores import CanaryState, judge_canaries
from privlora.config import Settings, settings_from
from privlora.demo import model_path, private_records
from privlora.mechanisms import NoiseSource
from privlora.training.files import RunFolder

RECORDS, STEPS, BATCH = 80, 16, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="new folder for the runs")
    parser.add_argument("--methods", nargs="+", default=["dp-adamw", "prism"])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--canaries", type=int, default=2000)
    parser.add_argument("--broken", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    draw = NoiseSource.standard_normal
    for target in arguments.epsilons:
        for name in arguments.methods:
            for noise in (1.0, 0.25) if arguments.broken else (1.0,):
                NoiseSource.standard_normal = lambda self, shape, noise=noise: draw(self, shape) * noise
                started = time.process_time()
                found = audit_run(
                    _settings(name, target, arguments.work / f"{name}-{target:g}-{noise:g}"),
                    canaries=arguments.canaries,
                    records=private_records(RECORDS, seed=1),
                )
                row = {"method": name, "target_epsilon": target, "noise": noise, **found.to_dict()}
                row["share"] = found.epsilon_lower / found.epsilon_claimed
                row |= _by_guesses(arguments.work / f"{name}-{target:g}-{noise:g}")
                row["cpu_seconds"] = round(time.process_time() - started, 1)
                rows.append(row)
                print(json.dumps(row), flush=True)
                facts = {"records": RECORDS, "steps": STEPS, "expected_batch_size": BATCH, "rows": rows}
                arguments.output.write_text(json.dumps(facts, indent=1) + "\n")


def _by_guesses(output: Path) -> dict[str, object]:
    folder = RunFolder(output)
    plan, state = read_ledger(folder.ledger).plan, CanaryState.load(folder.canaries)
    found = judge_canaries(replace(state, signals=None), plan.event, plan.steps, plan.delta)
    share = found.epsilon_lower / found.epsilon_claimed
    return {"share_by_guesses": share, "violated_by_guesses": found.violated}


def _settings(name: str, target: float, output: Path) -> Settings:
    return settings_from(
        {
            "model": {"name": str(model_path()), "dtype": "float32", "device": "cpu"},
            "data": {"path": "(in memory)", "max_length": 48},
            "adapter": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
            "privacy": {
                "target_epsilon": target,
                "delta": 1e-5,
                "steps": STEPS,
                "expected_batch_size": BATCH,
                "public_dataset_size": RECORDS,
            },
            "method": {"name": name, "relative_rate": False},
            "run": {"output": str(output)},
        },
        source="one_run",
    )


if __name__ == "__main__":
    main()
