"""How much of the true gradient is left in one private step, by where the noise goes: cosines at one state.

    python benchmarks/few_records/cosine.py --assets ASSETS [--pairs NAME ...] [--rows NAME ...] [--epsilon 1]
                                            [--draws 10]

A pair is a model, private texts and public ones of a similar kind. Every method starts from the same seed and makes
the same warm start on the public texts, so that no factor is zero; then batches are drawn from the private texts, and
each release is decoded and held against the unclipped mean gradient of its own batch, in the coordinates of the
adapter. 10 steps at a sampling rate of 0.2, as in PE-SGD (Zou et al. 2026). Nothing is trained after the warm start.

The row GRID holds all settings of a span against each other: all 400 private gradients are taken once, and 300 batches
with their noise are worked out from inner products alone, which is the same mechanism in N numbers. It says what the
setting that is chosen on public gradients keeps, what it forecast, and what the best of the grid would keep. The row
PROJECTION says how much of the records' mean gradient, and of one record's, lies outside the leading k directions, and
how alike the norms of records are in each place where noise can go (the paper's STD-to-Mean and Min-to-Max ratios).

Adds to benchmarks/results/few_records/cosine.json. Without ASSETS nothing is run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from privlora.accounting.calibration import calibrate_noise_multiplier
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.config import Settings, settings_from
from privlora.coordinates import ReleaseLaw, SpanCoordinates, SpanSpace
from privlora.coordinates.span import flattened, unit_vectors
from privlora.coordinates.span_choice import ALPHAS, RIDGES, choose_setting
from privlora.data.batching import micro_batches
from privlora.data.sampling import PoissonSampler
from privlora.mechanisms import GaussianMechanism
from privlora.mechanisms.charges import Uncharged
from privlora.randomness import counter_generator
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import tokenise
from privlora.training.models import load_model
from privlora.training.step import Step
from privlora.training.texts.voting import warm_start

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "few_records" / "cosine.json"
RECORDS, RATE, STEPS, DELTA, TEXTS, TOKENS = 400, 0.2, 10, 1e-5, 200, 64
RIDGE = 1e-6  # eta of the paper, as a share of the public gradients' mean square norm
_LETTERS = 300  # of a text that are kept: 64 tokens are fewer


@dataclass(frozen=True)
class Pair:
    model: str
    private: str
    public: str


PAIRS = {
    "reviews1M, pubmed from biorxiv": Pair("reviews1M", "pubmed", "biorxiv"),
    "reviews1M, reviews from sst2": Pair("reviews1M", "sentiment_domains", "glue/sst2"),
    "stories260K, reviews from sst2": Pair("stories260K", "sentiment_domains", "glue/sst2"),
    "stories260K, pubmed from biorxiv": Pair("stories260K", "pubmed", "biorxiv"),
    "babyllama105, pubmed from biorxiv": Pair("babyllama105", "pubmed", "biorxiv"),
    "babyllama105, reviews from sst2": Pair("babyllama105", "sentiment_domains", "glue/sst2"),
}


@dataclass(frozen=True)
class Row:
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    texts: int = TEXTS


ROWS = {
    "dp-adamw": Row("dp-adamw"),
    "pdp-sgd, top 50": Row("pdp-sgd"),
    "gep, top 50": Row("gep"),
    "b-gep, top 50": Row("b-gep"),
    "pe-sgd as in the paper": Row("pe-sgd-fix"),
    "pe-sgd, 50 texts": Row("pe-sgd-fix", texts=50),
    "pe-sgd, ridge 0.1": Row("pe-sgd-fix", {"ridge": 0.1}),
    "pe-sgd, ridge 1": Row("pe-sgd-fix", {"ridge": 1.0}),
    "pe-sgd, ridge 3": Row("pe-sgd-fix", {"ridge": 3.0}),
    "orthonormal, all": Row("pe-sgd-fix", {"alpha": 0.5, "ridge": 0.0}),
    "orthonormal, top 20": Row("pe-sgd-fix", {"alpha": 0.5, "ridge": 0.0, "top_k": 20}),
    "orthonormal, top 5": Row("pe-sgd-fix", {"alpha": 0.5, "ridge": 0.0, "top_k": 5}),
    "inner products": Row("pe-sgd-fix", {"alpha": 0.0}),
    "pe-sgd, chosen": Row("pe-sgd-fix", {"hold_out": 0.25}),
    "prism": Row("prism", {"clipping": "flat"}),
    "span-prism, as in the paper": Row("span-prism", {"ridge": 1e-6, "hold_out": 0.0}),
    "span-prism, ridge 1": Row("span-prism", {"ridge": 1.0}),
    "span-prism, ridge 3": Row("span-prism", {"ridge": 3.0}),
    "span-prism, orthonormal, top 5": Row("span-prism", {"alpha": 0.5, "ridge": 0.0, "top_k": 5}),
    "span-prism, chosen": Row("span-prism", {"hold_out": 0.25}),
}
for _title in ("span-prism, ridge 1", "span-prism, ridge 3"):
    ROWS[_title].settings["hold_out"] = 0.0
GRID = {
    "grid": Row("pe-sgd-fix", {"hold_out": 0.25}),
    "grid, span-prism": Row("span-prism", {"hold_out": 0.25}),
}
PROJECTION = {"projection": Row("pe-sgd-fix"), "projection, span-prism": Row("span-prism", {"hold_out": 0.0})}
AT_ONCE = {**GRID, **PROJECTION}
BATCHES = 300
DIRECTIONS = (3, 5, 10, 20, 30, 50, 75, 100, 150, TEXTS)


def texts_of(assets: Path, folder: str, count: int) -> list[dict[str, str]]:
    with gzip.open(assets / "data" / folder / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    column = "text" if "text" in rows[0] else "sentence1"
    every = max(1, len(rows) // count)
    return [{"text": row[column][:_LETTERS]} for row in rows[::every][:count]]


def settings_of(row: Row, model: Path, public: Path) -> Settings:
    return settings_from(
        {
            "model": {"name": str(model)},
            "data": {"path": "(in memory)", "max_length": TOKENS, "unchecked": True},
            "adapter": {"r": 8, "target_modules": ["q_proj", "v_proj"], "init": "random"},
            "synthesis": {
                "file": str(public),
                "seeds": row.texts,
                "variations": 0,
                "similarity_limit": None,
                "warm_start_epochs": 2,
            },
            "privacy": {
                "noise_multiplier": 1.0,
                "delta": DELTA,
                "steps": STEPS,
                "expected_batch_size": RATE * RECORDS,
                "public_dataset_size": RECORDS,
            },
            "method": {"name": row.method, "learning_rate": 2e-3, "relative_rate": False, **row.settings},
            "run": {"output": "unused"},
        }
    )


def cosines(
    row: Row, model: Any, tokenizer: Any, folder: Path, records: Any, public: Path, sigma: float, draws: int
) -> dict[str, Any]:
    """Of releases with the noise of the plan, and without noise; each against its own batch."""
    settings = settings_of(row, folder, public)
    parts = build_parts(settings, model, PublicStart(tokenizer))
    with parts.adapter:
        warm_start(parts)
        examples = tokenise(records, settings.data, tokenizer)
        found: dict[str, list[float]] = {"noisy": [], "exact": []}
        started = time.process_time()
        for kind, scale, count in (("noisy", sigma, draws), ("exact", 1e-6, 2)):
            step = step_of(parts, examples, scale)
            sampler = PoissonSampler(len(examples), RATE)
            for _ in range(count):
                drawn = sampler.draw().tolist()
                step.accumulate(drawn)
                vector = step.mechanism.release().vector
                decoded = (
                    parts.coordinates.decode(vector) if isinstance(parts.coordinates, SpanSpace) else vector
                )
                true = mean_gradient(parts, examples, drawn)
                given = flattened(decoded).double()
                found[kind].append(float(given @ true / (given.norm() * true.norm())))
        spent = time.process_time() - started
    values = found["noisy"]
    return {
        "cosine": mean(values),
        "error": stdev(values) / len(values) ** 0.5,
        "without_noise": mean(found["exact"]),
        "draws": draws,
        "cpu_seconds_a_draw": spent / (draws + 2),
    }


@dataclass(frozen=True)
class Seen:
    """All gradients at one state, by their inner products. gram: (N, N). among: (records, records) of private ones.

    values, axes: (N,), (N, records): squared singular values of the public gradients, largest first, and the private
    ones along their directions.
    """

    gram: Tensor
    among: Tensor
    values: Tensor
    axes: Tensor
    settings: Settings


def look(row: Row, model: Any, tokenizer: Any, folder: Path, records: Any, public: Path) -> Seen:
    """After the warm start."""
    settings = settings_of(row, folder, public)
    parts = build_parts(settings, model, PublicStart(tokenizer))
    space = parts.coordinates
    assert isinstance(space, SpanCoordinates)
    with parts.adapter:
        warm_start(parts)
        examples = tokenise(records, settings.data, tokenizer)
        space.prepare()
        gradients = private_gradients(parts, examples, list(range(len(examples))))
        public_gradients = space.span.gradients
        gram, products = public_gradients.gram(), public_gradients.times(gradients).mT
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    roots = torch.where(values > 1e-12 * values[0], values, torch.inf).rsqrt()
    axes = roots[:, None] * (vectors.mT @ products)
    return Seen(gram, gradients @ gradients.mT, values, axes, settings)


def projection(
    row: Row, model: Any, tokenizer: Any, folder: Path, records: Any, public: Path, sigma: float
) -> dict[str, Any]:
    """Relative error of projections on the leading k directions: |g - P g| / |g|."""
    seen = look(row, model, tokenizer, folder, records, public)
    count = len(seen.among)
    of_mean = seen.axes.mean(dim=1).square().cumsum(0) / (seen.among.sum() / count**2)
    of_each = (seen.axes.square().cumsum(0) / seen.among.diagonal()).mean(dim=1)

    def errors(share: Tensor) -> list[float]:
        return [float((1 - share[k - 1]).clamp_min(0).sqrt()) for k in DIRECTIONS]

    return {
        "directions": list(DIRECTIONS),
        "of_mean": errors(of_mean),
        "of_each": errors(of_each),
        "norms": norm_ratios(seen),
    }


def norm_ratios(seen: Seen) -> dict[str, dict[str, float]]:
    """Of columns of H, G^T H and (G^T G + eta I)^-1 G^T H: standard deviation over mean, least norm over largest."""
    roots = seen.values.sqrt()[:, None]
    ridge = RIDGE * seen.values.mean()
    norms = {
        "gradients": seen.among.diagonal().sqrt(),
        "inner products": (roots * seen.axes).norm(dim=0),
        "coefficients": (roots / (seen.values[:, None] + ridge) * seen.axes).norm(dim=0),
    }
    return {
        name: {"std_to_mean": float(of.std() / of.mean()), "min_to_max": float(of.min() / of.max())}
        for name, of in norms.items()
    }


def projection_table(results: dict[str, Any]) -> list[str]:
    """Of the mean gradient, for each pair and some k, as lines of Markdown."""
    shown = [DIRECTIONS.index(k) for k in (3, 10, 20, 50, 100, TEXTS)]
    lines = [
        "| pair | space |" + "".join(f" k = {DIRECTIONS[i]} |" for i in shown) + " one record, all |",
        "|" + "---|" * (3 + len(shown)),
    ]
    for name, rows in results["pairs"].items():
        for title, space in (("projection", "pe-sgd"), ("projection, span-prism", "span-prism")):
            found = rows[title]
            cells = "".join(f" {found['of_mean'][i]:.2f} |" for i in shown)
            lines.append(f"| {name} | {space} |{cells} {found['of_each'][-1]:.2f} |")
    return lines


def grid(
    row: Row, model: Any, tokenizer: Any, folder: Path, records: Any, public: Path, sigma: float
) -> dict[str, Any]:
    """What every setting of the span keeps, and the one that is chosen: see the top of this file."""
    at = look(row, model, tokenizer, folder, records, public)
    gram, among, values, seen = at.gram, at.among, at.values, at.axes
    law = ReleaseLaw(sigma, 1.0, at.settings.privacy.b, "normalized")
    started = time.process_time()
    chosen = choose_setting(gram, law)
    seconds = time.process_time() - started
    assert chosen is not None
    generator = torch.Generator().manual_seed(0)
    batches = (torch.rand(BATCHES, len(among), generator=generator) < RATE).double()
    noise = sigma * torch.randn(BATCHES, len(values), generator=generator, dtype=torch.float64)
    lengths, sums = (batches @ among * batches).sum(dim=1).sqrt(), batches @ seen.mT

    def kept(alpha: float, ridge: float, directions: int) -> Tensor:
        shifted = values + ridge * values.mean()
        encode = values.sqrt() * shifted**-alpha * (torch.arange(len(values)) < directions)
        columns = encode[:, None] * seen
        summed = batches @ (columns / columns.norm(dim=0)).mT
        decoded = (summed + noise) * (encode > 0) * values.sqrt() * shifted ** (alpha - 1)
        return (decoded * sums).sum(dim=1) / decoded.norm(dim=1) / lengths

    def said(alpha: float, ridge: float, directions: int) -> dict[str, Any]:
        found = kept(alpha, ridge, directions)
        return {
            "alpha": alpha,
            "ridge": ridge,
            "directions": directions,
            "cosine": float(found.mean()),
            "error": float(found.std()) / BATCHES**0.5,
        }

    whole = [said(a, r, k) for a in ALPHAS for r in RIDGES for k in DIRECTIONS]
    count, one = len(among), among.diagonal().mean()
    return {
        "paper": said(1.0, 1e-6, TEXTS),
        "chosen": {
            **said(chosen.alpha, chosen.ridge, chosen.directions),
            "forecast": chosen.cosine,
            "kappa": chosen.kappa,
            "cpu_seconds": seconds,
        },
        "best": max(whole, key=lambda point: point["cosine"]),
        "private_agreement": float((among.sum() / count - one) / (count - 1) / one),
        "public_agreement": float(
            (gram.sum() / len(gram) - gram.diagonal().mean()) / (len(gram) - 1) / gram.diagonal().mean()
        ),
    }


def step_of(parts: Parts, examples: Any, sigma: float) -> Step:
    privacy = parts.settings.privacy
    mechanism = GaussianMechanism(
        parts.coordinates,
        clip_norm=privacy.clip_norm,
        event=StepEvent(PoissonSampling(RATE), sigma),
        expected_batch_size=privacy.b,
        ledger=Uncharged(),
        clipping=parts.hyper.clipping,
    )
    return Step(state=parts, mechanism=mechanism, examples=examples, learning_rate=0.0)


def mean_gradient(parts: Parts, examples: Any, drawn: list[int]) -> Tensor:
    """The unclipped mean over the batch, in the adapter's own coordinates: (p,) float64."""
    return private_gradients(parts, examples, drawn).mean(dim=0)


