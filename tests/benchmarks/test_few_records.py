"""The comparison of methods for few records: rates, resuming, tables."""

from __future__ import annotations

import importlib
import json
import re
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
        if cell.row == "zero training":
            return {"loss": 2.0}
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
    assert study.rate("abstracts", "dp-adamw", 200, 1.0) == best
    assert {(cell.task, cell.role) for cell in runner.ran} == {(task, "selection")}
    assert {cell.seed for cell in runner.ran}.isdisjoint(comparison.SEEDS)


def test_a_search_begins_at_the_rate_of_the_most_alike_noise(comparison: Any, tmp_path: Path) -> None:
    study = comparison.Study(tmp_path / "out.jsonl", _Runner(0.008))
    study.rate("abstracts", "prism", 200, 1.0)
    study.runner.best = 0.016
    study.rate("abstracts", "prism", 200, 8.0)
    before = len(study.runner.ran)
    for records, epsilon, first in ((100, 1.0, 0.008), (1600, 1.0, 0.016), (200, None, 0.016)):
        study.runner.best = first
        assert study.rate("abstracts", "prism", records, epsilon) == first
        assert study.runner.ran[before].rate in (first, 2 * first)
        before = len(study.runner.ran)


def test_a_search_that_begins_where_runs_diverge_goes_down(comparison: Any) -> None:
    losses = {0.5: 1.2, 1.0: 0.9, 2.0: 7.0, 4.0: 7.5, 8.0: 7.1}
    assert comparison.best_along(list(losses), 3, losses.__getitem__) == 8.0
    assert comparison.best_along(list(losses), 3, losses.__getitem__, astray=2.0) == 1.0


def test_noise_alone_has_the_rate_of_the_row_whose_noise_it_is(comparison: Any, tmp_path: Path) -> None:
    runner = _Runner(0.008)
    study = comparison.Study(tmp_path / "out.jsonl", runner)
    assert study.rate("abstracts", "noise alone", 200, 1.0) == 0.008
    assert {cell.row for cell in runner.ran} == {"span-prism"}


def test_rehearsed_rates_are_found_once_and_on_no_record(comparison: Any, tmp_path: Path) -> None:
    class Rehearses(_Runner):
        def advise(self, cell: Any) -> dict[str, Any]:
            self.ran.append(cell)
            rows = [{"name": "prism", "learning_rate": 0.01}, {"name": "span-prism", "learning_rate": 0.02}]
            return {"row": "prism", "rows": rows}

    for runner, asked in ((Rehearses(0.0), 1), (Rehearses(0.0), 0)):
        study = comparison.Study(tmp_path / "out.jsonl", runner)
        assert study.rate("abstracts", "prism, rehearsed", 50, 1.0) == 0.01
        assert study.rate("abstracts", "span-prism, rehearsed", 50, 1.0) == 0.02
        assert [cell.role for cell in runner.ran] == ["rehearsal"] * asked


def test_what_is_finished_is_not_run_again(comparison: Any, tmp_path: Path) -> None:
    cell = comparison.Cell(
        task="abstracts", row="prism", records=200, epsilon=1.0, seed=0, rate=0.004, role="report"
    )
    comparison.Study(tmp_path / "out.jsonl", _Runner(0.0)).run(cell)
    again = comparison.Study(tmp_path / "out.jsonl", _Runner(0.0))
    again.finished.append({"machine": {}})
    again.run(cell)
    assert again.runner.ran == []
    again.run(replace(cell, seed=1))
    assert len(again.finished.rows) == 2


def _row(name: str, records: int, epsilon: float | None, seed: int, loss: float) -> dict[str, Any]:
    cell = {"task": "abstracts", "row": name, "records": records, "epsilon": epsilon, "seed": seed}
    return {
        "cell": {**cell, "rate": 0.004, "role": "report"},
        "loss": loss,
        "hardest": loss - 5,
        "accuracy": loss / 10,
    }


