"""fine_tune from end to end: a plain peft adapter, a statement that the ledger supports, the model as it was."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from promises import promise
from tiny_models import loaded_by_peft, set_checkpointing, tiny_model, tiny_tokenizer

import privlora.calling
import privlora.running
import privlora.training.step
from privlora.accounting import epsilon, read_ledger
from privlora.api import Result, fine_tune, resume_run, train_run
from privlora.config import settings_from
from privlora.errors import ConfigError, ModelError, PrivacyError, PrivloraError
from privlora.training.files import RunFolder

RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold.", "name": f"p{i % 9}"} for i in range(30)]
PRIVACY = promise(steps=4, batch=6, records=30, noise_multiplier=1.0)
NOT_PRIVATE = {"private": False, "steps": 4, "expected_batch_size": 6, "public_dataset_size": 30}


def tune(model: Any, output: Path, **options: Any) -> Result:
    given = {"privacy": PRIVACY, "adapter": {"r": 2}, "data": {"max_length": 40}, "records": RECORDS}
    return fine_tune(model, output=output, **{**given, "tokenizer": tiny_tokenizer(), **options})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 24)[None]).logits


class Peek:
    """Keeps the logits of the adapted model at the end of training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits = torch.zeros(0)
        write = privlora.running.publish

        def peek(folder: Any, parts: Any, *rest: Any, **named: Any) -> None:
            model = parts.adapter.model.eval()
            for group, (a, b) in zip(parts.adapter.groups, _exported(parts), strict=True):
                parts.adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)
            self.logits = logits(model)
            write(folder, parts, *rest, **named)

        monkeypatch.setattr(privlora.running, "publish", peek)


