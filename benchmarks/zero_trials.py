"""What is kept of the best tuned run by one private run of PRISM: at its default rate, and at those of ``auto``.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/zero_trials.py --data study-data --out benchmarks/results/zero_trials.jsonl
    python benchmarks/zero_trials.py --data study-data --out benchmarks/results/zero_trials.jsonl --signals
    python benchmarks/zero_trials.py --data study-data --out benchmarks/results/zero_trials.jsonl --looks
    python benchmarks/zero_trials.py --data study-data --out benchmarks/results/zero_trials.jsonl --norms
    python benchmarks/zero_trials.py --out benchmarks/results/zero_trials.jsonl --table

Two passes, divided as ``auto`` does, at rank 8. Rates are in factors of the root of two around the default, and go on
where the best is the first or last; each has two draws of batches and noise. ``auto`` chooses one rate by
noise alone, and one in rehearsals on public records of the same kind or of a neighbouring one; both are run with the
same draws, at a clip norm of 1. --signals: what a release holds beside its noise, step by step, at the rate by noise
alone. --looks: what the records' own losses would say there of a longer or shorter move, a third of the way and
halfway, in the metric of ``init``. --norms: that rate again at the clip norm of ``auto``, and on reviews1M, whose
gradients are shorter than 1, all rates. A row of the file is one run or one choice; rows that are there are not run
again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sizes import Runs, head, line

from privlora.config.auto import run_sizes

COMBINATIONS = (
    ("reviews1M", "math", 1000, 6),
    ("babyllama105", "pubmed", 1000, 6),
    ("reviews1M", "pubmed", 1000, 1),
    ("babyllama105", "math", 1000, 1),
    ("reviews1M", "math", 1000, 1),
    ("babyllama105", "pubmed", 1000, 1),
    ("reviews1M", "pubmed", 1000, 6),
    ("babyllama105", "math", 1000, 6),
    ("stories260K", "math", 1000, 6),
    ("stories260K", "pubmed", 500, 3),
)
ASIDE = (
    ("stories260K", "biorxiv", 1000, 6),
    ("stories260K", "solutions", 1000, 1),
    ("reviews1M", "biorxiv", 2000, 3),
    ("babyllama105", "solutions", 500, 3),
)
"""Run when all else was settled."""
LARGE = (
    ("stories260K", "math", 4000, 1),
    ("stories260K", "sst2", 20_000, 1),
    ("reviews1M", "math", 4000, 3),
)
"""After those; sst2 has no neighbour to rehearse on."""
PUBLIC = {
    "math": "math-public",
    "solutions": "math-public",
    "pubmed": "biorxiv-heldout",
    "biorxiv": "pubmed-heldout",
}
DEFAULT = 0.02
"""Of prism at 24 steps."""
FIRST, DRAWS = (0, 1, -1, 2, -2), 2
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
RIGHT_WEIGHTS = {"reviews1M": 0.7, "babyllama105": 0.56}
"""Of ``auto``; elsewhere 1."""


def rate_of(power: int, steps: int) -> float:
    return float(f"{DEFAULT * math.sqrt(24 / steps) * 2 ** (power / 2):.3g}")


class Study:
    """The rows of a file, and more as they are asked for."""

    def __init__(self, out: Path, data: Path) -> None:
        self.out, self.runs = out, Runs(data)
        self.rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    def row(self, wanted: dict[str, Any]) -> dict[str, Any]:
        for row in self.rows:
            if wanted.items() <= row.items() and ("clip_norm" in wanted) == ("clip_norm" in row):
                return row
        if wanted.get("part") == "signal":
            found = signal(self.runs, wanted)
        elif wanted.get("part") == "look":
            found = look(self.runs, wanted)
        elif wanted.get("part") == "clip norm":
            found = self.runs.norm(wanted)
        else:
            found = self.runs.run(wanted) if "rate" in wanted else self.runs.settle(wanted)
        self.rows.append({**wanted, **found})
        with self.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(self.rows[-1]) + "\n")
        print(json.dumps(self.rows[-1]), flush=True)
        return self.rows[-1]

    def loss(self, place: dict[str, Any], rate: float) -> float:
        """Mean of the draws; infinite where one went astray."""
        losses = [self.row({**place, "rate": rate, "draw": draw})["loss"] for draw in range(DRAWS)]
        mean = sum(losses) / DRAWS
        return mean if math.isfinite(mean) else math.inf

    def run(self, model: str, task: str, units: int, epsilon: float) -> None:
        place = place_of(model, task, units, epsilon)
        self.grid(place)
        choices = [{"part": "noise alone"}]
        if task in PUBLIC:
            choices.append({"part": "rehearsed", "public": PUBLIC[task]})
        for choice in choices:
            self.loss(place, self.row({**choice, **place})["rate"])

    def grid(self, place: dict[str, Any]) -> None:
        """Until the best rate has worse on both sides."""
        steps = place["steps"]
        losses = {power: self.loss(place, rate_of(power, steps)) for power in FIRST}
        while (best := min(losses, key=lambda power: losses[power])) in (min(losses), max(losses)):
            power = best + (1 if best == max(losses) else -1)
            losses[power] = self.loss(place, rate_of(power, steps))

    def norms(self, model: str, task: str, units: int, epsilon: float) -> None:
        place = place_of(model, task, units, epsilon)
        rate = self.row({"part": "noise alone", **place})["rate"]
        clipped = {**place, "clip_norm": self.row({"part": "clip norm", **place})["found"]}
        self.loss(clipped, rate)
        if model == "reviews1M":
            self.grid(clipped)

    def signals(self, model: str, task: str, units: int, epsilon: float) -> None:
        place = place_of(model, task, units, epsilon)
        rate = self.row({"part": "noise alone", **place})["rate"]
        self.row({"part": "signal", **place, "rate": rate, "draw": 0})

    def looks(self, model: str, task: str, units: int, epsilon: float) -> None:
        place = place_of(model, task, units, epsilon)
        rate = self.row({"part": "noise alone", **place})["rate"]
        metric = {"power": 1.0, "right": RIGHT_WEIGHTS.get(model, 1.0)}
        norm = self.row({"part": "clip norm", **place})["found"]
        for draw in range(DRAWS):
            self.row({"part": "look", **place, **metric, "clip_norm": norm, "rate": rate, "draw": draw})


def signal(runs: Runs, row: dict[str, Any]) -> dict[str, Any]:
    """Norms in units of clip_norm: of the mean of a step's clipped gradients, for each step, and of the noise on it."""
    from privlora.rehearsals.trials import Noise, trial_step
    from privlora.training.assembly import PublicStart, build_parts
    from privlora.training.models import unchanged_afterwards

    settings, plan = runs.prepare(row)
    privacy = settings.privacy
    train = runs.records(row["task"], settings)[0]
    train = train.like(list(train)[: round(privacy.n)])
    with unchanged_afterwards(runs.model):
        parts = build_parts(settings, runs.model, PublicStart(runs.tokenizer))
        with parts.adapter:
            noise = Noise(plan.event.noise_multiplier, privacy, privacy.n)
            step, norms = trial_step(parts, train, noise, draw=row["draw"]), []
            for _ in range(privacy.steps):
                step.accumulate(step.draw())
                total = step.mechanism.take()
                square = sum(float(part.double().square().sum()) for group in total.vector for part in group)
                norms.append(round(math.sqrt(square) / (noise.batch * privacy.clip_norm), 3))
                step.release(total)
            of_noise = noise.std / privacy.clip_norm * math.sqrt(parts.coordinates.dimension)
    return {"signal": norms, "noise": round(of_noise, 3)}


