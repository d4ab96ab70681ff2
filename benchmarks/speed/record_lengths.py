"""How long the records of three data sets are: what real_lengths.py draws its batches from.

    python benchmarks/speed/record_lengths.py --assets ASSETS --out benchmarks/results/record_lengths.json

Counts alone, of tokens and of labels among them, so that steps can be timed without the records. ASSETS holds
data/glue/sst2, data/math, data/pubmed (train.jsonl.gz each) and models/reviews1M, by whose tokenizer of 4,096 pieces
tokens are counted.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LONGEST = 512  # tokens; what is beyond is cut
MOST = 2000  # records of a set


def _sst2(row: dict[str, Any]) -> tuple[str, str]:
    return f"Review: {row['sentence1']}\nIt was", " good" if row["label"] else " bad"


def _gsm8k(row: dict[str, Any]) -> tuple[str, str] | None:
    return (f"{row['instruction']}\nAnswer:", f" {row['output']}") if row["source"] == "gsm8k" else None


def _pubmed(row: dict[str, Any]) -> tuple[str, str]:
    return "", row["text"]


# Name -> file, and the prompt and the completion of a row; only completions are labels.
SETS: dict[str, tuple[str, Callable[[dict[str, Any]], tuple[str, str] | None]]] = {
    "SST-2": ("glue/sst2", _sst2),
    "GSM8K": ("math", _gsm8k),
    "PubMed": ("pubmed", _pubmed),
}


def lengths_of(path: Path, texts: Callable[[dict[str, Any]], tuple[str, str] | None], tokenizer: Any) -> Any:
    """[tokens, labels, records], the shortest first."""
    found: Counter[tuple[int, int]] = Counter()
    for prompt, completion in _pairs(path, texts):
        before = len(tokenizer(prompt).input_ids)  # with <s>
        labelled = len(tokenizer(completion, add_special_tokens=False).input_ids) + 1  # with </s>
        tokens = min(before + labelled, LONGEST)
        found[tokens, max(tokens - before, 1)] += 1
    return [[*pair, count] for pair, count in sorted(found.items())]


def _pairs(
    path: Path, texts: Callable[[dict[str, Any]], tuple[str, str] | None]
) -> Iterator[tuple[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        pairs = (pair for line in lines if (pair := texts(json.loads(line))) is not None)
        for pair, _ in zip(pairs, range(MOST), strict=False):
            yield pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chosen.assets / "models" / "reviews1M")
    found = {
        name: lengths_of(chosen.assets / "data" / folder / "train.jsonl.gz", texts, tokenizer)
        for name, (folder, texts) in SETS.items()
    }
    chosen.out.write_text(json.dumps(found).replace("]], ", "]],\n") + "\n", encoding="utf-8")
    for name, rows in found.items():
        records = sum(count for *_, count in rows)
        for place, what in enumerate(("tokens", "labels")):
            mean = sum(row[place] * row[2] for row in rows) / records
            print(
                f"{name}: {records} records, {mean:.1f} {what} on average, {max(r[place] for r in rows)} at most"
            )


if __name__ == "__main__":
    main()