def test_tables_hold_means_and_standard_errors_best_first(comparison: Any) -> None:
    tables = importlib.import_module("comparison_tables")
    rows = [_row("zero training", 50, 1.0, 0, 5.0)]
    for records, epsilon in ((200, 1.0), (50, 1.0), (50, None)):
        rows += [_row("prism", records, epsilon, s, loss) for s, loss in enumerate((3.0, 4.0, 5.0))]
        rows += [_row("span-prism", records, epsilon, s, loss) for s, loss in enumerate((1.0, 2.0, 3.0))]
    rows += [_row("prism, rehearsed", 50, 1.0, 0, 4.5), _row("span-prism, rehearsed", 50, 1.0, 0, 4.0)]
    choice = {
        "task": "abstracts",
        "row": "auto",
        "records": 50,
        "epsilon": 1.0,
        "seed": 0,
        "role": "rehearsal",
    }
    (task,) = tables.tasks_of([*rows, {"cell": choice, "choice": {"row": "prism"}}])
    lines = task.to_markdown().splitlines()
    both = "4.0000 ± 0.5774 | 4.0000 ± 0.5774"
    assert "| method | M = 50 | M = 200 | hardest tenth, M = 50 | accuracy, M = 50 |" in lines
    assert "| method | ε = 1 | no privacy | hardest tenth, ε = 1 | accuracy, ε = 1 |" in lines
    assert lines.count(f"| prism | {both} | -1.000 | 40.00 % |") == 2
    order = [
        line.split(" |")[0]
        for line in lines[
            lines.index("| method | M = 50 | M = 200 | hardest tenth, M = 50 | accuracy, M = 50 |") :
        ]
    ]
    assert order[2:6] == ["| span-prism", "| prism", "| span-prism, rehearsed", "| prism, rehearsed"]
    assert "* M = 200, ε = 1: span-prism is +2.0000 (+2.4 SE) ahead of prism." in lines
    assert (
        "* M = 50, ε = 1: auto takes prism, which is -0.5000 ahead of span-prism at its rehearsed rate."
        in lines
    )
    assert tables.figure([task]).startswith(b"\x89PNG")


def beside_the_data() -> str:
    """The page of measurements that lies with the results."""
    return (ROOT / "benchmarks/results/few_records/README.md").read_text(encoding="utf-8")


def test_the_page_quotes_what_a_step_costs() -> None:
    step_cost = importlib.import_module("step_cost")
    found = json.loads(step_cost.RESULTS.read_text(encoding="utf-8"))
    page = beside_the_data()
    assert all(line in page for line in step_cost.to_markdown(found))
    # What the page says beside its table.
    assert all(row["memory"]["peak_over_kept"] <= 1.2 for row in found["rows"])
    assert len(found["rows"]) == 2


def test_the_page_quotes_where_public_gradients_could_lie() -> None:
    engines = importlib.import_module("engines")
    found = json.loads(engines.RESULTS.read_text(encoding="utf-8"))
    page = beside_the_data()
    for line in engines.to_markdown(found):
        assert line in page, line
    # What the page says beside its tables.
    (passed,), (of_groups,) = found["backward"]["rows"], found["groups"]["rows"]
    assert passed["difference"]["float32"] < 1.1e-6
    assert passed["difference"]["float64"] < 8.5e-8
    whole, halves, _ = (row["cpu"] for row in of_groups["rows"])
    assert f"{halves / whole:.1f} times the passes" in page
    prism = found["whole"]["rows"][-1]
    assert (prism["method"], prism["dimension"]) == ("span-prism", prism["weights"])


def test_the_page_quotes_what_came_out(comparison: Any) -> None:
    tables = importlib.import_module("comparison_tables")
    page = (ROOT / "docs" / "few-records.md").read_text(encoding="utf-8")
    book = (comparison.RESULTS.parent / "comparison.md").read_text(encoding="utf-8")
    tasks = tables.tasks_of(tables.read_rows(comparison.RESULTS))
    assert all(task.to_markdown() in book for task in tasks)
    reviews = tasks[0]
    head, _, *quoted = page.partition("has 5.0998:\n\n")[2].partition("\n\n")[0].splitlines()
    assert (reviews.name, f"{reviews.untrained:.4f}", len(quoted)) == ("reviews", "5.0998", 5)
    places = [(1.0, int(records)) for records in re.findall(r"M = (\d+)", head)]
    for line in quoted:
        row, *cells = line.strip("| ").split(" | ")
        assert cells == [str(reviews.losses[place][row]) for place in places], row


def test_the_page_quotes_what_lies_beside_a_span() -> None:
    cosine = importlib.import_module("cosine")
    results = json.loads(cosine.RESULTS.read_text(encoding="utf-8"))
    assert "\n".join(cosine.projection_table(results)) in beside_the_data()
