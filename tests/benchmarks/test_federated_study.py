"""The federated study and what rounds cost: rates, resuming, tables, formulas; the page quotes what came out."""

from __future__ import annotations

import importlib
import json
import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privlora.federated.rules import RULES, RuleSettings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "federated"
ASSETS = Path(os.environ.get("PRIVLORA_ASSETS") or ROOT.parent / "shared") / "assets"


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "federated")


@pytest.fixture
def study() -> Any:
    return importlib.import_module("study")


@pytest.fixture
def study_tables() -> Any:
    return importlib.import_module("study_tables")


@pytest.mark.parametrize("best", range(6))
def test_the_best_rate_of_the_grid_is_found_from_any_side(study: Any, best: int) -> None:
    tried = []

    def loss(rate: float) -> float:
        tried.append(rate)
        return abs(study.RATES.index(rate) - best)

    assert study.best_rate(loss) == study.RATES[best]
    assert len(set(tried)) <= 5


def test_the_rate_stays_if_both_neighbours_are_worse_or_equal(study: Any) -> None:
    assert study.best_rate(lambda rate: 0.0) == study.RATES[study.FIRST_RATE]


class _Runner:
    def __init__(self) -> None:
        self.ran: list[Any] = []

    def run(self, cell: Any) -> dict[str, Any]:
        self.ran.append(cell)
        return {"loss": 1.0 + len(self.ran)}


def test_finished_cells_are_not_run_again(study: Any, tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    cell = study.selection("reviews", "tan", 3.0, 0.016)
    first = study.Study(path, _Runner())
    first.finished.append({"machine": {}})
    assert first.run(cell) == first.run(cell) == 2.0
    again = study.Study(path, _Runner())
    assert again.run(cell) == 2.0
    assert again.runner.ran == []
    again.run(replace(cell, epsilon=1.0))
    assert len(again.runner.ran) == 1
    assert len(again.finished.rows) == 2


def test_controls_in_one_place_are_run_once_for_all_splits(study: Any) -> None:
    chosen = Namespace(epsilons=[3.0], splits=["iid", "domain"], per_round=4, seeds=list(study.SEEDS))
    rates = {"tan": 0.01, "central prism": 0.01, "each alone": 0.01, "zero training": 0.0}
    cells = study.planned("reviews", {(3.0, row): rate for row, rate in rates.items()}, chosen)
    count = {row: sum(cell.row == row for cell in cells) for row in rates}
    seeds = len(study.SEEDS)
    assert count == {
        "tan": 2 * seeds,
        "central prism": seeds,
        "each alone": 2 * seeds,
        "zero training": 1,
    }
    assert {cell.per_round for cell in cells if cell.row == "tan"} == {4}
    assert {cell.per_round for cell in cells if cell.row != "tan"} == {10}
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)


