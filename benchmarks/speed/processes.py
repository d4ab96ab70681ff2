"""What a private step takes in several processes, to the same step in one of them, and what crosses between them.

    python benchmarks/speed/processes.py --out benchmarks/results/processes.json

The processes are forked here and joined with gloo, one thread each. Rounds take turns: the first process takes a batch
alone while the others wait, then all take it together. Batches have SST-2's and GSM8K's lengths, the model is that of
real_lengths.py. Bytes are those of clipped sums (each other process to the first) and of states (the first to each).
--smoke takes a tiny model and small batches, and writes no results.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_lengths import RESULTS, Case
from speed_steps import Privlora, Setting
from torch import Tensor

from privlora.training.ranks import Ranks
from privlora.training.shared_step import SharedStep
from privlora.training.torch_ranks import joined

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

CASES = [Case("SST-2", 64, "8k"), Case("SST-2", 256, "8k"), Case("GSM8K", 64, "8k")]
METHODS = ("prism", "dp-adamw")


class Counted:
    """Ranks that add up the bytes of tensors which leave a process."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.sums, self.states = ranks, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def add(self, tensor: Tensor) -> Tensor:
        self.sums += tensor.nbytes
        return self._ranks.add(tensor)

    def copied(self, tensors: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        found = self._ranks.copied(tensors)
        self.states += sum(t.nbytes for t in found.values())
        return found


def measure(setting: Setting, method: str, size: int, rounds: int) -> dict[str, Any]:
    """Wall seconds of steps alone and together, in rounds, in ``size`` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reader, writer = os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            with joined() as ranks:
                found = _take_turns(setting, method, ranks, rounds)
                if ranks.first:
                    os.write(writer, json.dumps(found).encode())
            os._exit(0)
        children.append(child)
    os.close(writer)
    with open(reader) as told:
        answer = told.read()
    for child in children:
        os.waitpid(child, 0)
    return json.loads(answer)


def _take_turns(setting: Setting, method: str, ranks: Ranks, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    alone, together = Privlora(setting, method), Privlora(setting, method)
    step, counted, draws = together.private_step, Counted(ranks), np.random.default_rng(1)
    batch: list[Sequence[int]] = [list(range(min(8, setting.batch)))]  # the first does not count
    step.draw = lambda: batch[0]
    shared, seconds = SharedStep(step, counted), {"alone": list[float](), "together": list[float]()}
    released, release = list[float](), step.release

    def timed(*total: Any) -> Any:
        begun = time.perf_counter()
        found = release(*total)
        released.append(time.perf_counter() - begun)
        return found

    step.release = timed  # type: ignore[method-assign]
    for turn in range(rounds + 1):
        takes = {"alone": lambda: alone.step(batch[0]) if ranks.first else None, "together": shared.take}
        for name in ("alone", "together") if turn % 2 else ("together", "alone"):
            ranks.any(False)  # nobody is still at work
            begun = time.perf_counter()
            takes[name]()
            seconds[name].append(time.perf_counter() - begun)
        batch[0] = draws.choice(len(setting.lengths), setting.batch, replace=False).tolist()
    steps = rounds + 1
    one, all_ = (np.array(seconds[name][1:]) for name in ("alone", "together"))
    low, ratio, high = np.quantile(one / all_, [0.25, 0.5, 0.75])
    return {
        "alone_s": round(float(np.median(one)), 4),
        "together_s": round(float(np.median(all_)), 4),
        "faster": round(float(ratio), 3),
        "quartiles": [round(float(low), 3), round(float(high), 3)],
        "release_s": round(float(np.median(released)), 4) if released else None,
        "sum_bytes": counted.sums // steps,
        "state_bytes": counted.states // steps,
        "numbers": step.state.coordinates.dimension,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/many-devices.md."""
    lines = ["| batch | method | one process, s | two, s | faster (quartiles) |", "|---|---|---|---|---|"]
    for row in result["cases"]:
        low, high = row["quartiles"]
        times = f"{row['alone_s']:.2f} | {row['together_s']:.2f}"
        lines.append(
            f"| {row['case']} | {row['method']} | {times} | **{row['faster']:.2f}** ({low:.2f}-{high:.2f}) |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="the results as JSON")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lengths = json.loads((RESULTS / "record_lengths.json").read_text())
    result: dict[str, Any] = {"machine": describe_machine(), "processes": given.processes, "cases": []}
    for case in CASES:
        taken = replace(case, batch=case.batch // 8) if given.smoke else case
        setting = taken.setting(lengths, given.smoke)
        for method in METHODS:
            found = measure(setting, method, given.processes, 1 if given.smoke else given.rounds)
            result["cases"].append({"case": str(case), "method": method, **found})
            print(json.dumps(result["cases"][-1]), file=sys.stderr, flush=True)
            if given.out is not None and not given.smoke:
                given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()
