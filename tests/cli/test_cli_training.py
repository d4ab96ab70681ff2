"""Training and resuming: what is printed where, and interruptions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_cases import LOADING, TRAINING, WRITING, Call, check, phases, run_settings, write_config

import privlora
from privlora.accounting import read_ledger
from privlora.config import load_settings
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder
from privlora.training.observer import StepReport
from privlora.training.progress import RichObserver
from privlora.training.takeover import is_over


def test_json_is_alone_on_stdout(model: Path, folder: Path, call: Call) -> None:
    ended = call("train", write_config(folder, run_settings(model, folder)), "privacy.steps=4", "--json")
    assert ended.code == 0, ended.err
    found = ended.json
    summary = read_ledger(found["ledger"])
    assert found["steps"] == summary.charges == 4
    assert found["private"] is True
    assert found["epsilon"] == summary.epsilon()
    assert found["delta"] == 1e-3
    assert found["adjacency"] == "add-or-remove-one"
    assert found["accountant"] == "pld"
    assert found["versions"]["dp-accounting"]
    assert Path(found["report"]).exists()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(found["adapter"]))
    assert "step 4/4" in ended.err


def test_the_promise_names_all_that_it_depends_on(model: Path, folder: Path, call: Call) -> None:
    ended = call("train", write_config(folder, run_settings(model, folder)))
    run = folder / "run" / "release"
    for place in (f"adapter:  {run}\n", f"ledger:   {run}/ledger.jsonl\n", f"report:   {run}/report.html\n"):
        assert place in ended.out
    for word in ("at delta 0.001", "for each record", "add-or-remove-one", "poisson sampling", "PLD"):
        assert word in ended.out
    assert "dp-accounting" not in ended.out  # in the ledger and in --json


@pytest.mark.parametrize(
    ("groups", "name", "words"),
    [
        ({"method": {"learning_rate": 1e-3}}, "rate", "0.001 is 1/283 of the method's default"),
        ({"privacy": {"expected_batch_size": 0.5, "steps": 1}}, "empty", "61% of steps draw none"),
    ],
)
def test_an_odd_setting_is_told_as_a_plan_tells_it(
    groups: dict[str, Any], name: str, words: str, model: Path, folder: Path, call: Call
) -> None:
    config = write_config(folder, run_settings(model, folder, **groups))
    shown = call("plan", config).out.splitlines()
    (said,) = [line.removeprefix(name).strip() for line in shown if line.startswith(f"{name} ")]
    assert words in said
    assert call("train", config).err.splitlines().count(f"WARNING: {said}") == 1
    assert said not in call("resume", folder / "run").err  # it is too late


@pytest.mark.parametrize(
    "privacy", [{"private": False, "noise_multiplier": None}, {"insecure_noise_seed": 1}]
)
def test_what_is_not_private_says_so(privacy: dict[str, Any], model: Path, folder: Path, call: Call) -> None:
    settings = run_settings(model, folder, privacy=privacy)
    ended = call("train", write_config(folder, settings))
    assert ended.code == 0, ended.err
    assert "NOT PRIVATE" in ended.out
    assert "NOT PRIVATE" in ended.err.splitlines()[1]
    assert phases(ended) == list(TRAINING)
    assert "ε" not in ended.out + ended.err
    again = call("resume", folder / "run", "--json")
    assert again.err.splitlines()[2].startswith("this run is over already: no step is taken")
    assert again.json["private"] is False
    assert "epsilon" not in again.json


def _interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    shown = RichObserver.on_step

    def on_step(self: RichObserver, report: StepReport) -> None:
        shown(self, report)
        if report.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RichObserver, "on_step", on_step)


def test_ctrl_c_keeps_everything_and_resume_goes_on(
    model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = write_config(folder, run_settings(model, folder, privacy={"steps": 5})), folder / "run"
    with monkeypatch.context() as patch:
        _interrupt_at(2, patch)
        stopped = call("train", config, "--json")
    assert stopped.code == 130
    assert stopped.out == ""
    last = stopped.err.splitlines()[-1]
    assert last == f"interrupted: after step 2, which is saved. Continue with `privlora resume {run}`"
    assert "Traceback" not in stopped.err
    assert not (run / "release" / "adapter_model.safetensors").exists()
    # Only the ledger says that a run is over, never a report.
    (run / "release" / "privacy_report.json").write_text("{}")
    check(call("train", config), "holds a run already: its ledger shows charges", "privlora resume")
    charged = read_ledger(run / "release" / "ledger.jsonl")
    records = load_settings(config).data.path
    Path(records).rename(folder / "moved.jsonl")
    lost = call("resume", run)
    check(lost, "data.path (line ", "there is no file", "say where they lie now: ", "--data FILE")
    (folder / "moved.jsonl").rename(records)
    resumed = call("resume", run, "--json")
    assert resumed.code == 0, resumed.err
    spent = f"epsilon so far {rounded_up(charged.epsilon())} (δ 0.001)"
    assert f"going on after step 2 of 5, {spent}, by its first settings" in resumed.err
    assert phases(resumed) == [LOADING, TRAINING[3], TRAINING[2], "preparing the next step", WRITING]
    ledger = read_ledger(run / "release" / "ledger.jsonl")
    assert (ledger.charges, ledger.closed) == (5, True)
    assert "step 3/5" in resumed.err
    assert "step 2/5" not in resumed.err
    assert resumed.json["epsilon"] == ledger.epsilon()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_other_signals_save_as_ctrl_c_does(
    number: signal.Signals, model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupt_at(2, monkeypatch, number)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup it would be ignored
    try:
        stopped = call("train", write_config(folder, run_settings(model, folder)))
    finally:
        signal.signal(number, before)
    assert stopped.code == 128 + number
    assert stopped.err.splitlines()[-1].startswith("interrupted: after step 2, which is saved")
    assert (folder / "run/private/checkpoint.safetensors").exists()


@pytest.mark.parametrize("closed", ["broken", "never there"])
def test_a_run_that_nobody_reads_goes_on_to_its_end(closed: str, model: Path, folder: Path) -> None:
    """In a process of its own; it writes into a pipe without a reader, or has neither stdout nor stderr."""
    config = write_config(folder, run_settings(model, folder))
    line = [sys.executable, "-m", "privlora", "train", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    reader, writer = os.pipe()
    os.close(reader)
    shut = (lambda: os.closerange(1, 3)) if closed == "never there" else None
    ended = subprocess.run(
        line, stdout=writer, stderr=writer, preexec_fn=shut, env=environment, check=False, timeout=300
    )
    os.close(writer)
    assert ended.returncode == 0
    assert is_over(RunFolder(folder / "run"))
    assert (folder / "run/release/report.html").exists()
    for line_of in (folder / "run/release/ledger.jsonl").read_text().splitlines():
        json.loads(line_of)


def test_an_interruption_before_the_start_leaves_nothing(
    model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config = write_config(folder, run_settings(model, folder))
    monkeypatch.setattr("privlora.running.load_all", interrupt)
    stopped = call("train", config)
    assert stopped.code == 130
    assert (
        stopped.err.splitlines()[-1]
        == "interrupted: before the run started; nothing was released or spent, and the same command begins anew"
    )
    assert not (folder / "run").exists()


def test_a_report_that_somebody_put_there_makes_no_run_finished(finished: Path, folder: Path) -> None:
    run = RunFolder(Path(shutil.copytree(finished / "run", folder / "run")))
    assert is_over(run)
    run.report.unlink()
    assert is_over(run)
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(lines[:2]))
    run.report.write_text("{}")
    assert not is_over(run)


def test_full_memory_of_a_device_is_one_line(
    model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate too much")

    monkeypatch.setattr("privlora.training.step.micro_batch_gradients", full)
    settings = run_settings(model, folder, privacy={"expected_batch_size": 30})
    ended = call("train", write_config(folder, settings))
    assert ended.code == 2
    assert "error: out of device memory. Fix: lower run.tokens_per_micro_batch" in ended.err
    assert f"privlora resume {folder / 'run'}" in ended.err
