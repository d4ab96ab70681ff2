"""No key and no number of a pushed file is free, also where hashes were made of it: a resume seals what it finds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from push_cases import BASE, appended, refused, sealed_again

from privlora.accounting import read_ledger
from privlora.errors import PrivacyError
from privlora.evaluation.classes import ClassResult
from privlora.evaluation.metrics import METRICS
from privlora.evaluation.next_token import NextTokenResult
from privlora.evaluation.preferences import PreferenceResult
from privlora.rehearsals.kept import AIM, DRAWS, cost_on_private
from privlora.reporting.pushing import push
from privlora.reporting.rows import OF_EVALUATIONS
from privlora.reporting.seals import belongs
from privlora.reporting.statement import evaluation_rows
from privlora.training.files import RunFolder


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": 2.5},
        {"batch": 4},
        {"records": 40},
        {"note": "a patient"},
        {"step": True},
        {"step": 83697832},
        {"step": -1},
        {"epsilon": 0.5},
        {"epsilon": None},
        {"learning_rate": 987654321.0},
        {"held_out_loss": 987654321.0},
        {"held_out_loss": "a patient"},
    ],
)
def test_metrics_follow_from_what_is_public(changed: dict[str, Any], run: RunFolder) -> None:
    """Also where hashes were made of them: a run that went on seals what it finds."""
    rows = _rows(run.metrics)
    _write(run.metrics, [rows[0], {**rows[1], **changed}, *rows[2:]])
    sealed_again(run)
    refused(run, "metrics.jsonl")


def test_metrics_are_verified_without_torch(run: RunFolder) -> None:
    """As an auditor does, who has none: nothing is called altered for that."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from privlora.reporting.publication import read_report\n"
        "from privlora.reporting.rows import refuse_other_rows\n"
        "from privlora.training.files import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]))\nrefuse_other_rows(folder, read_report(folder.report), folder)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert run.metrics.exists()
    subprocess.run([sys.executable, "-c", code, str(run.root)], check=True)


