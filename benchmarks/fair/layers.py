"""Which layers of a model are worth the noise that falls on them: those outside of attention, or all, or fewer.

    python benchmarks/study_data.py --assets ASSETS --out study-data
    python benchmarks/fair/fair.py --data study-data --out benchmarks/results/layers.jsonl --seeds 100,101,102 \\
        --of "stories260K/24/3/prism/math-questions,pubmed/layers q_proj+v_proj,layers gate_proj+up_proj+down_proj"
    python benchmarks/fair/layers.py benchmarks/results

Runs of the fair table on the layers that a cell's start names. Trials have the choosing seeds alone, on their records;
lines with all seeds are reported as those of the fair table. What is on all layers is in fair.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tables

PREFIX = "layers "
ALL = "all"
NAMES = {
    "gate_proj+up_proj+down_proj": "feed-forward",
    "q_proj+k_proj+v_proj+o_proj": "attention",
    "q_proj+v_proj": "q, v",
    "gate_proj+up_proj+down_proj+o_proj": "feed-forward, o",
    "gate_proj+up_proj": "gate, up",
    "up_proj+down_proj": "up, down",
    "down_proj": "down",
}
COLUMNS = (ALL, "feed-forward", "attention", "q, v")
LEAST = (ALL, "feed-forward")

Place = tuple[str, str, str]
"""Model, task, row."""


def read(results: Path) -> dict[Place, dict[str, dict[int, tuple[np.ndarray, np.ndarray | None]]]]:
    """Place -> layers -> power of the root of two -> losses of choosing seeds on their records, and of the others on
    theirs (None in trials), of runs in 24 steps at epsilon 3."""
    found: Any = defaultdict(lambda: defaultdict(dict))
    for name in ("fair.jsonl", "layers.jsonl"):
        for text in (results / name).read_text().splitlines():
            line = json.loads(text)
            cell = line["cell"]
            start = cell.get("start", "")
            if (cell["steps"], cell["epsilon"]) != (24, 3) or not (not start or start.startswith(PREFIX)):
                continue
            place = cell["model"], cell["task"], cell["row"]
            layers = NAMES[start.removeprefix(PREFIX)] if start else ALL
            chooses = np.array([seed in tables.CHOOSING for seed in line["seeds"]])
            for power, choosing, report in zip(line["powers"], line["choosing"], line["report"], strict=True):
                losses = np.array(choosing)[chooses], np.array(report)[~chooses]
                if len(losses[1]) or power not in found[place][layers]:
                    found[place][layers][power] = losses if len(losses[1]) else (losses[0], None)
    return {
        place: {layers: dict(powers) for layers, powers in of.items()}
        for place, of in sorted(found.items())
        if len(of) > 1
    }


def trials(results: Path) -> Iterator[str]:
    """At the best rate, the mean of the choosing seeds; a star where that is the largest or the least that was run."""
    yield f"| model | task | method | {' | '.join(COLUMNS)} |"
    yield "|---" * (3 + len(COLUMNS)) + "|"
    for (model, task, row), of in read(results).items():
        cells = [_least(of.get(layers)) for layers in COLUMNS]
        yield f"| {model} | {task} | {row} | {' | '.join(cells)} |"


def others(results: Path) -> str:
    """Of layers that one place alone has, as in the table."""
    of = read(results)["stories260K", "math-questions", "prism"]
    return ", ".join(f"{name} {_least(of[name])}" for name in NAMES.values() if name not in COLUMNS)


def reported(results: Path) -> Iterator[str]:
    """At the rate that the choosing seeds chose, the other seeds on their records, and in brackets at the default."""
    yield f"| model | task | method | {' | '.join(LEAST)} |"
    yield "|---" * (3 + len(LEAST)) + "|"
    for (model, task, row), of in read(results).items():
        if all(any(report is not None for _, report in of[layers].values()) for layers in LEAST):
            cells = [_report(of[layers]) for layers in LEAST]
            yield f"| {model} | {task} | {row} | {' | '.join(cells)} |"


def standing(results: Path) -> Iterator[str]:
    """As the fair table's scores, of the rows that were run with all seeds on feed-forward layers."""
    tasks: dict[str, dict[str, dict[str, tables.Runs]]] = defaultdict(lambda: defaultdict(dict))
    start = next(f"{PREFIX}{names}" for names, name in NAMES.items() if name == "feed-forward")
    for cell, runs in tables.by_cell(results / "layers.jsonl", seeds=len(tables.SEEDS)):
        if cell.get("start") == start:
            tasks[cell["model"]][cell["task"]][cell["row"]] = runs
    yield "| model | method | own best rate | behind the first | one multiple | default rate |"
    yield "|---|---|---|---|---|---|"
    for model, of in sorted(tasks.items()):
        for each in tables.standings(of, sorted(set.intersection(*map(set, of.values())))):
            behind = f"{each.behind:.3f}, {each.behind / each.error:.1f} SE" if each.behind else ""
            scores = f"{each.score:.3f} | {behind} | {each.shared:.3f} | {each.default:.3f}"
            yield f"| {model} | {each.row} | {scores} |"


def gain(of: dict[str, dict[int, tuple[np.ndarray, np.ndarray | None]]]) -> float:
    """By how much feed-forward layers are ahead of all, in the trials."""
    whole, part = (min(float(losses.mean()) for losses, _ in of[layers].values()) for layers in LEAST)
    return whole - part


def _least(powers: dict[int, tuple[np.ndarray, np.ndarray | None]] | None) -> str:
    if powers is None:
        return ""
    means = {power: float(losses.mean()) for power, (losses, _) in powers.items()}
    best = min(means, key=lambda power: means[power])
    return f"{means[best]:.3f}{'*' * (best in (min(means), max(means)))}"


def _report(powers: dict[int, tuple[np.ndarray, np.ndarray | None]]) -> str:
    whole = {power: (choosing, report) for power, (choosing, report) in powers.items() if report is not None}
    best = min(whole, key=lambda power: float(whole[power][0].mean()))
    report = whole[best][1]
    edge = "*" * (best in (min(powers), max(powers)))
    return f"{report.mean():.3f} ± {report.std(ddof=1):.3f}{edge}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    print("\n".join([*trials(results), "", others(results), "", *reported(results), "", *standing(results)]))


if __name__ == "__main__":
    main()
