"""How steps, batch, learning rate and clip norm move the loss of a private run at one epsilon.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/sizes.py --data study-data --out benchmarks/results/sizes.jsonl
    python benchmarks/sizes.py --out benchmarks/results/sizes.jsonl --tables

Runs of PRISM at rank 8 on a Llama of 260,000 parameters, epsilon 3, delta 1e-5, texts of 48 tokens. The records are
public and noise follows from a public seed, so nothing is charged: steps, clipping and noise are those of
`privlora train`. A row of the file is one run; rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from study_data import TASKS

NAMES = {"math": "math-questions", "solutions": "math-solutions"}
"""Of study_data's tasks, where a row's is shorter."""
OF_RATE = (0.0138, 0.0196, 0.0277)  # rate * sqrt(steps)


OF_BANDS: dict[tuple[str, int, int, float, int | str], tuple[float, ...]] = {
    ("math", 8000, 38, 421.0, 1): (0.0126, 0.0178, 0.0252),
    ("math", 8000, 38, 421.0, "auto"): (0.0302, 0.043),
    ("math", 8000, 76, 210.5, "auto"): (0.0346, 0.049),
    ("math", 8000, 152, 105.3, "auto"): (0.0206, 0.0292, 0.0413),
    ("pubmed", 4000, 27, 296.3, 1): (0.0151, 0.0214, 0.0302, 0.0427),
    ("pubmed", 4000, 27, 296.3, "auto"): (0.0275, 0.0389, 0.055, 0.078),
    ("pubmed", 4000, 54, 148.1, "auto"): (0.0373, 0.0527),
    ("pubmed", 4000, 108, 74.1, "auto"): (0.0275, 0.0389, 0.055),
}
"""Rates of two passes in so many steps, in the size of the weights; the fewest steps are those of ``auto``."""

OF_METRIC: dict[tuple[str, str, int, int, int, float, float, float], tuple[float, ...]] = {
    ("babyllama105", "math", 1000, 13, 154, 6, 1, 0.56): (0.0192, 0.0272, 0.0384),
    ("stories260K", "math", 4000, 27, 296, 1, 1, 1.0): (0.011, 0.0157, 0.022),
    ("reviews1M", "math", 1000, 13, 154, 6, 0.2, 0.7): (0.038, 0.054),
    ("babyllama105", "pubmed", 1000, 13, 154, 1, 1, 0.56): (0.054, 0.077, 0.109),
}
"""Model, task, N, steps, batch, epsilon, clip norm and the right weight of ``auto`` -> rates, in PRISM's own metric and
in that of the singular values with this weight."""


OF_LAYERS: dict[tuple[str, str, int, int, int, float, float, float], tuple[float, ...]] = {
    ("stories260K", "math", 4000, 27, 296, 1, 0.63, 1.0): (0.011, 0.0157, 0.022),
    ("babyllama105", "pubmed", 1000, 13, 154, 1, 1.2, 0.56): (0.077, 0.109, 0.154),
    ("stories260K", "pubmed", 1000, 13, 154, 1, 0.63, 1.0): (0.0272, 0.0384, 0.0543),
    ("reviews1M", "pubmed", 1000, 13, 154, 1, 0.2, 0.7): (0.038, 0.054, 0.076),
    ("stories260K", "math", 8000, 38, 421, 3, 0.63, 1.0): (0.0126, 0.0178, 0.0252),
    ("babyllama105", "math", 1000, 13, 154, 6, 1.2, 0.56): (0.0192, 0.0272, 0.0384),
    ("stories260K", "pubmed", 4000, 27, 296, 3, 0.63, 1.0): (0.0214, 0.0302, 0.0427),
}
"""The same of runs in the metric of the singular values, on all layers and on those outside of attention."""


def grid() -> Iterator[dict[str, Any]]:
    """All runs."""
    for task in ("math", "pubmed"):
        for gradients in (1536, 6144):
            for steps in (12, 24, 48, 96, 192):
                batch = gradients // steps
                if batch < 32:
                    continue
                for c in OF_RATE:
                    rate = float(f"{c / math.sqrt(steps):.3g}")
                    yield {"part": "sizes", "task": task, "steps": steps, "batch": batch, "rate": rate}
    for steps, batch, rates in (
        (96, 256, (0.002, 0.004)),
        (384, 64, (0.001, 0.002, 0.004)),
        (24, 1024, (0.004, 0.008)),
        (48, 512, (0.004, 0.008)),
    ):
        for rate in rates:
            yield {"part": "sizes", "task": "math", "steps": steps, "batch": batch, "rate": rate}
    for task in ("math", "pubmed", "sst2", "solutions", "biorxiv"):
        for steps, own in ((24, (0.002, 0.0028, 0.004, 0.0056)), (96, (0.001, 0.002, 0.0028, 0.004))):
            for rate in own:
                clip = 10 if task == "sst2" else 1
                row = {"part": "rates", "task": task, "steps": steps, "batch": 64, "rate": rate}
                yield {**row, "clip_norm": clip}
    for (task, units, steps, batch, bands), rates in OF_BANDS.items():
        for rate in rates:
            for draw in range(2):
                row = {
                    "part": "bands",
                    "task": task,
                    "units": units,
                    "steps": steps,
                    "rate": rate,
                    "draw": draw,
                }
                yield {**row, "batch": batch, "relative": True, "bands": bands}
    for (model, task, units, steps, batch, epsilon, clip, right), rates in OF_METRIC.items():
        case = {"model": model, "task": task, "units": units, "steps": steps, "batch": batch}
        case |= {"relative": True, "clip_norm": clip, "epsilon": epsilon}
        for draw in range(2):
            for rate, power in product(rates, (0.0, 1.0)):
                own = {"rate": rate, "power": power, "right": right if power else 1.0, "draw": draw}
                yield {"part": "metric", **case, **own}
            yield {"part": "metric, by noise alone", **case, "power": 1.0, "right": right, "draw": draw}
    for (model, task, units, steps, batch, epsilon, clip, right), rates in OF_LAYERS.items():
        case = {"model": model, "task": task, "units": units, "steps": steps, "batch": batch, "power": 1.0}
        case |= {"relative": True, "clip_norm": clip, "epsilon": epsilon, "right": right}
        for draw, layers in product(range(2), ("all-linear", "feed-forward")):
            for rate in rates:
                yield {"part": "layers", **case, "layers": layers, "rate": rate, "draw": draw}
            yield {"part": "layers, by noise alone", **case, "layers": layers, "draw": draw}
    for task in ("math", "sst2", "pubmed"):
        for clip in (0.03, 0.1, 0.3, 1, 3, 10, 30):
            row = {"part": "clip norms", "task": task, "steps": 24, "batch": 64, "rate": 0.004}
            yield {**row, "clip_norm": clip}


def unit_of(row: dict[str, Any]) -> float:
    """Of a row with a relative rate, which is of one matrix: the root of the number of modules."""
    layers = 4 if row.get("model") == "reviews1M" else 5
    each = 3 if row.get("layers") == "feed-forward" else 7
    return math.sqrt(layers * each) if row.get("relative") else 1.0


class Runs:
    """One model, and the records of each task, read once."""

    def __init__(self, data: Path) -> None:
        self.data, self.kept = data, dict[str, Any]()
        self.model, self.name = None, ""

    def settings(self, row: dict[str, Any]) -> Any:
        from privlora.config import settings_from

        task = dict(TASKS[NAMES.get(row["task"], row["task"])])
        name, units, _ = task.pop("file"), task.pop("units"), task.pop("clip_norm", None)
        rate = row["rate"] * unit_of(row) if "rate" in row else "auto"
        return settings_from(
            {
                "model": {"name": str(self.data / "models" / row.get("model", "stories260K"))},
                "data": {"max_length": 48, "path": str(self.data / f"{name}-train.jsonl"), **task},
                "adapter": {"r": 8, "target_modules": row.get("layers", "all-linear")},
                "privacy": {
                    "target_epsilon": row.get("epsilon", 3),
                    "delta": 1e-5,
                    "steps": row["steps"],
                    "expected_batch_size": row["batch"],
                    "public_dataset_size": row.get("units", units),
                    "clip_norm": row.get("clip_norm", 1),
                    "bands": row.get("bands", 1),
                },
                "method": {
                    "name": "prism",
                    "learning_rate": rate,
                    "relative_rate": row.get("relative", False),
                    "metric_power": row.get("power", 0.0),
                    "right_weight": row.get("right", 1.0),
                },
                **({"auto": {"file": f"{self.data}/{row['public']}.jsonl"}} if "public" in row else {}),
            }
        )

    def records(self, task: str, settings: Any) -> tuple[Any, Any]:
        """In training, all that there are, and every second one held out."""
        from privlora.data.records import load_records
        from privlora.training.inputs import tokenise

        if task not in self.kept:
            train = tokenise(load_records(settings.data.path), settings.data, self.tokenizer)
            usable = [x for x, count in zip(train, train.label_counts, strict=True) if count]
            place = settings.data.path.replace("-train", "-heldout")
            held = tokenise(load_records(place), settings.data, self.tokenizer)
            self.kept[task] = train.like(usable), held.like(list(held)[::2][:200])
        return self.kept[task]

    def prepare(self, row: dict[str, Any]) -> tuple[Any, Any]:
        """The row's settings and plan; its model is at hand."""
        from privlora.training.models import given_or_loaded
        from privlora.training.promise import plan_privacy

        settings = self.settings(row)
        if self.name != settings.model.name:
            self.name, self.kept = settings.model.name, {}
            self.model, self.tokenizer = given_or_loaded(settings.model, None, None)
        return settings, plan_privacy(settings)

    def norm(self, row: dict[str, Any]) -> dict[str, float]:
        """The clip norm that the model's own texts give."""
        from privlora.rehearsals.settling import settle

        settings, plan = self.prepare({**row, "clip_norm": "auto", "rate": 1.0})
        began = time.process_time()
        found = settle(settings, plan, self.model, self.tokenizer).settings.privacy.clip_norm
        return {"found": found, "cpu_seconds": round(time.process_time() - began, 1)}

    def settle(self, row: dict[str, Any]) -> dict[str, float]:
        """The rate that rehearsals on the row's public file choose, or without one noise alone; and what it took."""
        from privlora.rehearsals.settling import settle

        settings, plan = self.prepare(row)
        began = time.process_time()
        chosen = settle(settings, plan, self.model, self.tokenizer)
        return {
            "rate": float(f"{chosen.settings.method.learning_rate / unit_of(row):.3g}"),
            "trials": sum(row["draws"] for row in chosen.facts["rows"]),
            "cpu_seconds": round(time.process_time() - began, 1),
        }

    def run(self, row: dict[str, Any]) -> dict[str, float]:
        """sigma, and the loss before and after; the rate, where that is left to noise alone."""
        from privlora.evaluation.next_token import record_losses
        from privlora.rehearsals.trials import Noise, trial_step
        from privlora.training.assembly import PublicStart, build_parts
        from privlora.training.models import unchanged_afterwards
        from privlora.training.promise import bands_of

        found = {} if "rate" in row else {"rate": self.settle(row)["rate"]}
        settings, plan = self.prepare({**row, **found})
        train, held = self.records(row["task"], settings)
        train = train.like(list(train)[: round(settings.privacy.n)])
        sigma = plan.event.noise_multiplier
        began = time.process_time()
        with unchanged_afterwards(self.model):
            parts = build_parts(settings, self.model, PublicStart(self.tokenizer))
            with parts.adapter:
                before = float(record_losses(self.model, held).mean())
                noise = Noise(sigma, settings.privacy, settings.privacy.n, bands=bands_of(plan))
                trial_step(parts, train, noise, draw=row.get("draw", 0)).take_many(settings.privacy.steps)
                seconds = round(time.process_time() - began, 1)
                parts.install_result()
                loss = float(record_losses(self.model, held).mean())
                return {**found, "sigma": sigma, "before": before, "loss": loss, "cpu_seconds": seconds}


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda row: row["loss"])


