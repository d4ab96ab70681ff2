"""What a run shows: on a terminal, in a log, with and without privacy."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from privlora.accounting import Plan, PoissonSampling, StepEvent, epsilon
from privlora.training.loop import StepReport
from privlora.training.progress import RichObserver, epsilon_checkpoints

EVENT = StepEvent(PoissonSampling(0.01), 1.0)


def plan(steps: int, *, insecure: bool = False) -> Plan:
    return Plan(
        event=EVENT,
        steps=steps,
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


def show(run: Plan | None, steps: int, *, terminal: bool = False, private_loss: float | None = None) -> str:
    """What a run of ``steps`` steps of half a second prints."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with RichObserver(console, run) as observer:
        observer.on_evaluation(0, 2.5)
        for step in range(1, steps + 1):
            if private_loss is not None:
                observer.on_private_loss(step, private_loss)
            observer.on_step(StepReport(step, steps, 2e-4, 0.5))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("steps", "points"), [(1, 1), (3, 3), (10, 10), (301, 10)])
def test_checkpoints_end_at_the_whole_run(steps: int, points: int) -> None:
    found = epsilon_checkpoints(plan(steps))
    assert len(found) == points
    assert found[-1] == (steps, epsilon([(EVENT, steps)], 1e-5))
    assert [step for step, _ in found] == sorted({step for step, _ in found})


def test_epsilon_is_never_below_what_was_spent() -> None:
    lines = [line for line in show(plan(12), 12).splitlines() if line.startswith("step ")]
    for line in lines:
        step = int(line.split()[1].split("/")[0])
        assert float(line.split("ε ")[1].split()[0]) >= epsilon([(EVENT, step)], 1e-5)


def test_a_log_gets_a_line_now_and_then() -> None:
    lines = show(plan(300), 300).splitlines()
    assert lines[0] == "held-out loss after step 0: 2.5000 nats per token (mean over records)"
    assert [line.split()[1] for line in lines[1:]] == ["1/300", *(f"{k}/300" for k in range(30, 301, 30))]
    assert "(δ 1e-05)  lr 0.0002  0.5 s/step  ETA 2:15" in lines[2]
    assert lines[-1].endswith("ETA 0:00")


def test_a_terminal_gets_one_live_line() -> None:
    shown = show(plan(20), 20, terminal=True)
    assert "step 7/20" in shown
    assert shown.count("\n") <= 3  # the held-out loss, the last step, and the end of the live line


@pytest.mark.parametrize("run", [None, plan(4, insecure=True)], ids=["non-private", "repeatable noise"])
def test_without_privacy_no_epsilon_is_shown(run: Plan | None) -> None:
    shown = show(run, 4)
    assert "ε" not in shown
    assert shown.count("NOT PRIVATE") == 4


def test_the_private_loss_is_marked() -> None:
    assert "loss 1.25" not in show(plan(2), 2)
    assert "PRIVATE training loss 1.2500" in show(plan(2), 2, private_loss=1.25)
