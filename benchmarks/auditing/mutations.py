"""Broken mechanisms that the one-step audit has to catch, for every private method, and correct ones that it must not.

    python benchmarks/auditing/mutations.py --output benchmarks/results/auditing/mutations.json

Each verdict has 99 % confidence, over all the canaries that were played for it. Rows that are in the output already are
kept, so an interrupted table goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from privlora.lab.audits.one_step import audit_step
from privlora.methods import METHODS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "auditing"))
from audit_cases import MUTATIONS, setting  # noqa: E402

SIGMA = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=150)
    parser.add_argument(
        "--correct", type=int, default=48, help="audits of correct mechanisms, over all methods"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    methods = [name for name, row in METHODS.items() if row.private]
    table = {"sigma": SIGMA, "trials": arguments.trials, "confidence": 0.99, "broken": [], "correct": []}
    if arguments.output.exists():
        table = json.loads(arguments.output.read_text())
    started = time.process_time()

    def keep(kind: str, row: dict[str, object]) -> None:
        table[kind].append(row)
        print(kind, json.dumps(row), flush=True)
        arguments.output.write_text(json.dumps(table, indent=1) + "\n")

    for name in methods:
        for mutation, case in MUTATIONS.items():
            if any((row["method"], row["mutation"]) == (name, mutation) for row in table["broken"]):
                continue
            found = case.audits(name, SIGMA, trials=arguments.trials)
            best = max(found, key=lambda each: each.epsilon_lower)
            keep(
                "broken",
                {
                    "method": name,
                    "mutation": mutation,
                    "caught": any(each.violated for each in found),
                    "statistic": best.statistic,
                    "epsilon_lower": round(best.epsilon_lower, 3),
                    "epsilon_claimed": round(best.epsilon_claimed, 3),
                },
            )
    for number in range(len(table["correct"]), arguments.correct):
        name = methods[number % len(methods)]
        mechanism, others, canary = setting(name, SIGMA)
        twin = setting(name, SIGMA)[0]
        found = audit_step(
            mechanism, mechanism.event, others, canary, trials=arguments.trials, confidence=0.99, twin=twin
        )
        keep(
            "correct",
            {"method": name, "flagged": found.violated, "epsilon_lower": round(found.epsilon_lower, 3)},
        )
    caught = sum(row["caught"] for row in table["broken"])
    flagged = sum(row["flagged"] for row in table["correct"])
    print(
        f"caught {caught} of {len(table['broken'])}, flagged {flagged} of {len(table['correct'])} correct ones"
    )
    print(f"{time.process_time() - started:.0f} CPU seconds")


if __name__ == "__main__":
    main()
