"""A run is resumed with the records and the model that it began with, and no others; a refusal charges nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import PRIVACY, PUBLIC, RECORDS, STEPS, STOPPED, Bench, edit_settings
from tiny_models import tiny_model

from privlora.accounting import read_ledger
from privlora.api import resume_run
from privlora.config import settings_from
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.training.files import RunFolder
from privlora.training.identity import fixed

pytestmark = pytest.mark.usefixtures("quick_reports")

NAMED = [{**record, "name": f"p{i // 2}"} for i, record in enumerate(RECORDS)]
BY_USER = {**PRIVACY, "unit": "user", "user_column": "name", "public_dataset_size": 15}


def resume(bench: Bench, folder: RunFolder, **given: Any) -> int:
    return bench.resume(folder.root, **{"evaluation": PUBLIC, **given}).steps


def refused(bench: Bench, folder: RunFolder, error: type[PrivloraError], match: str, **given: Any) -> None:
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    with pytest.raises(error, match=match) as caught:
        resume(bench, folder, **given)
    assert "patient" not in str(caught.value)
    assert before == {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}


def test_the_same_records_in_another_order(bench: Bench, run: RunFolder) -> None:
    assert resume(bench, run, records=RECORDS[::-1]) == STEPS


def test_other_records(bench: Bench, run: RunFolder) -> None:
    others = [{"text": f"a lazy cat {i} sleeps."} for i in range(30)]
    for records in (others, RECORDS[:-1], [*RECORDS, RECORDS[0]], [*RECORDS[:-1], others[0]]):
        refused(bench, run, PrivacyError, "private records are not those", records=records)
    refused(bench, run, PrivacyError, "are not those", records=others, evaluation=RECORDS)


def test_other_units(bench: Bench, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    bench.stopped(folder.root, 2, records=NAMED, privacy=BY_USER)
    swapped = [{**record, "name": NAMED[i - 1]["name"]} for i, record in enumerate(NAMED)]
    refused(bench, folder, PrivacyError, "are not those", records=swapped, evaluation=None)
    assert resume(bench, folder, records=NAMED[::-1], evaluation=None) == STEPS


def test_another_model(bench: Bench, run: RunFolder) -> None:
    nearly = tiny_model()
    with torch.no_grad():
        nearly.model.layers[1].mlp.up_proj.weight[0, 5] += 1e-3
    for model in (tiny_model(seed=1), nearly, tiny_model(dtype=torch.bfloat16)):
        refused(bench, run, RunError, "base model is not the one", model=model)


def test_no_run_goes_on_without_it(bench: Bench, run: RunFolder) -> None:
    """Deleted, nothing told other records or settings from its own, and its ledger's epsilon stood over both."""
    run.identity.unlink()
    refused(bench, run, RunError, "identity.json' is missing")
    with pytest.raises(RunError) as caught:
        resume_run(run.root, records=RECORDS, evaluation=PUBLIC)
    backup, another, spent = caught.value.fixes  # what can be done, and no release where there is none
    assert backup.startswith("restore it from a backup")
    assert another.startswith("without one this run cannot go on: begin another, in another run.output")
    assert spent.endswith(f"so keep {run.ledger}")
    run.report.write_text("{}")
    with pytest.raises(RunError, match="what it released already stays valid") as caught:
        resume_run(run.root, records=RECORDS, evaluation=PUBLIC)
    assert caught.value.fixes[-1].endswith(f"`privlora verify {run.release}`")