def _exported(parts: Any) -> Any:
    return parts.coordinates.factors() if parts.average is None else parts.average.factors()


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize(
    ("family", "method", "adapter"),
    [
        ("llama", "prism", {"r": 2}),
        ("gpt2", "prism", {"r": 3, "use_rslora": True, "lora_alpha": 5}),
        (
            "llama",
            {"name": "prism", "averaging": 0.9, "optimizer": "scalar"},
            {"r": 2, "target_modules": ["q_proj"]},
        ),
        ("gpt2", "dp-adamw", {"r": 2, "lora_alpha": 32}),
        ("llama-tied", {"name": "dp-adamw", "averaging": 0.9}, {"r": 2, "use_rslora": True}),
    ],
)
def test_peft_loads_the_release_with_our_logits(
    family: str, method: Any, adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peek = Peek(monkeypatch)
    model = tiny_model(family)
    before = logits(model)
    rate = {"learning_rate": 0.03}
    method = {**method, **rate} if isinstance(method, Mapping) else {"name": method, **rate}
    result = tune(model, tmp_path / "run", method=method, adapter=adapter)
    assert torch.equal(logits(model), before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = loaded_by_peft(tiny_model(family), result.release)
    torch.testing.assert_close(logits(loaded), peek.logits, rtol=0, atol=3e-5)
    assert float((peek.logits - before).abs().max()) > 0.01


def test_the_statement_is_what_the_ledger_and_the_accountant_say(tmp_path: Path) -> None:
    result = tune(tiny_model(), tmp_path / "run")
    summary = read_ledger(result.release / "ledger.jsonl")
    assert summary.closed
    assert summary.charges == result.steps == 4
    assert result.delta == PRIVACY["delta"]
    assert result.epsilon == pytest.approx(epsilon([(summary.plan.event, 4)], 1e-3), rel=1e-9)
    assert summary.plan.event.noise_multiplier == 1.0
    assert (summary.plan.unit, summary.plan.records_per_user) == ("record", None)
    assert summary.plan.event.sampling.sample_rate == pytest.approx(0.2)
    report = json.loads((result.release / "privacy_report.json").read_text())
    assert report["statement"]["epsilon"] == pytest.approx(result.epsilon)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"release", "private"}


@pytest.mark.usefixtures("quick_reports")
def test_a_target_epsilon_is_never_exceeded(tmp_path: Path) -> None:
    privacy = {**PRIVACY, "target_epsilon": 2.0}
    del privacy["noise_multiplier"]
    result = tune(tiny_model(), tmp_path / "run", privacy=privacy)
    assert result.epsilon is not None
    assert 1.9 < result.epsilon <= 2.0


@pytest.mark.parametrize(
    "privacy", [NOT_PRIVATE, {**PRIVACY, "insecure_noise_seed": 5}], ids=["no privacy", "repeatable noise"]
)
def test_no_epsilon_is_stated_without_privacy(privacy: dict[str, Any], tmp_path: Path) -> None:
    result = tune(tiny_model(), tmp_path / "run", privacy=privacy)
    assert result.epsilon is None
    assert result.delta is None
    assert "NOT PRIVATE" in (result.release / "README.md").read_text()
    assert "NOT PRIVATE" in (result.release / "report.html").read_text()


@pytest.mark.usefixtures("quick_reports")
def test_repeatable_noise_repeats_and_the_default_does_not(tmp_path: Path) -> None:
    weights = []
    for i, seed in enumerate((5, 5, None, None)):
        privacy = PRIVACY if seed is None else {**PRIVACY, "insecure_noise_seed": seed}
        result = tune(tiny_model(), tmp_path / str(i), privacy=privacy)
        weights.append((result.release / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert len(set(weights)) == 3


@pytest.mark.usefixtures("quick_reports")
def test_a_user_is_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    gradients = privlora.training.step.micro_batch_gradients

    def spy(adapter: Any, batch: Any, **options: Any) -> Any:
        captured, losses = gradients(adapter, batch, **options)
        seen.append((captured.units, len(batch.input_ids)))
        assert captured.units == len(losses) == batch.unit_count
        return captured, losses

    monkeypatch.setattr(privlora.training.step, "micro_batch_gradients", spy)
    privacy = {**PRIVACY, "unit": "user", "user_column": "name", "max_records_per_user": 3}
    privacy |= {"public_dataset_size": 9, "expected_batch_size": 4}
    result = tune(tiny_model(), tmp_path / "run", privacy=privacy)
    assert any(rows > units for units, rows in seen)
    assert all(rows <= 3 * units for units, rows in seen)
    assert read_ledger(result.release / "ledger.jsonl").plan.unit == "user"


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    names = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
    return {
        "flags": {n: {k: vars(m).get(k, "absent") for k in names} for n, m in model.named_modules()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "grad": [n for n, p in model.named_parameters() if p.grad is not None],
        "hooks": [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks],
    }


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("had", [None, True, False])
def test_the_model_comes_back_as_it_was(checkpointing: str, had: bool | None, tmp_path: Path) -> None:
    model = tiny_model().train()
    model.model.layers[0].eval()  # flags that differ between modules
    model.model.norm.weight.requires_grad_(False)
    if had is not None:
        set_checkpointing(model, reentrant=had)
    before, bits = state_of(model), {n: t.clone() for n, t in model.state_dict().items()}
    settings = {
        "model": {"name": "tiny", "gradient_checkpointing": checkpointing},
        "data": {"path": "(in memory)", "max_length": 40},
        "privacy": PRIVACY,
        "adapter": {"r": 2},
        "run": {"output": str(tmp_path / "run")},
    }
    train_run(settings_from(settings), model=model, tokenizer=tiny_tokenizer(), records=RECORDS)
    assert state_of(model) == before
    assert all(torch.equal(t, bits[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": {"name": "prism", "optimizer": "adam"}}, ConfigError),
        ({"method": "prism-paper", "adapter": {"init": "random"}}, ConfigError),
        ({"method": "prsm"}, ConfigError),
        ({"method": "adamw"}, ConfigError),  # adds no noise, so it cannot be private
        ({"adapter": {"r": 99}}, ModelError),
        ({"adapter": {"r": 2, "target_modules": ["q_porj"]}}, ModelError),
        ({"adapter": {"r": 2, "init": "no-such-folder"}}, ModelError),
        ({"privacy": {**PRIVACY, "delta": 0.04}}, ConfigError),
        ({"privacy": {**PRIVACY, "public_dataset_size": 20, "delta": 0.04}}, PrivacyError),
        ({"privacy": {**PRIVACY, "target_epsilon": 1.0}}, ConfigError),
        ({"data": {"text": "txet"}}, PrivloraError),
        ({"data": {"max_length": 8}}, PrivloraError),  # which cuts most of them
        ({"loading": {"dtype": torch.float16}}, ConfigError),
        ({"records": []}, PrivloraError),
        ({"records": lambda: RECORDS}, PrivloraError),
        ({"model": torch.nn.Linear(2, 2)}, PrivloraError),
        ({"tokenizer": None}, ConfigError),
        *(({"output": output}, ConfigError) for output in (None, "", 3)),
    ],
)
def test_what_is_refused_is_refused_before_anything_happens(
    options: dict[str, Any], error: type[PrivloraError], tmp_path: Path
) -> None:
    model = tiny_model()
    before = state_of(model)
    with pytest.raises(error) as refused:
        tune(**{"model": model, "output": tmp_path / "run", **options})
    assert "patient" not in str(refused.value)
    assert state_of(model) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quick_reports")
def test_from_files_alone(tmp_path: Path) -> None:
    """Model, tokenizer and records on disk; the second stage starts from the first one's adapter."""
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    (tmp_path / "records.jsonl").write_text("\n".join(json.dumps(row) for row in RECORDS))
    options: dict[str, Any] = {"privacy": PRIVACY, "data": {"max_length": 40}}
    files = (str(base), str(tmp_path / "records.jsonl"))
    first = fine_tune(*files, output=tmp_path / "2024", adapter={"r": 2}, **options)
    assert resume_run(tmp_path / "2024").epsilon == first.epsilon
    start = {"r": 2, "init": str(first.release)}
    second = fine_tune(*files, output=tmp_path / "second", adapter=start, method="prism-paper", **options)
    assert second.release.exists()
    config = yaml.safe_load(RunFolder(tmp_path / "second").settings.read_text())
    assert config["adapter"]["init"] == str(first.release)


@pytest.mark.usefixtures("quick_reports")
def test_a_folder_whose_name_is_a_number_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tiny_model(), tmp_path / "2024")
    monkeypatch.chdir(tmp_path)
    result = resume_run("2024", model=tiny_model(), tokenizer=tiny_tokenizer(), records=RECORDS)
    assert result.release == Path("2024/release")


def test_a_dtype_may_be_torchs() -> None:
    groups = {"data": None, "run": None, "loading": {"dtype": torch.bfloat16}, "privacy": PRIVACY}
    found = privlora.calling.settings_of_call("x", {"path": "x.jsonl"}, groups, "runs/x", source="fine_tune")
    assert found.model.dtype == "bfloat16"
