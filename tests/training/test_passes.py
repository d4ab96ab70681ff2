"""Runs that draw balls in bins, from start to end: who is drawn when, what is kept, and crashes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rank_cases import together
from run_cases import PRIVACY, RECORDS, STEPS, Bench, StopAt, check_finished, no_space_at, side_log

from privlora.accounting import compose_ledgers, read_ledger
from privlora.accounting.events import BallsInBinsSampling
from privlora.auditing.rerun import refuse_settings
from privlora.config import PrivacySettings, checked, settings_from
from privlora.config.auto import in_whole_passes
from privlora.data.sampling import BallsInBinsSampler
from privlora.errors import ConfigError, PrivacyError
from privlora.reporting.verifying import verify
from privlora.stacked.teams import _check
from privlora.training.loop import Interrupted

BINS = 5
NOTHING = {"model": {"name": "m"}, "data": {"path": "d"}}
PASSES = {**PRIVACY, "sampling": "balls-in-bins"}


@pytest.fixture(scope="module")
def bench() -> Bench:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Bench()


@contextmanager
def watched(log: Path) -> Iterator[None]:
    """Write a line for each draw: the step that the ledger is at, and who was drawn."""
    draw = BallsInBinsSampler.draw

    def noted(self: BallsInBinsSampler) -> Any:
        found = draw(self)
        with log.open("a") as out:
            out.write(json.dumps([self._charged(), found.tolist()]) + "\n")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BallsInBinsSampler, "draw", noted)
        yield


def check_turns(log: Path) -> None:
    """Whatever was lost in between, nobody is in two steps of a pass, and all are in a whole one."""
    drawn: dict[int, list[list[int]]] = {}
    for step, units in map(json.loads, log.read_text().splitlines()):
        drawn.setdefault(step, []).append(units)
    assert sorted(drawn) == list(range(STEPS))
    assert all(units == same[0] for same in drawn.values() for units in same)
    for first in range(0, STEPS, BINS):
        units = [unit for step in range(first, min(first + BINS, STEPS)) for unit in drawn[step][0]]
        assert len(set(units)) == len(units)
        assert len(units) == len(RECORDS) or first + BINS > STEPS


@pytest.mark.parametrize("method", ["prism", "dp-adamw"])
def test_a_run_from_start_to_end(method: str, bench: Bench, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with side_log(log), watched(tmp_path / "seen"):
        result = bench.start(folder, method=method, privacy=PASSES)
    check_finished(folder, log, result)
    check_turns(tmp_path / "seen")
    plan = read_ledger(folder / "release/ledger.jsonl").plan
    assert plan.event.sampling == BallsInBinsSampling(BINS)
    assert result.epsilon == pytest.approx(PRIVACY["target_epsilon"], rel=1e-3)
    assert all(check.passed for check in verify(folder / "release").checks if check.passed is not None)
    told = (folder / "release/README.md").read_text()
    assert "The bound for balls in bins is one for adding or removing a record" in told
    assert "follows from a key in the" in told
    assert f"in each pass of {BINS} steps each record is in exactly one" in told
    assert "cycles" not in told


def test_an_interrupted_run_and_a_lost_step_draw_nobody_twice(bench: Bench, tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", tmp_path / "seen"
    with watched(seen):
        with no_space_at(4):
            bench.start(folder, privacy=PASSES)
        with pytest.raises(Interrupted):
            bench.resume(folder, observer=StopAt(6))
        bench.resume(folder)
    check_turns(seen)


def test_without_its_key_or_in_another_order_a_run_does_not_go_on(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    bench.stopped(folder, 3, privacy=PASSES)
    path = folder / "private/cycles.json"
    kept = path.read_text()
    with pytest.raises(PrivacyError, match="another order"):
        bench.resume(folder, records=[*RECORDS[1:], RECORDS[0]])
    for damaged in (None, kept[:20], json.dumps({**json.loads(kept), "coefficients": [1.0]})):
        if damaged is None:
            path.unlink()
        else:
            path.write_text(damaged)
        with pytest.raises(PrivacyError, match="gone or damaged"):
            bench.resume(folder)
    path.write_text(kept)
    assert bench.resume(folder).steps == STEPS


def test_of_two_processes_the_first_one_draws(bench: Bench, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with watched(tmp_path / f"seen{rank}"):
            bench.start(tmp_path / "run", privacy=PASSES)

    assert together(2, work) == [0, 0]
    assert not (tmp_path / "seen1").exists()
    check_turns(tmp_path / "seen0")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bands": 3}, "does not go with bands"),
        ({"max_batch_size": 20}, "does not go with max_batch_size"),
        ({"expected_batch_size": 12}, "1/q = 2.5.* Fix: expected_batch_size=15, which makes 2"),
        ({"private": False, "target_epsilon": None}, "accounts for nothing"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(PrivacySettings, {**PASSES, **given}, "test")


@pytest.mark.parametrize("method", ["wishart-m2", "aug-pe", "pe-sgd"])
def test_methods_that_are_accounted_otherwise_are_refused(method: str, bench: Bench, tmp_path: Path) -> None:
    synthesis = None if method == "wishart-m2" else {}
    with pytest.raises(ConfigError, match=r"privacy\.sampling"):
        bench.start(tmp_path / "run", method=method, privacy=PASSES, synthesis=synthesis)


@pytest.mark.parametrize("sizes", [("auto", "auto"), (12, "auto"), ("auto", 500)])
def test_auto_of_either_size_is_taken(sizes: tuple[Any, Any]) -> None:
    privacy = {"target_epsilon": 3, "delta": 1e-5, "public_dataset_size": 2000, "sampling": "balls-in-bins"}
    given = {**privacy, "steps": sizes[0], "expected_batch_size": sizes[1]}
    found = settings_from({**NOTHING, "privacy": given}).privacy
    assert found.steps == sizes[0] or found.steps % round(1 / found.q) == 0
    assert found.b == sizes[1] or abs(found.q * round(1 / found.q) - 1) < 1e-3


def test_who_cannot_account_for_passes_refuses() -> None:
    federation = {"clients": 3, "rounds": 2, "rule": "tan"}
    privacy = {name: value for name, value in PASSES.items() if name != "steps"}
    with pytest.raises(ConfigError, match=r"privacy\.sampling does not go with a federation"):
        settings_from({**NOTHING, "federation": federation, "privacy": privacy})
    settings = settings_from({**NOTHING, "privacy": PASSES})
    with pytest.raises(ConfigError, match="an audit needs plain Poisson sampling"):
        refuse_settings(settings)
    with pytest.raises(ConfigError, match=r"privacy\.sampling=balls-in-bins does not go with many adapters"):
        _check(settings, None, 1)


def test_copies_that_went_on_apart_are_not_composed(bench: Bench, tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    bench.stopped(folder, 3, privacy=PASSES)
    shutil.copytree(folder, copy)
    for each in (folder, copy):
        bench.resume(each)
    ledgers = [each / "release/ledger.jsonl" for each in (folder, copy)]
    with pytest.raises(PrivacyError, match="samples in cycles, were continued apart"):
        compose_ledgers(ledgers, PRIVACY["delta"])


def test_auto_makes_whole_passes() -> None:
    for units, passes, steps in ((2000, 5, 30), (10_000, 5, 67), (500, 0.4, 10), (20_000, 2, 60)):
        found, batch = in_whole_passes(units, passes, steps)
        bins = round(units / batch)
        assert found % bins == 0
        assert abs(batch * bins / units - 1) < 0.01
