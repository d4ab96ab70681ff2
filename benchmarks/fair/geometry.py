"""What becomes of each row where a run does not begin with small, balanced factors of rank 8.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/fair/geometry.py --data study-data
    python benchmarks/fair/fair.py --out benchmarks/results/geometry.jsonl \\
        --of "stories260K/24/3/geometry/pubmed/continued x1,continued x2,continued x10" \\
        --of "stories260K/24/3/geometry/math-questions/rank 4,rank 16" \\
        --of "stories260K/24/3/prism+_dp-sgd + free, relative rates/math-questions,pubmed/rank 4,rank 16,rank 2,rank 1"
    python benchmarks/fair/geometry.py --table benchmarks/results/geometry.jsonl

The second line trains an adapter without privacy on abstracts of another archive (bioRxiv; AdamW, 40 steps of 64), and
writes it three times: B times 1, 2 and 10, A divided by the same. All three are one and the same model; other tools, or
learning rates of their own for A and B, leave such factors behind. The runs go on from there on PubMed's abstracts.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from tables import Runs, by_cell

MODEL = "stories260K"
SCALES = (1, 2, 10)
WEIGHTS = "adapter_model.safetensors"


def write_starts(data: Path) -> None:
    """DATA/starts/MODEL xC: one adapter in three gauges. Those that are there stay."""
    from privlora import fine_tune

    folder = data / "starts"
    if all((folder / f"{MODEL} x{scale}" / WEIGHTS).exists() for scale in SCALES):
        return
    with tempfile.TemporaryDirectory() as scratch:
        fine_tune(
            str(data / "models" / MODEL),
            str(data / "biorxiv-train.jsonl"),
            data={"text": "text", "max_length": 48, "unchecked": True},
            adapter={"r": 8, "lora_alpha": 16},
            privacy={
                "private": False,
                "steps": 40,
                "expected_batch_size": 64,
                "public_dataset_size": 2300,
                "delta": 1e-5,
            },
            method={"name": "adamw", "learning_rate": 0.004},
            output=f"{scratch}/run",
        )
        release = Path(scratch) / "run" / "not-private"
        for scale in SCALES:
            start = folder / f"{MODEL} x{scale}"
            shutil.rmtree(start, ignore_errors=True)
            start.mkdir(parents=True)
            shutil.copy(release / "adapter_config.json", start)
            tensors = {
                name: (t * scale if ".lora_B." in name else t / scale)
                for name, t in load_file(release / WEIGHTS).items()
            }
            save_file(tensors, start / WEIGHTS, metadata={"format": "pt"})


def table(path: Path) -> Iterator[str]:
    """Task by task: the loss at the best rate, ± over seeds, and at the default; where a column is a start."""
    found: dict[str, dict[str, dict[str, Runs]]] = {}
    for cell, runs in by_cell(path):
        kind = cell["start"].partition(" ")[0]
        of = found.setdefault(f"{cell['task']}, {kind}", {})
        of.setdefault(cell["row"], {})[cell["start"]] = runs
    for title, rows in found.items():
        starts = list(dict.fromkeys(start for of in rows.values() for start in of))
        yield f"\n{title}\n\n| method | {' | '.join(starts)} |\n|---{'|---' * len(starts)}|"
        for row, of in rows.items():
            yield f"| {row} | {' | '.join(_cell(of.get(start)) for start in starts)} |"


def _cell(runs: Runs | None) -> str:
    if runs is None:
        return ""
    best = runs.report[runs.best()]
    edge = "*" if runs.at_edge else ""
    return f"{best.mean():.3f} ± {best.std(ddof=1):.3f}{edge} ({runs.at(0).mean():.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("study-data"))
    parser.add_argument(
        "--table", type=Path, metavar="RESULTS", help="print the table of what is there; run nothing"
    )
    args = parser.parse_args()
    if args.table is not None:
        print("\n".join(table(args.table)))
        return
    write_starts(args.data)


if __name__ == "__main__":
    main()
