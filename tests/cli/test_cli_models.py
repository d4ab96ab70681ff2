"""evaluate and export: the same model in every form, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from cli_cases import CHECKING, LOADING, Call, after
from tiny_models import loaded_by_peft
from transformers import AutoModelForCausalLM

from privlora.reporting.publication import write_report
from privlora.reporting.seals import PAGES, digests, sealed, with_files
from privlora.training.files import RunFolder


def loss(call: Call, *argv: object) -> float:
    ended = call("evaluate", *argv, "--json")
    assert ended.code == 0, ended.err
    return float(ended.json["loss_per_example"])


@pytest.fixture
def strong(finished: Path, tmp_path: Path) -> Path:
    """The finished run with an adapter whose effect no rounding hides."""
    from safetensors.torch import load_file, save_file

    run = Path(shutil.copytree(finished / "run", tmp_path / "strong"))
    weights = run / "release" / "adapter_model.safetensors"
    save_file({k: v * 30 for k, v in load_file(weights).items()}, weights, metadata={"format": "pt"})
    _sealed_again(run)
    return run


def _sealed_again(run: Path) -> None:
    """As if a run had written what lies there."""
    folder = RunFolder(run)
    write_report(folder, with_files(json.loads(folder.report.read_text()), folder.release))


def test_a_run_is_its_adapter_on_its_base(strong: Path, finished: Path, model: Path, call: Call) -> None:
    data = ["--data", finished / "held_out.jsonl"]
    of_run = loss(call, strong, *data)
    of_adapter = loss(call, strong / "release", *data, "--max-length", 48)
    of_base = loss(call, model, *data, "--max-length", 48)
    assert of_run == of_adapter
    assert abs(of_run - of_base) > 1e-3


def test_evaluate_agrees_with_the_run(finished: Path, call: Call) -> None:
    rows = [
        json.loads(line) for line in (finished / "run/release/evaluations.jsonl").read_text().splitlines()
    ]
    of_run = loss(call, finished / "run", "--data", finished / "held_out.jsonl")
    assert of_run == pytest.approx(rows[-1]["loss_per_example"], abs=1e-5)


def test_columns_of_other_records(finished: Path, call: Call) -> None:
    columns = ["--prompt", "question", "--completion", "answer"]
    argv = ["evaluate", finished / "run", "--data", finished / "held_out.jsonl", *columns, "--json"]
    everything = call(*argv, "--loss-on", "all").json
    answers = call(*argv).json
    fewer = call(*argv, "--loss-on", "completion", "--limit", 2).json
    assert everything["tokens"] > answers["tokens"] > fewer["tokens"]
    assert (answers["examples"], fewer["examples"]) == (8, 2)


@pytest.mark.parametrize("of", ["run", "run/release"])
def test_numbers_of_the_runs_own_private_file_are_called_private(
    of: str, finished: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file, whatever it is called here; and not those of the public records beside it."""
    monkeypatch.setattr("privlora.cli.evaluation._held_out", lambda *_, **__: LOSS)
    (tmp_path / "link.jsonl").symlink_to(finished / "records.jsonl")
    for own in (finished / "records.jsonl", tmp_path / "link.jsonl"):
        shown = call("evaluate", finished / of, "--data", own)
        assert shown.err.startswith(f"PRIVATE: {own} is what this run was trained on.")
        assert shown.out.splitlines()[-1].startswith(f"PRIVATE: computed without noise on {own}, ")
    public = call("evaluate", finished / of, "--data", finished / "held_out.jsonl")
    assert "PRIVATE" not in public.err + public.out
    assert public.out.splitlines()[-1].startswith("If these records are private")


LOSS = {
    "loss_per_example": 2.0,
    "standard_error": 0.1,
    "loss_per_token": 2.0,
    "accuracy": 0.5,
    "tokens": 9,
    "examples": 3,
}


