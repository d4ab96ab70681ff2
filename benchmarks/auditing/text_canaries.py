"""What each kind of planted text shows of one run, on the embedded model and generated notes.

    python benchmarks/auditing/text_canaries.py --work runs/a --output benchmarks/results/auditing/text_canaries.json

Each kind of canary in runs of one plan with all of its noise, a quarter of it, and none (clipped still), several times:
canaries, batches and noise are new in each. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from privlora.auditing.canary_run import audit_run
from privlora.auditing.exposure import exposure_of_scores
from privlora.config import Settings, settings_from
from privlora.demo import model_path, private_records
from privlora.mechanisms import NoiseSource

RECORDS, STEPS, BATCH, CANARIES, EPSILON, RATE = 80, 64, 16, 200, 8.0, 5e-3
KINDS: list[tuple[str, float | None]] = [
    ("random-tokens", None),
    ("codes", None),
    ("sampled", None),
    ("sampled", 2.0),
    ("prefix-suffix", None),
    ("prefix-suffix", 2.0),
    ("new-token", None),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="new folder for the runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--canaries", type=int, default=CANARIES)
    parser.add_argument("--noises", type=float, nargs="+", default=[1.0, 0.25, 0.0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    known = {(row["kind"], row["temperature"], row["noise"], row["canaries"], row["repeat"]) for row in rows}
    draw = NoiseSource.standard_normal
    for repeat in range(arguments.repeats):
        for noise in arguments.noises:
            NoiseSource.standard_normal = lambda self, shape, noise=noise: draw(self, shape) * noise
            for kind, temperature in KINDS:
                cell = (kind, temperature, noise, arguments.canaries, repeat)
                if cell in known:
                    continue
                rows.append(_row(arguments.work / "-".join(map(str, cell)), *cell))
                print(json.dumps(rows[-1]), flush=True)
                facts = {
                    "records": RECORDS,
                    "steps": STEPS,
                    "expected_batch_size": BATCH,
                    "learning_rate": RATE,
                }
                arguments.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def _row(
    output: Path, kind: str, temperature: float | None, noise: float, canaries: int, repeat: int
) -> dict[str, Any]:
    started = time.process_time()
    found = audit_run(
        _settings(output),
        canaries=canaries,
        kind=kind,
        temperature=temperature,
        records=private_records(RECORDS, seed=1),
    )
    exposure = exposure_of_scores(*found.scores)
    return {
        "kind": kind,
        "temperature": temperature,
        "noise": noise,
        "repeat": repeat,
        **found.to_dict(),
        "exposure": exposure.mean,
        "chance": exposure.chance,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def _settings(output: Path) -> Settings:
    return settings_from(
        {
            "model": {"name": str(model_path()), "dtype": "float32", "device": "cpu"},
            "data": {"path": "(in memory)", "max_length": 48},
            "adapter": {"r": 8, "target_modules": "all-linear"},
            "privacy": {
                "target_epsilon": EPSILON,
                "delta": 1e-5,
                "steps": STEPS,
                "expected_batch_size": BATCH,
                "public_dataset_size": RECORDS,
            },
            "method": {"name": "dp-adamw", "learning_rate": RATE},
            "run": {"output": str(output)},
        },
        source="text_canaries",
    )


if __name__ == "__main__":
    main()