def test_that_of_another_run_is_refused(bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    """Of other records and the same settings: with it, these would go on under the first run's ledger."""
    others = [{"text": f"a lazy cat {i} sleeps."} for i in range(len(RECORDS))]
    other = RunFolder(tmp_path / "b")
    bench.stopped(other.root, 2, records=others, evaluation=PUBLIC)
    run.identity.write_bytes(other.identity.read_bytes())
    match = "not the one with which the run's checkpoint was taken"
    refused(bench, run, PrivacyError, match, records=others)


def test_a_choice_that_was_put_there_is_told_before_a_step_is_taken(bench: Bench, run: RunFolder) -> None:
    run.choice.write_text(json.dumps({"row": "prism", "rows": [], "clip_norm": 1.0, "median_norm": 4.0}))
    refused(bench, run, RunError, "is not what the run wrote when it began")


def test_edited_settings_are_told_before_the_model_is_loaded(run: RunFolder) -> None:
    edit_settings(run.root, "method", {"learning_rate": 0.5})
    edit_settings(run.root, "model", {"name": "no/such/model"})
    with pytest.raises(RunError, match=r"method.learning_rate was [\d.e-]+ and is 0.5"):
        resume_run(run.root, records=RECORDS, evaluation=PUBLIC)


@pytest.mark.parametrize(
    "content", ["", "null", "{}", '{"records": 1}', '{"records": "", "model": "", "settings": {}}']
)
def test_a_damaged_file_is_one_error(content: str, bench: Bench, run: RunFolder) -> None:
    run.identity.write_text(content)
    refused(bench, run, RunError, "identity.json' is damaged")


def test_it_is_private_and_the_ledger_has_none_of_it(run: RunFolder) -> None:
    kept = json.loads(run.identity.read_text())
    assert run.identity.parent == run.private
    for path in run.release.iterdir():
        assert not any(
            kept[name].encode() in path.read_bytes() for name in ("records", "model", "evaluation")
        )
    assert read_ledger(run.ledger).charges == STOPPED


def test_no_evaluation_where_the_run_has_none(bench: Bench, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    bench.stopped(folder.root, 2)
    refused(bench, folder, RunError, "has no evaluation records")
    assert resume(bench, folder, evaluation=None) == STEPS


EDITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "rate": ("method", {"learning_rate": 0.5}, r"method.learning_rate was [\d.e-]+ and is 0.5"),
    "unit of the rate": ("method", {"relative_rate": False}, "method.relative_rate was true and is false"),
    "row": ("method", {"name": "dp-adamw"}, "method.name was prism and is dp-adamw"),
    "averaging": ("method", {"averaging": 0.9}, "method.averaging was 0.5 and is 0.9"),
    "delta": ("privacy", {"delta": 1e-5}, "privacy.delta was 0.001 and is 1e-05"),
    "target": ("privacy", {"target_epsilon": 1.0}, "privacy.target_epsilon was 4.0 and is 1.0"),
    "clip norm": ("privacy", {"clip_norm": 9.0}, "privacy.clip_norm was 1.0 and is 9.0"),
    "steps": ("privacy", {"steps": 10}, "privacy.steps was 12 and is 10"),
    "rank": ("adapter", {"r": 1}, "adapter.r was 2 and is 1"),
    "seed": ("run", {"seed": 5}, "run.seed was 0 and is 5"),
    "length": ("data", {"max_length": 39}, "data.max_length was 40 and is 39"),
}


@pytest.mark.parametrize("name", EDITS)
def test_settings_that_were_edited_are_refused(name: str, bench: Bench, run: RunFolder) -> None:
    group, change, told = EDITS[name]
    edit_settings(run.root, group, change)
    promise = group in ("privacy", "data")
    refused(bench, run, PrivacyError if promise else RunError, told)
    with pytest.raises(PrivloraError) as caught:
        resume(bench, run)
    first, last = caught.value.fixes[0], caught.value.fixes[-1]
    assert first.startswith(f"write {group}.{next(iter(change))}: ")
    assert "another run" in last
    assert read_ledger(run.ledger).charges == STOPPED


MOVABLE = {
    "model": "name dtype gradient_checkpointing device fully_shard quantization attn_implementation device_map",
    "data": "path format evaluation",
    "run": "output tokens_per_micro_batch checkpoint_every evaluate_every report_to log_every",
    "synthesis": "file endpoint callable source",
    "federation": "clients",
}


@pytest.mark.parametrize("group", [{"synthesis": {}}, {"federation": {"rounds": 2, "clients": 3}}])
def test_all_other_settings_are_those_that_the_run_began_with(group: dict[str, Any]) -> None:
    privacy = {"noise_multiplier": 1.0, "delta": 1e-5, "expected_batch_size": 4, "public_dataset_size": 100}
    steps = {} if "federation" in group else {"steps": 2}
    given = {"model": {"name": "m"}, "data": {"path": "x.jsonl"}, "privacy": {**privacy, **steps}, **group}
    settings = settings_from(given, source="test")
    known = fixed(settings, {})
    for name, values in settings.model_dump(mode="json", exclude={"auto"}).items():
        may_change = {place for place in values or {} if f"{name}.{place}" not in known}
        assert may_change == (set(MOVABLE.get(name, "").split()) if values else set())


def test_settings_that_only_take_time_or_memory_may_change(bench: Bench, run: RunFolder) -> None:
    """And a default that is written out is the same setting; those of a finished run are held against it, too."""
    edit_settings(run.root, "run", {"tokens_per_micro_batch": 60, "checkpoint_every": 3, "evaluate_every": 4})
    edit_settings(run.root, "method", {"schedule": "constant", "error_feedback": 1.0})
    assert resume(bench, run) == STEPS
    edit_settings(run.root, "method", {"learning_rate": 0.5})
    refused(bench, run, RunError, "method.learning_rate was")


@pytest.mark.parametrize("name", [name for name, (group, *_) in EDITS.items() if group != "data"])
def test_the_statement_is_the_ledgers_whatever_was_edited(name: str, bench: Bench, run: RunFolder) -> None:
    """Also where what it is compared with was edited, too: it is refused, or states what its ledger does."""
    group, change, _ = EDITS[name]
    edit_settings(run.root, group, change, unseen=True)
    before = read_ledger(run.ledger)
    try:
        result = bench.resume(run.root, PUBLIC)
    except PrivloraError:
        assert read_ledger(run.ledger).charges == STOPPED
        return
    after = read_ledger(run.ledger)
    assert after.plan == before.plan
    assert (result.epsilon, result.delta) == (after.epsilon(), after.plan.delta)
    assert after.charges == STEPS
