"""A run whose plan has another release before training: charged in order, resumed, stated whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_cases import PRIVACY, STEPS, Bench

from privlora.accounting import Ledger, PoissonSampling, StepEvent, epsilon, read_ledger
from privlora.errors import PrivacyError
from privlora.evaluation import NextTokenResult
from privlora.training import assembly
from privlora.training.files import RunFolder, append_line
from privlora.training.observer import Observer, StepReport

VOTES = StepEvent(PoissonSampling(1.0), noise_multiplier=6.0)


class Breaks(Observer):
    """An observer who pulls the plug once, and notes the steps and rates that it saw."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, []

    def on_step(self, report: StepReport) -> None:
        self.seen.append((report.step, report.learning_rate))
        if report.step == self.at:
            self.at = 0
            raise RuntimeError("pulled")


def test_training_is_the_last_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, folder = Bench(), tmp_path / "run"
    planned = assembly.plan_run

    def with_votes(*args: Any) -> Any:
        plan = planned(*args)
        return replace(plan, phases=((VOTES, 2), *plan.phases))

    monkeypatch.setattr(assembly, "plan_run", with_votes)
    method = {"name": "dp-adamw", "schedule": "linear"}
    with pytest.raises(PrivacyError, match="lack 2 of their releases"):
        bench.start(folder, method=method, privacy={**PRIVACY, "target_epsilon": 3.0})
    ledger = folder / "release/ledger.jsonl"
    assert read_ledger(ledger).charges == 0
    with Ledger.open(ledger) as book:
        assert [book.charge(VOTES) for _ in range(2)] == [1, 2]
    watcher = Breaks(at=5)
    with pytest.raises(RuntimeError, match="pulled"):
        bench.resume(folder, observer=watcher)
    # Charged and released, but not saved: its number is spent, and training goes on behind it.
    assert read_ledger(ledger).charges == 2 + 5
    result = bench.resume(folder, observer=watcher)
    assert [step for step, _ in watcher.seen] == [*range(1, STEPS + 1)]
    rates = [rate for _, rate in watcher.seen]
    assert rates == pytest.approx([rates[0] * (1 - k / STEPS) for k in range(STEPS)])
    summary = read_ledger(ledger)
    assert summary.events() == list(summary.plan.phases)
    assert summary.closed
    assert result.epsilon == epsilon(list(summary.plan.phases), PRIVACY["delta"])
    statement = json.loads((folder / "release/privacy_report.json").read_text())["statement"]
    assert statement["epsilon"] == result.epsilon
    losses = RunFolder(folder).private_losses.read_text().splitlines()
    assert [json.loads(line)["step"] for line in losses] == [*range(3, 3 + STEPS)]


def test_releases_of_earlier_phases_that_a_ledger_lost_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of training count the releases before it."""
    bench, folder = Bench(), tmp_path / "run"
    planned = assembly.plan_run
    monkeypatch.setattr(
        assembly, "plan_run", lambda *a: replace((p := planned(*a)), phases=((VOTES, 1), *p.phases))
    )
    with pytest.raises(PrivacyError, match="lack 1 of their releases"):
        bench.start(folder)
    ledger = folder / "release/ledger.jsonl"
    with Ledger.open(ledger) as book:
        book.charge(VOTES)
    with pytest.raises(RuntimeError, match="pulled"):
        bench.resume(folder, observer=Breaks(at=4))
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:-1]))
    with pytest.raises(PrivacyError, match="was written after 5"):
        bench.resume(folder)
    # Where nothing else is left, the public evaluations prove as much.
    where = RunFolder(folder)
    for path in (where.checkpoint, where.private_losses):
        path.unlink(missing_ok=True)
    append_line(where.evaluations, {"step": 4, **NextTokenResult(5.0, 5.0, 0.1, 0.2, 8, 160).to_dict()})
    with pytest.raises(PrivacyError, match="was written after 5"):
        bench.resume(folder)
