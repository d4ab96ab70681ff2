"""Every code block of the README and of the guides runs, and so does their YAML."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

import privlora.methods
from privlora.api import train_run
from privlora.cli import main
from privlora.cli.memory import estimate_memory
from privlora.config import load_settings, settings_from
from privlora.config.names import settings_by_group
from privlora.demo import model_path, private_records
from privlora.methods import METHODS

ROOT = Path(__file__).parent.parent


def write_notes(name: str, count: int, seed: int) -> None:
    lines = "\n".join(map(json.dumps, private_records(count, seed)))
    Path(f"{name}.jsonl").write_text(lines, encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        pytest.param("docs/python.md", marks=pytest.mark.long),
        "docs/projection.md",
        "docs/projection-accounting.md",
        "docs/projection-studies.md",
        "docs/audit.md",
        pytest.param("docs/federated.md", marks=pytest.mark.long),
        "docs/synthesis.md",
        "docs/trl.md",
    ],
)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = privlora.methods.METHODS, privlora.methods.SPACES
    before = [set(table) for table in tables]
    found = blocks(page, "python")
    assert found
    for block in found:
        exec(compile(block, page, "exec"), {})
    for table, known in zip(tables, before, strict=True):  # a page may register more
        for name in table.keys() - known:
            del table[name]


def test_the_private_half_of_a_trl_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="the script takes its arguments from trl")
    monkeypatch.chdir(tmp_path)
    (script,) = blocks("docs/trl.md", "diff")
    lines = script.splitlines()
    added = [line for line in lines if line.startswith("+")]
    assert (len(added), len([line for line in lines if line.startswith("-")])) == (4, 2)
    exec(compile("\n".join(line[1:] for line in lines if not line.startswith("-")), "trl.md", "exec"), {})
    assert Path("runs/sft/release/adapter_model.safetensors").exists()


@pytest.mark.long
def test_the_quick_starts_yaml_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("docs/quickstart.md", "yaml")
    Path("notes.yaml").write_text(text, encoding="utf-8")
    write_notes("notes", 200, 1)
    write_notes("public_notes", 20, 2)
    small = [f"model.name={model_path()}", "privacy.steps=3", "privacy.public_dataset_size=200"]
    settings = load_settings("notes.yaml", small)
    result = train_run(settings)
    assert result.epsilon is not None
    assert 0 < result.epsilon <= 3
    assert (result.release / "report.html").exists()


PRIVACY: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-6, "steps": 9, "sample_rate": 0.01}
PRIVACY["public_dataset_size"] = 500_000


def test_big_models_are_described_in_settings_that_exist() -> None:
    others = {"data": {"path": "x.jsonl"}, "privacy": PRIVACY}
    found = []
    for block in blocks("docs/big-models.md", "yaml"):
        read = yaml.safe_load(block)
        model = read.get("model", {"name": "part", **read})
        found.append(settings_from({"model": model, **others}).model)
    assert [model.device_map for model in found] == [None, "auto"]


def test_big_models_take_the_memory_that_the_guide_says() -> None:
    page = (ROOT / "docs/big-models.md").read_text(encoding="utf-8")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config = LlamaConfig(
        **sizes, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights, most = [], []
    for packing, again in ((None, "none"), ("8bit", "none"), ("4bit", "non-reentrant")):
        model_of = {"dtype": "bfloat16", "quantization": packing, "gradient_checkpointing": again}
        others = {"data": {"path": "x.jsonl", "max_length": 512}, "privacy": PRIVACY}
        settings = settings_from({"model": {"name": "m", **model_of}, **others})
        memory = estimate_memory(settings, METHODS["prism"], model)
        weights.append(memory["weight_bytes"] / 2**30)
        most.append(memory["gradient_bytes_at_most"] / 2**30)
    assert "| weights of 8B | {:.1f} GiB | {:.1f} | {:.1f} |".format(*weights) in page
    full = memory["gradient_bytes"] / 2**30
    assert f"| 8B | {full:.1f} GiB | {most[0]:.1f} | {most[-1]:.1f} |" in page


@pytest.mark.long
def test_texts_are_made_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the page, in its order, on a small model."""
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("docs/synthesize.md", "yaml")
    Path("texts.yaml").write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "configs/non-private.yaml", "open.yaml")
    write_notes("notes", 60, 1)
    steps = ["privacy.steps=2", "privacy.expected_batch_size=6", "privacy.public_dataset_size=60"]
    small = [f"model.name={model_path()}", "data.max_length=40", *steps]
    few = ["synthesis.seeds=4", "synthesis.max_new_tokens=20", "synthesis.samples=12", "privacy.delta=1e-3"]
    commands = [line[2:] for block in blocks("docs/synthesize.md", "console") for line in block.splitlines()]
    assert len(commands) == 6
    for line in commands:
        program, *argv = shlex.split(line)
        assert program == "privlora"
        more = few if "texts.yaml" in argv else ["privacy.public_dataset_size=12"]
        assert main([*argv, *small, *more]) == 0, line
    assert len(Path("runs/texts/release/synthetic.jsonl").read_text(encoding="utf-8").splitlines()) == 12
    assert Path("runs/texts-audit/private/audit.html").exists()
    assert (
        Path("runs/more/release/ledger.jsonl").read_bytes()
        == Path("runs/adapter/release/ledger.jsonl").read_bytes()
    )


@pytest.mark.long
def test_federated_yaml_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="of the extra federated")
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("docs/federated.md", "yaml")
    Path("clinics.yaml").write_text(text, encoding="utf-8")
    for seed, name in enumerate(("north", "south", "west", "public_notes")):
        write_notes(name, 40, seed)
    small = [f"model.name={model_path()}", "federation.rounds=2", "privacy.expected_batch_size=24"]
    settings = load_settings("clinics.yaml", [*small, "privacy.public_dataset_size=120"])
    from privlora.federated.run import federate

    result = federate(settings)
    assert result.epsilon is not None
    assert 0 < result.epsilon <= 3
    assert sorted(path.name for path in result.release.glob("ledger-*")) == [
        f"ledger-{name}.jsonl" for name in ("north", "south", "west")
    ]


def test_pages_name_settings_that_there_are() -> None:
    groups = settings_by_group()
    others = {"adapter.compared"}  # of the object that a space is given
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = re.findall(rf"`({'|'.join(groups)})\.([a-z_]+)`", page.read_text(encoding="utf-8"))
        lost = {f"{group}.{name}" for group, name in named if name not in groups[group]}
        assert lost <= others, page.name
