"""What each method learns on models that people use, at equal privacy: one run of `fine_tune` a line.

    python benchmarks/real_models/grid.py --models MODELS --assets ASSETS --minutes 60 --threads 2
    python benchmarks/real_models/grid.py --show

MODELS holds Hugging Face folders, ASSETS holds data/ (gzipped JSON lines). Cells run in the order of ``cells``, the
most informative first; a line that is there is not run again, so it can be interrupted, and goes on on any machine.
Every method gets the same records, sizes and rates: its own `auto`, then half and twice of it. The untrained model is
measured by the same calls. Loss is in nats a token, a mean over held-out records; score is the task's first metric.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

RESULTS = Path(__file__).parents[1] / "results" / "real_models.jsonl"
RECORDS, HELD_OUT = 4000, 300  # at most
STEPS, BATCH = 16, 128
RATES = (1.0, 0.5, 2.0)  # times what auto finds, or the default where it finds none

SMOLLM, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"


@dataclass(frozen=True)
class Task:
    """source: under data/. columns: as `fine_tune` takes them. scored: whether answers are scored, too."""

    source: str
    columns: Mapping[str, Any]
    scored: bool = False


TASKS = {
    "sst2": Task("glue/sst2", {"task": "sst2", "max_length": 128}, scored=True),
    "mrpc": Task("glue/mrpc", {"task": "mrpc", "max_length": 192}, scored=True),
    "cola": Task("glue/cola", {"task": "cola", "max_length": 96}, scored=True),
    "stsb": Task("glue/stsb", {"task": "stsb", "max_length": 160}, scored=True),
    "qnli": Task("glue/qnli", {"task": "qnli", "max_length": 192}, scored=True),
    "e2e": Task("e2e_nlg", {"prompt": "mr", "completion": "ref", "max_length": 160}),
    "pubmed": Task("pubmed", {"text": "text", "max_length": 128}),
    "math": Task("math", {"prompt": "instruction", "completion": "output", "max_length": 256}),
}

FREE = {"clipping": "spectral", "averaging": 0.5, "beta1": 0.0}
"""PRISM's ingredients that cost nothing and work on factors too."""
FEED_FORWARD = {"r": 8, "target_modules": "feed-forward"}
ALL_LINEAR = {"r": 8, "target_modules": "all-linear"}
OF_THE_PAPER = {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]}


@dataclass(frozen=True)
class Method:
    """settings: of the group method. rate: in the place of auto. privacy: beside what all have."""

    settings: Mapping[str, Any]
    adapter: Mapping[str, Any]
    private: bool = True
    rate: float | None = None
    privacy: Mapping[str, Any] = field(default_factory=dict)


def _free(name: str) -> Method:
    return Method({"name": name, **FREE}, FEED_FORWARD)


PRISM = Method({"name": "prism", "metric_power": 1, "right_weight": "auto"}, FEED_FORWARD)
"""As `privlora init` writes it."""
METHODS = {
    "prism": PRISM,
    "dp-sgd + free": _free("dp-sgd"),
    "dp-adamw + free": _free("dp-adamw"),
    "dp-sgd": Method({"name": "dp-sgd"}, ALL_LINEAR),
    "dp-adamw": Method({"name": "dp-adamw"}, ALL_LINEAR),
    "ffa + free": _free("ffa"),
    "lora+ + free": _free("lora+"),
    "lora-rite + free": _free("lora-rite"),
    "prism, balls in bins": replace(PRISM, privacy={"sampling": "balls-in-bins"}),
    "prism-paper": Method({"name": "prism-paper"}, OF_THE_PAPER),
    "prism, all layers": replace(PRISM, adapter=ALL_LINEAR),
    "prism, last iterate": replace(PRISM, settings={**PRISM.settings, "averaging": 0.0}),
    "prism, flat clipping": replace(PRISM, settings={**PRISM.settings, "clipping": "flat"}),
    "prism, flat clipping, last iterate": replace(
        PRISM, settings={**PRISM.settings, "clipping": "flat", "averaging": 0.0}
    ),
    "adamw, not private": Method({"name": "adamw"}, ALL_LINEAR, private=False, rate=1e-3),
    "prism, not private": Method({"name": "prism"}, FEED_FORWARD, private=False, rate=0.02),
}


