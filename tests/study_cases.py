"""Small studies: on paper with invented scores, and on disk with a tiny model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_cases import save_tiny_model, write_records

from privlora.accounting import PoissonSampling, StepEvent
from privlora.lab.studies.choice import Progress, report_cells, selection_cells
from privlora.lab.studies.results import Role, Row
from privlora.lab.studies.settings import Cell, Study, study_from

CONTENT: dict[str, Any] = {
    "base": {
        "model": {"name": "model", "device": "cpu"},
        "data": {"path": "records.jsonl", "evaluation": "held_out.jsonl", "max_length": 48},
        "privacy": {"delta": 1e-3, "steps": 3, "expected_batch_size": 4, "public_dataset_size": 40},
    },
    "tasks": {"one": None, "two": {"data.max_length": 24}},
    "methods": ["prism", "dp-adamw", "adamw"],
    "epsilon": [3],
    "rank": [2],
    "learning_rate": [0.002, 0.02, 0.2],
    "seeds": [0, 1],
    "selection": {"seeds": [100, 101]},
}


def content(**changes: Any) -> dict[str, Any]:
    """The study above with other values at its top level."""
    return copy.deepcopy({**CONTENT, **changes})


def on_disk(folder: Path, **changes: Any) -> dict[str, Any]:
    """A study that can run: a tiny model, 40 records and 10 held-out ones in ``folder``."""
    found = content(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    found["base"]["model"]["name"] = str(save_tiny_model(folder / "model"))
    found["base"]["data"]["path"] = str(write_records(folder / "records.jsonl"))
    found["base"]["data"]["evaluation"] = str(write_records(folder / "held_out.jsonl", 10, first=100))
    return found


def invented(
    study: Study,
    loss: Callable[[Cell], float],
    *,
    fails: Callable[[Cell], bool] = lambda cell: False,
    before: float = 4.0,
) -> Progress:
    """The study as if it had been run, each run ending with ``loss`` of its cell."""

    def row(cell: Cell, role: Role) -> Row:
        facts: dict[str, Any] = {
            "steps": 3,
            "delta": 1e-3,
            "cpu_seconds": 1.0,
            "machine": "paper",
            "versions": {},
        }
        if cell.epsilon:
            facts["event"] = StepEvent(PoissonSampling(0.1), 2.0 / cell.epsilon).to_dict()
        untouched = {"loss": before, "accuracy": 0.1}
        fingerprint = study.fingerprint(cell, role)
        if fails(cell):
            return Row(cell, role, fingerprint, "it <broke>", {}, untouched, facts)
        return Row(cell, role, fingerprint, None, {"loss": loss(cell), "accuracy": 0.2}, untouched, facts)

    rows = [row(cell, "selection") for cell in selection_cells(study)]
    rows += [row(cell, "report") for cell in report_cells(study, Progress(study, rows))]
    return Progress(study, rows)


def paper(**changes: Any) -> Study:
    """A checked study that is not run."""
    return study_from(content(**changes), "paper.yaml")
