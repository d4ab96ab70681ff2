"""What is published says nothing about how fast a run went, how often it stopped, or where its files lie."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
from cli_cases import run_settings, save_tiny_model, write_config, write_records
from run_cases import PRIVACY, STEPS, Bench

from privlora.accounting import read_ledger
from privlora.cli import main
from privlora.mechanisms import NoiseSource
from privlora.training import assembly, step
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer, StepReport
from privlora.training.promise import sampler

PUBLIC = [{"text": f"a public note, number {i}."} for i in range(3)]
SLOW_RECORD = 3
MORNING, NIGHT = (datetime(2031, 5, 17, hour, tzinfo=UTC).timestamp() for hour in (9, 21))
NAMED = {"run_id", "salt", "prev"}  # random in every run


class Clock:
    """Stands for every clock of this process; each look at it takes ten milliseconds."""

    def __init__(self, now: float) -> None:
        self.now = now

    def read(self) -> float:
        self.now += 0.01
        return self.now


@contextmanager
def ruled_by(clock: Clock) -> Iterator[pytest.MonkeyPatch]:
    class Datetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Datetime:
            return cls.fromtimestamp(clock.read(), tz)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("time", "monotonic", "perf_counter", "process_time"):
            patch.setattr(time, name, clock.read)
        for module in [module for name, module in sys.modules.items() if name.startswith("privlora")]:
            if getattr(module, "datetime", None) is datetime:
                patch.setattr(module, "datetime", Datetime)
        yield patch


class Stops(Observer):
    """Sends SIGINT to this process after these steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def on_step(self, report: StepReport) -> None:
        if report.step in self.steps:
            os.kill(os.getpid(), signal.SIGINT)


def trained(
    bench: Bench, root: Path, start: float, *, slow: float = 0.0, stops: tuple[int, ...] = ()
) -> RunFolder:
    """A private run whose noise and batches are those of every other; ``slow``: seconds that one record takes."""
    clock = Clock(start)
    noise, streams = NoiseSource(7), {}

    def draws(privacy: Any, units: int) -> Any:
        repeated = privacy.model_copy(update={"insecure_noise_seed": 7})
        return streams.setdefault(units, sampler(repeated, units))

    def batches(records: Any, *args: Any, **options: Any) -> Any:
        clock.now += slow if any(SLOW_RECORD in unit for unit in records) else 0.0
        return original(records, *args, **options)

    original = step.micro_batches
    with ruled_by(clock) as patch:
        patch.setattr(assembly, "NoiseSource", lambda seed: noise)
        patch.setattr(assembly, "sampler", draws)
        patch.setattr(step, "micro_batches", batches)
        with nullcontext() if not stops else pytest.raises(Interrupted):
            bench.start(root, observer=Stops(stops), evaluation=PUBLIC, run={"evaluate_every": 4})
        for _ in stops[1:]:
            with pytest.raises(Interrupted):
                bench.resume(root, PUBLIC, Stops(stops))
        if stops:
            bench.resume(root, PUBLIC)
    assert clock.now - start >= slow  # the record was drawn
    return RunFolder(root)


def everything(folder: RunFolder) -> dict[str, tuple[int, bytes]]:
    """Every path of the folder: when it was changed last, and its bytes but for the named fields."""
    run_id = read_ledger(folder.ledger).run_id
    found = {}
    for path in [folder.release, *sorted(folder.release.rglob("*"))]:
        content = path.read_bytes().replace(run_id.encode(), b"RUN") if path.is_file() else b""
        if path == folder.ledger:
            lines = [json.loads(line) for line in content.splitlines()]
            content = repr([{k: v for k, v in line.items() if k not in NAMED} for line in lines]).encode()
        if path == folder.report:  # of files, one of them random, that are compared themselves
            report = json.loads(content)
            for one in (*report["files"].values(), report["sha256"]):
                content = content.replace(one.encode(), b"HASH")
        found[str(path.relative_to(folder.root))] = path.stat().st_mtime_ns, content
    return found


def test_neither_speed_nor_interruptions_are_published(bench: Bench, tmp_path: Path) -> None:
    one = trained(bench, tmp_path / "one", MORNING)
    two = trained(bench, tmp_path / "two", NIGHT, slow=300.0)
    three = trained(bench, tmp_path / "three", MORNING, stops=(5, 9))
    assert read_ledger(three.ledger).charges == STEPS
    expected = everything(one)
    assert len(expected) == 8  # the folder, and seven files
    midnight = int(datetime(2031, 5, 17, tzinfo=UTC).timestamp()) * 10**9
    assert {changed for changed, _ in expected.values()} == {midnight}
    for other in (two, three):
        found = everything(other)
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


# 9:05, 23:59:59, T12:00; and seconds since 1970, of the years 2001 to 2065.
TIME_OF_DAY = re.compile(r"(?<![\d.])([01]?\d|2[0-3]):[0-5]\d(?!\d)|(?<![\d.])[12]\d{9}(?!\d)")

# Salts, hashes and run_ids, some of whose digits may look like a time.
RANDOM = re.compile(r"\b[0-9a-f]{16,}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


def test_no_text_holds_a_time_of_day_or_a_place(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base model")
    write_records(tmp_path / "records.jsonl")
    held_out = write_records(tmp_path / "held_out.jsonl", 8, first=100)
    settings = run_settings(base, tmp_path, data={"evaluation": str(held_out)})
    assert main(["train", str(write_config(tmp_path, settings))]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    for form in ("as-lora", "merge"):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / form), f"--{form}"]) == 0
    folder = RunFolder(tmp_path / "run")
    folders = [folder.release, tmp_path / "as-lora", tmp_path / "merge"]
    files = [path for place in folders for path in place.iterdir()]
    texts = [path for path in files if path.suffix != ".safetensors" and path.name != "tokenizer.json"]
    assert len(texts) >= 14
    places = (
        str(tmp_path),
        "records.jsonl",
        "held_out",
        f"{Path.home()}/",
        f"{tempfile.gettempdir()}/pytest",
    )
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert TIME_OF_DAY.search(RANDOM.sub("", text)) is None, path
        assert [place for place in places if place in text] == [], path
    assert {path.stat().st_mtime % 86400 for path in [*files, *folders]} == {0.0}
    config = json.loads((folder.release / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "path/to/base model"
    assert str(base) in folder.settings.read_text()  # which stay at home
    card = (folder.release / "README.md").read_text()
    assert "from_pretrained('path/to/base model')" in card


@pytest.mark.parametrize(
    "text", ["2031-05-17T09:00:12+00:00", "at 9:05", "23:59:59", "1937124000", "written 1937124000.5"]
)
def test_the_search_would_find_one(text: str) -> None:
    assert TIME_OF_DAY.search(text)


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("change", [{"private": False, "target_epsilon": None}, {"insecure_noise_seed": 1}])
def test_what_protects_nobody_is_not_called_a_release(
    change: dict[str, Any], bench: Bench, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    privacy = {k: v for k, v in {**PRIVACY, **change}.items() if v is not None}
    method = "adamw" if "private" in change else "prism"
    result = bench.start(root, method=method, privacy=privacy)
    assert result.release == root / "not-private"
    assert (result.release / "adapter_model.safetensors").exists()
    assert bench.resume(root).release == result.release
    assert {path.name for path in root.iterdir()} == {"not-private", "private"}