def look(runs: Runs, row: dict[str, Any]) -> dict[str, Any]:
    """Steps -> scale -> by how much the loss of 150 records in training has fallen, with the update times that."""
    from privlora.evaluation.next_token import record_losses
    from privlora.rehearsals.trials import Noise, trial_step
    from privlora.training.assembly import PublicStart, build_parts
    from privlora.training.models import unchanged_afterwards

    settings, plan = runs.prepare(row)
    privacy = settings.privacy
    train = runs.records(row["task"], settings)[0]
    train = train.like(list(train)[: round(privacy.n)])
    seen = train.like(list(train)[:150])
    found = dict[str, dict[str, float]]()
    with unchanged_afterwards(runs.model):
        parts = build_parts(settings, runs.model, PublicStart(runs.tokenizer))
        with parts.adapter:
            before = float(record_losses(runs.model, seen).mean())
            noise = Noise(plan.event.noise_multiplier, privacy, privacy.n)
            step, taken = trial_step(parts, train, noise, draw=row["draw"]), 0
            for at in (round(privacy.steps / 3), round(privacy.steps / 2)):
                step.take_many(at - taken)
                taken = at
                factors = [(a.clone(), b.clone()) for a, b in parts.average.factors()]
                falls = found.setdefault(str(at), {})
                for scale in SCALES:
                    for group, (a, b) in zip(parts.adapter.groups, factors, strict=True):
                        ones = a.new_ones(a.shape[0], a.shape[-1])
                        parts.adapter.install(group, a * scale, ones, b)
                    falls[f"{scale:g}"] = round(before - float(record_losses(runs.model, seen).mean()), 4)
                parts.coordinates.install()
    return {"falls": found}