def _row(name: str, split: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    cell = {
        "task": "reviews",
        "row": name,
        "split": split,
        "epsilon": 3.0,
        "per_round": 10,
        "seed": seed,
        "rate": 0.01,
        "role": "report",
    }
    return {"cell": cell, "loss": loss, **more}


def test_tables_hold_means_standard_errors_and_gaps(study_tables: Any) -> None:
    rows = [_row("tan", "iid", seed, loss) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    rows += [_row("tan", "domain", seed, loss) for seed, loss in enumerate((3.0, 4.0, 5.0))]
    rows += [_row("central prism", "iid", seed, loss) for seed, loss in enumerate((0.0, 1.0, 2.0))]
    rows += [_row("fedsa", "iid", 0, 9.0, of_clients=[1.0, 2.0])]
    (table,) = study_tables.tables(rows)
    text = study_tables.markdown(table)
    # A standard deviation of 1 over three seeds: 0.577 each, 0.816 of the difference, 2 / 0.816 = 2.4.
    line = "| tan | 0.01 | 2.000 ± 0.577 | 4.000 ± 0.577 | 3.000 ± 0.577 | +2.000 (+2.4 SE) |"
    assert line in text.splitlines()
    assert "| fedsa | 0.01 | 1.500 |  |  |  |" in text.splitlines()


def test_only_runs_with_the_chosen_rate_are_reported(study_tables: Any) -> None:
    rows = [_row("tan", "iid", 0, 2.0), _row("tan", "iid", 0, 3.0)]
    rows[1]["cell"]["rate"] = 0.02
    for row, loss in zip(rows[::], (5.0, 4.0), strict=True):
        chosen_by = {**row["cell"], "role": "selection", "seed": 100}
        rows.append({"cell": chosen_by, "loss": loss})
    (table,) = study_tables.tables(rows)
    assert table.rates == {"tan": 0.02}
    assert table.value("tan", "iid").mean == 3.0
    assert "| reviews | ε = 3 | tan | 5.000 | **4.000** |" in study_tables.rates_table(rows)


def test_the_summary_says_who_is_ahead(study_tables: Any) -> None:
    losses = {"central prism": 3.0, "central dp-adamw": 3.5, "joint": 3.25, "tan": 3.75, "alt": 4.0}
    losses |= {"fedavg": 4.5, "ffa": 4.25, "fedask": 5.0}
    rows = [_row(name, "iid", 0, loss) for name, loss in losses.items()]
    text = study_tables.summary(study_tables.tables(rows)).splitlines()
    cells = "3.000 | 3.500 | 3.250 | 3.750 | 4.000 | 4.500 | 4.250 | 5.000 | +0.250 | +0.500 |"
    assert text[2] == f"| reviews | ε = 3 | {cells}"
    assert len(study_tables.summary(study_tables.tables(rows[:-1])).splitlines()) == 2  # not all are there


@pytest.mark.parametrize(("domains", "owners"), [(5, 10), (30, 10), (1, 10)])
def test_domains_are_cut_or_joined_into_ten_clients(domains: int, owners: int) -> None:
    cells = importlib.import_module("study_cells")
    records = [{"client": f"d{number // 20}", "text": "t"} for number in range(20 * domains)]
    short = cells._short(records, cells.TASKS["authors"])
    assert len({record["owner"] for record in short}) == owners


@pytest.mark.parametrize("rule", RULES)
def test_formulas_of_messages_are_what_rules_say(rule: str) -> None:
    cost = importlib.import_module("cost")
    sizes, settings = (3, 90, 80), RuleSettings(rank=2)
    for number in (1, 2, 3):
        down, up = RULES[rule].message_sizes([sizes], settings, number, cost.CLIENTS)
        assert cost.formulas(rule, number, *sizes, settings.rank) == (down, up)


@pytest.mark.parametrize("row", ["tan", "each alone", "central prism"])
def test_a_cell_runs(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ASSETS.is_dir():
        pytest.skip("the study's model and records are not here")
    cells = importlib.import_module("study_cells")
    monkeypatch.setattr(cells, "ROUNDS", 1)
    monkeypatch.setattr(cells, "LOCAL_STEPS", 1)
    monkeypatch.setattr(cells, "STEPS", 1)
    monkeypatch.setattr(cells, "EVALUATION", 20)
    study = importlib.import_module("study")
    found = cells.Runner(ASSETS).run(study.selection("reviews", row, 3.0, 0.01))
    assert 3.0 < found["loss"] < 6.0
    assert found["noise_multiplier"] > 0


@pytest.fixture
def page() -> str:
    return (ROOT / "docs" / "federated-results.md").read_text(encoding="utf-8")


def test_the_page_quotes_the_tables(page: str, study: Any, study_tables: Any) -> None:
    rows = study_tables.read_rows(RESULTS / "study.jsonl")
    whole = study_tables.page(rows)
    assert whole == (RESULTS / "study.md").read_text(encoding="utf-8")
    quoted = [
        line.split(" | ", 2) for line in page.splitlines() if re.match(r"\| (authors|reviews|sst2) ", line)
    ]
    assert len(quoted) == 4
    for task, epsilon, losses in quoted:
        privacy = "without privacy" if epsilon == "none" else f"ε = {epsilon}"
        assert f"{task} | {privacy} | {losses.removesuffix(' |')} | " in whole


def test_what_aggregation_loses_is_quoted() -> None:
    aggregation = importlib.import_module("aggregation")
    found = json.loads((RESULTS / "aggregation.json").read_text(encoding="utf-8"))
    assert aggregation.table(found) in (RESULTS / "README.md").read_text(encoding="utf-8")
    for row, scenario in (("fedask, p = 0", "clients drift"), ("fedex", "clients unrelated")):
        again = aggregation.over_seeds(row, scenario)
        assert again == pytest.approx(found["scenarios"][scenario][row], rel=1e-3, abs=1e-9)


def test_counted_bytes_are_those_of_the_formulas() -> None:
    counted = json.loads((RESULTS / "cost.json").read_text(encoding="utf-8"))["bytes"]
    for rule in RULES:
        # The name of the run, 32 letters, goes down with each request.
        assert counted[rule]["other_bytes"] == [[32 * 10 * len(RULES[rule].stages), 0]] * 3, rule
