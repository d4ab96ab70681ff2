"""Callbacks are told public numbers alone, stop a run without losing a step, and are refused before one is charged."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from run_cases import PRIVACY, PUBLIC, RECORDS, STEPS, Bench
from transformers import TrainerCallback
from transformers.trainer_callback import EarlyStoppingCallback

from privlora.accounting import read_ledger
from privlora.api import fine_tune, resume_run
from privlora.config import settings_from
from privlora.errors import ConfigError, RunError
from privlora.training.callbacks import PublicEvent, Several, _Callbacks
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer, StepReport, refuse_no_observer

RUN = {"checkpoint_every": 100, "log_every": 5, "evaluate_every": 6}


def tune(bench: Bench, folder: Path, **options: Any) -> Any:
    return bench.start(folder, evaluation=PUBLIC, **{"run": RUN, **options})


class Heard(TrainerCallback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.given: list[Any] = []

    def note(self, name: str, args: Any, state: Any, more: dict[str, Any]) -> None:
        self.calls.append((name, state.global_step))
        self.given.append((dict(vars(args)), vars(state).copy(), more))

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.note("begin", args, state, more)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.note("step", args, state, more)

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.note("log", args, state, more)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.note("evaluate", args, state, more)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.note("end", args, state, more)


@pytest.mark.usefixtures("quick_reports")
def test_both_kinds_are_told_of_the_same_run(tmp_path: Path) -> None:
    heard, events = Heard(), list[PublicEvent]()
    tune(Bench(), tmp_path / "run", callbacks=[heard, events.append])
    kinds = [event.kind for event in events]
    assert kinds[:3] == ["begin", "evaluation", "step"]
    assert kinds[-2:] == ["evaluation", "end"]
    assert [event.step for event in events if event.kind == "step"] == list(range(1, STEPS + 1))
    assert [event.step for event in events if event.kind == "evaluation"] == [0, 6, STEPS]
    told = [name for name, _ in heard.calls if name != "log"]
    assert told == [kind.replace("evaluation", "evaluate") for kind in kinds]
    assert [step for name, step in heard.calls if name == "log"] == [0, 1, 5, 6, 10, STEPS, STEPS]
    ledger = read_ledger(tmp_path / "run/release/ledger.jsonl")
    assert events[-1].epsilon == pytest.approx(ledger.epsilon())
    assert events[0].epsilon == 0.0


@pytest.mark.usefixtures("quick_reports")
def test_nothing_private_can_be_told(tmp_path: Path) -> None:
    """Of neighbouring records, by repeatable noise: all that callbacks are given is the same but for the adapter's
    held-out loss, which is released; and none of it is of another kind than these."""
    found = []
    privacy = {**PRIVACY, "insecure_noise_seed": 5}
    for number, records in enumerate((RECORDS, RECORDS[:-1])):
        bench, heard, events = Bench(), Heard(), list[PublicEvent]()
        listening = {"callbacks": [heard, events.append], "run": RUN}
        bench.start(tmp_path / str(number), records=records, privacy=privacy, **listening)
        found.append((heard.given, [repr(event) for event in events]))
    assert found[0] == found[1]
    for arguments, state, more in found[0][0]:
        assert set(more) <= {"logs", "metrics"}
        assert not any(isinstance(value, Path) or "/" in str(value) for value in arguments.values())
        assert state["train_batch_size"] is None
        assert state["total_flos"] == 0
    names = {name for row in found[0][0][-1][1]["log_history"] for name in row}
    assert names <= {"step", "epsilon", "learning_rate", "clip_norm", "eval_loss"}
    assert {field.name for field in fields(PublicEvent)} == {
        *("kind", "step", "steps", "learning_rate", "clip_norm", "held_out_loss", "plan", "stop")
    }


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("kind", ["function", "trainer", "loss"])
def test_a_callback_stops_a_run_that_can_be_resumed(kind: str, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = kind == "trainer" and state.global_step == 3

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> Any:
            control.should_training_stop = kind == "loss" and state.global_step == 6
            return control

    def stop(event: PublicEvent) -> None:
        if kind == "function" and event.kind == "step" and event.step == 3:
            asdict(event)["stop"]()  # a copy holds nothing of the run, and stops it as well
            assert not hasattr(event.stop, "__self__")

    bench, at = Bench(), 6 if kind == "loss" else 3
    with pytest.raises(Interrupted) as stopped:
        tune(bench, tmp_path / "run", callbacks=[stop, Stops])
    assert stopped.value.step == at
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == at
    begun = list[PublicEvent]()
    result = bench.resume(tmp_path / "run", PUBLIC, callbacks=[begun.append])
    assert (begun[0].kind, begun[0].step) == ("begin", at)
    assert [event.step for event in begun if event.kind == "step"] == list(range(at + 1, STEPS + 1))
    assert result.epsilon is not None
    assert result.epsilon <= PRIVACY["target_epsilon"]


@pytest.mark.usefixtures("quick_reports")
def test_an_error_in_a_callback_loses_no_step(tmp_path: Path) -> None:
    def fails(event: PublicEvent) -> None:
        if event.kind == "step" and event.step == 3:
            raise KeyError("typo")

    bench = Bench()
    with pytest.raises(
        RunError, match=r"callback fails failed at step 3, up to which all is saved: KeyError"
    ):
        tune(bench, tmp_path / "run", callbacks=[fails])
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 3
    begun = list[PublicEvent]()
    bench.resume(tmp_path / "run", PUBLIC, callbacks=[begun.append])
    assert begun[0].step == 3


@pytest.mark.usefixtures("quick_reports")
def test_what_ends_the_process_leaves_at_once_and_all_charges_stay(tmp_path: Path) -> None:
    """As docs/python.md says of SystemExit: the work since the last checkpoint is lost, and no charge is."""

    def leave(event: PublicEvent) -> None:
        if event.kind == "step" and event.step == 3:
            raise SystemExit(7)

    bench = Bench()
    with pytest.raises(SystemExit):
        tune(bench, tmp_path / "run", callbacks=[leave])
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 3
    assert not (tmp_path / "run/private/checkpoint.safetensors").exists()
    bench.resume(tmp_path / "run", PUBLIC)
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == STEPS


@pytest.mark.usefixtures("quick_reports")
def test_an_error_before_the_first_step_charges_nothing(tmp_path: Path) -> None:
    """EarlyStoppingCallback wants the best of several checkpoints, and there is none."""
    bench, early = Bench(), EarlyStoppingCallback(early_stopping_patience=1)
    with pytest.raises(RunError, match=r"EarlyStoppingCallback\.on_train_begin failed at step 0"):
        tune(bench, tmp_path / "run", callbacks=[early])
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 0
    lines = {**RUN, "report_to": "jsonl"}
    with pytest.raises(Interrupted):
        tune(bench, tmp_path / "run", run=lines, callbacks=[lambda event: event.stop()])
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 0
    assert tune(bench, tmp_path / "run", run=lines).epsilon is not None  # takes its place


@pytest.mark.usefixtures("quick_reports")
def test_an_error_at_the_very_end_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: PublicEvent) -> None:
        assert event.kind != "end"

    assert tune(Bench(), tmp_path / "run", callbacks=[fails]).epsilon is not None
    assert "the run is complete, but callback fails failed" in caplog.text


class AsksForTheModel(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None: ...


class WandbCallback(TrainerCallback):
    __module__ = "transformers.integrations.integration_utils"


class Disguised(WandbCallback):
    """Of this module, and made nowhere: the class is looked at first."""

    def __init__(self) -> None:
        raise AssertionError("made")


class CannotBeMade(TrainerCallback):
    def __init__(self) -> None:
        raise RuntimeError("nothing installed")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("print", "callbacks is of type str"),
        ({"a": print}, "callbacks is of type dict"),
        (print, "callbacks is of type builtin_function_or_method"),
        ([3], r"callbacks\[0\] is of type int"),
        ([print, Path], r"callbacks\[1\] is the class Path"),
        ([lambda: None], "cannot be called with one argument"),
        ([lambda a, b: None], "cannot be called with one argument"),
        ([AsksForTheModel()], "AsksForTheModel.on_step_end cannot be called.*not given the model"),
        ([WandbCallback], "is transformers' WandbCallback.* It.*use run.*report_to"),
        ([WandbCallback()], "use run.*report_to"),
        ([Disguised], "is transformers' WandbCallback, in part.*use run.*report_to"),
        ([Disguised.__new__(Disguised)], "in part.*use run.*report_to"),
        ([CannotBeMade], r"callbacks\[0\] cannot be made.*nothing installed"),
    ],
)
def test_what_is_no_callback_is_refused_before_anything(given: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        fine_tune("no-such-model", RECORDS, privacy=PRIVACY, callbacks=given, output=tmp_path / "run")
    with pytest.raises(ConfigError, match=says):
        resume_run(tmp_path / "run", callbacks=given)


SETTINGS = settings_from(
    {"model": {"name": "m"}, "data": {"path": "x.jsonl"}, "privacy": PRIVACY, "run": {"log_every": 2}}
)


def test_an_observer_is_one_by_its_class_and_can_be_called() -> None:
    refuse_no_observer(None)
    refuse_no_observer(Observer())
    for wrong in (print, object(), Observer, lambda event: None):
        with pytest.raises(ConfigError, match="observer is no Observer"):
            refuse_no_observer(wrong)

    class Short(Observer):
        def on_step(self) -> None: ...  # type: ignore[override]

    with pytest.raises(ConfigError, match=r"observer\.on_step takes other arguments"):
        refuse_no_observer(Short())


def test_callbacks_hear_public_numbers_alone() -> None:
    heard = Heard()
    both = Several((Observer(), _Callbacks([heard], [], None, SETTINGS)))
    both.on_step(StepReport(1, 12, 0.1, 99.5, 1.0))
    both.on_warning("odd")
    both.on_public_work("texts", 1, 2)
    assert "99.5" not in str(heard.given)
    assert json.dumps([more for _, _, more in heard.given]) == json.dumps(
        [{}, {"logs": {"learning_rate": 0.1, "clip_norm": 1.0}}]
    )


class Meddles(TrainerCallback):
    """Writes into all that it is given."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> None:
        logs["private"] = 1.0
        for row in state.log_history:
            row["private"] = 1.0
        state.log_history.append({"private": 1.0})
        args.private = state.private = 1.0


def test_what_a_callback_writes_reaches_no_other() -> None:
    heard = Heard()
    observer = _Callbacks([Meddles(), heard, Meddles()], [], None, SETTINGS)
    for step in (1, 2):
        observer.on_step(StepReport(step, 12, 0.1, 99.5, 1.0))
        observer.on_evaluation(step, 2.5)
    assert len(heard.given) == 9
    assert "private" not in str(heard.given)
    assert [len(state["log_history"]) for _, state, _ in heard.given] == [0, 1, 1, 2, 2, 2, 3, 4, 4]
