"""The loop as a whole: what it charges, what it saves, what it hides, and with which plan it refuses to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from promises import promise
from run_cases import PRIVACY, PUBLIC, RECORDS, STEPS, Bench, StopAt, edit_settings, releases, side_log

import privlora.training.loop
from privlora.accounting import PoissonSampling, read_ledger
from privlora.accounting.meaning import meaning, noise_for
from privlora.config import PrivacySettings, checked
from privlora.data.batching import micro_batches
from privlora.data.examples import Template, build_examples
from privlora.data.sampling import PoissonSampler
from privlora.errors import PrivacyError
from privlora.evaluation import evaluate_next_token
from privlora.mechanisms import Release
from privlora.optimizers import Optimizer
from privlora.training.checkpoint import load_checkpoint
from privlora.training.files import read_lines
from privlora.training.gradients import micro_batch_gradients
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer, StepReport
from privlora.training.promise import noise_multiplier, sampler

pytestmark = pytest.mark.usefixtures("quick_reports")


class Watcher(Observer):
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.evaluations: list[int] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_evaluation(self, step: int, loss: float) -> None:
        self.evaluations.append(step)


def test_every_step_is_charged_released_and_shown(bench: Bench, tmp_path: Path) -> None:
    watcher = Watcher()
    with side_log(tmp_path / "log"):
        bench.start(tmp_path / "run", observer=watcher, evaluation=PUBLIC, run={"evaluate_every": 5})
    assert releases(tmp_path / "log") == list(range(1, STEPS + 1))
    assert [report.step for report in watcher.steps] == list(range(1, STEPS + 1))
    assert watcher.evaluations == [0, 5, 10, STEPS]
    rows = [
        json.loads(line) for line in (tmp_path / "run/private/training_loss.jsonl").read_text().splitlines()
    ]
    assert len(rows) == STEPS
    assert len({row["units"] for row in rows}) > 1  # realised batch sizes stay in private/
    assert "units" not in (tmp_path / "run/release/ledger.jsonl").read_text()


def test_a_run_publishes_what_is_public_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    public_records = [{"text": "a public note."}] * 2
    bench.start(tmp_path / "run", evaluation=public_records, privacy={**PRIVACY, "steps": 2})
    public = {"adapter_config.json", "adapter_model.safetensors", "evaluations.jsonl", "ledger.jsonl"}
    assert {path.name for path in (tmp_path / "run/release").iterdir()} <= public
    private = {path.name for path in (tmp_path / "run/private").iterdir()}
    assert private == {
        "checkpoint.safetensors",
        "config.resolved.yaml",
        "data_summary.json",
        "identity.json",
        "training_loss.jsonl",
    }


def test_the_held_out_loss_is_that_of_the_public_records(bench: Bench, tmp_path: Path) -> None:
    public = [{"text": f"on day {i} the weather was fine."} for i in range(5)]
    privacy = {**PRIVACY, "steps": 2, "noise_multiplier": 1.0}
    del privacy["target_epsilon"]
    bench.start(tmp_path / "run", evaluation=public, privacy=privacy)
    first, last = read_lines(tmp_path / "run/release/evaluations.jsonl")
    examples = build_examples(public, Template(text="text"), bench.tokenizer, max_length=40)
    expected = evaluate_next_token(bench.model, examples).to_dict()
    assert first == pytest.approx({"step": 0, **expected}, rel=1e-5)
    for count in ("examples", "tokens"):
        assert last[count] == expected[count]
    bench.start(tmp_path / "without", privacy=privacy)
    assert not (tmp_path / "without/release/evaluations.jsonl").exists()


def test_an_evaluation_that_a_crash_lost_is_made_up_for(bench: Bench, tmp_path: Path) -> None:
    """Else the gap would publish where the run broke."""
    root = tmp_path / "run"
    bench.stopped(root, 8, run={"evaluate_every": 4}, evaluation=PUBLIC)
    path = root / "release/evaluations.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert read_lines(path)[-1]["step"] == 4
    bench.resume(root, PUBLIC)
    assert [row["step"] for row in read_lines(path)] == [0, 4, 8, STEPS]


def test_what_a_crash_lost_is_told_on_the_screen_alone(bench: Bench, tmp_path: Path) -> None:
    class Told(Watcher):
        def on_warning(self, what: str) -> None:
            if "public prompts" not in what:
                warnings.append(what)

    warnings: list[str] = []
    root = tmp_path / "run"
    bench.stopped(root, 4)
    kept = (root / "private/checkpoint.safetensors").read_bytes()
    with pytest.raises(Interrupted):
        bench.resume(root, observer=StopAt(7))
    (root / "private/checkpoint.safetensors").write_bytes(kept)  # as kill -9 leaves it
    bench.resume(root, observer=Told())
    (told,) = warnings
    assert told.startswith("steps 5 to 7 were charged and not saved")
    for path in (path for path in root.rglob("*") if path.is_file()):
        assert b"not saved when the run broke off" not in path.read_bytes()


@pytest.mark.parametrize("method", ["prism", "dp-adamw"])
def test_empty_batches_are_full_steps(method: str, bench: Bench, tmp_path: Path) -> None:
    privacy = promise(steps=20, batch=4, noise_multiplier=1.0, delta=1e-5, sample_rate=1e-9)
    with side_log(tmp_path / "log"):
        columns = {"max_length": 40, "unchecked": True}  # 30 records for a public 4e9
        result = bench.start(tmp_path / "run", method=method, privacy=privacy, data=columns)
    assert releases(tmp_path / "log") == list(range(1, 21))
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 20
    assert result.steps == 20
    rows = (tmp_path / "run/private/training_loss.jsonl").read_text().splitlines()
    assert [json.loads(row)["units"] for row in rows] == [0] * 20


def test_micro_batches_come_after_the_draw(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11, P16: one release for each logical batch, however many micro-batches it takes."""
    count = [0]

    def counted(*args: Any, **options: Any) -> Any:
        for batch in micro_batches(*args, **options):
            count[0] += 1
            yield batch

    monkeypatch.setattr(privlora.training.step, "micro_batches", counted)
    with side_log(tmp_path / "log"):
        bench.start(tmp_path / "run", run={"tokens_per_micro_batch": 1})
    assert count[0] > 2 * STEPS
    assert len(releases(tmp_path / "log")) == STEPS


