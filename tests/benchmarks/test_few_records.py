"""The comparison of methods for few records: rates, resuming, tables."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "few_records")


@pytest.fixture
def comparison() -> Any:
    return importlib.import_module("comparison")


class _Runner:
    """Runs whose loss is least at one rate."""

    def __init__(self, best: float) -> None:
        self.best, self.ran = best, list[Any]()

    def run(self, cell: Any) -> dict[str, Any]:
        self.ran.append(cell)
        return {"loss": 1.0 + abs(cell.rate - self.best), "hardest": -0.1}


@pytest.mark.parametrize(("rates", "task"), [("own", "abstracts"), ("other", "reviews")])
@pytest.mark.parametrize("steps", [-2, 0, 3])
def test_a_rate_is_sought_by_runs_that_are_not_reported(
    comparison: Any, tmp_path: Path, steps: int, rates: str, task: str
) -> None:
    best = comparison.ROWS["dp-adamw"].first_rate * 2.0**steps
    runner = _Runner(best)
    study = comparison.Study(tmp_path / "out.jsonl", runner, rates)
    assert study.rate("abstracts", "dp-adamw", 1.0) == best
    assert {(cell.task, cell.role) for cell in runner.ran} == {(task, "selection")}
    assert {cell.seed for cell in runner.ran}.isdisjoint(comparison.SEEDS)


def test_noise_alone_has_the_rate_of_the_row_whose_noise_it_is(comparison: Any, tmp_path: Path) -> None:
    runner = _Runner(0.008)
    study = comparison.Study(tmp_path / "out.jsonl", runner)
    assert study.rate("abstracts", "noise alone", 1.0) == 0.008
    assert {cell.row for cell in runner.ran} == {"span-prism"}


def test_what_is_finished_is_not_run_again(comparison: Any, tmp_path: Path) -> None:
    cell = comparison.Cell(
        task="abstracts", row="prism", records=200, epsilon=1.0, seed=0, rate=0.004, role="report"
    )
    comparison.Study(tmp_path / "out.jsonl", _Runner(0.0)).run(cell)
    again = comparison.Study(tmp_path / "out.jsonl", _Runner(0.0))
    again.append({"machine": {}})
    again.run(cell)
    assert again.runner.ran == []
    again.run(replace(cell, seed=1))
    assert len(comparison.read_rows(tmp_path / "out.jsonl")) == 2


def test_tables_hold_means_and_standard_errors_best_first(comparison: Any) -> None:
    tables = importlib.import_module("comparison_tables")

    def row(name: str, seed: int, loss: float) -> dict[str, Any]:
        cell = {"task": "abstracts", "row": name, "records": 200, "epsilon": 1.0, "seed": seed, "rate": 0.004}
        return {"cell": {**cell, "role": "report"}, "loss": loss, "hardest": loss - 5}

    rows = [row("zero training", 0, 5.0)]
    rows += [row("prism", seed, loss) for seed, loss in enumerate((3.0, 4.0, 5.0))]
    rows += [row("span-prism", seed, loss) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    (table,) = tables.tables_of(rows)
    lines = table.to_markdown().splitlines()
    assert lines[-4:-2] == [
        "| span-prism | 0.004 | 2.0000 ± 0.5774 | -3.000 |",
        "| prism | 0.004 | 4.0000 ± 0.5774 | -1.000 |",
    ]
    assert lines[-1] == "M = 200: span-prism is +2.0000 (+2.4 SE) ahead of prism."


def test_the_page_quotes_what_a_step_costs() -> None:
    step_cost = importlib.import_module("step_cost")
    found = json.loads(step_cost.RESULTS.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "few-records.md").read_text(encoding="utf-8")
    assert all(line in page for line in step_cost.to_markdown(found))
    # What the page says beside its table.
    assert all(row["memory"]["peak_over_kept"] <= 1.2 for row in found["rows"])
    assert len(found["rows"]) == 2


def test_the_page_quotes_what_came_out(comparison: Any) -> None:
    tables = importlib.import_module("comparison_tables").tables_of(comparison.read_rows(comparison.RESULTS))
    page = (ROOT / "docs" / "few-records.md").read_text(encoding="utf-8")
    for table in tables:
        if table.epsilon is not None:
            rows = [line for line in table.to_markdown().splitlines() if line.startswith("| ")]
            assert all(line in page for line in rows)
            assert f"{table.untrained:.4f}" in page
