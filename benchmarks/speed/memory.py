"""What `privlora plan` says a step takes at its most, next to what it takes: fresh processes on random models.

    python benchmarks/speed/memory.py --out benchmarks/results/memory.json
    python benchmarks/speed/memory.py --show benchmarks/results/memory.json
    python benchmarks/speed/memory.py --predict --out benchmarks/results/memory.json    # next to what was measured
    python benchmarks/speed/memory.py --models FOLDER --out …       # with pretrained models, each a folder in it

Each process first takes a step of a tiny model, so that all code is in memory; then it loads the model, builds the
method's parts, takes an empty step, and one of two of the micro-batches that are predicted to take most. Measured is
the largest resident size during that last step (VmHWM, set back before it) over that with the model loaded. glibc keeps
freed pieces of up to 32 MiB in its heap, so each row is measured where pieces of 64 KiB and more go back at once.
Linux alone. --smoke: one row of a tiny model.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

# Pieces of 64 KiB and more are given back to the system when they are freed.
AT_ONCE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
METHODS = ("prism", "dp-adamw", "dp-sgd")
_TARGETS = {"qv": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Case:
    """A random Llama and the settings of a step on it."""

    method: str
    hidden: int = 512
    vocabulary: int = 8_000
    length: int = 128
    rank: int = 16
    tokens: int = 2048
    layers: int = 8
    dtype: str = "float32"
    checkpointing: str = "none"
    clipping: str = "own"
    targets: str = "all-linear"
    pretrained: str = ""

    def __str__(self) -> str:
        plain = ("float32", "none", "own", "all-linear")
        more = (self.dtype, self.checkpointing, self.clipping, self.targets)
        more = [each for each in more if each not in plain]
        size = f"{self.hidden} x {self.layers}, {self.vocabulary // 1000 or self.vocabulary}k"
        size = self.pretrained or size
        return ", ".join([self.method, size, f"length {self.length}, r {self.rank}, {self.tokens}", *more])


SHAPES: tuple[dict[str, int], ...] = (
    {"hidden": 256, "length": 32, "rank": 8},
    {"hidden": 256, "length": 128},
    {"hidden": 256, "length": 512, "rank": 8},
    {"length": 128, "tokens": 256},
    {"length": 128},
    {"length": 512, "tokens": 4096},
    {"hidden": 256, "vocabulary": 128_000, "length": 128, "rank": 8, "tokens": 1024},
    {"vocabulary": 128_000, "length": 32, "tokens": 1024},
)
CASES = [Case(method, **shape) for shape in SHAPES for method in METHODS] + [
    Case("prism", checkpointing="non-reentrant"),
    Case("prism", dtype="bfloat16", hidden=256, tokens=512),
    Case("prism", dtype="bfloat16", hidden=256, tokens=2048),
    Case("prism", dtype="bfloat16", tokens=512),
    Case("prism", hidden=256, tokens=16_384, clipping="automatic"),
    Case("dp-adamw", hidden=256, tokens=16_384, clipping="automatic"),
]
CASES += [
    Case("prism", rank=8, dtype="bfloat16", pretrained=name, **more)
    for name in ("smollm2-135m-instruct", "gemma-3-270m")
    for more in (
        {},
        {"length": 512},
        {"clipping": "automatic", "tokens": 1024},
        {"checkpointing": "non-reentrant"},
        {"targets": "qv"},
    )
]
TINY = Case("prism", hidden=32, vocabulary=100, length=16, rank=2, tokens=64, layers=1)


def measured(case: Case) -> dict[str, float]:
    """In this process. MiB: predicted and measured peaks over the loaded model; seconds of the prediction."""
    found = predicted(case)
    with tempfile.TemporaryDirectory() as folder:
        same = {
            name: getattr(case, name) for name in ("method", "dtype", "checkpointing", "clipping", "targets")
        }
        warm = replace(TINY, **same)
        _take(warm, _model(warm), 2, 8, Path(folder) / "warm")
        model = _model(case)
        _tidy()
        loaded = _resident("VmRSS")
        most = _take(case, model, int(found["rows"]), int(found["width"]), Path(folder) / "ledger")
    return {**found, "measured_mib": round(most - loaded, 1)}


def predicted(case: Case) -> dict[str, float]:
    """The part of ``measured`` that needs no step, and the micro-batch that it is of."""
    import torch

    from privlora.training.fitting import StepMemory

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with torch.device("meta"):
        skeleton = _model(case)
    settings, cpu = _settings(case), torch.device("cpu")
    StepMemory(settings, skeleton, cpu)  # finds which layers are adapted; it is known from then on
    started = time.process_time()
    peak = StepMemory(settings, skeleton, cpu).peak(case.tokens)
    return {
        "rows": peak.rows,
        "width": peak.width,
        "predicted_mib": round(peak.step_bytes / 2**20, 1),
        "model_mib": round(peak.model_bytes / 2**20, 1),
        "seconds": round(time.process_time() - started, 3),
    }


def _model(case: Case) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    if case.pretrained:
        folder = Path(os.environ["PRIVLORA_MODELS"], case.pretrained)
        dtype = getattr(torch, case.dtype)
        if torch.empty(0).is_meta:
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for (
            weight
        ) in model.parameters():  # else they are mapped from the file, and come into memory with the step
            weight.data = weight.data.clone()
        return model
    heads = max(1, case.hidden // 64)
    config = LlamaConfig(
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=case.hidden * 43 // 16,
        vocab_size=case.vocabulary,
        max_position_embeddings=1024,
    )
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype)).eval()


def _settings(case: Case) -> Any:
    from privlora.config import settings_from

    return settings_from(
        {
            "model": {"name": "random", "gradient_checkpointing": case.checkpointing},
            "data": {"path": "(random)", "max_length": case.length},
            "adapter": {"r": case.rank, "target_modules": _TARGETS.get(case.targets, case.targets)},
            "method": {"name": case.method} | ({} if case.clipping == "own" else {"clipping": case.clipping}),
            "privacy": {
                "noise_multiplier": 1.0,
                "delta": 1e-6,
                "steps": 3,
                "expected_batch_size": 1_000,
                "public_dataset_size": 100_000,
            },
            "run": {"tokens_per_micro_batch": case.tokens},
        },
        source="benchmark",
    )


def _take(case: Case, model: Any, rows: int, width: int, ledger: Path) -> float:
    """Two steps, the second of two such micro-batches. MiB at the second one's peak."""
    import numpy as np

    from privlora.accounting import Ledger
    from privlora.data.examples import Example, Examples
    from privlora.data.units import Units
    from privlora.training.assembly import build_parts, build_step
    from privlora.training.inputs import Data
    from privlora.training.promise import plan_privacy

    settings = _settings(case)
    rng = np.random.default_rng(0)
    lengths = [width] * (2 * rows - 1) + [max(1, width - 1)]
    ids = [
        rng.integers(0, min(case.vocabulary, model.config.vocab_size), length).astype(np.int32)
        for length in lengths
    ]
    examples = Examples([Example(each, each.copy()) for each in ids], pad_token_id=0)
    parts = build_parts(settings, model)
    plan = plan_privacy(settings, model)
    with Ledger.create(ledger, plan) as kept:
        data = Data(examples, Units(np.arange(len(examples))), Examples([], pad_token_id=0))
        step = build_step(parts, data, kept)
        step.take([])
        _tidy()
        Path("/proc/self/clear_refs").write_text("5")
        step.take(list(range(2 * rows)))
        most = _resident("VmHWM")
    parts.adapter.detach()
    return most