@dataclass(frozen=True)
class Cell:
    """What a line is of. rate: times auto's."""

    model: str
    task: str
    method: str
    epsilon: float
    seed: int
    rate: float

    def plain(self) -> Cell:
        """Without an epsilon where the method makes no promise."""
        return self if METHODS[self.method].private else replace(self, epsilon=0.0)


def cells() -> list[Cell]:
    """The most informative first: SmolLM2 at epsilon 3 on three kinds of tasks, then seeds, rates, promises, the other
    tasks, and the other model."""
    first, others = ("sst2", "e2e", "pubmed"), ("mrpc", "cola", "stsb", "qnli", "math")
    leading = (
        "prism",
        "dp-sgd + free",
        "prism, balls in bins",
        "dp-adamw + free",
        "dp-sgd",
        "adamw, not private",
        "prism-paper",
    )
    wanted = [Cell(SMOLLM, *of, 3.0, 0, 1.0) for of in product(first, leading)]
    wanted += [Cell(SMOLLM, *of, 3.0, 0, 1.0) for of in product(first, METHODS)]
    wanted += [Cell(SMOLLM, *of, 3.0, seed, 1.0) for seed, *of in product((1, 2), first, leading)]
    wanted += [Cell(SMOLLM, *of, 3.0, 0, rate) for *of, rate in product(first, leading, RATES)]
    wanted += [Cell(SMOLLM, *of, epsilon, 0, 1.0) for epsilon, *of in product((1.0, 6.0), first, leading)]
    wanted += [Cell(SMOLLM, *of, 3.0, 0, 1.0) for of in product(others, METHODS)]
    wanted += [Cell(GEMMA, *of, 3.0, 0, 1.0) for of in product(first, METHODS)]
    return list(dict.fromkeys(cell.plain() for cell in wanted))


