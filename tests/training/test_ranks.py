"""Several processes of one run: they give what one gives, and release, charge and draw once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from promises import promise
from rank_cases import ended, found_together, mechanism_of, start_together, together
from run_cases import PRIVACY, PUBLIC, RECORDS, STEPS, Bench, check_after_crash, check_finished, side_log
from safetensors.torch import load_file

import privlora.running
from privlora.accounting import read_ledger
from privlora.api import Result, resume_run
from privlora.config import settings_from
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.mechanisms import GaussianMechanism
from privlora.methods import METHODS, VOTE_METHODS
from privlora.training.checkpoint import read_mark
from privlora.training.observer import Observer, StepReport
from privlora.training.ranks import Ranks, RankStopped, deal
from privlora.training.shared_step import SharedStep
from privlora.training.step import Step

pytestmark = pytest.mark.usefixtures("quick_reports")

REPEATABLE = promise(steps=3, batch=12, records=30, noise_multiplier=0.5, insecure_noise_seed=5)
USERS = [{**record, "who": f"user {i % 11}"} for i, record in enumerate(RECORDS)]


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "not-private/adapter_model.safetensors")


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of the updates' products, relative: factors may differ by a rotation."""
    assert a.keys() == b.keys()
    names = [name for name in a if "lora_B" in name]
    updates = [(x[n] @ x[n.replace("lora_B", "lora_A")]).flatten() for x in (a, b) for n in names]
    one, two = (torch.cat(part) for part in (updates[: len(names)], updates[len(names) :]))
    return float((one - two).norm() / one.norm())


def groups_of(name: str, tmp_path: Path) -> dict[str, Any]:
    method = METHODS[name]
    groups: dict[str, Any] = {"privacy": dict(REPEATABLE)}
    if not method.private:
        whole = {"steps": 3, "expected_batch_size": 30, "public_dataset_size": 30}
        groups["privacy"] = {"private": False, **whole}  # whose draws have no public seed
    if method.public_texts:
        texts = tmp_path / "public.jsonl"
        texts.write_text("".join(json.dumps({"text": f"a visitor came {i} times"}) + "\n" for i in range(60)))
        groups["synthesis"] = {"file": str(texts), "seeds": 4, "variations": 1}
    return groups


# What is shared are a space's sums and state; further rows of a space move it by another rule.
ROWS = [name for name in METHODS if name not in VOTE_METHODS]
ONE_A_SPACE = {METHODS[name].space: name for name in reversed(ROWS)}.values()


@pytest.mark.parametrize(
    "name", [name if name in ONE_A_SPACE else pytest.param(name, marks=pytest.mark.long) for name in ROWS]
)
def test_every_row_gives_what_one_process_gives(name: str, bench: Bench, tmp_path: Path) -> None:
    """The same draws and the same noise, whose seed is public here, so sums differ by their rounding alone."""
    groups = groups_of(name, tmp_path)
    bench.start(tmp_path / "one", method=name, **groups)
    assert together(2, lambda _: bench.start(tmp_path / "two", method=name, **groups)) == [0, 0]
    assert farthest(adapter_of(tmp_path / "one"), adapter_of(tmp_path / "two")) < 1e-4
    if METHODS[name].private:
        assert read_ledger(tmp_path / "two/not-private/ledger.jsonl").charges == REPEATABLE["steps"]


def test_processes_move_in_the_units_of_the_same_weights(bench: Bench, tmp_path: Path) -> None:
    method = {"name": "prism", "learning_rate": 0.02}
    start = partial(bench.start, privacy=dict(REPEATABLE))
    start(tmp_path / "one", method={**method, "relative_rate": True})
    relative = lambda _: start(tmp_path / "two", method={**method, "relative_rate": True})  # noqa: E731
    assert together(2, relative) == [0, 0]
    start(tmp_path / "entries", method={**method, "relative_rate": False})
    one, two, entries = (adapter_of(tmp_path / name) for name in ("one", "two", "entries"))
    assert farthest(one, two) < 1e-4
    assert farthest(one, entries) > 0.1


