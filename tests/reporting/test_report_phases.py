"""What a run of several phases says: every phase in numbers and in words, the curve across them."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reporting_cases import Run, leaf_paths
from rich.console import Console

from privlora.accounting import (
    Ledger,
    LedgerSummary,
    Plan,
    PoissonSampling,
    StepEvent,
    TruncatedPoissonSampling,
    epsilon,
    read_ledger,
)
from privlora.cli.accounting import budget
from privlora.cli.planning import _cost
from privlora.reporting.card import card
from privlora.reporting.facts import gather
from privlora.reporting.page import render
from privlora.reporting.tables import privacy_table, sentence
from privlora.training.observer import StepReport
from privlora.training.progress import RichObserver

HISTOGRAM = StepEvent(PoissonSampling(1.0), 4.0)
CAPPED = StepEvent(TruncatedPoissonSampling(0.1, 14, 60), 2.0)
PROJECTED = StepEvent(PoissonSampling(0.1), 2.0, ((3, 16),))


def planned(run: Run, *before: tuple[StepEvent, int]) -> Plan:
    """The run's plan after other phases."""
    return replace(run.summary.plan, phases=(*before, *run.summary.plan.phases))


def charged(plan: Plan, path: Path, steps: int) -> LedgerSummary:
    with Ledger.create(path, plan) as ledger:
        for step in range(1, steps + 1):
            ledger.charge(plan.event_of(step))
    return read_ledger(path)


def reported(run: Run, summary: LedgerSummary) -> dict[str, Any]:
    found = json.loads(json.dumps(gather(run.parts, summary, []), allow_nan=False))
    return found


@pytest.fixture
def two(private_run: Run, tmp_path: Path) -> tuple[LedgerSummary, dict[str, Any]]:
    """A histogram, then training with 2 of 4 steps charged."""
    summary = charged(planned(private_run, (HISTOGRAM, 1)), tmp_path / "ledger", 3)
    return summary, reported(private_run, summary)


def test_a_report_lists_its_phases(two: tuple[LedgerSummary, dict[str, Any]], report: dict[str, Any]) -> None:
    summary, found = two
    statement, of_one = found["statement"], report["statement"]
    names = ("sampling", "noise_multiplier", "projections")
    assert statement["phases"] == [
        {
            "sampling": {"kind": "poisson", "sample_rate": 1.0},
            "noise_multiplier": 4.0,
            "projections": [],
            "steps_planned": 1,
            "steps_charged": 1,
        },
        {**{name: of_one[name] for name in names}, "steps_planned": 4, "steps_charged": 2},
    ]
    assert set(statement) == {*of_one, "phases"} - set(names)
    assert (statement["steps_planned"], statement["steps_charged"]) == (5, 3)
    assert "statement.phases[].sampling.kind" in set(leaf_paths(found))
    events = [(HISTOGRAM, 1), (summary.plan.phases[1][0], 2)]
    assert statement["epsilon"] == epsilon(events, summary.plan.delta)
    assert statement["epsilon_replace_one"] == epsilon(events, summary.plan.delta, adjacency="replace-one")
    assert found["noise"]["noise_std"] == report["noise"]["noise_std"]  # of the phase that trains


def test_the_curve_crosses_phases(two: tuple[LedgerSummary, dict[str, Any]]) -> None:
    summary, found = two
    training, delta = summary.plan.phases[1][0], summary.plan.delta
    values = [point["epsilon"] for point in found["epsilon_over_steps"]]
    spent = [
        epsilon(events, delta)
        for events in ([(HISTOGRAM, 1)], [(HISTOGRAM, 1), (training, 1)], [(HISTOGRAM, 1), (training, 2)])
    ]
    assert values == pytest.approx(spent, rel=1e-3)
    assert all(value >= exact * (1 - 1e-9) for value, exact in zip(values, spent, strict=True))
    assert values[-1] == found["statement"]["epsilon"]


def test_every_phase_is_said(two: tuple[LedgerSummary, dict[str, Any]]) -> None:
    _, found = two
    table = dict(privacy_table(found))
    assert table["Phase 1"].startswith("1 noisy step of the Gaussian mechanism with noise multiplier 4")
    assert table["Phase 2"].endswith("; 4 planned")
    assert table["Steps T"] == "3 charged of 5 planned"
    for shown in (render(found), card(found), sentence(found)):
        assert "noise multiplier 4" in shown
        assert "noise multiplier 1" in shown


def test_what_one_phase_costs_more_is_said_of_the_run(private_run: Run, tmp_path: Path) -> None:
    """A capped batch, or a projection, in any phase."""
    found = reported(private_run, charged(planned(private_run, (CAPPED, 1)), tmp_path / "capped", 2))
    assert "cut to 14 of at most 60 units" in sentence(found)
    assert any("How many records there are" in text for text in found["not_protected"])
    found = reported(private_run, charged(planned(private_run, (PROJECTED, 1)), tmp_path / "projected", 2))
    assert found["statement"]["epsilon_replace_one"] is None
    assert dict(privacy_table(found))["ε if one unit is replaced"] == "not known for this mechanism"
    assert any("replaced by another" in text for text in found["not_protected"])


def test_a_plan_of_phases_is_priced_over_its_steps(private_run: Run) -> None:
    plan = planned(private_run, (HISTOGRAM, 2))
    training = plan.phases[1][0]
    cost = _cost(plan, cross_check=True)
    events = [(HISTOGRAM, 2), (training, 4)]
    assert [point["step"] for point in cost["over_steps"]] == [2, 3, 5, 6]
    assert cost["over_steps"][0]["epsilon"] == epsilon([(HISTOGRAM, 2)], plan.delta)
    assert cost["epsilon"] == epsilon(events, plan.delta)
    assert cost["epsilon_replace_one"] == epsilon(events, plan.delta, adjacency="replace-one")
    assert cost["cross_check"]["rdp"]["epsilon"] == epsilon(events, plan.delta, accountant="rdp")
    assert "2 steps of Gaussian mechanism, sigma=4" in plan.describe()
    assert "and 4 steps of Gaussian mechanism, sigma=1" in plan.describe()


def test_a_log_shows_what_all_phases_spent(private_run: Run) -> None:
    plan, console = planned(private_run, (HISTOGRAM, 1)), Console(file=io.StringIO(), width=120)
    with RichObserver(console, plan) as observer:
        for step in (1, 2):
            observer.on_step(StepReport(step, 2, 2e-4, 0.5))
    lines = console.file.getvalue().splitlines()
    for step, line in enumerate(lines, start=1):  # of training, which the votes came before
        events = [(HISTOGRAM, 1), (plan.phases[1][0], step)]
        assert f"ε {math.ceil(epsilon(events, plan.delta) * 100) / 100:.2f} " in line


def test_a_budget_names_what_each_run_released(
    private_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(private_run, (HISTOGRAM, 1))
    charged(plan, tmp_path / "many", 3)
    charged(private_run.summary.plan if private_run.summary else plan, tmp_path / "one", 2)
    budget([tmp_path / "many", tmp_path / "one"], None, None, as_json=True)
    many, one = json.loads(capsys.readouterr().out)["runs"]
    training = plan.phases[1][0].to_dict()
    assert "event" not in many
    assert many["phases"] == [{"event": HISTOGRAM.to_dict(), "steps": 1}, {"event": training, "steps": 2}]
    assert "phases" not in one
    assert one["event"] == training
    assert (many["steps_charged"], one["steps_charged"]) == (3, 2)