def read(assets: Path, task: Task, part: str, most: int) -> list[dict[str, Any]]:
    with gzip.open(assets / "data" / task.source / f"{part}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return rows[:: max(1, len(rows) // most)][:most]  # rows of a file may be sorted


def held_out(assets: Path, task: Task) -> list[dict[str, Any]]:
    if task.source == "math":  # it has a test set alone
        rows = read(assets, task, "train", 2 * HELD_OUT)
        return rows[1::2]
    return read(assets, task, "validation", HELD_OUT)


def run(cell: Cell, rate: float | str, models: Path, assets: Path, scratch: Path) -> dict[str, Any]:
    """A line: trains, and measures the release as anybody would who loads it."""
    from privlora import fine_tune
    from privlora.config import kept_settings
    from privlora.evaluation import evaluate_next_token, evaluate_task
    from privlora.training.files import RunFolder
    from privlora.training.inputs import tokenise
    from privlora.training.models import load_tokenizer

    task, method = TASKS[cell.task], METHODS[cell.method]
    held = held_out(assets, task)
    records = [row for row in read(assets, task, "train", RECORDS + HELD_OUT) if row not in held][:RECORDS]
    promise = {"target_epsilon": cell.epsilon, "clip_norm": "auto"} if method.private else {"private": False}
    wall, cpu = time.perf_counter(), time.process_time()
    result = fine_tune(
        models / cell.model,
        records,
        data=dict(task.columns),
        privacy={
            "public_dataset_size": len(records) // 100 * 100,
            "delta": 1e-5,
            "steps": STEPS,
            "expected_batch_size": BATCH,
            **promise,
            **method.privacy,
        },
        adapter=dict(method.adapter),
        method={**method.settings, "learning_rate": rate},
        run={"seed": cell.seed, "tokens_per_micro_batch": "auto"},
        output=scratch / "run",
        show_progress=False,
    )
    took = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    settings = kept_settings(RunFolder(result.release.parent).settings)
    model, tokenizer = result.model, load_tokenizer(settings.model)
    examples = tokenise(held, settings.data, tokenizer)

    def measured() -> dict[str, float]:
        found = evaluate_next_token(model, examples)
        told = {"loss": found.loss_per_example, "standard_error": found.standard_error}
        if task.scored:
            scored = evaluate_task(model, tokenizer, cell.task, held, max_length=settings.data.max_length)
            told[scored.metric_name] = scored.metric
        return {name: round(value, 5) for name, value in told.items()}

    after = measured()
    with model.disable_adapter():
        before = measured()
    return {
        **asdict(cell),
        "learning_rate": settings.method.learning_rate,
        "clip_norm": settings.privacy.clip_norm if method.private else None,
        "records": len(records),
        "steps": STEPS,
        "batch": BATCH,
        "untrained": before,
        "trained": after,
        **{name: round(value) for name, value in took.items()},
    }


def asked_rate(cell: Cell, lines: Sequence[Mapping[str, Any]]) -> float | str | None:
    """What the cell trains at; None while the rate that it is a multiple of is not known."""
    own = METHODS[cell.method].rate
    if own is not None or cell.rate == 1.0:
        return "auto" if own is None else own * cell.rate
    of = asdict(replace(cell, rate=1.0))
    found = (line["learning_rate"] for line in lines if {name: line.get(name) for name in of} == of)
    rate = next(found, None)
    return None if rate is None else rate * cell.rate


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Of each model, task and epsilon the methods, the best loss first."""
    rows = [
        "| model | task | epsilon | method | rate | learning rates | losses of seeds | loss | gain | score |",
        "|---" * 10 + "|",
    ]
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        place = tuple(line[name] for name in ("model", "task", "epsilon", "method", "rate"))
        cells.setdefault(place, []).append(line)

    def mean(of: Sequence[Mapping[str, Any]], when: str, what: str) -> float:
        return sum(line[when][what] for line in of) / len(of)

    for place, of in sorted(cells.items(), key=lambda one: (*one[0][:3], mean(one[1], "trained", "loss"))):
        model, task, epsilon, method, rate = place
        loss, before = (mean(of, when, "loss") for when in ("trained", "untrained"))
        names = [name for name in of[0]["trained"] if name not in ("loss", "standard_error")]
        score = ", ".join(
            f"{name} {mean(of, 'untrained', name):.3f} to {mean(of, 'trained', name):.3f}" for name in names
        )
        of = sorted(of, key=lambda line: int(line["seed"]))
        rates = ", ".join(f"{line['learning_rate']:.3g}" for line in of)
        seeds = ", ".join(f"{line['seed']}: {line['trained']['loss']:.3f}" for line in of)
        rows.append(
            f"| {model} | {task} | {epsilon or 'none'} | {method} | x {rate:g} | {rates} | {seeds} | {loss:.3f} "
            f"| {before - loss:.3f} | {score} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after so many")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], help="words that a cell has to hold, as sst2 prism")
    parser.add_argument("--show", action="store_true", help="print the table of what is there; run nothing")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.show:
        print(table(lines))
        return
    from privlora.training.loop import Interrupted

    torch.set_num_threads(args.threads)
    ends = time.time() + 60 * args.minutes
    machine = describe_machine()
    there = [{name: line[name] for name in asdict(cells()[0])} for line in lines]
    for cell in cells():
        rate = asked_rate(cell, lines)
        wanted = all(word in map(str, asdict(cell).values()) for word in args.only)
        if rate is None or not wanted or asdict(cell) in there or time.time() > ends:
            continue
        try:
            with tempfile.TemporaryDirectory() as scratch:
                line = run(cell, rate, args.models, args.assets, Path(scratch))
        except Interrupted:
            print("stopped; the same command goes on")
            return
        except Exception:  # noqa: BLE001 - one failed run must not end a grid
            print(cell, traceback.format_exc(), flush=True)
            continue
        lines.append({**line, "threads": args.threads, "machine": machine})
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(lines[-1]) + "\n")
        print(
            f"{cell}: {line['untrained']} to {line['trained']}, rate {line['learning_rate']:.4g}, "
            f"{line['seconds']} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
