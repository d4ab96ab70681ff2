"""What a private step costs on 1 to 512 devices, for bases of 1 to 70 billion parameters: a model, no measurement.

    python benchmarks/speed/scaling.py > benchmarks/scaling.md

Three parts add up. Gradients are shared out: 4 N FLOPs a token (forward, and backward through frozen weights) and two
passes of memory over each unit's P and Q. The release is one process's alone: noise, and moving the state. What crosses
is 8 bytes a number of the sum and 4 of the state, by way of the CPU, in trees. The last table holds the same model
against what processes.py measured on CPUs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
RANK, BATCH, TOKENS = 16, 1024, 512  # records in a step, tokens of each
DEVICES = (1, 8, 64, 512)
# Of one H200 and its machine, from data sheets and from the audits of steps; nothing here was run on one.
FLOPS, MEMORY = 350e12, 3e12  # a second in bfloat16; bytes a second
CROSSING = 10e9  # bytes a second between two processes, by way of the CPU
NOISE = 80e6 * 16  # normals a second on 16 cores (docs/performance.md)
MOVING = 20  # passes of memory over the state in an optimizer's step and the average
OF_CPUS = 1e9  # bytes a second between two processes of one machine without a GPU


@dataclass(frozen=True)
class Base:
    """A decoder with grouped attention, by its shapes; adapters are on all linear layers of a block."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    keys: int  # width of keys and values
    vocabulary: int = 128_000

    @property
    def sides(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of a block's linear layers."""
        h, i, k = self.hidden, self.intermediate, self.keys
        return [(h, h), (k, h), (k, h), (h, h), (i, h), (i, h), (h, i)]

    @property
    def parameters(self) -> float:
        return self.layers * sum(m * n for m, n in self.sides) + self.vocabulary * self.hidden

    @property
    def numbers(self) -> float:
        """Of one unit's P and Q, of a sum and of a state."""
        return self.layers * RANK * sum(m + n for m, n in self.sides)


BASES = (
    Base("1B", 16, 2048, 8192, 512),
    Base("4B", 36, 2560, 9728, 1024),
    Base("8B", 32, 4096, 14336, 1024),
    Base("70B", 80, 8192, 28672, 1024),
)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step's parts."""

    gradients: float
    release: float
    crossing: float

    @property
    def total(self) -> float:
        return self.gradients + self.release + self.crossing


def cost(base: Base, devices: int) -> Cost:
    """Of one step of BATCH records of TOKENS tokens."""
    units = math.ceil(BATCH / devices)
    compute = units * TOKENS * 4 * base.parameters / FLOPS
    clipping = units * base.numbers * 4 * 2 / MEMORY
    release = base.numbers / NOISE + MOVING * 4 * base.numbers / MEMORY
    return Cost(compute + clipping, release, crossing(base.numbers * 8, base.numbers * 4, devices, CROSSING))


def crossing(sums: float, states: float, processes: int, speed: float) -> float:
    """A reduction and a broadcast, each in as many rounds as the number of processes doubles."""
    return math.ceil(math.log2(processes)) * (sums + states) / speed


def model_table() -> list[str]:
    lines = [
        "| base | numbers released | devices | gradients, s | release, s | crossing, s | step, s | of ideal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for base in BASES:
        alone = cost(base, 1).total
        for devices in DEVICES:
            found = cost(base, devices)
            parts = " | ".join(
                f"{part:.3g}" for part in (found.gradients, found.release, found.crossing, found.total)
            )
            share = alone / devices / found.total
            lines.append(f"| {base.name} | {base.numbers / 1e6:.0f}M | {devices} | {parts} | {share:.0%} |")
    return lines


def check_table(path: Path) -> list[str]:
    """Measured speed-ups beside what the model makes of the same step in one process."""
    result = json.loads(path.read_text(encoding="utf-8"))
    size = result["processes"]
    lines = [
        "| batch | method | faster, measured | by the model | bytes of a sum / 8 a number |",
        "|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        alone, release = row["alone_s"], row["release_s"]
        together = (alone - release) / size + release
        together += crossing(row["sum_bytes"], row["state_bytes"], size, OF_CPUS)
        bytes_ = row["sum_bytes"] / 8 / row["numbers"]
        cells = (
            row["case"],
            row["method"],
            f"{row['faster']:.2f}",
            f"{alone / together:.2f}",
            f"{bytes_:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    measured = RESULTS / "processes.json"
    parts = [
        "# What a step costs on many devices",
        "A model, made by `python benchmarks/speed/scaling.py`; **nothing here was run on a GPU**. "
        f"{BATCH:,} records of {TOKENS} tokens in a step, rank {RANK} on all linear layers, each device with the whole "
        'base. "Of ideal": the time of one device, shared out, over the step\'s.',
        "\n".join(model_table()),
        "The release (noise on 16 cores, the optimizer) is the first device's alone, and what crosses goes by way of "
        "the CPU: together they are what is left where gradients are shared out among hundreds of devices. Larger "
        "batches, which private training likes anyway, move that limit.",
        "## The same model and what was measured",
        f"Two processes of one CPU thread each, joined by gloo (`processes.py`, {measured.name}); the crossing is "
        f"taken at {OF_CPUS / 1e9:g} GB a second. The model knows nothing of units that cannot be shared out evenly.",
        "\n".join(check_table(measured)) if measured.exists() else "Not measured yet.",
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page())
