"""What many records and many steps cost: tokenising, loading, ledgers, epsilon after each step, calibration.

    python benchmarks/scale.py --out benchmarks/results/scale.json            # minutes
    python benchmarks/scale.py --out … --only loading                         # the other figures stay
    python benchmarks/scale.py --smoke                                        # seconds, nothing is kept

All times are CPU seconds of one process with one thread, medians of several rounds, after imports. `--as before` keeps
them under another name in the same file, to compare with an older checkout (on its PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from machine import describe_machine
from transformers import AutoTokenizer

import privlora.accounting.ledger as ledger_module
from privlora.accounting import (
    Ledger,
    Plan,
    PoissonSampling,
    Sampling,
    StepEvent,
    TruncatedPoissonSampling,
    accountants,
    calibrate_noise_multiplier,
    epsilon,
    read_ledger,
)
from privlora.config import settings_from
from privlora.data.examples import Template, build_examples
from privlora.demo import model_path
from privlora.training.identity import identify
from privlora.training.inputs import load_data

QUESTIONS: dict[str, tuple[Sampling, int, float, float]] = {
    "q 0.01, T 200, epsilon 3": (PoissonSampling(0.01), 200, 3.0, 1e-5),
    "q 1e-4, T 10,000, epsilon 3": (PoissonSampling(1e-4), 10_000, 3.0, 1e-6),
    "q 1e-3, T 100,000, epsilon 8": (PoissonSampling(1e-3), 100_000, 8.0, 1e-6),
    "truncated, q 0.01, T 1000, epsilon 3": (TruncatedPoissonSampling(0.01, 175, 10_000), 1000, 3.0, 1e-5),
}
RUNS = {
    "q 0.01, sigma 1.0, T 1000": (StepEvent(PoissonSampling(0.01), 1.0), 1000, 1e-5),
    "q 1e-3, sigma 0.8, T 5000": (StepEvent(PoissonSampling(1e-3), 0.8), 5000, 1e-6),
    "q 1e-3, sigma 0.58, T 100,000": (StepEvent(PoissonSampling(1e-3), 0.58), 100_000, 1e-6),
}


def cpu(work: Callable[[], Any]) -> float:
    """CPU seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


