"""A profile of a run: it changes nothing, stays private, and tells what the steps really did."""

from __future__ import annotations

import gzip
import json
import os
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_cases import call, run_settings, write_config, write_records
from run_cases import PUBLIC, RECORDS, Bench, StopAt
from safetensors.torch import load_file

from privlora import running, stages
from privlora.profiling import watch as watching
from privlora.profiling.facts import STAGES, fit
from privlora.profiling.findings import findings
from privlora.profiling.run import _made
from privlora.profiling.trace import BATCHES, TRACE, Trace, _without_clocks, summed
from privlora.profiling.watch import StepTimes, Watch
from privlora.stages import ACCUMULATE, BACKWARD, CHARGE, EVALUATION, FORWARD, OPTIMIZER, heard_by, stage
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted

REPEATABLE = {
    "noise_multiplier": 0.5,
    "delta": 1e-3,
    "steps": 6,
    "expected_batch_size": 12,
    "public_dataset_size": 30,
    "insecure_noise_seed": 5,
}
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


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what `plan` would tell, which takes a second."""
    monkeypatch.setattr(running, "told_peak", lambda settings, model: "not here")


def facts_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "private/profile/profile.json").read_text())
    return found


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
    assert {path.name for path in (profiled / "private/profile").iterdir()} == {
        "profile.html",
        "profile.json",
        "trace.json.gz",
    }
    assert (profiled / "private/profile").stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in (profiled / "private/profile").iterdir()} == {0o600}
    losses = [(folder / "private/training_loss.jsonl").read_text().splitlines() for folder in twins]
    assert [without_names(line) for line in losses[0]] == [without_names(line) for line in losses[1]]
    states = [load_file(folder / "private/checkpoint.safetensors") for folder in twins]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_what_it_tells(twins: tuple[Path, Path]) -> None:
    facts = facts_of(twins[1])
    assert facts["steps"] == facts["planned_steps"] == 6
    assert [each["step"] for each in facts["every_step"]] == [1, 2, 3, 4, 5, 6]
    assert [each["profiler"] for each in facts["every_step"]] == [False, True, True, False, False, False]
    assert facts["measured"] == 3
    told = {line["stage"]: line for line in facts["stages"]}
    assert list(told) == [name for name in STAGES if name in told]
    assert {"draw", "collate", "forward", "loss", "backward", "capture", "accumulate"} <= told.keys()
    assert {"charge", "noise", "optimizer", "averaging", "install", "rest"} <= told.keys()
    assert sum(line["share"] for line in told.values()) == pytest.approx(1)
    assert sum(line["wall"] for line in told.values()) == pytest.approx(facts["seconds"]["median"])
    times = {line["stage"]: line["times"] for line in facts["aside"]}
    assert times == {"evaluation": 3, "checkpoint": 3}  # not that before the first step, which is no step's
    drawn = [
        json.loads(line)["units"]
        for line in (twins[1] / "private/training_loss.jsonl").read_text().splitlines()
    ]
    shapes = facts["micro_batches"]["shapes"]
    assert sum(rows for rows, _, _ in shapes) == sum(drawn)
    assert all(0 < tokens <= rows * width for rows, width, tokens in shapes)
    assert sum(tokens for _, _, tokens in shapes) == sum(each["tokens"] for each in facts["every_step"])
    assert facts["memory"]["told"]["step_bytes"] > 0


def test_the_trace_is_bounded_and_whole(twins: tuple[Path, Path]) -> None:
    traced = facts_of(twins[1])["operators"]
    assert 1 <= traced["batches"] <= BATCHES
    assert {row["stage"] for row in traced["operators"]} & {FORWARD, BACKWARD}
    with gzip.open(twins[1] / "private/profile/trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("privlora: forward") == traced["batches"]
    assert {"privlora: charge", "privlora: optimizer", "privlora: noise"} <= set(names)


def traced(folder: Path) -> Trace:
    """Of a window with a product in it, in a step that is over."""
    trace = Trace(folder, torch.device("cpu"), 1)
    trace.step_begins()
    torch.ones(2, 2) @ torch.ones(2, 2)
    trace.end()
    return trace


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
    assert trace.found is not None
    assert ("No space left" in caplog.text) is fails


def test_the_next_start_removes_what_a_kill_left_of_a_trace(
    tmp_path: Path,
) -> None:
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


def test_the_page(twins: tuple[Path, Path]) -> None:
    page = (twins[1] / "private/profile/profile.html").read_text()
    for words in (
        "PRIVATE",
        "What could be done about it",
        "A step by its stages",
        "aten::",
        "trace.json.gz",
    ):
        assert words in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.usefixtures("untold")
def test_an_interrupted_run_leaves_what_was_seen_and_a_resumed_one_the_rest(
    bench: Bench, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        bench.start(tmp_path, privacy=REPEATABLE, observer=StopAt(2), profile=True)
    assert [each["step"] for each in facts_of(tmp_path)["every_step"]] == [1, 2]
    pages: list[Path] = []
    from privlora.api import resume_run

    given = {"model": bench.model, "tokenizer": bench.tokenizer, "records": RECORDS}
    resume_run(tmp_path, on_profile=pages.append, **given)
    assert pages == [tmp_path / "private/profile/profile.html"]
    assert [each["step"] for each in facts_of(tmp_path)["every_step"]] == [3, 4, 5, 6]
    again = resume_run(tmp_path, on_profile=pages.append, **given)
    assert again.profile is None  # it takes no step
    assert len(pages) == 1


@pytest.mark.usefixtures("untold")
def test_a_run_that_fails_in_a_step_keeps_the_steps_before(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from privlora.optimizers import IterateAverage

    update, calls = IterateAverage.update, []

    def fails(self: IterateAverage) -> None:
        if stages.listener() is not None:  # not in a step on paper
            calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        update(self)

    monkeypatch.setattr(IterateAverage, "update", fails)
    with pytest.raises(KeyboardInterrupt):
        bench.start(tmp_path, privacy=REPEATABLE, profile=True)
    assert facts_of(tmp_path)["steps"] == 2
    assert stages.listener() is None


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.long)])
def test_few_steps(bench: Bench, tmp_path: Path, steps: int) -> None:
    bench.start(tmp_path, privacy={**REPEATABLE, "steps": steps}, profile=True)
    facts = facts_of(tmp_path)
    assert facts["steps"] == steps
    assert facts["operators"]["operators"]


@pytest.mark.usefixtures("untold")
def test_without_privacy(bench: Bench, tmp_path: Path) -> None:
    privacy = {"private": False, "steps": 3, "expected_batch_size": 12, "public_dataset_size": 30}
    result = bench.start(tmp_path, privacy=privacy, method="adamw", profile=True)
    assert result.profile == tmp_path / "private/profile/profile.html"
    told = {line["stage"] for line in facts_of(tmp_path)["stages"]}
    assert {FORWARD, OPTIMIZER} <= told
    assert CHARGE not in told


def test_nobody_listens_without_a_profile(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stage(FORWARD) is stage(CHARGE)  # one object that does nothing

    def unwanted(*_: object) -> None:
        raise AssertionError("nobody asked for a profile")

    monkeypatch.setattr(Watch, "__init__", unwanted)
    monkeypatch.setattr(torch.profiler, "profile", unwanted)
    bench.start(tmp_path, privacy={**REPEATABLE, "steps": 1})
    assert not (tmp_path / "private/profile").exists()


def heard(watch: Watch, step: int, *names: str) -> None:
    watch.step_begins(step)
    for name in names:
        with stage(name):
            pass


def test_stages_in_one_another() -> None:
    watch = Watch(torch.device("cpu"), 3, None)
    with heard_by(watch):
        with stage(FORWARD):  # before the first step
            pass
        watch.step_begins(1)
        with stage(OPTIMIZER), stage(CHARGE):
            pass
        with stage(EVALUATION), stage(FORWARD):  # the evaluation's own pass
            pass
        heard(watch, 2, BACKWARD)
    watch.end(whole=True)
    one, two = watch.steps
    assert one.occurred == {OPTIMIZER: 1, CHARGE: 1, EVALUATION: 1}
    assert two.occurred == {BACKWARD: 1}
    assert one.seconds == pytest.approx(sum(one.wall.values()) - one.wall[EVALUATION])
    assert [each.step for each in watch.measured()] == [2]


def test_a_gpu_is_waited_for_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, now = [], [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            now[0] += 7.0
            self.at = now[0]

        def synchronize(self) -> None:
            waits.append(self)

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    sizes = SimpleNamespace(memory_allocated=100, max_memory_allocated=900)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for name, value in vars(sizes).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    watch = Watch(torch.device("cuda"), 2, None)
    with heard_by(watch):
        heard(watch, 1, FORWARD, BACKWARD)
        heard(watch, 2, FORWARD)
    watch.end(whole=True)
    assert len(waits) == 2
    assert watch.steps[0].wall[FORWARD] == pytest.approx(0.007)  # milliseconds of events
    assert (watch.memory.before, watch.memory.most) == (100, 900)


def event(name: str, start: float, end: float, own: float = 0.0, **more: Any) -> Any:
    times = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    given = {"device_type": "DeviceType.CPU", "input_shapes": [[2, 3]], **more}
    return SimpleNamespace(
        name=name, time_range=times, self_cpu_time_total=own, self_device_time_total=2 * own, **given
    )


def test_operators_belong_to_the_stage_around_them() -> None:
    events = [
        event("privlora: forward", 0, 100),
        event("aten::mm", 10, 60, 50),
        event("aten::mm", 61, 71, 10, input_shapes=[[9, 9]]),
        event("privlora: backward", 101, 300),
        event("aten::mm", 110, 180, 70),
        event("aten::nonzero", 181, 182, 1),
        event("aten::add", 310, 315, 5),
        event("cudaLaunchKernel", 316, 317, 1),
        event("kernel", 320, 420, device_type="DeviceType.CUDA"),
    ]
    on_cpu = summed(events, 50, 2, "cpu")
    rows = {(row.stage, row.name): row for row in on_cpu.operators}
    assert rows[FORWARD, "aten::mm"].calls == 2
    assert rows[FORWARD, "aten::mm"].seconds == pytest.approx(60e-6)
    assert rows[FORWARD, "aten::mm"].shapes == "2x3"
    assert rows[BACKWARD, "aten::mm"].seconds == pytest.approx(70e-6)
    assert ("rest", "aten::add") in rows
    assert (on_cpu.read_backs, on_cpu.launches, on_cpu.busy) == (1, 1, None)
    on_gpu = summed(events, 50, 2, "cuda")
    assert on_gpu.operators[0].seconds == pytest.approx(140e-6)
    assert on_gpu.busy == pytest.approx(100e-6)


def steps_like(seconds: Callable[[int], float], count: int = 12) -> list[StepTimes]:
    found = []
    for n in range(count):
        step = StepTimes(n, positions=1000 + 100 * n)
        step.wall["forward"] = seconds(step.positions)
        found.append(step)
    return found


def test_a_line_through_steps() -> None:
    line = fit(steps_like(lambda positions: 2 + 0.001 * positions))
    assert line is not None
    assert (line["fixed"], line["per_position"]) == (pytest.approx(2), pytest.approx(0.001))
    assert fit(steps_like(lambda positions: 2 + 0.001 * positions, count=4)) is None
    assert fit(steps_like(lambda positions: 3.0 + (positions // 100) % 2)) is None  # no line
    assert fit(steps_like(lambda positions: 9 - 0.001 * positions)) is None


def made_up(twins: tuple[Path, Path], **changes: Any) -> dict[str, Any]:
    """The facts of a run in which nothing stands out, with others in their place; of dicts, only what is given."""
    facts = facts_of(twins[1])
    shares = changes.pop("shares", {})
    facts["stages"] = [
        {**line, "share": {"forward": 0.45, "backward": 0.5, **shares}.get(line["stage"], 0.001)}
        for line in facts["stages"]
    ]
    facts |= {"threads": 4, "cores": 4, "cpu_seconds": 40.0, "aside": [], "fit": None, "checkpointing": False}
    facts["seconds"] = {"median": 10.0, "low": 9.0, "high": 11.0}
    facts["micro_batches"] |= {"padding": 0.05}
    facts["memory"] |= {"of_steps": None}
    for name, value in changes.items():
        facts[name] = {**facts[name], **value} if isinstance(value, dict) and facts[name] else value
    return facts


ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "95% of a step, and nothing else stands out"),
    "padding": ({"micro_batches": {"padding": 0.55}}, "more than half of the positions are padding"),
    "bfloat16": (
        {"dtype": "bfloat16", "micro_batches": {"padding": 0.4, "width": [32, 32, 64]}},
        "padded by 1 to 32 columns",
    ),
    "alone": ({"micro_batches": {"alone": True, "of_a_step": 12}}, "by itself, 12 passes a step"),
    "averaging": ({"shares": {"averaging": 0.06}}, "Averaging is 6% of a step"),
    "charge": ({"shares": {"charge": 0.2}}, "Put run.output on a local disk"),
    "noise": ({"shares": {"noise": 0.08}}, "Noise takes 8% of a step"),
    "clip and sum": ({"shares": {ACCUMULATE: 0.3}}, "Clipping and summing takes 30% of a step"),
    "one thread": ({"threads": 1, "cpu_seconds": 10.0}, "1 of 4 cores: OMP_NUM_THREADS"),
    "shared cores": ({"cpu_seconds": 8.0}, "Of 4 threads 0.8 computed on average"),
    "recomputing": ({"checkpointing": True}, "Activations are recomputed"),
    "fixed": ({"fit": {"fixed": 6.0, "per_position": 1e-3}}, "About 6 s of a step come whatever its length"),
    "evaluation": (
        {"aside": [{"stage": "evaluation", "times": 4, "each": 20.0, "of_a_step": 2.0}]},
        "run.evaluate_every says how often",
    ),
    "idle": (
        {"on_gpu": True, "dtype": "bfloat16", "operators": {"busy": 0.2, "seconds": 1.0, "launches": 900}},
        "The GPU computes 20% of the time",
    ),
    "float32 on a GPU": (
        {"on_gpu": True, "operators": {"busy": 0.9, "seconds": 1.0}},
        "model.dtype=bfloat16 is several times as fast",
    ),
    "memory": (
        {"memory": {"of_steps": 4 * 2**30, "told": {"step_bytes": 2**30, "rows": 1, "width": 8}}},
        "MALLOC_MMAP_THRESHOLD_",
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_follows_from_the_numbers(twins: tuple[Path, Path], name: str) -> None:
    changes, words = ADVICE[name]
    facts = made_up(twins, **changes)
    found = findings(facts)
    assert len(found) == 1
    assert words in found[0]


def test_memory_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_status", lambda name: None)
    memory = watching.Memory(torch.device("cpu"))
    memory.begin()
    memory.look(calm=True)
    assert memory.before is None
    assert memory.most is not None


@pytest.fixture
def config(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cli_cases import save_tiny_model

    write_records(tmp_path / "records.jsonl")
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    return write_config(tmp_path, run_settings(model, tmp_path))


@pytest.mark.usefixtures("drawn")
@pytest.mark.usefixtures("untold")
def test_as_a_user_types_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = config.parent / "run/private/profile/profile.html"
    ended = call(capsys, "train", config, "--profile")
    assert ended.code == 0, ended.err
    assert f"PRIVATE, where the time of a step went: {page}" in ended.err
    assert f"profile:  {page}\n" in ended.out
    found = call(capsys, "train", config, f"run.output={config.parent / 'other'}", "--profile", "--json").json
    assert found["profile"] == str(config.parent / "other/private/profile/profile.html")
    plain = call(capsys, "train", config, f"run.output={config.parent / 'third'}", "--json").json
    assert "profile" not in plain
    resumed = call(capsys, "resume", config.parent / "third", "--profile")
    assert resumed.code == 0
    assert "profile" not in resumed.out  # it is over: there is no step to look at


def test_what_takes_no_steps_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = write_records(config.parent / "public.jsonl", first=500)
    votes = ["method.name=aug-pe", "synthesis.generator=file", f"synthesis.file={public}"]
    refused = call(capsys, "train", config, *votes, "--profile")
    assert refused.code == 2
    assert "releases votes and takes no steps" in refused.err
    assert not (config.parent / "run").exists()


@pytest.mark.usefixtures("untold")
def test_a_signal_leaves_the_page(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from privlora.training.progress import RichObserver

    monkeypatch.setattr(RichObserver, "on_step", lambda self, report: signal.raise_signal(signal.SIGINT))
    stopped = call(capsys, "train", config, "--profile")
    assert stopped.code == 130
    assert "PRIVATE, where the time of a step went" in stopped.err
    assert (config.parent / "run/private/profile/profile.html").exists()


def test_public_work_that_waits_for_others() -> None:
    watch = Watch(torch.device("cpu"), 1, None)
    with heard_by(watch):
        watch.step_begins(1)
        with stage(stages.PREPARE), stage(stages.PROCESSES):
            pass
        with stage(stages.PREPARE), stage(FORWARD):
            watch.micro_batch(4, 8, 30)  # of public texts
    watch.end(whole=True)
    assert watch.steps[0].occurred == {stages.PREPARE: 2, stages.PROCESSES: 1}
    assert watch.steps[0].batches == 0
