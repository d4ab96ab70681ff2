"""The tables of benchmarks/results/few_records/README.md that are made of what engines.py measured."""

from __future__ import annotations

import json
from typing import Any

import step_cost

PLACES = ("memory", "file, pages kept", "file, pages let go")
KINDS = ("layers", "Gaussian")


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def places_table(found: dict[str, Any]) -> list[str]:
    """Lines of Markdown: the linear algebra of a step, seconds of CPU + seconds of waiting for the disk."""
    steps = {row["rank"]: row["step_seconds"] for row in json.loads(step_cost.RESULTS.read_text())["rows"]}
    lines = [
        "| p, millions | numbers | G | " + " | ".join(PLACES) + " | read from it | more of a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["places"]["rows"]:
        spent = [row["places"][place] for place in PLACES]
        memory, _, let_go = (one["cpu"] + one["waited"] for one in spent)
        cells = [f"{row['parameters'] / 1e6:.2f}", row["dtype"], _gigabytes(row["bytes"])]
        cells += [f"{one['cpu']:.1f} s" for one in spent[:2]]
        cells += [f"{spent[2]['cpu']:.1f} + {spent[2]['waited']:.1f} s", _gigabytes(spent[2]["bytes_read"])]
        lines.append("| " + " | ".join([*cells, f"{(let_go - memory) / steps[row['rank']]:.0%}"]) + " |")
    return lines


def engines_table(found: dict[str, Any]) -> list[str]:
    """The whole step by how much of G is kept at once, in CPU seconds."""
    (of_groups,), (passed,) = found["groups"]["rows"], found["backward"]["rows"]
    (stored,) = (
        row["places"]["memory"]["works"]
        for row in found["places"]["rows"]
        if row["rank"] == of_groups["rank"] and row["dtype"] == "float32"
    )
    decode = stored["decode"]["cpu"]
    other = sum(work["cpu"] for work in stored.values()) - decode
    lines = ["| kept at once | bytes | passes | decoding | the step |", "|---|---|---|---|---|"]
    whole = 0.0
    for row in of_groups["rows"]:
        ways = [(f"one of {row['groups']} groups of layers", passed["cpu"])]
        if row["groups"] == 1:
            ways = [("G", decode), ("G, decoded by a pass", passed["cpu"])]
        for name, decoding in ways:
            step = row["cpu"] + other + decoding
            whole = whole or step
            lines.append(
                f"| {name} | {_gigabytes(row['bytes_kept'])} | {row['cpu']:.0f} s | {decoding:.1f} s "
                f"| {step:.0f} s, {step / whole:.2f} times |"
            )
    return lines


def sketches_table(found: dict[str, Any], setting: str = "chosen") -> list[str]:
    """Cosines at epsilon 1, and without noise in brackets, a column for each kind and pair."""
    pairs = found["sketches"]["rows"]
    lines = [
        "| numbers a text | "
        + " | ".join(f"{kind}, {name.split(', ')[1]}" for name in pairs for kind in KINDS)
        + " |",
        "|---" * (1 + len(KINDS) * len(pairs)) + "|",
    ]
    first = next(iter(pairs.values()))
    for asked in sorted({row["asked"] for row in first["settings"][setting]["sketches"]}):
        cells = [
            f"{row['noisy']:.2f} ({row['without_noise']:.2f})"
            for pair in pairs.values()
            for kind in KINDS
            for row in pair["settings"][setting]["sketches"]
            if (row["kind"], row["asked"]) == (kind, asked)
        ]
        lines.append(f"| {asked:,} | " + " | ".join(cells) + " |")
    cells = []
    for pair in pairs.values():
        exact = pair["settings"][setting]["exact"]
        cells += [f"{exact['noisy']:.2f} ({exact['without_noise']:.2f})"] * len(KINDS)
    lines.append(f"| all {first['entries']:,} | " + " | ".join(cells) + " |")
    return lines


def whole_table(found: dict[str, Any]) -> list[str]:
    lines = ["| method | `adapter.r` | coordinates | G | CPU seconds of a step |", "|---|---|---|---|---|"]
    for row in found["whole"]["rows"]:
        cells = (
            row["method"],
            row["rank"],
            f"{row['dimension']:,}",
            _gigabytes(row["bytes"]),
            f"{row['cpu']:.1f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def to_markdown(found: dict[str, Any]) -> list[str]:
    """The tables of the page, a line a row."""
    return [*places_table(found), *engines_table(found), *sketches_table(found), *whole_table(found)]
