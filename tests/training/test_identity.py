"""A run is resumed with the records and the model that it began with, and no others; a refusal charges nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import PRIVACY, PUBLIC, RECORDS, STEPS, STOPPED, Bench, StopAt
from tiny_models import tiny_model

from privlora.accounting import read_ledger
from privlora.api import fine_tune, resume_run
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted

pytestmark = pytest.mark.usefixtures("quick_reports")

NAMED = [{**record, "name": f"p{i // 2}"} for i, record in enumerate(RECORDS)]
BY_USER = {**PRIVACY, "unit": "user", "user_column": "name", "public_dataset_size": 15}


def resume(bench: Bench, folder: RunFolder, **given: Any) -> int:
    whole = {"model": bench.model, "tokenizer": bench.tokenizer, "records": RECORDS, "evaluation": PUBLIC}
    return resume_run(folder.root, **{**whole, **given}).steps


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
    with pytest.raises(Interrupted):
        start_by_user(bench, folder)
    swapped = [{**record, "name": NAMED[i - 1]["name"]} for i, record in enumerate(NAMED)]
    refused(bench, folder, PrivacyError, "are not those", records=swapped, evaluation=None)
    assert resume(bench, folder, records=NAMED[::-1], evaluation=None) == STEPS


def start_by_user(bench: Bench, folder: RunFolder) -> None:
    fine_tune(
        bench.model,
        NAMED,
        tokenizer=bench.tokenizer,
        privacy=BY_USER,
        adapter={"r": 2},
        columns={"max_length": 40},
        output=folder.root,
        observer=StopAt(2),
    )


def test_another_model(bench: Bench, run: RunFolder) -> None:
    nearly = tiny_model()
    with torch.no_grad():
        nearly.model.layers[1].mlp.up_proj.weight[0, 5] += 1e-3
    for model in (tiny_model(seed=1), nearly, tiny_model(dtype=torch.bfloat16)):
        refused(bench, run, RunError, "base model is not the one", model=model)


def test_runs_of_older_versions_go_on(bench: Bench, run: RunFolder) -> None:
    run.identity.unlink()
    assert resume(bench, run, records=RECORDS[:-1]) == STEPS


@pytest.mark.parametrize("content", ["", "null", "{}", '{"records": 1}'])
def test_a_damaged_file_is_one_error(content: str, bench: Bench, run: RunFolder) -> None:
    run.identity.write_text(content)
    refused(bench, run, RunError, "identity.json' is damaged")


def test_it_is_private_and_the_ledger_has_none_of_it(run: RunFolder) -> None:
    kept = json.loads(run.identity.read_text())
    assert run.identity.parent == run.private
    for path in run.release.iterdir():
        assert not any(value.encode() in path.read_bytes() for value in kept.values())
    assert read_ledger(run.ledger).charges == STOPPED


def test_no_evaluation_where_the_run_has_none(bench: Bench, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        bench.start(folder.root, observer=StopAt(2))
    refused(bench, folder, RunError, "has no evaluation records")
    assert resume(bench, folder, evaluation=None) == STEPS
