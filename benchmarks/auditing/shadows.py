"""Shadow adapters of a small language model: what the attack tells, and what training them side by side saves.

    python benchmarks/auditing/shadows.py --assets ASSETS --output benchmarks/results/auditing/shadows.json

ASSETS holds models/stories260K and data/sentiment_domains/train.jsonl.gz. Goes on where it stopped: what is in the
output is not measured again. Times are of one thread, of all ways in turn, the smaller of two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from privlora.auditing.shadows import audit_shadows
from privlora.config import Settings, settings_from
from privlora.data.examples import Examples
from privlora.data.sampling import PoissonSampler
from privlora.mechanisms import GaussianMechanism
from privlora.mechanisms.charges import Uncharged
from privlora.methods import find_method
from privlora.stacked import train_adapters
from privlora.training.assembly import build_parts
from privlora.training.inputs import load_data
from privlora.training.models import unchanged_afterwards
from privlora.training.promise import plan_privacy
from privlora.training.step import Step

RECORDS, STEPS, BATCH, TOKENS, RANK, KIND = 30, 12, 6, 32, 4, "codes"
CELLS = [("adamw", None)] + [
    (name, target) for target in (8, 3, 1) for name in ("dp-adamw", "prism", "lora-fa")
]
TARGETS: dict[str, str | list[str]] = {"query and value": ["q_proj", "v_proj"], "all linear": "all-linear"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--parts", nargs="+", default=["attack", "speed"], choices=["attack", "speed"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"attack": [], "speed": []}
    if arguments.output.exists():
        found = json.loads(arguments.output.read_text())
    found["attack_setting"] = {
        "model": "stories260K",
        "records": RECORDS,
        "steps": STEPS,
        "expected_batch_size": BATCH,
        "tokens": TOKENS,
        "rank": RANK,
        "modules": TARGETS["query and value"],
        "canary": KIND,
    }
    folder = arguments.assets / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with gzip.open(arguments.assets / "data/sentiment_domains/train.jsonl.gz", "rt") as file:
        texts = [{"text": json.loads(line)["text"]} for line in file][::100]

    def keep(part: str, row: dict[str, Any]) -> None:
        found[part].append(row)
        print(json.dumps(row), flush=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")

    done = {(row["method"], row["target_epsilon"]) for row in found["attack"]}
    for name, target in CELLS if "attack" in arguments.parts else ():
        if (name, target) not in done:
            settings = _settings(name, {"target_epsilon": target} if target else None)
            started = time.process_time()
            audit = audit_shadows(
                settings,
                adapters=arguments.adapters,
                kind=KIND,
                model=model,
                tokenizer=tokenizer,
                records=texts[:RECORDS],
                seed=3,
            )
            seconds = round(time.process_time() - started, 1)
            hyper = (
                find_method(name).resolve(settings.method, None, STEPS, private=target is not None).to_dict()
            )
            keep(
                "attack",
                {"target_epsilon": target, **audit.to_dict(), "settings": hyper, "cpu_seconds": seconds},
            )
    known = {(row["method"], row["modules"]) for row in found["speed"]}
    for name in ("dp-adamw", "prism") if "speed" in arguments.parts else ():
        for modules in TARGETS:
            if (name, modules) not in known:
                keep(
                    "speed",
                    {"method": name, "modules": modules, **_speed(name, modules, model, tokenizer, texts)},
                )


def _settings(
    name: str, noise: dict[str, float] | None, *, modules: str = "query and value", **privacy: int
) -> Settings:
    chosen: dict[str, Any] = {"steps": STEPS, "expected_batch_size": BATCH, "public_dataset_size": RECORDS}
    chosen |= {"private": False} if noise is None else {**noise, "delta": 1e-5}
    return settings_from(
        {
            "model": {"name": "stories260K"},
            "data": {"path": "(in memory)", "max_length": TOKENS},
            "adapter": {"r": RANK, "target_modules": TARGETS[modules]},
            "privacy": {**chosen, **privacy},
            "method": {"name": name, "relative_rate": False},
            "run": {"output": "(nowhere)"},
        },
        source="shadows",
    )


def _speed(
    name: str, modules: str, model: torch.nn.Module, tokenizer: Any, texts: list[dict[str, str]]
) -> dict[str, Any]:
    """Milliseconds of CPU a step and adapter: ordinary runs, and 8 or 16 adapters side by side."""
    sizes = {"steps": 10, "expected_batch_size": 8, "public_dataset_size": 64}
    settings = _settings(name, {"noise_multiplier": 1.0}, modules=modules, **sizes)
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"max_length": 48})})
    data = load_data(settings, tokenizer, texts[:64])

    def ordinary() -> None:
        for _ in range(2):
            _ordinary_run(settings, model, data.examples)

    def together(count: int) -> Callable[[], None]:
        members = torch.ones(count, 64, dtype=torch.bool)

        def run() -> None:
            train_adapters(settings, model, data.examples, members=members, together=count)

        return run

    ways = {"ordinary": (ordinary, 2)}
    ways |= {f"together_{count}": (together(count), count) for count in (8, 16)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2):
        for way, (run, adapters) in ways.items():
            started = time.process_time()
            run()
            times[way].append((time.process_time() - started) / (adapters * settings.privacy.steps) * 1e3)
    return {way: round(min(values), 1) for way, values in times.items()}


def _ordinary_run(settings: Settings, model: torch.nn.Module, examples: Examples) -> None:
    """The steps of a run without its folder, its ledger and its evaluation, on a model that is loaded already."""
    privacy = settings.privacy
    with unchanged_afterwards(model):
        parts = build_parts(settings, model)
        sampler = PoissonSampler(len(examples), privacy.q)
        mechanism = GaussianMechanism(
            parts.coordinates,
            clip_norm=privacy.clip_norm,
            event=plan_privacy(settings, model).event,
            expected_batch_size=privacy.b,
            ledger=Uncharged(),
            clipping=parts.hyper.clipping,
        )
        step = Step(
            state=parts,
            mechanism=mechanism,
            examples=examples,
            learning_rate=parts.learning_rate,
            draw=sampler.draw,
        )
        with parts.adapter:
            step.take_many(privacy.steps)


if __name__ == "__main__":
    main()