def _tidy() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resident(what: str) -> float:
    """MiB by /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(what))) / 1024


def in_a_fresh_process(case: Case) -> dict[str, float]:
    """What ``measured`` gives there."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(
        command, env={**os.environ, **AT_ONCE, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of benchmarks/results/performance.md."""
    lines = [
        "| method, model, records, tokens of a micro-batch | rows x width | predicted, MiB | measured | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        ratio = row["predicted_mib"] / row["measured_mib"]
        cells = [row["case"], f"{row['rows']:.0f} x {row['width']:.0f}", f"{row['predicted_mib']:.0f}"]
        lines.append("| " + " | ".join([*cells, f"{row['measured_mib']:.0f}", f"**{ratio:.2f}**"]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="the results as JSON; rows that it holds are replaced or kept"
    )
    parser.add_argument("--models", type=Path, help="a folder of pretrained models")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=list(map(str, CASES)))
    parser.add_argument(
        "--show", type=Path, metavar="JSON", help="measure nothing; print the table of this file"
    )
    parser.add_argument("--predict", action="store_true", help="measure nothing; predict again, in --out")
    parser.add_argument("--smoke", action="store_true", help="does everything run? One row of a tiny model")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.case is not None:
        print(json.dumps(measured(Case(**json.loads(chosen.case)))))
        return
    if chosen.models is not None:
        os.environ["PRIVLORA_MODELS"] = str(chosen.models)
    result: dict[str, Any] = {"machine": describe_machine(), "cases": []}
    kept = chosen.show or chosen.out
    if kept is not None and kept.exists() and not chosen.smoke:
        result = json.loads(kept.read_text(encoding="utf-8"))
    for case in [] if chosen.show else [TINY] if chosen.smoke else CASES:
        if chosen.only is not None and str(case) not in chosen.only:
            continue
        if case.pretrained and chosen.models is None:
            continue
        done = {each["case"]: each for each in result["cases"]}
        row = {"case": str(case), **(predicted(case) if chosen.predict else in_a_fresh_process(case))}
        done[str(case)] = {**done.get(str(case), {}), **row}
        order = [str(TINY), *map(str, CASES)]
        result["cases"] = [done[name] for name in order if name in done]
        if chosen.out is not None and not chosen.smoke:
            chosen.out.write_text(json.dumps(result, indent=1) + "\n")
        print(row, file=sys.stderr, flush=True)
    print(markdown(result))


if __name__ == "__main__":
    main()