def sst2_like(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Sentences of 2 to 40 words (9 in the median) from a Zipf law over 5000 made-up words, and a one-word label."""
    draw = np.random.default_rng(seed)
    syllables = [a + b for a in "bcdfglmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    words = ["".join(draw.choice(syllables, draw.integers(1, 4))) for _ in range(5000)]
    lengths = np.clip(draw.lognormal(2.2, 0.7, count), 2, 40).astype(int)
    drawn = np.minimum(draw.zipf(1.3, lengths.sum()), len(words)) - 1
    ends = np.cumsum(lengths)
    return [
        {
            "sentence": " ".join(words[i] for i in drawn[end - length : end]),
            "label": ("negative", "positive")[end % 2],
        }
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]


def tokenising(count: int, rounds: int, tokenizer_name: str) -> dict[str, float]:
    """Microseconds and bytes a record."""
    records, tokenizer = sst2_like(count), AutoTokenizer.from_pretrained(tokenizer_name)
    template = Template(prompt="{sentence}\nSentiment:", completion=" {label}")

    def build(some: list[dict[str, str]]) -> Any:
        return build_examples(some, template, tokenizer, max_length=128, loss_on="completion")

    prompts = [f"{record['sentence']}\nSentiment:" for record in records]
    build(records[:1000])
    seconds = [cpu(lambda: build(records)) for _ in range(rounds)]
    alone = [
        cpu(lambda: tokenizer.backend_tokenizer.encode_batch_fast(prompts, add_special_tokens=False))
        for _ in range(rounds)
    ]
    tracemalloc.start()
    examples = build(records[: min(count, 20_000)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = int(examples.lengths.sum())
    return {
        "records": count,
        "tokens_per_record": round(tokens / len(examples), 2),
        "us_per_record": round(statistics.median(seconds) / count * 1e6, 1),
        "us_per_record_of_the_tokenizer_alone": round(statistics.median(alone) / count * 1e6, 1),
        "bytes_per_record_beside_ids": round((held - 4 * tokens) / len(examples), 1),
    }


def loading(count: int, tokenizer: str) -> dict[str, float]:
    """All that a run does with a file of records before it trains, in a fresh process.

    Records are ten times what ``sst2_like`` draws, with 100 public ones beside. Bytes are of the largest resident set,
    over that of the same process when it had loaded 2000 records.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, size in (("few", 2000), ("all", count), ("public", 100)):
            with open(folder / f"{name}.jsonl", "w") as file:
                for seed in range(10):
                    some = sst2_like(size // 10, seed=seed + 10 * (name == "public"))
                    file.writelines(json.dumps(record) + "\n" for record in some)
        first = _in_a_process(folder, tokenizer)
    return {"records": count, **first}


def _in_a_process(folder: Path, tokenizer: str) -> dict[str, float]:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_load, (folder, tokenizer))


def _load(folder: Path, tokenizer_name: str) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    torch.set_num_threads(1)

    def load(name: str) -> Any:
        with open(folder / f"{name}.jsonl") as file:
            count = sum(1 for _ in file)
        form = {"prompt": "{sentence}\nSentiment:", "completion": " {label}", "loss_on": "completion"}
        places = {"path": str(folder / f"{name}.jsonl"), "evaluation": str(folder / "public.jsonl")}
        sizes = {"delta": 0.1 / count, "steps": 5, "expected_batch_size": 16, "public_dataset_size": count}
        settings = settings_from(
            {
                "model": {"name": tokenizer_name},
                "data": {**places, **form, "max_length": 128},
                "privacy": {"target_epsilon": 3.0, **sizes},
                "method": {"name": "prism", "relative_rate": False},
            }
        )
        data = load_data(settings, tokenizer)
        identify(data, torch.nn.Linear(1, 1))
        return data

    load("few")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept: list[Any] = []
    seconds = cpu(lambda: kept.append(load("all")))
    (data,) = kept
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    ids = 4 * int(data.examples.lengths.sum())
    return {
        "s": round(seconds, 2),
        "records_per_s": round(len(data.examples) / seconds),
        "resident_bytes_per_record": round(grown / len(data.examples), 1),
        "bytes_of_ids_per_record": round(ids / len(data.examples), 1),
    }


def ledgers(steps: int, rounds: int) -> dict[str, float]:
    """A ledger of so many steps: charging without waiting for the disk, reading, epsilon."""
    event = StepEvent(PoissonSampling(1e-3), 0.8)
    plan = Plan(
        ((event, steps),), 1e-6, None, "add-or-remove-one", "record", None, 1.0, 64.0, "prism", "scale"
    )
    sync, ledger_module.os.fsync = ledger_module.os.fsync, lambda file: None
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ledger.jsonl")
            with Ledger.create(path, plan) as ledger:
                charging = cpu(lambda: [ledger.charge(event) for _ in range(steps)])
            reading = [cpu(lambda: read_ledger(path)) for _ in range(rounds)]
            summary = read_ledger(path)
    finally:
        ledger_module.os.fsync = sync
    epsilon([(StepEvent(PoissonSampling(0.5), 5.0), 1)], 1e-5, grid=1e-2)  # imports
    first, again = [], []
    for _ in range(rounds):
        accountants._step_pld.cache_clear()
        first.append(cpu(summary.epsilon))
        again.append(cpu(summary.epsilon))
    return {
        "steps": steps,
        "charge_us": round(charging / steps * 1e6, 1),
        "read_s": round(statistics.median(reading), 3),
        "epsilon_first_s": round(statistics.median(first), 3),
        "epsilon_again_s": round(statistics.median(again), 4),
    }


def each_step(event: StepEvent, steps: int, delta: float, asked: int) -> dict[str, float]:
    """Epsilon after as many of the steps, the first ones and others evenly spread; all of them where they are few."""
    accountants._step_pld.cache_clear()
    first = cpu(lambda: epsilon([(event, 1)], delta))
    numbers = sorted({*range(1, min(steps, 20) + 1), *np.linspace(1, steps, asked).astype(int).tolist()})
    times = [cpu(lambda n=n: epsilon([(event, n)], delta)) for n in numbers]
    return {
        "asked": len(times),
        "first_ms": round(first * 1e3, 1),
        "mean_ms": round(statistics.mean(times) * 1e3, 2),
        "median_ms": round(statistics.median(times) * 1e3, 2),
    }


def calibrations(rounds: int, smoke: bool) -> dict[str, dict[str, float]]:
    """Seconds and what was found; nothing is kept from one to the next."""
    found: dict[str, dict[str, float]] = {}
    for name, question in list(QUESTIONS.items())[: 1 if smoke else None]:
        seconds = []
        for _ in range(rounds):
            accountants._step_pld.cache_clear()
            started = time.process_time()
            result = calibrate_noise_multiplier(*question, cache=False)
            seconds.append(time.process_time() - started)
        found[name] = {
            "s": round(statistics.median(seconds), 2),
            "noise_multiplier": result.noise_multiplier,
            "epsilon": result.epsilon,
        }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as", dest="name", default="now")
    parser.add_argument("--tokenizer", default=str(model_path()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100_000, help="of the ledger")
    parser.add_argument("--asked", type=int, default=200)
    parser.add_argument("--stored", type=int, default=1_000_000, help="records to load")
    parser.add_argument("--only", nargs="+", metavar="PART", help="the others keep their figures in --out")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args(argv)
    rounds, asked = (1, 20) if given.smoke else (given.rounds, given.asked)
    parts: dict[str, Callable[[], Any]] = {
        "tokenising": lambda: tokenising(2000 if given.smoke else given.records, rounds, given.tokenizer),
        "loading": lambda: loading(4000 if given.smoke else given.stored, given.tokenizer),
        "ledger": lambda: ledgers(2000 if given.smoke else given.steps, rounds),
        "epsilon_after_each_step": lambda: {
            name: each_step(*run, asked) for name, run in list(RUNS.items())[: 1 if given.smoke else None]
        },
        "calibrate": lambda: calibrations(rounds, given.smoke),
    }
    if unknown := set(given.only or ()) - set(parts):
        parser.error(f"unknown {', '.join(sorted(unknown))}; give some of {', '.join(parts)}")
    found: dict[str, Any] = {name: parts[name]() for name in given.only or parts}
    found |= {"machine": describe_machine(), "rounds": rounds} if given.only is None else {}
    print(json.dumps(found, indent=2))
    if given.out is not None:
        kept = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(
            json.dumps(kept | {given.name: kept.get(given.name, {}) | found}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