def _spelt(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"))


def _twice(row: dict[str, Any]) -> str:
    return '{"step": 1, ' + json.dumps(row)[1:]


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize("line", [_spelt, _twice])
def test_rows_are_spelt_as_a_run_spells_them(
    name: str, line: Callable[[dict[str, Any]], str], run: RunFolder
) -> None:
    first, *others = _rows(run.release / name)
    (run.release / name).write_text("\n".join([line(first), *map(json.dumps, others)]) + "\n")
    sealed_again(run)
    refused(run, name)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_nothing_lies_behind_the_last_row(name: str, run: RunFolder) -> None:
    appended(name, "a patient")(run.release)
    sealed_again(run)
    refused(run, name)


def test_no_step_of_the_metrics_is_left_out(run: RunFolder) -> None:
    """Which steps are shown follows from one number; else it would tell something."""
    rows = _rows(run.metrics)
    for kept in (rows[:-1], rows[1:], [*rows, rows[-1]]):
        _write(run.metrics, kept)
        sealed_again(run)
        refused(run, "metrics.jsonl")
    _write(run.metrics, [row for row in rows if row["step"] != 2])  # of run.log_every: 3
    sealed_again(run)
    assert push(run, "me/notes", base_model=BASE, dry_run=True).files


@pytest.mark.parametrize(
    "changed",
    [{"note": 1.5}, {"units": 4}, {"accuracy": True}, {"accuracy": "a patient"}, {"accuracy": None}],
)
def test_evaluations_have_known_keys_and_numbers(changed: dict[str, Any], run: RunFolder) -> None:
    rows = _rows(run.evaluations)
    _write(run.evaluations, [{**rows[0], **changed}, *rows[1:]])
    sealed_again(run, evaluation=evaluation_rows(_rows(run.evaluations)))
    refused(run, "(evaluations.jsonl|report.json)")


@pytest.mark.parametrize("changed", [{"note": 1.5}, {"accuracy": True}, {"accuracy": "a patient"}])
def test_a_report_repeats_nothing_else_where_the_file_is_gone(
    changed: dict[str, Any], run: RunFolder
) -> None:
    rows = _rows(run.evaluations)
    for name in ("evaluations.jsonl", "metrics.jsonl"):  # nobody has to publish them
        (run.release / name).unlink()
    sealed_again(run)
    assert push(run, "me/notes", base_model=BASE, dry_run=True).files
    sealed_again(run, evaluation=[{**rows[0], **changed}, *rows[1:]])
    refused(run, "report.json")


def test_no_step_is_evaluated_twice(run: RunFolder) -> None:
    rows = _rows(run.evaluations)
    _write(run.evaluations, [{**rows[0], "loss_per_example": 987654321.0}, *rows])
    sealed_again(run)
    refused(run, "evaluations.jsonl")


def test_nothing_lies_behind_a_ledger(run: RunFolder) -> None:
    appended("ledger.jsonl", "a patient")(run.release)
    sealed_again(run)
    refused(run, "ledger.jsonl")


def _choice(run: RunFolder, kind: str) -> dict[str, Any]:
    """As a run of that method and rate keeps it."""
    method = json.loads(run.report.read_text())["method"]
    rate = method["learning_rate"]
    draws = {"loss": 2.5, "spread": 0.25, "draws": DRAWS}
    trials = [{"name": "prism", "learning_rate": each, **draws} for each in (rate, 0.5, 0.25)]
    found: dict[str, Any] = {"row": "prism", "rows": trials}
    if kind == "noise":
        found |= {"aim": AIM, "of_its_own": 16, "untrained": 2.4}
    else:
        found |= {"in_place_of_records": 40, "held_out": 20, "drawn": 8, "untrained": 3.0}
        found |= {"equal_from": rate, "equal_to": 0.5}
    return {**found, **cost_on_private(read_ledger(run.ledger).plan, len(found["rows"]))}


def _chosen(run: RunFolder, choice: dict[str, Any], text: str | None = None) -> None:
    """As if ``choice`` had chosen the run's method. text: what the file says."""
    method = json.loads(run.report.read_text())["method"]
    run.choice.write_text(json.dumps(choice, indent=1) + "\n" if text is None else text)
    sealed_again(run, method={**method, "choice": choice})


KINDS = ("noise", "file")


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_spelt_as_a_run_spells_it(kind: str, run: RunFolder) -> None:
    choice = _choice(run, kind)
    _chosen(run, choice)
    assert push(run, "me/notes", base_model=BASE, dry_run=True).files
    _chosen(run, choice, '{"row": "a patient", ' + json.dumps(choice)[1:])
    refused(run, "choice.json")
    _chosen(run, choice)
    run.choice.write_text(json.dumps({**choice, "untrained": 2.0}, indent=1) + "\n")
    sealed_again(run)
    refused(run, "choice.json")


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("file", {"note": 1}),
        ("file", {"row": "a patient"}),
        ("file", {"row": "gep"}),
        ("file", {"untrained": "a patient"}),
        ("file", {"rows": {1: {"name": "a patient"}}}),
        ("file", {"rows": {1: {"note": 1}}}),
        ("file", {"rows": {1: {"loss": [1]}}}),
        ("noise", {"rows": {0: {"learning_rate": 777.7}}}),
        ("noise", {"median_norm": 0.5, "clip_norm": 0.12}),
        ("noise", {"median_norm": 5.0, "clip_norm": 1.0}),
        ("noise", {"turning": 0.5, "right_weight": 0.5}),
        ("noise", {"turning": 3.0, "right_weight": 0.5}),
        *((kind, {"private_epsilon": value}) for kind in KINDS for value in (0.5, 1234567.89, None)),
        *((kind, {"private_runs": 2}) for kind in KINDS),
    ],
    ids=str,
)
def test_a_choice_has_known_keys_names_and_numbers(
    kind: str, changed: dict[str, Any], run: RunFolder
) -> None:
    """Also where its file is gone, of which the report repeats all."""
    choice = _choice(run, kind)
    if "rows" in changed:
        choice["rows"] = [{**row, **changed["rows"].get(k, {})} for k, row in enumerate(choice["rows"])]
    else:
        choice |= changed
    _chosen(run, choice)
    refused(run)
    run.choice.unlink()
    sealed_again(run)
    refused(run)


@pytest.mark.parametrize("name", ["ledger-north.jsonl", "ledger-north.jsonl.txt", "ledger-a b.jsonl"])
def test_ledgers_of_clients_are_a_federations(name: str, run: RunFolder) -> None:
    shutil.copyfile(run.ledger, run.release / name)
    sealed_again(run)
    with pytest.raises(PrivacyError, match="is nothing that a run leaves there"):
        push(run, "me/notes", base_model=BASE, dry_run=True)
    sealed_again(run, federation={})
    report = json.loads(run.report.read_text())
    assert (name in report["files"]) == belongs(name, report) == (name == "ledger-north.jsonl")
    if name == "ledger-north.jsonl":
        appended(name, "a patient")(run.release)
        sealed_again(run)
        refused(run, "ledger-north.jsonl")
    else:
        with pytest.raises(PrivacyError, match="is nothing that a run leaves there"):
            push(run, "me/notes", base_model=BASE, dry_run=True)


def test_known_names_of_evaluations_are_those_of_results() -> None:
    kinds = NextTokenResult, ClassResult, PreferenceResult
    named = {"step", *METRICS, *(field.name for kind in kinds for field in fields(kind))} - {"metrics"}
    assert named == OF_EVALUATIONS
