from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reporting_cases import STEPS, Run, make_run

from privlora.accounting import epsilon
from privlora.reporting.facts import gather
from privlora.reporting.statement import evaluation_rows
from privlora.reporting.tables import privacy_table, sentence


def load(run: Run) -> dict[str, Any]:
    loaded = json.loads((run.folder.release / "privacy_report.json").read_text())
    return loaded


def test_the_statement_is_the_ledgers(private_run: Run, report: dict[str, Any]) -> None:
    statement, summary = report["statement"], private_run.summary
    assert report["stamp"] == {"text": "DIFFERENTIALLY PRIVATE", "reason": None}
    assert statement["epsilon"] == summary.epsilon()
    assert statement["epsilon_replace_one"] > statement["epsilon"]
    assert (statement["steps_charged"], statement["steps_planned"]) == (STEPS, STEPS + 1)
    assert statement["sampling"] == {"kind": "poisson", "sample_rate": 8 / 60}
    assert report["adapter"]["init"] == private_run.parts.method.init
    assert report["noise"]["noise_std"] == pytest.approx(1.0 * 1.0 / 8)


def test_a_start_of_this_machine_is_published_by_its_name_alone(tmp_path: Path) -> None:
    start = make_run(tmp_path / "secret-place" / "run", privacy={"noise_multiplier": 1.0}).folder.release
    own = start.rename(start.with_name("my-start"))
    run = make_run(tmp_path / "run", privacy={"noise_multiplier": 1.0}, init=str(own))
    assert load(run)["adapter"]["init"] == "my-start"
    for path in run.folder.release.iterdir():
        assert b"secret-place" not in path.read_bytes(), path.name


def test_an_adapted_clipping_norm_is_public(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", privacy={"noise_multiplier": 1.0, "clip_quantile": 0.25})
    report = load(run)
    assert report["noise"]["clip_quantile"] == 0.25
    assert report["noise"]["last_clip_norm"] == run.parts.adaptive.value != 1.0
    # What is stated is the cost of sum and counts together; the noise on the sum is 0.5 % larger.
    assert report["statement"]["noise_multiplier"] == 1.0
    assert report["noise"]["noise_std"] == pytest.approx(0.99**-0.5 / 8)
    assert dict(privacy_table(report))["Clipping norm C"].startswith("1 at first, ")
    assert "0.25 quantile" in sentence(report)


def test_epsilon_is_rounded_up_wherever_it_is_read(report: dict[str, Any]) -> None:
    stated = {**report, "statement": {**report["statement"], "epsilon": 2.0341}}
    assert dict(privacy_table(stated))["Guarantee (ε, δ)"] == "(2.035, 0.001)"
    assert "ε = 2.035 at δ = 0.001" in sentence(stated)


def test_epsilon_over_steps_rises_to_the_statement(private_run: Run, report: dict[str, Any]) -> None:
    plan = private_run.summary.plan
    curve = report["epsilon_over_steps"]
    assert [point["step"] for point in curve] == [1, 2, 3]
    values = [point["epsilon"] for point in curve]
    assert values == sorted(values)
    assert values[-1] == report["statement"]["epsilon"]
    for step, value in enumerate(values, start=1):  # never below what was spent
        assert value >= epsilon([(plan.event, step)], plan.delta) * (1 - 1e-9)


def test_no_epsilon_without_privacy(public_run: Run, insecure_run: Run) -> None:
    public, insecure = load(public_run), load(insecure_run)
    assert public["stamp"]["text"] == insecure["stamp"]["text"] == "NOT PRIVATE"
    assert "non-private mode" in public["stamp"]["reason"]
    assert "repeatable" in insecure["stamp"]["reason"]
    assert public["statement"] is None
    assert public["noise"] is None
    assert insecure["statement"]["epsilon"] is None
    assert insecure["statement"]["epsilon_replace_one"] is None
    for report in (public, insecure):
        assert report["epsilon_over_steps"] == []
        assert len(report["not_protected"]) == 1


def test_modules_come_in_the_models_order_with_their_spectrum(
    private_run: Run, report: dict[str, Any]
) -> None:
    model, factors = private_run.parts.adapter.model, private_run.parts.named_factors()
    names = [module["name"] for module in report["adapter"]["modules"]]
    assert names == [module["name"] for module in report["noise"]["modules"]]
    assert names == [name for name, _ in model.named_modules() if name in factors]
    for module in report["adapter"]["modules"]:
        a, b = factors[module["name"]]
        exact = torch.linalg.svdvals((a @ b.T).double())[:3]
        torch.testing.assert_close(
            torch.tensor(module["singular_values"]).double(), exact, rtol=1e-4, atol=1e-6
        )


def test_numbers_that_json_lacks_become_null() -> None:
    row = {"loss_per_example": math.inf, "standard_error": math.nan, "loss_per_token": 1.0, "accuracy": 0.0}
    rows = evaluation_rows([{"step": 4, **row, "examples": 1, "tokens": 2}] * 2)
    assert len(rows) == 1
    assert rows[0]["loss_per_example"] is rows[0]["standard_error"] is None


def test_a_diverged_adapter_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "adamw")
    coordinates = run.parts.coordinates
    tensors = coordinates.state_dict()
    tensors["0.left"][0, 0, 0] = math.nan
    report = gather(run.parts, None, [])
    assert [None] * 3 in [module["singular_values"] for module in report["adapter"]["modules"]]
    assert report["evaluation"] == []
    json.dumps(report, allow_nan=False)


def test_the_unit_decides_what_is_not_protected(tmp_path: Path, report: dict[str, Any]) -> None:
    user = {"unit": "user", "user_column": "who", "max_records_per_user": 4, "insecure_noise_seed": 1}
    run = make_run(tmp_path / "run", privacy={"noise_multiplier": 1.0, **user})
    statement = load(run)["statement"]
    assert (statement["unit"], statement["records_per_user"]) == ("user", 4)
    assert any("same person" in text for text in report["not_protected"])


def test_a_projected_mechanism_is_named_with_its_layers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "wishart-m2", privacy={"noise_multiplier": 1.0})
    report = load(run)
    sizes = {(3, site.n) for site in run.parts.adapter.sites}
    assert report["statement"]["projections"] == [list(pair) for pair in sorted(sizes)]
    assert report["statement"]["epsilon_replace_one"] is None
    assert any("replaced by another" in text for text in report["not_protected"])
    rows = dict(privacy_table(report))
    assert rows["ε if one unit is replaced"] == "not known for this mechanism"
    assert "3 of 16, 3 of 24 input dimensions" in rows["Mechanism"]


def test_checks_that_were_switched_off_are_published(private_run: Run) -> None:
    parts = private_run.parts
    settings = parts.settings.changed(data={"unchecked": True})
    report = gather(replace(parts, settings=settings), private_run.summary, [])
    assert report["method"]["unchecked"] is True
    assert any("data.unchecked" in each for each in report["not_protected"])
    assert "unchecked" not in gather(parts, private_run.summary, [])["method"]
