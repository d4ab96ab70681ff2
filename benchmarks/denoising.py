"""Whether two more things that cost no privacy leave less noise: shrinking what a run leaves, and batches that grow.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/denoising.py --data study-data --out benchmarks/results/denoising.jsonl
    python benchmarks/denoising.py --out benchmarks/results/denoising.jsonl --tables

Runs of PRISM as in sizes.py, 1,536 gradients in 24 steps at one epsilon. shrunk: the update Z = A B^T of each layer is
multiplied by a number, or its singular values s are shrunk to s sqrt(1 - c l / s^2), l being the mean square of those
that a run of noise alone leaves. growing: 12 steps of 32 and 12 of 96, with one noise multiplier or one noise in the
mean of each step, whose exact composition has the same epsilon. A row of the file is one run.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from sizes import Runs, head, line, read_rows, run_missing

STEPS, BATCH = 24, 64
RATES = {1: (0.01, 0.014, 0.02), 3: (0.014, 0.02, 0.028)}
"""By epsilon, in the size of the weights."""
SCALES, SHARES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25), (0.25, 0.5, 1.0)
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "constant": ((24, 64),),
    "growing": ((12, 32), (12, 96)),
    "growing, one noise": ((12, 32), (12, 96)),
    "falling": ((12, 96), (12, 32)),
}
"""(steps, batch) of each part."""


def grid() -> Iterator[dict[str, Any]]:
    """All runs."""
    for draw, task, epsilon in product(range(2), ("math", "pubmed"), RATES):
        for rate in RATES[epsilon]:
            row = {"task": task, "epsilon": epsilon, "rate": rate, "draw": draw}
            yield {"part": "shrunk", **row}
            for shape in SHAPES:
                yield {"part": "growing", "shape": shape, **row}


def prepared(runs: Runs, row: dict[str, Any]) -> tuple[Any, float, Any, Any]:
    """The row's settings, noise multiplier, and records in training and held out."""
    settings, plan = runs.prepare({**row, "steps": STEPS, "batch": BATCH, "relative": True})
    train, held = runs.records(row["task"], settings)
    return settings, plan.event.noise_multiplier, train.like(list(train)[: round(settings.privacy.n)]), held


def shrunk(runs: Runs, row: dict[str, Any]) -> dict[str, Any]:
    """Losses of one run, with what it leaves as it is and shrunk."""
    import torch

    from privlora.evaluation.next_token import record_losses
    from privlora.rehearsals.trials import Noise, trial_step
    from privlora.training.assembly import PublicStart, build_parts
    from privlora.training.models import unchanged_afterwards

    settings, sigma, train, held = prepared(runs, row)
    noise = Noise(sigma, settings.privacy, settings.privacy.n)
    with unchanged_afterwards(runs.model):
        parts = build_parts(settings, runs.model, PublicStart(runs.tokenizer))
        with parts.adapter:
            before = float(record_losses(runs.model, held).mean())
            alone = trial_step(parts, train, noise, draw=row["draw"] + 50)
            for _ in range(STEPS):
                alone.take([])
            left = [torch.linalg.svdvals(a.double() @ b.double().mT) for a, b in parts.average.factors()]
        parts = build_parts(settings, runs.model, PublicStart(runs.tokenizer))
        with parts.adapter:
            trial_step(parts, train, noise, draw=row["draw"]).take_many(STEPS)
            factors = [(a.clone(), b.clone()) for a, b in parts.average.factors()]

            def loss(found: Sequence[tuple[Any, Any]]) -> float:
                for group, (a, b) in zip(parts.adapter.groups, found, strict=True):
                    parts.adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)
                return float(record_losses(runs.model, held).mean())

            def kept(share: float) -> Iterator[tuple[Any, Any]]:
                for (a, b), noisy in zip(factors, left, strict=True):
                    rank = a.shape[-1]
                    u, s, v = torch.linalg.svd(a.double() @ b.double().mT, full_matrices=False)
                    u, s, v = u[..., :rank], s[..., :rank], v[..., :rank, :]
                    level = (noisy[..., :rank] ** 2).mean(-1, keepdim=True)
                    s = s * (1 - share * level / (s**2).clamp_min(1e-30)).clamp_min(0).sqrt()
                    yield (u * s[..., None, :]).to(a.dtype), v.mT.contiguous().to(b.dtype)

            scaled = {f"{scale:g}": loss([(a * scale, b) for a, b in factors]) for scale in SCALES}
            return {
                "sigma": sigma,
                "before": before,
                "scaled": scaled,
                "shrunk": {f"{share:g}": loss(list(kept(share))) for share in SHARES},
            }