def head(*names: str) -> tuple[str, str]:
    """The first two lines of a table."""
    return f"| {' | '.join(names)} |", "|---" * len(names) + "|"


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """As benchmarks/results/sizes.md has them."""
    sizes = defaultdict(list)
    for row in rows:
        if row["part"] == "sizes":
            sizes[row["task"], row["steps"] * row["batch"], row["steps"]].append(row)
    yield from head(
        "task", "gradients", "steps x batch", "sigma", "noise of the run", "rate x sqrt(steps)", "gain"
    )
    for (task, gradients, steps), of in sorted(sizes.items()):
        row = best(of)
        noise = row["sigma"] / (row["batch"] * math.sqrt(steps))
        c = row["rate"] * math.sqrt(steps)
        gain = row["before"] - row["loss"]
        size, sigma = f"{steps} x {row['batch']}", f"{row['sigma']:.3f}"
        yield line(task, f"{gradients:,}", size, sigma, f"{noise:.2g}", f"{c:.3f}", f"{gain:.3f}")
    yield ""
    yield from head("task", "steps", "best rate", "its rate x sqrt(steps)", "gain at best", "at the default")
    rates = defaultdict(list)
    for row in rows:
        if row["batch"] == 64 and row["part"] != "clip norms" and row["steps"] in (24, 96):
            rates[row["task"], row["steps"]].append(row)
    for (task, steps), of in sorted(rates.items()):
        row = best(of)
        default = min(of, key=lambda one: abs(one["rate"] - 0.004 * math.sqrt(24 / steps)))
        own, plain = (one["before"] - one["loss"] for one in (row, default))
        c = row["rate"] * math.sqrt(steps)
        yield line(task, steps, row["rate"], f"{c:.3f}", f"{own:.3f}", f"{plain / own:.1%}")
    yield ""
    yield from head("clip_norm", "math", "sst2", "pubmed")
    clips = {(row["task"], row["clip_norm"]): row for row in rows if row["part"] == "clip norms"}
    for clip in sorted({clip for _, clip in clips}):
        cells = [clips.get((task, clip)) for task in ("math", "sst2", "pubmed")]
        yield line(f"{clip:g}", *("" if one is None else f"{one['loss']:.3f}" for one in cells))
    yield ""
    yield from head("task", "N", "steps x batch", "bands", "best rate", "loss at best")
    for (task, units, steps, batch, bands), rates in OF_BANDS.items():
        place = {"part": "bands", "task": task, "units": units, "steps": steps, "bands": bands}
        of = [row for row in rows if place.items() <= row.items()]
        losses = {rate: [row["loss"] for row in of if row["rate"] == rate] for rate in rates}
        means = {rate: sum(each) / len(each) for rate, each in losses.items() if len(each) > 1}
        if means:
            rate = min(means, key=lambda each: means[each])
            size = f"{steps} x {batch:.0f}"
            yield line(task, f"{units:,}", size, bands, f"{rate:g}", f"{means[rate]:.3f}")
    yield ""
    yield from tables_of_layers(rows)
    yield ""
    yield from head(
        "model", "task", "N", "epsilon", "steps x batch", "its own metric", "by values", "rate by noise alone"
    )
    for (model, task, units, steps, batch, epsilon, _, _), rates in OF_METRIC.items():
        place = {"model": model, "task": task, "units": units, "epsilon": epsilon}
        all_of = [row for row in rows if place.items() <= row.items()]
        of, cells = [row for row in all_of if row["part"] == "metric"], list[str]()
        for power in (0.0, 1.0):
            drawn = {r: [x["loss"] for x in of if (x["rate"], x["power"]) == (r, power)] for r in rates}
            means = {rate: sum(each) / len(each) for rate, each in drawn.items() if len(each) == 2}
            if len(means) == len(rates):
                rate = min(means, key=lambda each: means[each])
                cells.append(f"{means[rate]:.3f} at {rate:g}")
        alone = [row for row in all_of if row["part"] == "metric, by noise alone"]
        if len(cells) == len(alone) == 2:
            cells.append(f"{sum(row['loss'] for row in alone) / 2:.3f} at {alone[0]['rate']:g}")
            yield line(model, task, f"{units:,}", epsilon, f"{steps} x {batch}", *cells)


