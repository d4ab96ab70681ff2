"""Every YAML under configs/ says how to run it, and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_cases import NAMES, call, record, save_tiny_model, task_record, write_records
from federation_cases import write_clients
from safetensors.torch import load_file

from privlora.accounting import read_ledger
from privlora.config import Settings, load_settings
from privlora.reporting.pushing import push
from privlora.training.files import RunFolder

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), chat=True)


def overrides(settings: Settings, model: Path, folder: Path) -> list[str]:
    """A small model and generated records in place of the example's; the rest stays as it is written."""
    path = settings.data.path
    suffix = Path(path if isinstance(path, str) else path[0]).suffix or ".jsonl"
    make = record if settings.data.task is None else task_record
    if settings.data.label is not None:
        labels = settings.data.labels
        assert isinstance(labels, list)
        make = lambda number: {**record(number), "label": labels[number % len(labels)]}  # noqa: E731
    if settings.data.chosen is not None:
        make = lambda number: {**record(number), "better": f"yes {number}", "worse": "no"}  # noqa: E731
    if settings.data.prompt == "prompt":
        make = lambda number: {**record(number), "prompt": "Write."}  # noqa: E731
    if settings.data.completion == "response":
        make = lambda number: {"instruction": "Write.", "response": f"note {number}", "category": number % 3}  # noqa: E731
    small: dict[str, object] = {
        "model.name": model,
        "data.max_length": min(settings.data.max_length, 128),  # the small model's positions
        "data.unchecked": True,  # which prompts of tasks may fill
        "adapter.r": 4,
        "privacy.expected_batch_size": 4 if settings.federation is None else 8,
        "privacy.public_dataset_size": 40 if settings.privacy.unit == "record" else len(NAMES),
        "run.output": folder / "run",
    }
    federation = settings.federation
    if federation is None or isinstance(federation.clients, int):
        small["data.path"] = write_records(folder / f"records{suffix}", make=make)
    if federation is None:
        small["privacy.steps"] = 4
    else:
        small["federation.local_steps"] = min(4, federation.local_steps)
        small["federation.rounds"] = 4 // min(4, federation.local_steps)
        if not isinstance(federation.clients, int):
            small["federation.clients"] = json.dumps(write_clients(folder))
    if settings.data.evaluation is not None:
        small["data.evaluation"] = write_records(folder / f"public{suffix}", 6, first=100, make=make)
    if settings.adapter.public_text is not None:
        small["adapter.public_text"] = write_records(folder / f"similar{suffix}", 12, first=200, make=make)
    if settings.privacy.max_batch_size is not None:
        small |= {
            "privacy.max_batch_size": 8,
            "privacy.target_epsilon": "null",
            "privacy.noise_multiplier": 4,
        }
    elif settings.privacy.private:
        small["privacy.target_epsilon"] = 0.5  # the less epsilon, the less there is to compute
    if settings.method.warmup_steps is not None:
        small["method.warmup_steps"] = 2
    if settings.synthesis is not None:
        small |= {"synthesis.seeds": 16, "synthesis.max_new_tokens": 16}
    if settings.method.name == "popri":
        # The small model has no room for the words that a chat is asked in.
        small |= {"synthesis.requests": 2, "synthesis.seeds": 8, "synthesis.chat": False}
        small |= {"synthesis.max_new_tokens": 8, "synthesis.epochs": 1}
    return [f"{key}={value}" for key, value in small.items()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_command_that_runs_it_stands_at_its_top(config: Path) -> None:
    assert len(CONFIGS) >= 8
    top = config.read_text().split("\nmodel:")[0]
    assert f"privlora train configs/{config.name}" in top
    assert all(line.startswith("#") for line in top.strip().splitlines())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_it_runs(config: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_settings(config)
    if settings.method.name == "popri":
        pytest.importorskip("trl", reason="without the extra preferences")
    ended = call(capsys, "train", config, *overrides(settings, model, tmp_path), "--json")
    assert ended.code == 0, ended.err
    release = Path(ended.json["adapter"])
    if settings.federation is None:
        assert ended.json["steps"] == 4
    assert ended.json["private"] is settings.privacy.private
    if settings.privacy.private:
        assert 0.1 < ended.json["epsilon"] <= 0.5
        ledger = read_ledger(ended.json["ledger"])
        assert (ledger.charges, ledger.closed) == (4, True)
        base = None if (release / "synthetic.jsonl").exists() else "me/base"
        pushed = push(RunFolder(release.parent), "me/run", base_model=base, dry_run=True)
        assert set(pushed.files) == {path.name for path in release.iterdir()}
    assert any(bool(tensor.any()) for tensor in load_file(release / "adapter_model.safetensors").values())
    rank = json.loads((release / "adapter_config.json").read_text())["r"]
    if settings.method.name == "projected":
        assert rank > 4  # of dense updates it grows by r a step, up to the layers' sizes
    else:  # a split of the frozen weights is taken back by as much again
        assert rank == (8 if settings.method.name == "prism-paper" else 4)
