"""What a run shows: on a terminal, in a log, with and without privacy."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import re
from typing import Any

import pytest
from promises import small_settings
from rich.console import Console

from privlora.accounting import Plan, PoissonSampling, StepEvent, epsilon
from privlora.config import RunSettings
from privlora.training import progress
from privlora.training.observer import StepReport
from privlora.training.progress import RichObserver

EVENT = StepEvent(PoissonSampling(0.01), 1.0)


@pytest.fixture(autouse=True)
def drawn_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frames of the refreshing thread, whose number depends on the machine's load."""
    monkeypatch.setattr(progress, "Live", functools.partial(progress.Live, auto_refresh=False))


def plan(steps: int, *, insecure: bool = False) -> Plan:
    return Plan(
        phases=((EVENT, steps),),
        delta=1e-5,
        target_epsilon=None,
        adjacency="add-or-remove-one",
        unit="record",
        records_per_user=None,
        clip_norm=1.0,
        expected_batch_size=10.0,
        method="prism",
        dataset="cases",
        insecure_noise=insecure,
    )


def show(run: Plan | None, steps: int, *, terminal: bool = False) -> str:
    """What a run of ``steps`` steps of half a second prints."""
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=120)
    with RichObserver(console, run, timed=True) as observer:
        observer.on_evaluation(0, 2.5)
        for step in range(1, steps + 1):
            observer.on_step(StepReport(step, steps, 2e-4, 0.5))
    return console.file.getvalue()


def spent(step: int) -> str:
    """Epsilon of that many charged steps, as a line shows it."""
    return f"ε {math.ceil(epsilon([(EVENT, step)], 1e-5) * 100) / 100:.2f} (δ 1e-05)"


def test_a_log_shows_what_was_spent() -> None:
    """At the first step, in the middle and at the end: never the next checkpoint's."""
    lines = {line.split()[1]: line for line in show(plan(300), 300).splitlines() if line.startswith("step ")}
    assert len({spent(step) for step in (1, 30, 150, 300)}) == 4
    for step in (1, 30, 150, 300):
        assert spent(step) in lines[f"{step}/300"]
    assert "after" not in "".join(lines.values())


def test_a_live_line_names_the_step_of_its_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing takes a twentieth of the time at most; the last step has its own."""
    now, asked = [0.0], list[int]()

    def slow(plan: Plan, step: int) -> float:
        now[0] += 1.0
        asked.append(step)
        return epsilon([(EVENT, step)], 1e-5)

    monkeypatch.setattr(progress, "spent", slow)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120)
    with RichObserver(console, plan(30)) as observer:
        for step in range(1, 31):
            now[0] += 4.0
            observer.on_step(StepReport(step, 30, 2e-4, 4.0))
    assert asked == [1, 6, 11, 16, 21, 26, 30]
    lines = re.findall(r"step (\d+)/30  ε ([\d.]+) \((?:δ 1e-05|step (\d+))\)  lr", console.file.getvalue())
    for step, number, known in lines:
        assert number == spent(int(known or step)).split()[1]
        assert int(known or step) == max(each for each in asked if each <= int(step))
    assert {int(step) for step, _, known in lines if not known} == set(asked)
    assert {int(step) for step, *_ in lines} == set(range(1, 31))


def test_releases_before_training_count() -> None:
    voted = (StepEvent(PoissonSampling(0.5), 2.0), 5)
    whole = dataclasses.replace(plan(10), phases=(voted, (EVENT, 10)))
    for line in [line for line in show(whole, 10).splitlines() if line.startswith("step ")]:
        step = int(line.split()[1].partition("/")[0])
        true = epsilon([voted, (EVENT, step)], 1e-5)
        assert f"ε {math.ceil(true * 100) / 100:.2f} " in line


@pytest.mark.parametrize("timed", [True, False])
def test_no_clock_decides_on_a_line_of_a_log_that_tells_no_time(
    timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=120)
    with RichObserver(console, plan(300), timed=timed) as observer:
        for step in (1, 2, 3):
            observer.on_step(StepReport(step, 300, 2e-4, 31.0))
            observer.on_public_work("writing", step, 200)
            now[0] += 31.0
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/300",
        *["2/300", "3/300"] * timed,
    ]
    assert sum(line.startswith("writing") for line in lines) == 1


@pytest.mark.parametrize("run", [None, plan(4, insecure=True)], ids=["non-private", "repeatable noise"])
def test_without_privacy_no_epsilon_is_shown(run: Plan | None) -> None:
    shown = show(run, 4)
    assert "ε" not in shown
    assert shown.count("NOT PRIVATE") == 4


@pytest.mark.parametrize("width", [80, 120, 160])
@pytest.mark.parametrize("steps", [40, 1_000_000])
def test_a_live_line_is_never_cut(width: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step, rate and time left stand on every live line; bar, losses, delta and before that the epsilon of an earlier
    step where there is room. 80 columns are a terminal's usual width."""
    monkeypatch.setattr(progress, "spent", lambda *_: 12.344)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    first = steps // 2
    with RichObserver(console, plan(steps)) as observer:
        for loss in (3.0, 2.5, 2.25):
            observer.on_evaluation(0, loss)
        observer.on_step(StepReport(first, steps, 2.5e-4, 3.5))
        observer._account_again_at = math.inf
        observer.on_step(StepReport(first + 1, steps, 2.5e-4, 3.5))
        observer.on_public_work("writing public texts", 38, 200)
        observer.on_step(StepReport(first + 2, steps, 2.5e-4, 3.5))
        observer.on_public_work("writing public texts", 38, 200)
    shown = re.sub("\x1b\\[[0-9?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n").splitlines()
    lines = [line for line in shown if "step " in line and "/" in line and "held-out" not in line]
    assert lines.pop() == lines[-1]  # as it is taken away
    assert all(len(line) <= width for line in shown if "held-out" not in line)
    for line, step in zip(lines, [first, first + 1, first + 1, first + 2, first + 2], strict=True):
        assert f"step {step}/{steps}  " in line
        assert f"  lr 0.00025  3.5 s/step  ETA {progress.clock(3.5 * (steps - step))}" in line
    assert "ε 12.35" in lines[0]
    assert any("38 of 200" in line for line in shown)


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        ({}, "nats per token"),
        ({"text": "t", "label": "l", "labels": 3}, "nats"),
        ({"text": "t", "label": "l", "labels": "score"}, "squared error"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "nats per preference"),
    ],
)
def test_units_of_held_out_losses(data: dict[str, Any], unit: str) -> None:
    assert progress._unit_of(small_settings(data={"path": "x.jsonl", **data})) == unit


@pytest.mark.parametrize(
    ("given", "steps", "every"),
    [(None, 19, 0), (None, 20, 2), (None, 45, 5), (None, 300, 30), (0, 300, 0), (7, 3, 7)],
)
def test_ten_looks_at_held_out_losses(given: int | None, steps: int, every: int) -> None:
    assert RunSettings(output="x", evaluate_every=given).evaluation_interval(steps) == every
