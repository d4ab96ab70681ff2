"""Whatever kills a run, and whenever: the ledger covers the releases, files are whole, and resuming ends the plan."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_cases import (
    PRIVACY,
    PUBLIC,
    STEPS,
    Bench,
    StopAt,
    assert_same,
    check_after_crash,
    check_finished,
    failing,
    fingerprint,
    in_a_child,
    no_space_at,
    releases,
    side_log,
)

import privlora.accounting.ledger
import privlora.running
import privlora.training.loop
from privlora.accounting import Ledger, PoissonSampling, calibrate_noise_multiplier, read_ledger
from privlora.errors import RunError
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.optimizers import IterateAverage, Optimizer
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted

METHODS = [{"name": "prism", "averaging": 0.9}, {"name": "dp-adamw", "averaging": 0.9}]

pytestmark = pytest.mark.usefixtures("quick_reports")


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Warm: whatever is imported or calibrated once is done before any process is forked."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    q = PRIVACY["expected_batch_size"] / PRIVACY["public_dataset_size"]
    tempfile.gettempdir()
    calibrate_noise_multiplier(PoissonSampling(q), STEPS, PRIVACY["target_epsilon"], PRIVACY["delta"])
    return Bench()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
def test_kill_9_at_random_moments(method: dict[str, Any], bench: Bench, tmp_path: Path) -> None:
    """6 kills a method; a run that gets to its end makes room for the next one."""
    rng = random.Random(method["name"])
    kills = ended = 0
    folder, log = tmp_path / "0", tmp_path / "0.log"

    def work() -> None:
        with side_log(log):
            bench.continue_or_start(folder, method=method)

    crashes = 0
    while kills < 6:
        code = in_a_child(work, kill_after=rng.uniform(0.02, 0.5))
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            ended += 1
            folder, log, crashes = tmp_path / str(ended), tmp_path / f"{ended}.log", 0
            continue
        kills, crashes = kills + 1, crashes + 1
        check_after_crash(folder, log, crashes)
    with side_log(log):
        check_finished(folder, log, bench.continue_or_start(folder, method=method))


def test_kill_9_in_the_last_checkpoint_leaves_no_temporary_file(bench: Bench, tmp_path: Path) -> None:
    """All steps are charged by then, so nothing writes, and so replaces, that file again."""
    folder, log = tmp_path / "run", tmp_path / "log"
    leftover = folder / "private/.checkpoint.safetensors.privlora-tmp"

    def work() -> None:
        rename = os.replace

        def die_at_the_end(source: Path, target: Path) -> None:
            if source == leftover and releases(log)[-1:] == [STEPS]:
                leftover.with_name(
                    ".tmpA1b2C3"
                ).touch()  # as a kill within safetensors.torch.save_file leaves it
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        os.replace = die_at_the_end  # type: ignore[assignment]
        with side_log(log):
            bench.start(folder)

    assert in_a_child(work) == -signal.SIGKILL
    assert leftover.exists()
    with Ledger.open(folder / "release/ledger.jsonl"):  # a living process may be writing that file
        with pytest.raises(RunError, match="locked"):
            bench.resume(folder)
        assert leftover.exists()
    with side_log(log):
        check_finished(folder, log, bench.resume(folder))


# Calls after or before which a process may die; the run makes a few hundred of them.
DANGEROUS = ("write", "fsync", "replace", "ftruncate", "open", "mkdir")


def deadly(at: int) -> Callable[[], int]:
    """Make this process kill itself around its ``at``-th dangerous call; returns how many were made."""
    count = [0]

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def then_die(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == at and at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **options)
            finally:
                if count[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return then_die

    for name in DANGEROUS:
        setattr(os, name, wrapped(getattr(os, name)))
    return lambda: count[0]


def test_kill_9_around_every_kind_of_system_call(bench: Bench, tmp_path: Path) -> None:
    """Every early call (folders, settings, the ledger's first line) and a sample of the later ones."""

    def work(folder: Path, log: Path, at: int) -> None:
        with side_log(log):
            calls = deadly(at)
            bench.continue_or_start(folder)
            (folder.parent / "calls").write_text(str(calls()))

    assert in_a_child(lambda: work(tmp_path / "dry", tmp_path / "dry.log", -1)) == 0
    total = int((tmp_path / "calls").read_text())
    assert total > 40
    for at in [*range(1, 12), *random.Random(0).sample(range(12, total - 8), 3)]:
        folder, log = tmp_path / str(at), tmp_path / f"{at}.log"
        code = in_a_child(lambda f=folder, w=log, k=at: work(f, w, k))
        assert code == -signal.SIGKILL
        check_after_crash(folder, log, crashes=1)
        with side_log(log):
            check_finished(folder, log, bench.continue_or_start(folder))


# Owner, attribute, and which call of it fails.
PLACES: list[tuple[Any, str, int]] = [
    (privlora.accounting.ledger.Ledger, "charge", 5),
    (privlora.accounting.ledger.Ledger, "finish", 1),
    (GaussianMechanism, "accumulate", 9),
    (GaussianMechanism, "release", 5),
    (NoiseSource, "standard_normal", 20),
    (Optimizer, "step", 5),
    (IterateAverage, "update", 5),
    (privlora.training.loop, "save_checkpoint", 2),
    (privlora.training.loop, "append_line", 3),
    (privlora.training.loop, "evaluate_held_out", 1),
    (privlora.training.loop, "evaluate_held_out", 2),
    (privlora.running, "publish", 1),
    (privlora.running, "write_atomically", 1),
    (os, "replace", 1),
    (os, "replace", 3),
    (os, "fsync", 1),
    (os, "fsync", 3),
    (os, "fsync", 9),
    (os, "fsync", 12),
]


def whole(place: tuple[Any, str, int], after: bool) -> Any:
    """Around charges and releases both sides are looked at at once, elsewhere one of them, by turns."""
    guarded = place[1] in ("charge", "release", "standard_normal", "publish")
    now = guarded or PLACES.index(place) % 2 == after
    called = f"{place[0].__name__.rsplit('.')[-1]}.{place[1]}-{place[2]}-{'after' if after else 'before'}"
    return pytest.param(place, after, marks=() if now else pytest.mark.long, id=called)


@pytest.mark.parametrize(("place", "after"), [whole(p, after) for p in PLACES for after in (False, True)])
def test_an_exception_anywhere(
    place: tuple[Any, str, int], after: bool, bench: Bench, tmp_path: Path
) -> None:
    owner, name, at = place
    folder, log = tmp_path / "run", tmp_path / "log"
    options: dict[str, Any] = {"method": METHODS[0], "evaluation": PUBLIC}
    before = fingerprint(bench.model)
    with side_log(log):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), at, after))
            with pytest.raises((OSError, RunError), match=r"[Nn]o space|cannot be written"):
                bench.start(folder, **options)
        assert_same(before, fingerprint(bench.model))
        check_after_crash(folder, log, crashes=1)
        result = bench.continue_or_start(folder, **options)
    check_finished(folder, log, result)
    assert_same(before, fingerprint(bench.model))
    assert len(releases(log)) >= STEPS - 1
    rows = (folder / "release/evaluations.jsonl").read_text().splitlines()
    assert len(rows) in (1, 2)
    assert f'"step": {STEPS}' in rows[-1]


