"""Files of records in many shapes, and a base model's folder without weights."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_models import byte_tokenizer

SECRET = "Greta Rivers has a dry cough"


def save_base(folder: Path, *, chat: bool = False, positions: int = 128) -> Path:
    """A tokenizer over bytes and a config.json."""
    tokenizer = byte_tokenizer(("<pad>", "</s>"), pad_token="<pad>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    return folder


def rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Records whose columns are these texts with a number behind, or what a function makes of the number."""
    return [
        {name: made(i) if callable(made) else f"{made} {i}" for name, made in columns.items()}
        for i in range(count)
    ]


def jsonl(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def table(path: Path, records: Sequence[dict[str, Any]], separator: str = ",") -> Path:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(records)
    path.write_text(out.getvalue(), encoding="utf-8")
    return path


def chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{SECRET}?"}, {"role": "assistant", "content": f"yes {i}"}]


def sharegpt(i: int) -> list[dict[str, str]]:
    return [{"from": "human", "value": "hi"}, {"from": "gpt", "value": f"yes {i}"}]
