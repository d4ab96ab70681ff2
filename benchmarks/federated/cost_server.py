"""One round's aggregation for ten clients of an adapter of Llama-2-7B's shape: CPU seconds and memory of one rule.

    python benchmarks/federated/cost_server.py tan

Prints JSON. A process of its own for each rule, so that its peak of memory is the rule's. Answers are random float32,
made outside of what is timed; the server takes in one after the other.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from privlora.federated.rules import RULES, RuleSettings

SIZES = (64, 4096, 4096)
"""Of q_proj and v_proj in the 32 layers of Llama-2-7B."""
RANK, CLIENTS = 16, 10


def aggregate(name: str, sizes: tuple[int, int, int] = SIZES) -> dict[str, float]:
    """cpu_seconds: to take in all answers and to make the next broadcast. peak_mb: of the process, which holds torch,
    the rule's state and an answer from the first (before_mb)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    L, m, n = sizes
    settings = RuleSettings(rank=RANK)
    rule = RULES[name]([(torch.zeros(L, m, RANK), torch.randn(L, n, RANK) / n**0.5)], settings)
    spent, before = 0.0, 0.0
    for stage in rule.stages:
        shapes = rule.shapes(stage, 1, [sizes], settings)[1]
        first = {key: 0.01 * torch.randn(shape) for key, shape in shapes.items()}
        before = before or _peak()
        for _ in range(CLIENTS):
            # Answers of their own for all; what they hold changes no cost but that of equal singular values.
            answer = {key: tensor.roll(1, dims=1) for key, tensor in first.items()}
            spent += timed(lambda answer=answer, stage=stage: rule.add(stage, answer, 1.0))  # type: ignore[misc]
            first = answer
        spent += timed(lambda stage=stage: rule.close(stage))  # type: ignore[misc]
    spent += timed(lambda: rule.broadcast(rule.stages[0]))
    return {"cpu_seconds": spent, "peak_mb": _peak(), "before_mb": before}


def timed(do: Callable[[], object]) -> float:
    """CPU seconds."""
    start = time.process_time()
    do()
    return time.process_time() - start


def _peak() -> float:
    """MB since this program began; getrusage would count what it was started from."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) / 1024 if found else float("nan")


if __name__ == "__main__":
    print(json.dumps(aggregate(sys.argv[1])))