def test_a_crash_leaves_no_gap_in_what_is_published(bench: Bench, tmp_path: Path) -> None:
    """The step whose update was lost is evaluated as well, with what is left."""
    folder = tmp_path / "run"
    with no_space_at(6):
        bench.start(folder, evaluation=PUBLIC, run={"evaluate_every": 3})
    bench.resume(folder, PUBLIC)
    rows = (folder / "release/evaluations.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 3, 6, 9, STEPS]


@pytest.mark.parametrize(("during", "stops"), [("step", 5), ("evaluation", 5)])
def test_sigint_saves_and_resuming_loses_no_step(
    during: str, stops: int, bench: Bench, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    handler = signal.getsignal(signal.SIGINT)
    before = fingerprint(bench.model)
    run = {"checkpoint_every": 100, "evaluate_every": 5}
    with side_log(log):
        with pytest.raises(Interrupted) as interrupted:
            bench.start(folder, observer=StopAt(5, during), run=run, evaluation=PUBLIC)
        assert interrupted.value.step == stops
        assert signal.getsignal(signal.SIGINT) is handler
        assert_same(before, fingerprint(bench.model))
        assert (folder / "private/checkpoint.safetensors").exists()
        assert read_ledger(folder / "release/ledger.jsonl").charges == stops
        check_finished(folder, log, bench.resume(folder, PUBLIC))
    assert releases(log) == list(range(1, STEPS + 1))


def test_a_finished_run_is_only_reported_again(bench: Bench, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with side_log(log):
        first = bench.start(folder)
        weights = (folder / "release/adapter_model.safetensors").read_bytes()
        charges = (folder / "release/ledger.jsonl").read_bytes()
        (folder / "release/adapter_model.safetensors").unlink()
        again = bench.resume(folder)
    assert again == first
    assert (folder / "release/adapter_model.safetensors").read_bytes() == weights
    assert (folder / "release/ledger.jsonl").read_bytes() == charges
    assert len(releases(log)) == STEPS


def test_a_release_is_not_replaced_by_an_untrained_adapter(tmp_path: Path) -> None:
    bench = Bench()
    bench.start(tmp_path / "run", privacy={**PRIVACY, "steps": 2})
    folder = RunFolder(tmp_path / "run")
    trained = (folder.release / "adapter_model.safetensors").read_bytes()
    folder.checkpoint.unlink()
    with pytest.raises(RunError, match=r"finished, and its checkpoint is gone"):
        bench.resume(tmp_path / "run")
    assert (folder.release / "adapter_model.safetensors").read_bytes() == trained