def tables_of_layers(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Of each case that is there the loss at the best rate, and at that by noise alone, on either kind of layers."""
    names = [
        f"{layers}{how}" for layers in ("all-linear", "feed-forward") for how in ("", ", by noise alone")
    ]
    yield from head("model", "task", "N", "epsilon", "steps x batch", *names)
    for (model, task, units, steps, batch, epsilon, *_), rates in OF_LAYERS.items():
        place = {"model": model, "task": task, "units": units, "epsilon": epsilon}
        cells = list[str]()
        for layers in ("all-linear", "feed-forward"):
            of = [row for row in rows if {**place, "layers": layers}.items() <= row.items()]
            drawn = {
                rate: [x["loss"] for x in of if (x["part"], x["rate"]) == ("layers", rate)] for rate in rates
            }
            means = {rate: sum(each) / len(each) for rate, each in drawn.items() if len(each) == 2}
            alone = [row for row in of if row["part"] == "layers, by noise alone"]
            if len(means) < len(rates) or len(alone) < 2:
                break
            rate = min(means, key=lambda each: means[each])
            edge = "*" if rate == rates[-1] else ""
            cells += [
                f"{means[rate]:.3f} at {rate:g}{edge}",
                f"{sum(row['loss'] for row in alone) / 2:.3f} at {alone[0]['rate']:g}",
            ]
        else:
            yield line(model, task, f"{units:,}", epsilon, f"{steps} x {batch}", *cells)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The runs of a file; none where it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_missing(
    wanted: list[dict[str, Any]], path: Path, run: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Add to a file each wanted run that it lacks, as soon as that is done."""
    found = read_rows(path)
    for number, row in enumerate(wanted, 1):
        if any(row.items() <= one.items() for one in found):
            continue
        done = {**row, **run(row)}
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(done) + "\n")
        print(f"{number} of {len(wanted)}: {json.dumps(done)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("study-data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tables", action="store_true", help="print the tables of what is there; run nothing"
    )
    parser.add_argument("--most", type=int, help="stop after so many runs")
    args = parser.parse_args()
    if args.tables:
        print("\n".join(tables(read_rows(args.out))))
        return
    import torch

    torch.set_num_threads(1)
    runs = Runs(args.data)
    run_missing(list(grid())[: args.most], args.out, runs.run)


if __name__ == "__main__":
    main()