@pytest.mark.parametrize(
    ("privacy", "records"),
    [
        ({"clip_quantile": 0.5, "clip_norm": 2.4}, RECORDS),
        ({"max_batch_size": 14}, RECORDS),
        ({"unit": "user", "user_column": "who", "public_dataset_size": 11, "expected_batch_size": 5}, USERS),
    ],
    ids=["adaptive", "truncated", "users"],
)
def test_three_processes_give_what_one_gives(
    privacy: dict[str, Any], records: list[dict[str, Any]], bench: Bench, tmp_path: Path
) -> None:
    """Counts are added, batches cut once, and nobody's records clipped in parts."""
    start = partial(bench.start, records=records, privacy={**REPEATABLE, **privacy})
    start(tmp_path / "one")
    assert together(3, lambda _: start(tmp_path / "three")) == [0, 0, 0]
    assert farthest(adapter_of(tmp_path / "one"), adapter_of(tmp_path / "three")) < 1e-4
    rows = [
        [json.loads(line)["units"] for line in (tmp_path / n / "private/training_loss.jsonl").open()]
        for n in ("one", "three")
    ]
    assert rows[0] == rows[1]  # of all processes


def test_an_empty_batch_has_the_noise_of_one_process(tmp_path: Path) -> None:
    """tau^2, not tau^2 for each process, and not none."""

    def release(ranks: Ranks) -> list[float] | None:
        mechanism = mechanism_of()
        found = []
        for _ in range(1 + 200_000 // mechanism.coordinates.dimension):
            total = mechanism.take_all(ranks)
            if ranks.first:
                found += [t.double().flatten() for ts in mechanism.release(total).vector for t in ts]
        return [float(torch.cat(found).var()), mechanism.noise_std] if found else None

    (variance, std), *others = found_together(3, tmp_path, release)
    assert others == [None, None]
    assert abs(variance / std**2 - 1) < 0.03


def test_sums_of_another_state_are_not_added(tmp_path: Path) -> None:
    def take(ranks: Ranks) -> str:
        mechanism = mechanism_of(adaptive=True)
        if ranks.rank == 1:
            mechanism.adaptive.value *= 1 + 1e-12
        with pytest.raises(
            (PrivacyError, RankStopped), match="of process 1 is not that of process 0"
        ) as error:
            mechanism.take_all(ranks)
        return type(error.value).__name__

    assert found_together(3, tmp_path, take) == ["PrivacyError", "RankStopped", "RankStopped"]


def test_other_processes_cannot_release(bench: Bench, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """Their mechanism has a ledger that refuses, should anybody ask it for a release."""
    take = SharedStep.take

    def released(self: SharedStep) -> torch.Tensor:
        if not self._ranks.first:
            self._step.release()
        return take(self)

    monkeypatch.setattr(SharedStep, "take", released)
    assert together(2, lambda _: bench.start(tmp_path / "run")) == [1, 1]
    assert "the run's ledger is another's" in capfd.readouterr().err


def test_units_are_dealt_whole_once_and_evenly() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 8):
        for count in (0, 1, 5, 200):
            weights = [int(w) for w in rng.integers(1, 1000, count)]
            shares = deal(weights, size)
            assert Counter(n for share in shares for n in share) == Counter(range(count))
            loads = [sum(weights[n] for n in share) for share in shares]
            assert max(loads) - min(loads) <= max(weights, default=0)
            assert deal(weights, size) == shares


def test_what_processes_tell_each_other(tmp_path: Path) -> None:
    tensors = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "number": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).mT,
    }

    def talk(ranks: Ranks) -> dict[str, Any]:
        return {
            "same": ranks.same(lambda: f"of {ranks.rank}"),
            "each": ranks.each(lambda: ranks.rank),
            "dealt": ranks.dealt(lambda: [[0], [1, 1], [2, 2, 2]]),
            "gathered": ranks.gathered(ranks.rank * 10),
            "sum": ranks.add(torch.full((2,), float(ranks.rank + 1), dtype=torch.float64)),
            "any": [ranks.any(ranks.rank == 2), ranks.any(False)],
            "copied": ranks.copied(lambda: tensors),
        }

    first, *others = found_together(3, tmp_path, talk)
    assert first["gathered"] == [0, 10, 20]
    assert first["sum"].tolist() == [6.0, 6.0]
    for rank, found in enumerate([first, *others]):
        assert (found["same"], found["each"], found["dealt"]) == ("of 0", rank, [rank] * (rank + 1))
        assert found["any"] == [True, False]
        assert all(torch.equal(t, found["copied"][name]) for name, t in tensors.items())
        assert {name: t.dtype for name, t in found["copied"].items()} == {
            n: t.dtype for n, t in tensors.items()
        }