def place_of(model: str, task: str, units: int, epsilon: float) -> dict[str, Any]:
    steps, batch = run_sizes(units, 2)
    return {
        "model": model,
        "task": task,
        "units": units,
        "epsilon": epsilon,
        "steps": steps,
        "batch": batch,
        "relative": True,
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """As benchmarks/results/sizes.md has it: combinations of which all is there."""
    yield from head(
        "model",
        "task",
        "N",
        "epsilon",
        "steps x batch",
        "best rate",
        "gain at best",
        "at the default",
        "by noise alone",
        "rehearsed",
        "by noise alone, clip norm auto",
    )
    for combination in (*COMBINATIONS, *ASIDE, *LARGE):
        place = place_of(*combination)
        of = [
            row for row in rows if place.items() <= row.items() and row.get("part") not in ("signal", "look")
        ]
        gains: dict[tuple[float | None, float | None], list[float]] = {}
        for row in of:
            if "loss" in row:
                at = row["rate"], row.get("clip_norm")
                gains.setdefault(at, []).append(row["before"] - row["loss"])
        means = {at: sum(each) / DRAWS for at, each in gains.items() if len(each) == DRAWS}
        chosen = {row["part"]: row.get("rate", row.get("found")) for row in of if "part" in row}
        alone, norm = chosen.get("noise alone"), chosen.get("clip norm")
        runs = [
            (rate_of(0, place["steps"]), None),
            (alone, None),
            (chosen.get("rehearsed"), None),
            (alone, norm),
        ]
        if not {at for at in runs if at[0] is not None} <= means.keys():
            continue
        best = max(means, key=lambda at: means[at])
        model, task, units, epsilon = combination
        size = f"{place['steps']} x {place['batch']:g}"
        kept = ["" if at[0] is None else f"{means[at] / means[best]:.1%}" for at in runs]
        yield line(model, task, f"{units:,}", epsilon, size, best[0], f"{means[best]:.3f}", *kept)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("study-data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the table of what is there; run nothing")
    parser.add_argument("--aside", action="store_true", help="the combinations that were set aside")
    parser.add_argument("--signals", action="store_true", help="of the first two kinds of combinations")
    parser.add_argument("--looks", action="store_true", help="of the same")
    parser.add_argument("--norms", action="store_true", help="of all combinations, at the clip norm of auto")
    parser.add_argument("--large", action="store_true", help="those of 4,000 records and more")
    args = parser.parse_args()
    study = Study(args.out, args.data)
    if args.table:
        print("\n".join(table(study.rows)))
        return
    import torch

    torch.set_num_threads(1)
    if args.norms:
        for combination in (*COMBINATIONS, *ASIDE, *LARGE):
            study.norms(*combination)
        return
    if args.signals or args.looks:
        for combination in (*COMBINATIONS, *ASIDE):
            (study.looks if args.looks else study.signals)(*combination)
        return
    for combination in LARGE if args.large else ASIDE if args.aside else COMBINATIONS:
        study.run(*combination)


if __name__ == "__main__":
    main()
