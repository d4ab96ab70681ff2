"""What federated rounds cost: time beside a run in one place, secure sums, the server's memory, bytes.

    python benchmarks/federated/cost.py --out benchmarks/results/federated/cost.json [--parts rounds bytes ...]

Parts, each of them with random models or random numbers, on one thread:

rounds   a round of ten clients in one process beside as many steps of a run in one place, with as many records, by
         turns, on the embedded model. CPU seconds of a step, medians.
secure   whole rounds of ten clients in one process with and without secure sums at messages of 10 MB (fedavg on a
         random Llama of width 512), where the work of all clients adds up; and one sum alone, counted for each.
masking  MB a CPU second at 40 million entries: adding one key stream, the ten of a client among ten, and rounding.
server   one round's aggregation for ten clients of an adapter of Llama-2-7B's shape (q_proj and v_proj, rank 16,
         float32), for each rule: CPU seconds and peak memory of a process that does nothing else.
bytes    bytes of each round as counted, beside formulas of the rules' papers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cost_rounds import Job, against_a_run, of_federation, secure_against_plain, sums_alone
from cost_server import CLIENTS, timed
from transformers import LlamaConfig, LlamaForCausalLM

from privlora.config import ModelSettings
from privlora.demo import model_path
from privlora.federated.rules import RULES
from privlora.federated.secure.masks import encode, shift
from privlora.training.models import adapter_for, load_model

ROOT = Path(__file__).parents[2]


def demo(**changes: Any) -> Job:
    model, tokenizer = load_model(ModelSettings(name=str(model_path())))
    return Job(model=model, tokenizer=tokenizer, **changes)


def rounds(turns: int) -> dict[str, Any]:
    return {
        f"{batch} records a step": against_a_run(demo(records=2000, batch=batch), turns)
        for batch in (160, 480)
    }


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
    wide = Job(model=LlamaForCausalLM(config), tokenizer=demo().tokenizer, rank=64, batch=40.0)
    return {
        "parameters": sum(p.numel() for p in wide.model.parameters()),
        "rounds": {f"{steps} local steps": secure_against_plain(wide, turns, steps) for steps in (1, 4)},
        "alone": [sums_alone(CLIENTS, 2_500_000, bits) for bits in (32, 64)],
    }


def masking(turns: int) -> dict[str, Any]:
    """MB of the vector a CPU second: with one key stream, with those of a client among ten, and of its rounding."""
    found: dict[str, Any] = {}
    entries, turns = 40_000_000, max(turns, 3)
    for bits in (32, 64):
        vector = np.zeros(entries, f"<u{bits // 8}")
        found[f"{bits} bits"] = {"bytes": vector.nbytes}
        for streams in (1, CLIENTS):
            keys = [number.to_bytes(32, "little") for number in range(streams)]
            seconds = [timed(lambda keys=keys, vector=vector: shift(vector, keys)) for _ in range(turns)]  # type: ignore[misc]
            found[f"{bits} bits"][f"MB/s with {streams} streams"] = vector.nbytes / 1e6 / median(seconds)
    tensors = {"0.left": torch.full((entries,), 0.01)}
    seconds = [timed(lambda: encode(tensors, CLIENTS)) for _ in range(turns)]
    return {**found, "MB/s of float32 rounded": 4 * entries / 1e6 / median(seconds)}


def server(turns: int) -> dict[str, Any]:
    """Each rule in a process of its own."""
    program = str(Path(__file__).with_name("cost_server.py"))
    return {
        rule: json.loads(
            subprocess.run([sys.executable, program, rule], check=True, capture_output=True).stdout
        )
        for rule in RULES
    }


def formulas(rule: str, t: int, L: int, m: int, n: int, r: int) -> tuple[int, int]:
    """Floats to and from one client in round t for L modules of m x n; of fedask with p = 0, under privacy.

    ffa, rolora and alt send all factors down, so that a client that comes anew has them. flora and fedex: as long as
    their ranks are below m and n.
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


def clients(turns: int) -> dict[str, Any]:
    """Rounds over ever more clients that share the same records, each number in a process of its own."""
    program = str(Path(__file__).with_name("cost_clients.py"))
    return {
        f"{rule}, {count} clients": json.loads(
            subprocess.run(
                [sys.executable, program, rule, str(count), str(turns)], check=True, capture_output=True
            ).stdout
        )
        for rule, counts in (("tan", (10, 30, 100, 300, 1000)), ("joint", (5, 10, 20, 40)))
        for count in counts
    }


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "rounds": rounds,
    "secure": secure,
    "masking": masking,
    "server": server,
    "clients": clients,
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
