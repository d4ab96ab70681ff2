"""The one-step audit of one method on one copy of the package, in a process of its own.

    python mutant_audit.py RESULT METHOD

Played are a canary that lies in all modules and one in each, all of them together with 99.99 % confidence, at sigma 1
and with the operating system's noise. The copy comes first in PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from mutant_child import cpu_seconds

import privlora
from privlora.auditing.gradient_canaries import draw_canaries
from privlora.lab.audits.one_step import audit_step

sys.path[:0] = [str(Path(__file__).parents[1] / "auditing"), str(Path(__file__).parents[1])]
from audit_cases import setting  # noqa: E402

SIGMA, TRIALS, DOUBT = 1.0, 300, 1e-4


def main(result: str, method: str) -> None:
    torch.set_num_threads(1)
    mechanism, others, everywhere = setting(method, SIGMA)
    twin = setting(method, SIGMA)[0]
    adapter = mechanism.coordinates.adapter
    generator = torch.Generator().manual_seed(3)
    alone = [draw_canaries(adapter, 1, generator, site=s) for s in range(len(adapter.sites))]
    canaries = [everywhere, *alone]
    confidence = 1 - DOUBT / len(canaries)
    found = [
        audit_step(
            mechanism, mechanism.event, others, canary, trials=TRIALS, confidence=confidence, twin=twin
        )
        for canary in canaries
    ]
    worst = max(found, key=lambda audit: audit.epsilon_lower)
    content = {
        "violated": any(audit.violated for audit in found),
        "epsilon_lower": worst.epsilon_lower,
        "epsilon_claimed": worst.epsilon_claimed,
        "statistic": worst.statistic,
        "package": privlora.__file__,
        "seconds": cpu_seconds(),
    }
    Path(result).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
