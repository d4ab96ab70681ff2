"""Small files of public text for the studies in benchmarks/studies, cut from larger ones.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    privlora lab compare benchmarks/studies/private_methods.yaml --jobs 2

ASSETS holds models/ (Hugging Face folders) and data/ (gzipped JSON lines). The models are linked, not copied. Next to
them are the embedded model and records of the demo.
"""

from __future__ import annotations

import argparse
import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

from privlora.demo import model_path, private_records

# Our name: the larger file, how many rows of it.
FILES = {
    "math-train": ("math/train", 10_000),
    "math-heldout": ("math/gsm8k_test", 400),
    "math-public": ("math/mawps_validation", 400),
    "pubmed-train": ("pubmed/train", 10_000),
    "pubmed-heldout": ("pubmed/validation", 400),
    "biorxiv-train": ("biorxiv/train", 10_000),
    "biorxiv-heldout": ("biorxiv/validation", 400),
    "sst2-train": ("glue/sst2/train", 20_000),
    "sst2-heldout": ("glue/sst2/validation", 800),
    "domains-train": ("sentiment_domains/train", 10_000),
    "domains-heldout": ("sentiment_domains/validation", 800),
}

TASKS: dict[str, dict[str, Any]] = {
    "math-questions": {"file": "math", "units": 9400, "text": "instruction"},
    "math-solutions": {
        "file": "math",
        "units": 9400,
        "prompt": "{instruction}\n",
        "completion": "output",
        "loss_on": "completion",
        "max_length": 80,
    },
    "pubmed": {"file": "pubmed", "units": 4300, "text": "text"},
    "biorxiv": {"file": "biorxiv", "units": 2300, "text": "text"},
    "sst2": {
        "file": "sst2",
        "units": 20000,
        "prompt": "Review: {sentence1}\nIt is ",
        "completion": "label_text",
        "loss_on": "completion",
        "clip_norm": 10.0,
    },
    "sentiment-domains": {
        "file": "domains",
        "units": 7800,
        "prompt": "Review: {text}\nIt is ",
        "completion": "label_text",
        "loss_on": "completion",
        "clip_norm": 10.0,
    },
}
"""Settings of group data, beside the file, its number of units, and a clip norm that is not 1."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("study-data"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (source, limit) in FILES.items():
        with gzip.open(args.assets / "data" / f"{source}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        # Rows of a file may be sorted: take them evenly.
        step = max(1, len(rows) // limit)
        with open(args.out / f"{name}.jsonl", "w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows[::step][:limit])
    with open(args.out / "domains-train.jsonl", encoding="utf-8") as rows:  # of the federations
        (args.out / "domains-first.jsonl").write_text("".join(islice(rows, 4000)), encoding="utf-8")
    for name, records in {
        "demo-train": private_records(1000, 1),
        "demo-heldout": private_records(400, 2),
    }.items():
        lines = (json.dumps({"text": record["text"]}) + "\n" for record in records)
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    if not (args.out / "demo-model").exists():
        (args.out / "demo-model").symlink_to(model_path().resolve(), target_is_directory=True)
    link = args.out / "models"
    if not link.exists():
        link.symlink_to((args.assets / "models").resolve(), target_is_directory=True)
    print(f"wrote {len(FILES) + 3} files to {args.out}")


if __name__ == "__main__":
    main()