def test_another_base(strong: Path, finished: Path, model: Path, tmp_path: Path, call: Call) -> None:
    moved = shutil.copytree(model, tmp_path / "moved")
    adapter = Path(shutil.copytree(strong / "release", tmp_path / "adapter"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")})
    )
    data = ["--data", finished / "held_out.jsonl"]
    assert call("evaluate", adapter, *data).code == 2
    assert loss(call, adapter, *data, "--base", moved) == loss(call, strong / "release", *data)


def test_merged_weights_give_the_same_logits(strong: Path, model: Path, tmp_path: Path, call: Call) -> None:
    merged = call("export", strong, tmp_path / "new" / "merged", "--merge", "--json").json
    assert merged == {"output": str(tmp_path / "new" / "merged"), "form": "merged model"}
    names = set(os.listdir(merged["output"]))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {"privacy_report.json", "ledger.jsonl"} <= names
    assert "adapter_config.json" not in names
    ids = torch.arange(20).reshape(2, 10)
    base = AutoModelForCausalLM.from_pretrained(model)
    untrained = base(ids).logits
    expected = loaded_by_peft(base, strong / "release")(ids).logits
    found = AutoModelForCausalLM.from_pretrained(merged["output"])(ids).logits
    assert (found - expected).abs().max() < 1e-3 * (expected - untrained).abs().max()


@pytest.mark.parametrize("private", [True, False])
def test_a_merged_model_has_its_card(private: bool, finished: Path, tmp_path: Path, call: Call) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    stamp = "DIFFERENTIALLY PRIVATE" if private else "NOT PRIVATE"
    if not private:
        path = run / "release" / "privacy_report.json"
        report = json.loads(path.read_text())
        path.write_text(json.dumps({**report, "stamp": {"text": stamp, "reason": "a test"}}))
        _sealed_again(run)
    merged = tmp_path / "merged"
    assert call("export", run, merged, "--merge").code == 0
    text = (merged / "README.md").read_text()
    assert f"\n# {stamp}: " in text
    assert "library_name: transformers" in text
    assert 'AutoModelForCausalLM.from_pretrained(".")' in text
    for absent in ("peft", "report.html"):
        assert absent not in text.split("Versions: ")[0]
    assert len({path.stat().st_mode for path in merged.iterdir()}) == 1


def test_altered_weights_are_not_exported_with_a_promise(finished: Path, tmp_path: Path, call: Call) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    config = run / "release" / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    for form in ("--merge", "--as-lora"):
        ended = call("export", run, tmp_path / "out", form)
        assert ended.code == 2
        assert "adapter_config.json in" in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["--merge", "--as-lora"])
def test_what_is_exported_is_named_with_its_hashes(
    form: str, finished: Path, tmp_path: Path, call: Call
) -> None:
    assert call("export", finished / "run", "--output", tmp_path / "out", form).code == 0
    report = json.loads((tmp_path / "out/privacy_report.json").read_text())
    files = {path.name for path in (tmp_path / "out").iterdir()} - set(PAGES)
    assert report["files"] == digests(tmp_path / "out", files)
    assert files == report["files"].keys()
    assert report == sealed(report)


def test_a_card_is_made_anew_and_no_other_ledger_is_exported(
    finished: Path, tmp_path: Path, call: Call
) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    (run / "release/README.md").write_text("a patient")
    assert call("export", run, tmp_path / "out", "--as-lora").code == 0
    assert "a patient" not in (tmp_path / "out/README.md").read_text()
    ledger = run / "release/ledger.jsonl"
    ledger.rename(tmp_path / "elsewhere")
    ledger.symlink_to(tmp_path / "elsewhere")
    ended = call("export", run, tmp_path / "other", "--as-lora")
    assert ended.code == 2
    assert "'ledger.jsonl' in" in ended.err
    assert not (tmp_path / "other").exists()


def test_a_copy_of_the_adapter(finished: Path, tmp_path: Path, call: Call) -> None:
    copied = call("export", finished / "run", tmp_path / "copy", "--as-lora")
    assert copied.out == f"adapter in {tmp_path / 'copy'}\n"
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md", "ledger.jsonl"):
        assert (tmp_path / "copy" / name).read_bytes() == (finished / "run" / "release" / name).read_bytes()
    assert not (tmp_path / "copy" / "config.resolved.yaml").exists()


def test_weights_that_do_not_fit_leave_nothing(finished: Path, tmp_path: Path, call: Call) -> None:
    """A limit on the size of files stands in for a full disk; it also holds inside safetensors."""
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = max(path.stat().st_size for path in (run / "release").iterdir())  # of the model it is more
    for most, says in ((4_000, "cannot copy"), (2 * whole, "cannot write")):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            ended = call("export", run, tmp_path / "new", "--merge")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert ended.code == 2
        (error,) = after(ended, CHECKING, *([LOADING] if most > 4_000 else []))
        assert says in error
        assert list(tmp_path.iterdir()) == [run]