def test_an_error_anywhere_is_told_everywhere(tmp_path: Path) -> None:
    def fail(ranks: Ranks) -> tuple[str, str]:
        def make() -> None:
            if ranks.rank == 1:
                raise ConfigError("no such model", fix="give one")

        with pytest.raises((ConfigError, RankStopped, Exception)) as error:
            ranks.each(make)
        return type(error.value).__name__, str(error.value)

    first, second, third = found_together(3, tmp_path, fail)
    assert first[1].startswith("process 1 of 3: no such model")
    assert (second[0], third[0]) == ("RankStopped", "RankStopped")


def test_unlike_models_are_refused(bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def start(rank: int) -> None:
        if rank:
            next(bench.model.parameters()).data[0] += 1
        bench.start(tmp_path / "run")

    assert together(2, start) == [1, 1]
    assert "the base model of process 1 is not that of process 0" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def change_weights(model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Beyond what tells runs' models apart."""
    weight = max(model.parameters(), key=lambda p: p.numel())
    weight.data.view(-1)[70] += 1


def change_modules(model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    """What no weight, buffer or configuration tells."""
    norms = [m for m in model.modules() if hasattr(m, "variance_epsilon")]
    assert norms
    for norm in norms:
        norm.variance_epsilon = 1.0


def change_versions(model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    # By its name there: transformers puts another module in its place while parts of it are imported.
    patch.setattr("privlora.training.identity.transformers.__version__", "0.1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_weights, "the base model of process 1 is not"),
        (change_modules, "process 1 computes other logits"),
        (change_versions, "the version of process 1 is not"),
    ],
    ids=["weights", "modules", "versions"],
)
def test_processes_that_would_compute_otherwise_are_refused(
    change: Any, said: str, bench: Bench, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record's gradient would depend on who else was drawn: sums moved by up to 6.3 C."""

    def start(rank: int) -> None:
        if rank:
            change(bench.model, monkeypatch)
        bench.start(tmp_path / "run")

    assert together(2, start) == [1, 1]
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_sum_is_left_in_the_first_process_alone(tmp_path: Path) -> None:
    def take(ranks: Ranks) -> tuple[Any, Any, str]:
        mechanism = mechanism_of(adaptive=True)
        total = mechanism.take_all(ranks)
        mechanism.adaptive.value *= 2
        refused = ""
        if ranks.first:
            with pytest.raises(PrivacyError) as error:
                mechanism.release(total)
            refused = str(error.value)
        return total.vector is None, total.place is None, refused

    first, second = found_together(2, tmp_path, take)
    assert first[:2] == (False, False)
    assert "another point, clipping norm or projection" in first[2]
    assert second == (True, True, "")


def test_runs_one_after_the_other_in_the_same_processes(bench: Bench, tmp_path: Path) -> None:
    def start(_: int) -> None:
        for number in range(3):
            bench.start(tmp_path / str(number), privacy={**PRIVACY, "steps": 2})

    assert together(2, start) == [0, 0]
    assert all((tmp_path / f"{number}/release/ledger.jsonl").exists() for number in range(3))


def test_a_process_that_goes_on_after_an_error_leaves_nobody_waiting(bench: Bench, tmp_path: Path) -> None:
    class Failing(Observer):
        def on_run(self, *_: object) -> None:
            raise RuntimeError

    stopped = tmp_path / "stopped"

    def start(rank: int) -> None:
        try:
            bench.start(tmp_path / "run", observer=None if rank else Failing())
        except RankStopped:
            stopped.write_text("")
            return
        except RuntimeError:  # of the first process, which lives on
            end = time.monotonic() + 60
            while not stopped.exists() and time.monotonic() < end:
                time.sleep(0.1)
        assert stopped.exists()
        with pytest.raises(RunError, match="start the processes again"):
            bench.start(tmp_path / "again")

    assert together(2, start) == [0, 0]


def test_one_process_reads_prepares_releases_and_moves(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get records and states from it, and do nothing after their part of a batch."""
    kind = METHODS["prism"].coordinates
    for owner, name in (
        ("privlora.running.load_all", "load_all"),
        (kind, "prepare"),
        (kind, "advance"),
        (GaussianMechanism, "release"),
    ):
        do = getattr(privlora.running if isinstance(owner, str) else owner, name)

        def noted(*args: Any, do: Any = do, name: str = name, **options: Any) -> Any:
            with (tmp_path / f"{name} by {os.environ['RANK']}").open("a") as file:
                file.write("x")
            return do(*args, **options)

        if isinstance(owner, str):
            monkeypatch.setattr(owner, noted)
        else:
            monkeypatch.setattr(owner, name, noted)
    run = {"privacy": {**PRIVACY, "steps": 2}}
    assert together(2, lambda _: bench.start(tmp_path / "run", **run)) == [0, 0]
    found = {path.name: len(path.read_text()) for path in tmp_path.iterdir() if path.is_file()}
    assert found == {"load_all by 0": 1, "prepare by 0": 2, "advance by 0": 2, "release by 0": 2}


def test_a_finished_run_is_asked_for_texts_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"synthesis": {"source": "runs/done", "publish": True}}
    settings = settings_from(
        {"model": {"name": "m"}, "data": {"path": "d.jsonl"}, "privacy": REPEATABLE, **asked}, source="test"
    )

    def ask(*_: Any, **__: Any) -> Result:
        (tmp_path / f"asked by {os.environ['RANK']}").write_text("")
        return Result(tmp_path, 3, None, None)

    monkeypatch.setattr("privlora.api._settings_of", lambda *_: settings)
    monkeypatch.setattr("privlora.running.ask_finished_run", ask)

    def resume(_: int) -> None:
        assert resume_run(tmp_path).steps == 3

    assert together(2, resume) == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["asked by 0"]


def test_votes_are_asked_for_in_one_process(bench: Bench, tmp_path: Path, capfd: Any) -> None:
    texts = tmp_path / "public.jsonl"
    texts.write_text('{"text": "a"}\n{"text": "b"}\n')
    groups = {"synthesis": {"seeds": 2, "publish": True}}
    assert together(2, lambda _: bench.start(tmp_path / "run", method="aug-pe", **groups)) == [1, 1]
    assert "in one process" in capfd.readouterr().err


def test_a_refused_charge_stops_all(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(self: Any, event: Any) -> int:
        raise PrivacyError("no")

    monkeypatch.setattr("privlora.accounting.Ledger.charge", refuse)
    assert together(2, lambda _: bench.start(tmp_path / "run")) == [1, 1]
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 0


def test_kill_9_of_any_process_at_random_moments(bench: Bench, tmp_path: Path) -> None:
    """What was charged covers what was released, and another number of processes takes it to its end."""
    rng = random.Random(3)
    kills = ended_well = 0
    folder, log, crashes = tmp_path / "0", tmp_path / "0.log", 0

    def work(rank: int) -> None:
        with side_log(log):
            bench.continue_or_start(folder)

    while kills < 4:
        size = rng.choice((1, 2, 3))
        children = start_together(size, work)
        time.sleep(rng.uniform(0.3, 1.5))
        os.kill(rng.choice(children), signal.SIGKILL)
        codes = ended(children)
        assert set(codes) <= {0, 1, -signal.SIGKILL}
        if -signal.SIGKILL not in codes:
            ended_well += 1
            folder, log, crashes = tmp_path / str(ended_well), tmp_path / f"{ended_well}.log", 0
            continue
        kills, crashes = kills + 1, crashes + 1
        check_after_crash(folder, log, crashes)
    with side_log(log):
        check_finished(folder, log, bench.continue_or_start(folder))


class SignalTo(Observer):
    """Signals another process of the run, whose id stands in a file, after a step."""

    def __init__(self, number: int, step: int, file: Path) -> None:
        self.number, self.step, self.file = number, step, file

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            os.kill(int(self.file.read_text()), self.number)


def start_and_signal_the_second(
    bench: Bench, folder: Path, number: int, step: int, **groups: Any
) -> list[int]:
    file = folder.parent / "pid"

    def start(rank: int) -> None:
        if rank == 1:
            file.write_text(str(os.getpid()))
        bench.start(folder, observer=None if rank else SignalTo(number, step, file), **groups)

    return together(2, start)


def test_a_signal_to_any_process_stops_all_after_the_same_step(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert start_and_signal_the_second(bench, folder, signal.SIGTERM, step=3) == [1, 1]
    said = capfd.readouterr().err
    assert "RankStopped" not in said  # nobody was left waiting
    assert said.count("privlora.training.loop.Interrupted: interrupted after step") == 2
    assert 3 <= saved_and_charged(folder)[0] < STEPS
    assert bench.resume(folder).steps == STEPS


def test_a_process_that_is_lost_after_a_step_loses_no_step(bench: Bench, tmp_path: Path) -> None:
    """Between two checkpoints, too: the first process saves where it is."""
    folder, rarely = tmp_path / "run", {"checkpoint_every": 100}
    codes = start_and_signal_the_second(bench, folder, signal.SIGKILL, step=5, run=rarely)
    assert codes == [1, -signal.SIGKILL]
    assert saved_and_charged(folder)[0] >= 5  # the step after whose release it was lost, too
    assert bench.resume(folder).steps == STEPS
    assert read_ledger(folder / "release/ledger.jsonl").charges == STEPS


def test_a_process_that_is_lost_in_a_batch_loses_no_step(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulate, begun = Step.accumulate, list[int]()

    def until_the_sixth(self: Step, drawn: Any) -> torch.Tensor:
        begun.append(1)
        if len(begun) == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return accumulate(self, drawn)

    monkeypatch.setattr(Step, "accumulate", until_the_sixth)
    folder = tmp_path / "run"
    codes = together(2, lambda _: bench.start(folder, run={"checkpoint_every": 100}))
    assert codes == [1, -signal.SIGKILL]
    assert saved_and_charged(folder) == (5, 5)


def saved_and_charged(folder: Path) -> tuple[int, int]:
    """Steps; they are equal."""
    saved = read_mark(folder / "private/checkpoint.safetensors").step
    charged = read_ledger(folder / "release/ledger.jsonl").charges
    assert saved == charged
    return saved, charged


def test_callbacks_are_called_in_the_first_process_and_stop_all(
    bench: Bench, tmp_path: Path, capfd: Any
) -> None:
    folder = tmp_path / "run"

    def start(rank: int) -> None:
        def listen(event: Any) -> None:
            with open(tmp_path / str(rank), "a") as file:
                file.write(f"{event.kind} {event.step}\n")
            if event.kind == "evaluation" and event.step == 3:
                event.stop()

        bench.start(folder, evaluation=PUBLIC, run={"evaluate_every": 3}, callbacks=[listen])

    assert together(2, start) == [1, 1]
    assert capfd.readouterr().err.count("privlora.training.loop.Interrupted: interrupted after step 3") == 2
    told = (tmp_path / "0").read_text().splitlines()
    assert told[-4:] == ["step 2", "step 3", "evaluation 3", "end 3"]
    assert not (tmp_path / "1").exists()
    assert saved_and_charged(folder) == (3, 3)
