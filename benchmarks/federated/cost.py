"""What federated rounds cost: time beside a run in one place, secure sums, the server's memory, bytes.

    python benchmarks/federated/cost.py --out benchmarks/results/federated/cost.json [--parts rounds bytes ...]

Parts, each of them with random models or random numbers, on one thread:

rounds   a round of ten clients in one process beside as many steps of a run in one place, with as many records, by
         turns, on the embedded model. CPU seconds of a step, medians.
secure   whole rounds of ten clients in one process with and without secure sums at messages of 10 MB (fedavg on a
         random Llama of width 512), where the work of all clients adds up; and one sum alone, counted for each.
masking  MB/s at which one key stream is added to 40 million entries.
server   one round's aggregation for ten clients of an adapter of Llama-2-7B's shape (q_proj and v_proj, rank 16,
         float32), for each rule: CPU seconds and peak memory of a process that does nothing else.
bytes    bytes of each round as counted, beside formulas of the rules' papers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cost_rounds import Job, against_a_run, of_federation, secure_against_plain, sums_alone
from transformers import LlamaConfig, LlamaForCausalLM

from privlora.config import ModelSettings
from privlora.demo import model_path
from privlora.federated.rules import RULES, RuleSettings
from privlora.federated.secure.masks import shift
from privlora.training.models import adapter_for, load_model

ROOT = Path(__file__).parents[2]
SIZES = (64, 4096, 4096)
"""Of q_proj and v_proj in the 32 layers of Llama-2-7B."""
RANK_7B, CLIENTS = 16, 10


def demo(**changes: Any) -> Job:
    model, tokenizer = load_model(ModelSettings(name=str(model_path())))
    return Job(model=model, tokenizer=tokenizer, **changes)


def rounds(turns: int) -> dict[str, Any]:
    return against_a_run(demo(), turns)


def secure(turns: int) -> dict[str, Any]:
    """rank: so that (m + n) r floats of all modules are 10 MB."""
    config = LlamaConfig(
        vocab_size=1280,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    job = demo(rank=64, batch=40.0)
    wide = Job(model=LlamaForCausalLM(config), tokenizer=job.tokenizer, rank=64, batch=40.0)
    return {
        "parameters": sum(p.numel() for p in wide.model.parameters()),
        "rounds": {f"{steps} local steps": secure_against_plain(wide, turns, steps) for steps in (1, 4)},
        "alone": [sums_alone(CLIENTS, 2_500_000, bits) for bits in (32, 64)],
    }


def masking(turns: int) -> dict[str, Any]:
    found = {}
    for bits in (32, 64):
        vector, speeds = np.zeros(40_000_000, f"<u{bits // 8}"), []
        for turn in range(max(turns, 3)):
            start = time.process_time()
            shift(vector, [turn.to_bytes(32, "little")])
            speeds.append(vector.nbytes / 1e6 / (time.process_time() - start))
        found[f"{bits} bits"] = {"MB_per_cpu_second": median(speeds), "bytes": vector.nbytes}
    return found


def server(turns: int) -> dict[str, Any]:
    """Each rule in a process of its own."""
    found = {}
    context = multiprocessing.get_context("spawn")
    for name in RULES:
        with context.Pool(1) as pool:
            found[name] = pool.apply(aggregate, (name,))
    return found


def aggregate(name: str) -> dict[str, Any]:
    """Random answers of all clients, made one after the other outside of what is timed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    L, m, n = SIZES
    settings = RuleSettings(rank=RANK_7B)
    rule = RULES[name]([(torch.zeros(L, m, RANK_7B), torch.randn(L, n, RANK_7B) / n**0.5)], settings)
    before, spent = _peak(), 0.0
    for stage in rule.stages:
        shapes = rule.shapes(stage, 1, [SIZES], settings)[1]
        for _ in range(CLIENTS):
            answer = {key: 0.01 * torch.randn(shape) for key, shape in shapes.items()}
            spent += _timed(lambda answer=answer, stage=stage: rule.add(stage, answer, 1.0))  # type: ignore[misc]
        spent += _timed(lambda stage=stage: rule.close(stage))  # type: ignore[misc]
    spent += _timed(lambda: rule.broadcast(rule.stages[0]))
    return {"cpu_seconds": spent, "peak_mb": _peak(), "peak_mb_before": before}


def _timed(do: Callable[[], object]) -> float:
    start = time.process_time()
    do()
    return time.process_time() - start


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def formulas(rule: str, t: int, L: int, m: int, n: int, r: int) -> tuple[int, int]:
    """Floats to and from one client in round t for L modules of m x n; of fedask with p = 0, under privacy.

    ffa, rolora and alt send all factors down, so that a client that comes anew has them.
    """
    whole, left, right = L * (m + n) * r, L * m * r, L * n * r
    half = left if t % 2 else right
    return {
        "fedavg": (whole, whole),
        "fedprox": (whole, whole),
        "scaffold": (2 * whole, 2 * whole),
        "ffa": (whole, left),
        "fedsa": (right, right),
        "flora": ((t - 1) * CLIENTS * whole, whole),
        "fedex": (whole + (t - 1) * (CLIENTS - 1) * whole, whole),
        "flexlora": (whole, whole),
        "fedsvd": (whole, left),
        "rolora": (whole, half),
        "fedask": (whole + left, whole),
        "tan": (whole + L * r, whole + L * r * r),
        "alt": (whole + L * r, half),
    }[rule]


def bytes_of_rounds(turns: int) -> dict[str, Any]:
    """Tensors' bytes as counted, less the name of the run and of the stage in each message, beside the formulas."""
    job = demo(records=200, batch=20.0, tokens=16)
    sizes = [(len(g.sites), g.m, g.n) for g in _groups(job)]
    found: dict[str, Any] = {}
    for rule in RULES:
        done = of_federation(job, rule=rule, rounds=3)[1]
        expected = []
        for t in (1, 2, 3):
            each = [formulas(rule, t, *size, job.rank) for size in sizes]
            expected.append([4 * CLIENTS * sum(one[side] for one in each) for side in (0, 1)])
        counted = [[one.down, one.up] for one in done]
        others = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(counted, expected, strict=True)]
        found[rule] = {"counted": counted, "formula": expected, "other_bytes": others}
    return found


def _groups(job: Job) -> Any:
    adapter = adapter_for(job.settings(Path("unused"), steps=1), job.model)
    groups = adapter.groups
    adapter.detach()
    return groups


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "rounds": rounds,
    "secure": secure,
    "masking": masking,
    "server": server,
    "bytes": bytes_of_rounds,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    torch.set_num_threads(1)
    old = json.loads(chosen.out.read_text()) if chosen.out is not None and chosen.out.exists() else {}
    for part in chosen.parts:
        old[part] = {**PARTS[part](chosen.turns), "machine": describe_machine()}
        print(json.dumps({part: old[part]}), flush=True)
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(json.dumps(old, indent=1) + "\n")


if __name__ == "__main__":
    main()