def private_gradients(parts: Parts, examples: Any, drawn: list[int]) -> Tensor:
    """In the adapter's own coordinates: (records, p) float64, in any order."""
    space = parts.coordinates.inner if isinstance(parts.coordinates, SpanSpace) else parts.coordinates
    rows = []
    with training_passes(parts.adapter.model, counter_generator(0)):
        for batch in micro_batches(drawn, examples, max_tokens=4096):
            captured, _ = micro_batch_gradients(parts.adapter, batch)
            rows.append(unit_vectors(space, captured).double())
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *AT_ONCE], default=[*ROWS, *AT_ONCE])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--draws", type=int, default=10)
    chosen = parser.parse_args()
    if not (chosen.assets / "models").is_dir():
        print(f"skipped: there are no models in {chosen.assets}")
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    torch.set_num_threads(1)
    plan = calibrate_noise_multiplier(PoissonSampling(RATE), STEPS, chosen.epsilon, DELTA)
    results: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"pairs": {}}
    if results.get("epsilon", chosen.epsilon) != chosen.epsilon:
        raise SystemExit(f"{chosen.out} is of epsilon {results['epsilon']}: give another --out")
    results |= {
        "epsilon": chosen.epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "records": RECORDS,
        "machine": describe_machine(),
    }
    for name in chosen.pairs:
        pair = PAIRS[name]
        folder = chosen.assets / "models" / pair.model
        records = texts_of(chosen.assets, pair.private, RECORDS)
        of_pair = results["pairs"].setdefault(name, {})
        with tempfile.TemporaryDirectory() as temporary:
            public = Path(temporary) / "public.jsonl"
            lines = (json.dumps(record) for record in texts_of(chosen.assets, pair.public, TEXTS))
            public.write_text("\n".join(lines), encoding="utf-8")
            for title in chosen.rows:
                row = {**ROWS, **AT_ONCE}[title]
                model, tokenizer = load_model(settings_of(row, folder, public).model)
                given = (row, model, tokenizer, folder, records, public, plan.noise_multiplier)
                if title in ROWS:
                    of_pair[title] = cosines(*given, chosen.draws)
                else:
                    of_pair[title] = (grid if title in GRID else projection)(*given)
                print(name, "|", title, of_pair[title], flush=True)
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                chosen.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