def test_smaller_micro_batches_for_want_of_memory_are_told_in_private_only(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How small they are follows from the lengths of records."""

    def limited(adapter: Any, batch: Any, **options: Any) -> Any:
        if batch.unit_count > 1:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return micro_batch_gradients(adapter, batch, **options)

    monkeypatch.setattr("privlora.training.step.micro_batch_gradients", limited)
    root = tmp_path / "run"
    bench.start(root)
    rows = [json.loads(row) for row in (root / "private/training_loss.jsonl").read_text().splitlines()]
    lowered = rows[-1]["tokens_per_micro_batch"]
    assert lowered < 120
    assert "tokens_per_micro_batch: 120\n" in (root / "private/config.resolved.yaml").read_text()
    for path in (path for path in (root / "release").rglob("*") if path.is_file()):
        assert b"tokens_per_micro_batch" not in path.read_bytes()


def interrupted(bench: Bench, folder: Path, **options: Any) -> None:
    bench.stopped(folder, 3, **options)


@pytest.mark.parametrize(
    "change",
    [
        {"expected_batch_size": 12},
        {"public_dataset_size": 60},
        {"unit": "user", "user_column": "name"},
        {"insecure_noise_seed": 1},
        {"max_batch_size": 20},
        {"steps": STEPS + 1},
        {"steps": STEPS - 1},
    ],
)
def test_settings_that_the_ledger_did_not_plan_are_refused(
    change: dict[str, Any], bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    interrupted(bench, folder)
    edit_settings(folder, "privacy", change, unseen=True)
    named = [{**row, "name": f"p{i}"} for i, row in enumerate(RECORDS)]
    with side_log(tmp_path / "log"), pytest.raises(PrivacyError, match="planned"):
        bench.resume(folder, records=named)
    assert releases(tmp_path / "log") == []
    assert read_ledger(folder / "release/ledger.jsonl").charges == 3


def test_a_checkpoint_of_other_defaults_is_one_clear_error(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(bench, folder, method={"name": "prism", "error_feedback": 0.0})
    edit_settings(folder, "method", {"error_feedback": None}, unseen=True)  # as if it had been the default
    with pytest.raises(privlora.errors.RunError, match=r"holds no .*residual.* which the method needs"):
        bench.resume(folder)


def test_an_adapted_clipping_norm_is_resumed(bench: Bench, tmp_path: Path) -> None:
    """Its course goes on where the checkpoint left it, and the ledger shows one event of the whole cost."""
    used: list[tuple[int, float]] = []
    step = Optimizer.step

    def noted(self: Optimizer, release: Release, learning_rate: float) -> None:
        used.append((release.step, release.clip_norm))
        step(self, release, learning_rate)

    options: dict[str, Any] = {"privacy": {**PRIVACY, "clip_quantile": 0.5}, "run": {"checkpoint_every": 100}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", noted)
        bench.stopped(tmp_path / "run", 5, **options)
        _, states = load_checkpoint(
            tmp_path / "run/private/checkpoint.safetensors",
            run_id=read_ledger(tmp_path / "run/release/ledger.jsonl").run_id,
        )
        bench.resume(tmp_path / "run")
    assert [number for number, _ in used] == list(range(1, STEPS + 1))
    norms = [value for _, value in used]
    assert norms[0] == 1.0
    assert len(set(norms)) > STEPS / 2  # a share outside [0, 1] moves it by a fixed factor, up and down again
    assert norms[5] == float(states["clip_norm"]["value"])
    summary = read_ledger(tmp_path / "run/release/ledger.jsonl")
    assert summary.charges == STEPS
    assert summary.epsilon() <= PRIVACY["target_epsilon"]


def test_resumed_noise_is_fresh_even_with_public_seeds(bench: Bench, tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.manual_seed(0)
        with side_log(tmp_path / "log"):
            interrupted(bench, tmp_path / name)
            torch.manual_seed(0)
            bench.resume(tmp_path / name)
    text = (tmp_path / "log").read_text().split("\n")[:-1]
    hashes = [line.split()[1] for line in text]
    assert len(set(hashes)) == len(hashes)


def test_batches_are_never_drawn_again(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches that can be foreseen, sampling amplifies nothing."""
    draw, seen = PoissonSampler.draw, list[tuple[int, ...]]()

    def noted(self: PoissonSampler) -> np.ndarray:
        drawn = draw(self)
        seen.append(tuple(sorted(drawn.tolist())))
        return drawn

    monkeypatch.setattr(PoissonSampler, "draw", noted)
    privacy = PrivacySettings(**PRIVACY)
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        alike = sampler(privacy, len(RECORDS))
        for _ in range(3):
            alike.draw()
    for name in ("one", "two"):
        np.random.seed(0)
        interrupted(bench, tmp_path / name)
    bench.resume(tmp_path / "one")
    starts = [tuple(seen[at : at + 3]) for at in (0, 3, 6, 9, 12)]
    assert len(seen) == 12 + STEPS - 3
    assert len(set(starts)) == 5


def test_a_non_private_run_can_be_stopped_and_resumed(bench: Bench, tmp_path: Path) -> None:
    privacy = {**PRIVACY, "private": False}
    del privacy["target_epsilon"]
    folder = tmp_path / "run"
    interrupted(bench, folder, method="adamw", privacy=privacy)
    with side_log(tmp_path / "log"):
        result = bench.resume(folder)
    assert releases(tmp_path / "log") == list(range(4, STEPS + 1))
    assert result.epsilon is None
    assert not (folder / "release/ledger.jsonl").exists()


def test_long_steps_are_saved_by_the_clock(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = list[int]()
    save = privlora.training.loop.save_checkpoint

    def noted(path: Path, parts: Any, mark: Any) -> None:
        saved.append(mark.step)
        save(path, parts, mark)

    monkeypatch.setattr("privlora.training.loop.save_checkpoint", noted)
    clock = iter(range(0, 100_000, 215))  # minutes each time it is asked
    monkeypatch.setattr("privlora.training.loop.time.monotonic", lambda: next(clock))
    bench.start(tmp_path / "run", run={"checkpoint_every": 100})
    assert saved == [3, 6, 9, 12]


@pytest.mark.parametrize(("right", "found"), [(0.6, 0.2), (0.9, 0.05)])
def test_a_run_keeps_a_target_of_shares(right: float, found: float, tmp_path: Path) -> None:
    shares = {"target_epsilon": None, "target_right_guesses": right, "target_found": found}
    Bench().start(tmp_path / "run", privacy={**PRIVACY, **shares})
    means = meaning(read_ledger(tmp_path / "run/release/ledger.jsonl").events())
    assert means.right_guesses <= right
    assert means.found_at_1_percent <= found
    binds = means.right_guesses if right == 0.6 else means.found_at_1_percent
    assert binds > 0.99 * (0.6 if right == 0.6 else found)


def test_noise_for_shares_counts_what_is_projected_afresh() -> None:
    shares = {"target_epsilon": None, "target_right_guesses": 0.6}
    privacy = checked(PrivacySettings, {**PRIVACY, **shares}, "test")
    phases, layers = ((PoissonSampling(0.1), 10),), ((16, 64),)
    found = noise_multiplier(privacy, phases, layers)
    assert found == noise_for(phases, right_guesses=0.6, projections=layers)
    assert found < noise_multiplier(privacy, phases)
