from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reporting_cases import STEPS, Run, leaf_paths, make_run

from privlora.accounting import epsilon
from privlora.reporting.facts import gather
from privlora.reporting.statement import evaluation_rows
from privlora.reporting.wording import privacy_table, sentence

# Every value that a report may hold. Whoever adds a line states that it is public.
ALLOWED = {
    "schema_version",
    "files.adapter_config.json",
    "files.adapter_model.safetensors",
    "files.evaluations.jsonl",
    "files.ledger.jsonl",
    "sha256",
    "stamp.text",
    "stamp.reason",
    "statement",
    "statement.epsilon",
    "statement.delta",
    "statement.unit",
    "statement.records_per_user",
    "statement.adjacency",
    "statement.epsilon_replace_one",
    "statement.sampling.kind",
    "statement.sampling.sample_rate",
    "statement.sampling.max_batch_size",
    "statement.sampling.dataset_size",
    "statement.noise_multiplier",
    "statement.projections",
    "statement.clip_norm",
    "statement.expected_batch_size",
    "statement.steps_planned",
    "statement.steps_charged",
    "statement.accountant",
    "statement.dataset",
    "statement.run_id",
    "statement.created",
    "means.right_guesses",
    "means.found_at_1_percent",
    "means.found_at_1_permille",
    "epsilon_over_steps",
    "epsilon_over_steps[].step",
    "epsilon_over_steps[].epsilon",
    "target_epsilon",
    "noise",
    "noise.noise_std",
    "noise.clipping_slack",
    "noise.clip_quantile",
    "noise.last_clip_norm",
    "noise.intrinsic",
    "noise.law",
    "noise.draws",
    "noise.modules[].name",
    "noise.modules[].m",
    "noise.modules[].n",
    "noise.modules[].r",
    "noise.modules[].closed_form",
    "noise.modules[].measured",
    "evaluation[].step",
    "evaluation[].loss_per_example",
    "evaluation[].standard_error",
    "evaluation[].loss_per_token",
    "evaluation[].accuracy",
    "evaluation[].examples",
    "evaluation[].tokens",
    "adapter.base_model",
    "adapter.base_is_local",
    "adapter.base_sha256",
    "adapter.base_revision",
    "adapter.rank",
    "adapter.coverage.share",
    "adapter.coverage.experts",
    "adapter.lora_alpha",
    "adapter.use_rslora",
    "adapter.target_modules",
    "adapter.init",
    "adapter.public_seed",
    "adapter.exported",
    "adapter.modules[].name",
    "adapter.modules[].m",
    "adapter.modules[].n",
    "adapter.modules[].singular_values[]",
    "method.name",
    "method.summary",
    "method.reference",
    "method.coordinates",
    "method.described",
    "method.optimizer",
    "method.learning_rate",
    "method.relative_rate",
    "method.schedule",
    "method.warmup_steps",
    "method.averaging",
    "method.clipping",
    "method.beta1",
    "method.error_feedback",
    "method.right_weight",
    "method.metric_power",
    "method.beta2",
    "method.steps",
    "method.max_length",
    "method.loss_on",
    "method.dropout",
    "method.lora_dropout",
    "versions.privlora",
    "versions.dp-accounting",
    "versions.torch",
    "versions.transformers",
    "versions.peft",
    "versions.python",
    "not_protected[]",
}


# Settings that only some optimizers have; public like the rest of the group.
SOMETIMES = {
    "method.chat_template_sha256",
    "method.chat_template_kwargs.enable_thinking",
    "method.hold_out",
    "method.span.alpha[]",
    "method.span.ridge[]",
    "method.span.directions[]",
    "method.span.texts[]",
    "method.span.cosine[]",
    "method.span.kappa[]",
    "method.alpha",
    "method.ridge",
    "method.top_k",
    "method.embedding_clip",
    "method.beside",
    "method.compares",
    "method.residual_clip",
    "method.weight_decay",
    "method.learning_rate_ratio",
    "method.floor",
    "method.perturbation",
    "method.public_texts.generator",
    "method.public_texts.count",
    "method.public_texts.evolve_every",
    "method.public_texts.warm_start_epochs",
}


def load(run: Run) -> dict[str, Any]:
    loaded = json.loads((run.folder.release / "privacy_report.json").read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("kind", ["private_run", "public_run", "insecure_run"])
def test_a_report_holds_nothing_outside_the_list(kind: str, request: pytest.FixtureRequest) -> None:
    assert set(leaf_paths(load(request.getfixturevalue(kind)))) <= ALLOWED | SOMETIMES


def test_a_private_report_holds_the_whole_list(report: dict[str, Any]) -> None:
    only_with_a_cap = {"statement.sampling.max_batch_size", "statement.sampling.dataset_size"}
    absent = only_with_a_cap | {"statement", "noise", "epsilon_over_steps"}
    assert set(leaf_paths(report)) == ALLOWED - absent


def test_the_statement_is_the_ledgers(private_run: Run, report: dict[str, Any]) -> None:
    statement, summary = report["statement"], private_run.summary
    assert summary is not None
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
    assert run.parts.adaptive is not None
    assert report["noise"]["clip_quantile"] == 0.25
    assert report["noise"]["last_clip_norm"] == run.parts.adaptive.value != 1.0
    # What is stated is the cost of sum and counts together; the noise on the sum is 0.5 % larger.
    assert report["statement"]["noise_multiplier"] == 1.0
    assert report["noise"]["noise_std"] == pytest.approx(0.99**-0.5 / 8)
    said = dict(privacy_table(report))
    assert said["Clipping norm C"].startswith("1 at first, ")
    assert "0.25 quantile" in sentence(report)
    assert "0.5 % larger" in " ".join(said)


def test_epsilon_over_steps_rises_to_the_statement(private_run: Run, report: dict[str, Any]) -> None:
    assert private_run.summary is not None
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
    assert "fresh random projections" in sentence(report)
    assert any("replaced by another" in text for text in report["not_protected"])
    rows = dict(privacy_table(report))
    assert rows["ε if one unit is replaced"] == "not known for this mechanism"
    assert "3 of 16, 3 of 24 input dimensions" in rows["Mechanism"]
    page = (run.folder.release / "report.html").read_text()
    assert "τ·n·√(m/r)" in page
    assert "‖left‖" not in page
