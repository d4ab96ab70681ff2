"""Held-out loss of every method at equal privacy: real text, several seeds, one learning-rate grid for all.

    python benchmarks/utility.py --assets ASSETS --out benchmarks/results/utility.jsonl      # runs what is missing
    python benchmarks/utility.py --out benchmarks/results/utility.jsonl --table              # prints the tables

ASSETS holds models/ and data/ (Hugging Face folders and gzipped JSON lines). Each finished run is one line of the
output, so the study can be stopped and continued. Every method gets the same model, records, steps, batch, clipping
norm, rank and learning rates; what is compared is the held-out loss at each method's best learning rate (chosen by
the mean over seeds).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track

from privlora.config import Settings, settings_from
from privlora.data.batching import micro_batches
from privlora.evaluation import evaluate_next_token
from privlora.mechanisms import GaussianMechanism, MeanMechanism, Mechanism
from privlora.training.gradients import micro_batch_gradients
from privlora.training.session import Data, build_parts, load_data, load_model, plan_privacy, sampler


@dataclass(frozen=True)
class Task:
    model: str
    train: str
    validation: str
    text: str
    source: str | None = None  # keep records whose "source" is this
    max_length: int = 80


TASKS = {
    "gsm8k-questions": Task(
        "stories260K", "math/train", "math/gsm8k_test", text="instruction", source="gsm8k"
    ),
    "pubmed": Task("stories260K", "pubmed/train", "pubmed/validation", text="text"),
}

# name -> (method, optimizer, further settings of the method, further settings of the adapter)
CONTENDERS: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any]]] = {
    "prism/rank": ("prism", "rank", {}, {}),
    "prism/scalar": ("prism", "scalar", {}, {}),
    "prism/sgd": ("prism", "sgd", {}, {}),
    "prism/paper": ("prism", "paper", {}, {"init": "spectral-split"}),
    "dp-adamw": ("dp-adamw", None, {}, {}),
    "adamw (non-private)": ("adamw", None, {}, {}),
}


class _Charges:
    """Counts steps: a study on public data needs no ledger on disk."""

    def __init__(self) -> None:
        self.count = 0

    def charge(self, event: object) -> int:
        self.count += 1
        return self.count


def read(assets: Path, name: str, task: Task, limit: int | None = None) -> list[dict[str, str]]:
    with gzip.open(assets / "data" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    kept = [row for row in rows if task.source is None or row["source"] == task.source]
    return [{"text": row[task.text]} for row in kept][:limit]


def settings_for(
    task: Task,
    assets: Path,
    contender: str,
    epsilon: float | None,
    rate: float,
    seed: int,
    args: Any,
    size: int,
) -> Settings:
    method, optimizer, more, adapter = CONTENDERS[contender]
    privacy: dict[str, Any] = {
        "steps": args.steps,
        "expected_batch_size": args.batch,
        "public_dataset_size": size,
    }
    if epsilon is None:
        privacy["private"] = False
    else:
        privacy |= {"target_epsilon": epsilon, "delta": 1e-5, "clip_norm": 1.0}
    return settings_from(
        {
            "model": {"name": str(assets / "models" / task.model)},
            "data": {"path": "unused", "max_length": task.max_length},
            "privacy": privacy,
            "adapter": {"r": args.rank, **adapter},
            "method": {"name": method, "optimizer": optimizer, "learning_rate": rate, **more},
            "run": {"seed": seed},
        }
    )


def train_once(settings: Settings, model: torch.nn.Module, data: Data, pad: int) -> dict[str, float]:
    """Steps of one run and its held-out result; noise and sampling are fresh from the operating system."""
    parts = build_parts(settings, model)
    try:
        mechanism: Mechanism
        if settings.privacy.private:
            plan, _ = plan_privacy(settings)
            mechanism = GaussianMechanism(
                parts.coordinates,
                clip_norm=plan.clip_norm,
                event=plan.event,
                expected_batch_size=plan.expected_batch_size,
                ledger=_Charges(),
            )
            sigma = plan.event.noise_multiplier
        else:
            sigma = 0.0
            mechanism = MeanMechanism(
                parts.coordinates, expected_batch_size=settings.privacy.b, steps=settings.privacy.steps
            )
        draws = sampler(settings.privacy, len(data.units))
        model.train()
        started = time.process_time()
        for step in range(1, settings.privacy.steps + 1):
            drawn = data.units.draw_records(draws.draw(), draws.generator)
            for batch in micro_batches(drawn, data.examples, max_tokens=8192, pad_token_id=pad):
                captured, _ = micro_batch_gradients(
                    model, parts.adapter, batch, summed=not mechanism.needs_examples
                )
                mechanism.accumulate(captured)
            parts.optimizer.step(mechanism.release(), parts.learning_rate(step))
            if parts.average is not None:
                parts.average.update()
        seconds = time.process_time() - started
        if parts.average is not None:
            for group, (a, b) in zip(parts.adapter.groups, parts.average.factors(), strict=True):
                parts.adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)
        result = evaluate_next_token(model, data.evaluation, pad_token_id=pad)
    finally:
        parts.adapter.detach()
    return {
        "loss": result.loss_per_example,
        "accuracy": result.accuracy,
        "noise_multiplier": sigma,
        "cpu_seconds": round(seconds, 1),
    }


def study(args: argparse.Namespace, console: Console) -> None:
    done = {_key(row) for row in _rows(args.out)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.tasks:
        task = TASKS[name]
        records, held_out = (
            read(args.assets, task.train, task),
            read(
                args.assets,
                task.validation,
                task if "train" in task.validation else _plain(task),
                args.held_out,
            ),
        )
        base = settings_for(task, args.assets, args.contenders[0], 1.0, 1.0, 0, args, len(records))
        model, tokenizer = load_model(base.model)
        pad = tokenizer.pad_token_id or 0
        data = load_data(base, tokenizer, records, held_out)
        before = evaluate_next_token(model, data.evaluation, pad_token_id=pad).loss_per_example
        jobs = [
            (seed, contender, epsilon, rate)
            for seed, contender, rate in itertools.product(args.seeds, args.contenders, args.learning_rates)
            for epsilon in ([None] if CONTENDERS[contender][0] == "adamw" else args.epsilons)
        ]
        for seed, contender, epsilon, rate in track(jobs, description=name, console=console):
            row: dict[str, Any] = {
                "task": name,
                "contender": contender,
                "epsilon": epsilon,
                "learning_rate": rate,
                "seed": seed,
                "steps": args.steps,
                "batch": args.batch,
                "rank": args.rank,
            }
            if _key(row) in done:
                continue
            settings = settings_for(task, args.assets, contender, epsilon, rate, seed, args, len(records))
            row |= train_once(settings, model, data, pad)
            row |= {
                "loss_before": before,
                "model": task.model,
                "records": len(records),
                "torch": torch.__version__,
                "machine": platform.machine(),
            }
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _plain(task: Task) -> Task:
    """Test files hold one source only."""
    return Task(task.model, task.train, task.validation, task.text, None, task.max_length)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("task", "contender", "epsilon", "learning_rate", "seed", "steps", "batch", "rank")
    return tuple(row[name] for name in names)


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: best learning rate of each contender, mean ± standard deviation over seeds."""
    lines = []
    for task in sorted({row["task"] for row in rows}):
        mine = [row for row in rows if row["task"] == task]
        epsilons = sorted({row["epsilon"] for row in mine if row["epsilon"] is not None})
        lines += [f"\n**{task}** (held-out nats per token; {mine[0]['loss_before']:.3f} before)\n"]
        lines += ["| method | " + " | ".join(f"ε = {e:g}" for e in epsilons) + " |"]
        lines += ["|---" * (len(epsilons) + 1) + "|"]
        for contender in CONTENDERS:
            cells = [_cell(mine, contender, e) for e in epsilons]
            if any(cells):
                lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]], contender: str, epsilon: float) -> str:
    by_rate: dict[float, list[float]] = {}
    for row in rows:
        if row["contender"] == contender and row["epsilon"] in (epsilon, None):
            by_rate.setdefault(row["learning_rate"], []).append(row["loss"])
    if not by_rate:
        return ""
    rate, losses = min(by_rate.items(), key=lambda item: statistics.mean(item[1]))
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    edge = " *" if rate in (min(by_rate), max(by_rate)) and len(by_rate) > 1 else ""
    return f"{statistics.mean(losses):.3f}{spread} ({rate:g}{edge})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/utility.jsonl"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print the tables and stop")
    args = parser.parse_args()
    console = Console(stderr=True)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not args.table:
        if args.assets is None:
            parser.error("--assets is needed to run the study")
        study(args, console)
    print(tables(_rows(args.out)))


if __name__ == "__main__":
    main()