def growing(runs: Runs, row: dict[str, Any]) -> dict[str, Any]:
    """The loss of one run whose batches have another size in its second half."""
    from privlora.accounting import epsilon
    from privlora.accounting.events import PoissonSampling, StepEvent
    from privlora.evaluation.next_token import record_losses
    from privlora.rehearsals.trials import Noise, trial_step
    from privlora.training.assembly import PublicStart, build_parts
    from privlora.training.models import unchanged_afterwards

    settings, sigma, train, held = prepared(runs, row)
    shape, units = SHAPES[row["shape"]], settings.privacy.n

    def multiplier(sigma: float, batch: int) -> float:
        return sigma * batch / BATCH if row["shape"].endswith("one noise") else sigma

    low, high = sigma / 4, 4 * sigma
    for _ in range(20):
        middle = (low + high) / 2
        events = [
            (StepEvent(PoissonSampling(batch / units), multiplier(middle, batch)), steps)
            for steps, batch in shape
        ]
        low, high = (
            (middle, high) if epsilon(events, settings.privacy.delta) > row["epsilon"] else (low, middle)
        )
    with unchanged_afterwards(runs.model):
        parts = build_parts(settings, runs.model, PublicStart(runs.tokenizer))
        with parts.adapter:
            before = float(record_losses(runs.model, held).mean())
            for number, (steps, batch) in enumerate(shape):
                privacy = settings.privacy.model_copy(update={"expected_batch_size": float(batch)})
                noise = Noise(multiplier(high, batch), privacy, units)
                trial_step(parts, train, noise, draw=row["draw"] + 100 * number).take_many(steps)
            parts.install_result()
            loss = float(record_losses(runs.model, held).mean())
    return {"sigma": high, "before": before, "loss": loss}


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """As benchmarks/results/denoising.md has them: losses at the best rate of each column, means of the draws."""
    columns = {
        **{f"Z x {scale:g}": ("scaled", f"{scale:g}") for scale in SCALES},
        **{f"shrunk, c = {share:g}": ("shrunk", f"{share:g}") for share in SHARES},
    }
    found: dict[tuple[str, int], dict[str, dict[float, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        of = found[row["task"], row["epsilon"]]
        if row["part"] == "growing":
            of[row["shape"]][row["rate"]].append(row["loss"])
        else:
            for name, (kind, key) in columns.items():
                of[name][row["rate"]].append(row[kind][key])
    for names in (tuple(columns), tuple(SHAPES)):
        yield from head("task", "epsilon", *names)
        for (task, epsilon), of in sorted(found.items()):
            cells = [min((mean(losses) for losses in of[name].values()), default=None) for name in names]
            yield line(task, epsilon, *("" if cell is None else f"{cell:.3f}" for cell in cells))
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("study-data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tables", action="store_true", help="print the tables of what is there; run nothing"
    )
    args = parser.parse_args()
    if args.tables:
        print("\n".join(tables(read_rows(args.out))))
        return
    import torch

    torch.set_num_threads(1)
    runs = Runs(args.data)
    kinds = {"shrunk": shrunk, "growing": growing}
    run_missing(list(grid()), args.out, lambda row: kinds[row["part"]](runs, row))


if __name__ == "__main__":
    main()
