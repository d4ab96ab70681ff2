"""run.report_to: public numbers alone, and none to a service before the run has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from run_cases import PRIVACY, PUBLIC, RECORDS, STEPS, Bench

import privlora.training.loggers as module
from privlora.api import fine_tune
from privlora.errors import ConfigError
from privlora.training.callbacks import PublicEvent
from privlora.training.files import RunFolder, read_lines
from privlora.training.loop import Interrupted

ALL = ["jsonl", "tensorboard", "wandb", "trackio"]


class Sent:
    """Fakes of all three packages, and what they were told in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[Any, ...]] = []
        wandb, trackio = ModuleType("wandb"), ModuleType("trackio")

        def init(name: str) -> Any:
            def begin(**options: Any) -> Any:
                self.told.append((name, "init", options))
                return SimpleNamespace(log=log(name), finish=lambda: self.told.append((name, "finish")))

            return begin

        def log(name: str) -> Any:
            return lambda values, step: self.told.append((name, step, dict(values)))

        fakes: dict[str, Any] = {"Settings": lambda **options: options, "init": init("wandb")}
        vars(wandb).update(fakes)
        vars(trackio).update(init=init("trackio"), log=log("trackio"), finish=lambda: None)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.setitem(sys.modules, "trackio", trackio)
        monkeypatch.setattr(module, "find_spec", lambda name: object())
        monkeypatch.setattr(module, "_summary_writer", lambda: self.writer)

    def writer(self, folder: str) -> Any:
        assert folder.endswith("private/tensorboard")

        def add(name: str, value: float, step: int, walltime: float) -> None:
            self.told.append(("tensorboard", step, {name: value}, walltime))

        return SimpleNamespace(add_scalar=add, flush=lambda: None, close=lambda: None)


def tune(folder: Path, records: Any = RECORDS, **options: Any) -> Any:
    run = {"report_to": ALL, "log_every": 5, "label": "notes", "checkpoint_every": 100}
    return Bench().start(folder, records=records, **{"run": run, **options})


@pytest.mark.usefixtures("quick_reports")
def test_neighbouring_records_log_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By repeatable noise, without evaluation: steps, epsilon, rates and clip norms follow from public settings."""
    found = []
    for number, records in enumerate((RECORDS, RECORDS[:-1])):
        sent = Sent(monkeypatch)
        privacy = {**PRIVACY, "insecure_noise_seed": 5}
        result = tune(tmp_path / str(number), records, privacy=privacy)
        told = repr(sent.told).replace(str(tmp_path / str(number)), "")
        found.append((told, (result.release / "metrics.jsonl").read_bytes()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("quick_reports")
def test_what_each_logger_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, at_the_last_step = Sent(monkeypatch), list[tuple[Any, ...]]()

    def listen(event: PublicEvent) -> None:
        if event.step == STEPS and event.kind == "step":
            at_the_last_step.extend(sent.told)

    result = tune(tmp_path / "run", evaluation=PUBLIC, callbacks=[listen])
    assert {row[0] for row in at_the_last_step} == {"tensorboard"}  # services hear of it when all is over
    for name in ("wandb", "trackio"):
        rows = [row for row in sent.told if row[0] == name]
        assert rows[0][1] == "init"
        assert rows[0][2]["name"] == "notes"
        logged = {row[1]: row[2] for row in rows if isinstance(row[1], int)}
        assert list(logged) == [0, 1, 5, 10, STEPS]
        assert logged[5].keys() == {"epsilon", "learning_rate"}
        assert logged[STEPS].keys() == {"epsilon", "learning_rate", "held_out_loss"}
        assert logged[STEPS]["epsilon"] == pytest.approx(result.epsilon)
    (begun,) = [row[2] for row in sent.told if row[:2] == ("wandb", "init")]
    assert begun.keys() == {"project", "name", "dir", "settings"}
    assert begun["dir"] == str(tmp_path / "run/private")
    off = ("disable_code", "disable_git", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")
    assert all(begun["settings"][name] for name in off)
    assert not begun["settings"]["save_code"]
    assert begun["settings"]["console"] == "off"
    assert begun["settings"]["program"] == "privlora"  # else the path of the script
    (begun,) = [row[2] for row in sent.told if row[:2] == ("trackio", "init")]
    assert not any(begun[name] for name in ("auto_log_gpu", "auto_log_cpu", "embed"))
    assert {row[3] for row in sent.told if row[0] == "tensorboard"} == {0.0}
    names = {name for row in sent.told if isinstance(row[1], int) for name in row[2]}
    assert names == {"epsilon", "learning_rate", "clip_norm", "held_out_loss"}


@pytest.mark.usefixtures("quick_reports")
def test_lines_do_not_show_where_a_run_broke(tmp_path: Path) -> None:
    def stop(event: PublicEvent) -> None:
        if event.step == 7:
            event.stop()

    run = {"report_to": "jsonl", "log_every": 5, "checkpoint_every": 100}
    with pytest.raises(Interrupted):
        tune(tmp_path / "run", run=run, callbacks=[stop])
    lines = RunFolder(tmp_path / "run").metrics
    assert [row["step"] for row in read_lines(lines)] == [1, 5]
    assert {name for row in read_lines(lines) for name in row} == {
        "step",
        "epsilon",
        "learning_rate",
        "clip_norm",
    }
    Bench().resume(tmp_path / "run")
    assert (
        tune(tmp_path / "whole", run=run).release.joinpath("metrics.jsonl").read_bytes() == lines.read_bytes()
    )
    rows = read_lines(lines)
    assert [row["step"] for row in rows] == [1, 5, 10, STEPS]
    assert rows[0].keys() == {"step", "epsilon", "learning_rate", "held_out_loss"}
    assert lines.stat().st_mtime == (lines.parent / "ledger.jsonl").stat().st_mtime


@pytest.mark.usefixtures("quick_reports")
def test_a_service_that_fails_harms_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Sent(monkeypatch)

    def fails(**options: Any) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(sys.modules["wandb"], "init", fails)
    result = tune(tmp_path / "run", run={"report_to": ["wandb"], "log_every": 50})
    assert result.epsilon is not None
    assert "wandb did not take the run's numbers (PermissionError: no key)" in caplog.text


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_told_before_anything(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"needs the package {name}.*Fix: pip install 'privlora\[{name}\]'"
    ):
        fine_tune("no-such", RECORDS, privacy=PRIVACY, run={"report_to": name}, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
