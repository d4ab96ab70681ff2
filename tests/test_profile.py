"""A profile of a run: it changes nothing, stays private, and tells what the steps really did."""

from __future__ import annotations

import gzip
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from run_cases import PUBLIC, RECORDS, Bench
from safetensors.torch import load_file

from privlora.profiling import BATCHES, TRACE, Window, _made, _without_clocks
from privlora.stages import CHARGE, FORWARD, stage
from privlora.training.files import RunFolder

REPEATABLE = promise(steps=6, batch=12, records=30, noise_multiplier=0.5, insecure_noise_seed=5)
RANDOM = {"run_id", "salt", "prev", "charge", "hash"}  # in every run


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="module")
def twins(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the same run without a profile and with one."""
    found = []
    for name, profile in (("plain", False), ("profiled", True)):
        folder = tmp_path_factory.mktemp(name) / "run"
        run = {"evaluate_every": 2, "tokens_per_micro_batch": 200}
        bench.start(folder, privacy=REPEATABLE, evaluation=PUBLIC, run=run, profile=profile)
        found.append(folder)
    return found[0], found[1]


def named(folder: Path, place: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / place).iterdir() if path.is_file()}


def without_names(line: str) -> Any:
    return {key: value for key, value in json.loads(line).items() if key not in RANDOM}


def test_the_release_is_the_same_to_the_byte(twins: tuple[Path, Path]) -> None:
    assert all(path.is_file() for folder in twins for path in (folder / "not-private").iterdir())
    plain, profiled = (named(folder, "not-private") for folder in twins)
    assert plain.keys() == profiled.keys()
    for name in ("adapter_model.safetensors", "adapter_config.json", "evaluations.jsonl"):
        assert plain[name] == profiled[name], name
    ledgers = [files["ledger.jsonl"].decode().splitlines() for files in (plain, profiled)]
    assert [without_names(line) for line in ledgers[0]] == [without_names(line) for line in ledgers[1]]
    for files in (plain, profiled):
        assert not [name for name, content in files.items() if b"profil" in content.lower()]


def test_private_files_are_the_same_but_for_the_profile(twins: tuple[Path, Path]) -> None:
    plain, profiled = twins
    assert named(plain, "private").keys() == named(profiled, "private").keys()
    assert not (plain / "private/profile").exists()
    assert {path.name for path in (profiled / "private/profile").iterdir()} == {TRACE}
    assert (profiled / "private/profile").stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in (profiled / "private/profile").iterdir()} == {0o600}
    losses = [(folder / "private/training_loss.jsonl").read_text().splitlines() for folder in twins]
    assert [without_names(line) for line in losses[0]] == [without_names(line) for line in losses[1]]
    states = [load_file(folder / "private/checkpoint.safetensors") for folder in twins]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def ranges_of(folder: Path) -> list[str]:
    """Names of all that a trace holds."""
    with gzip.open(folder / "private/profile" / TRACE) as file:
        return [str(event.get("name")) for event in json.load(file)["traceEvents"]]


def test_the_trace_is_bounded_and_whole(twins: tuple[Path, Path]) -> None:
    names = ranges_of(twins[1])
    assert 1 <= names.count("privlora: forward") <= BATCHES
    assert {"privlora: charge", "privlora: optimizer", "privlora: noise", "privlora: backward"} <= set(names)


def traced(folder: Path) -> Window:
    """Of a window with a product in it, in a step that is over."""
    window = Window(folder, torch.device("cpu"), 1)
    window.step_begins()
    torch.ones(2, 2) @ torch.ones(2, 2)
    window.end()
    return window


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "disk full"])
def test_a_trace_on_its_way_is_for_its_owner_and_in_its_folder(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, elsewhere = tmp_path / "profile", tmp_path / "tmp"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    compress, seen = gzip.GzipFile.__init__, list[tuple[dict[str, int], dict[str, int]]]()

    def on_the_way(*given: Any, **named: Any) -> None:
        seen.append((modes(folder), modes(elsewhere)))
        if fails:
            raise OSError(28, "No space left on device")
        compress(*given, **named)

    monkeypatch.setattr(gzip.GzipFile, "__init__", on_the_way)
    monkeypatch.setattr(gzip.GzipFile, "__del__", lambda _: None, raising=False)  # of one that was never made
    before = os.umask(0o022)
    try:
        trace = traced(folder)
    finally:
        os.umask(before)
    assert len(seen) == 1
    assert set(seen[0][0].values()) == {0o600}
    assert seen[0][1] == modes(elsewhere) == {}
    assert modes(folder) == ({} if fails else {TRACE: 0o600})
    assert trace.path == (None if fails else folder / TRACE)
    assert ("No space left" in caplog.text) is fails


def test_the_next_start_removes_what_a_kill_left_of_a_trace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for sweep in (folder.remove_leftovers, lambda: _made(folder.profile)):
        folder.profile.mkdir(mode=0o755, exist_ok=True)
        folder.profile.chmod(0o755)
        names = [".trace.json.privlora-tmp", ".trace.json.privlora-tmp.tmp", ".trace.json.gz.privlora-tmp"]
        for name in (*names, TRACE):
            (folder.profile / name).write_text("x")
        sweep()
        assert [path.name for path in folder.profile.iterdir()] == [TRACE]
    assert stat.S_IMODE(folder.profile.stat().st_mode) == 0o700


def test_no_clock_reaches_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's profiler writes the second at which it starts and stops."""
    with _without_clocks():
        os.write(2, b"USDT:2026-01-01 00:00:00 profiler_start")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_an_interrupted_run_leaves_its_trace_and_a_resumed_one_its_own(bench: Bench, tmp_path: Path) -> None:
    bench.stopped(tmp_path, 2, privacy=REPEATABLE, profile=True)
    assert "privlora: forward" in ranges_of(tmp_path)
    from privlora.api import resume_run
    from privlora.training.observer import Observer

    traces: list[Path] = []

    class Hears(Observer):
        def on_profile(self, trace: Path) -> None:
            traces.append(trace)

    (tmp_path / "private/profile" / TRACE).unlink()
    given = {"model": bench.model, "tokenizer": bench.tokenizer, "records": RECORDS, "observer": Hears()}
    resume_run(tmp_path, profile=True, **given)
    assert traces == [tmp_path / "private/profile" / TRACE]
    assert "privlora: forward" in ranges_of(tmp_path)
    again = resume_run(tmp_path, profile=True, **given)
    assert again.profile is None  # it takes no step
    assert len(traces) == 1


def test_without_privacy(bench: Bench, tmp_path: Path) -> None:
    privacy = {"private": False, "steps": 3, "expected_batch_size": 12, "public_dataset_size": 30}
    result = bench.start(tmp_path, privacy=privacy, method="adamw", profile=True)
    assert result.profile == tmp_path / "private/profile" / TRACE
    names = ranges_of(tmp_path)
    assert {"privlora: forward", "privlora: optimizer"} <= set(names)
    assert "privlora: charge" not in names


def test_nobody_listens_without_a_profile(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stage(FORWARD) is stage(CHARGE)  # one object that does nothing

    def unwanted(*_: object) -> None:
        raise AssertionError("nobody asked for a profile")

    monkeypatch.setattr(Window, "__init__", unwanted)
    monkeypatch.setattr(torch.profiler, "profile", unwanted)
    bench.start(tmp_path, privacy={**REPEATABLE, "steps": 1})
    assert not (tmp_path / "private/profile").exists()
