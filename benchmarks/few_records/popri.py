"""Does a model write more like private reviews once POPri's rounds have tuned it? Losses, by epsilon.

    python benchmarks/few_records/popri.py --assets ASSETS [--seeds 0] [--learning-rate 1e-3]

400 product reviews are private. In each of 10 rounds the model writes 5 texts of 64 tokens for each of 40 requests,
every record scores all 200, the noisy sums become preferences, and DPO tunes the adapter on them. Epsilon is that of
all rounds together at delta 1e-5; "none" is the least noise that there may be, and "noise alone" has preferences that
no record has a part in. Before the first round and after the last, on reviews that nobody trained on: the loss after
the words that the model is asked by, and how near new samples of the model are to them; then the loss of the base
model after ordinary training on 200 samples of the tuned one. Writes benchmarks/results/few_records/popri.json.
Without ASSETS nothing is run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privlora.accounting import Ledger, Plan, PoissonSampling, StepEvent, calibrate_noise_multiplier
from privlora.adapters import LowRankAdapter
from privlora.config.groups import ModelSettings
from privlora.data.examples import Examples, Template, build_examples
from privlora.data.units import Units
from privlora.evaluation import evaluate_next_token
from privlora.mechanisms import MeanMechanism
from privlora.methods import build, find_method
from privlora.randomness import counter_generator
from privlora.synthesis.directions import directions, record_directions
from privlora.synthesis.embeddings import hidden_states
from privlora.synthesis.generators import PromptedGenerator
from privlora.synthesis.popri import POPri
from privlora.synthesis.prompts import PRESETS
from privlora.synthesis.rounds import Rounds
from privlora.synthesis.votes import Voters, similarity_scores
from privlora.synthesis.writers import ModelWriter
from privlora.training.models import load_model
from privlora.training.state import TrainState
from privlora.training.step import Step
from privlora.training.texts.preferences import PreferenceTuner

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "few_records" / "popri.json"
RECORDS, HELD_OUT, ROUNDS, DELTA, TOKENS = 400, 200, 10, 1e-5, 64
REQUESTS, SAMPLES, RANK, TEXTS = 40, 5, 3, 200
BETA, EPOCHS = 0.01, 1
CELLS: dict[str, float | None] = {"none": None, "4": 4.0, "1": 1.0, "noise alone": 1.0}
_LETTERS = 300  # of a text that are kept: 64 tokens are fewer


def texts_of(assets: Path, part: str, count: int) -> list[str]:
    path = assets / "data" / "sentiment_domains" / f"{part}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    reviews = [row["text"] for row in rows if row["client"] != "airline"]
    every = max(1, len(reviews) // count)
    return [text[:_LETTERS] for text in reviews[::every][:count]]


class Bench:
    """The model, its words, the reviews that are private and those that are held out."""

    def __init__(self, assets: Path) -> None:
        folder = assets / "models" / "reviews1M"
        self.model, self.tokenizer = load_model(ModelSettings(name=str(folder)))
        self.private = texts_of(assets, "train", RECORDS)
        self.held_out = texts_of(assets, "validation", HELD_OUT)
        self.prompts = PRESETS["product-review"]
        self.embed = partial(hidden_states, self.model, self.tokenizer, max_length=TOKENS)
        self.records = record_directions(self.private, self.embed)
        self.near = directions(self.embed(self.held_out))

    def examples(self, texts: list[str]) -> Examples:
        """Texts after the words that the model is asked by."""
        records = [{"prompt": self.prompts.lead_in, "completion": text} for text in texts]
        template = Template(prompt="prompt", completion="completion")
        return build_examples(records, template, self.tokenizer, max_length=TOKENS + 16, add_eos=False)

    def loss(self) -> float:
        return evaluate_next_token(self.model, self.examples(self.held_out)).loss_per_token

    def state(self, seed: int) -> TrainState:
        adapter = LowRankAdapter(self.model, rank=16)
        coordinates, optimizer = build(find_method("adamw"), adapter, lora_alpha=16.0, seed=seed)
        adapter.attach()
        return TrainState(coordinates=coordinates, optimizer=optimizer)

    def generator(self, seed: int) -> PromptedGenerator:
        writer = ModelWriter(self.model, self.tokenizer, chat=False, max_new_tokens=TOKENS)
        return PromptedGenerator(writer, self.prompts, seed=seed)

    def similarity(self, texts: list[str], adapter: LowRankAdapter) -> float:
        """The mean cosine between texts and held-out reviews."""
        found = directions(self.embed(texts, adapter=adapter))
        return float(found.mean(axis=0) @ self.near.mean(axis=0))

    def after_training_on(self, texts: list[str], seed: int) -> float:
        """The held-out loss of the base model after two ordinary epochs on texts."""
        state = self.state(seed)
        with state.adapter:
            examples = self.examples(texts)
            draw = counter_generator(seed)
            batches = [
                b
                for _ in range(2)
                for b in np.array_split(draw.permutation(len(examples)), len(examples) // 8)
            ]
            mechanism = MeanMechanism(state.coordinates, expected_batch_size=8, steps=len(batches))
            step = Step(state=state, mechanism=mechanism, examples=examples, learning_rate=1e-3, masks=draw)
            for batch in batches:
                step.take(batch.tolist())
            return self.loss()


def measured(bench: Bench, cell: str, seed: int, rate: float) -> dict[str, Any]:
    epsilon = CELLS[cell]
    sampling = PoissonSampling(1.0)
    sigma = (
        1e-6
        if epsilon is None
        else calibrate_noise_multiplier(sampling, ROUNDS, epsilon, DELTA).noise_multiplier
    )
    plan = Plan(
        phases=((StepEvent(sampling, sigma), ROUNDS),),
        delta=DELTA,
        target_epsilon=epsilon,
        adjacency="add-or-remove-one",
        unit="record",
        records_per_user=None,
        clip_norm=1.0,
        expected_batch_size=float(RECORDS),
        method="popri",
        dataset="reviews",
    )
    records = bench.records[:0] if cell == "noise alone" else bench.records
    state, generator = bench.state(seed), bench.generator(seed)
    tuner = PreferenceTuner(state, bench.tokenizer, learning_rate=rate, beta=BETA, epochs=EPOCHS, seed=seed)
    embed = partial(bench.embed, adapter=state.adapter)
    started = time.process_time()
    with state.adapter, tempfile.TemporaryDirectory() as folder:
        before = generator.random(TEXTS)
        found: dict[str, Any] = {
            "cell": cell,
            "seed": seed,
            "learning_rate": rate,
            "noise_multiplier": sigma,
            "loss_before": bench.loss(),
            "similarity_before": bench.similarity(before, state.adapter),
        }
        proposer = POPri(
            generator.requests(REQUESTS), SAMPLES, generator.samples, tuner.tune, embed, rank=RANK
        )
        with Ledger.create(Path(folder) / "ledger.jsonl", plan) as ledger:
            voters = Voters(records, Units(np.arange(len(records))), similarity_scores)
            Rounds(proposer, voters, ledger, divisor=float(RECORDS)).run(lambda stored: None)
        after = generator.random(TEXTS)
        found["loss_after"] = bench.loss()
        found["similarity_after"] = bench.similarity(after, state.adapter)
        found["characters_before"], found["characters_after"] = (
            sum(map(len, texts)) / TEXTS for texts in (before, after)
        )
    found["base_after_training_on_first_samples"] = bench.after_training_on(before, seed)
    found["base_after_training_on_last_samples"] = bench.after_training_on(after, seed)
    found["cpu_seconds"] = time.process_time() - started
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    chosen = parser.parse_args()
    if not (chosen.assets / "models").is_dir():
        print(f"skipped: there are no models in {chosen.assets}")
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    torch.set_num_threads(1)
    bench = Bench(chosen.assets)
    results: dict[str, Any] = {
        "setting": {
            "records": RECORDS,
            "held_out": HELD_OUT,
            "rounds": ROUNDS,
            "requests": REQUESTS,
            "samples": SAMPLES,
            "rank": RANK,
            "tokens": TOKENS,
            "beta": BETA,
            "epochs": EPOCHS,
            "delta": DELTA,
        },
        "machine": describe_machine(),
        "cells": [],
    }
    for seed in chosen.seeds:
        for cell in chosen.cells:
            results["cells"].append(measured(bench, cell, seed, chosen.learning_rate))
            print(results["cells"][-1], flush=True)
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
