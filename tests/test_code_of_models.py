"""A model folder's own code never runs, whoever answers on standard input: it would see the private records."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from promises import promise
from test_layers import SOURCE
from transformers import AutoModelForCausalLM, AutoTokenizer

from privlora import fine_tune
from privlora.config import ModelSettings
from privlora.demo import model_path, private_records
from privlora.errors import ModelError
from privlora.training.models import load_model, load_skeleton

LOADERS = {"from_pretrained", "from_config", "load_dataset", "SentenceTransformer", "generate"}
OF_ADAPTERS = {"PeftModel", "PeftConfig"}  # which read tensors and JSON alone

EVIL = """
open({ran!r}, "a").write("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class EvilConfig(LlamaConfig):
    model_type = "evil"

class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig

class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""
CONFIG, MODEL = {"AutoConfig": "evil.EvilConfig"}, {"AutoModelForCausalLM": "evil.EvilModel"}
TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}}
PROMISE = promise(steps=1, batch=8, records=60, delta=1e-4, noise_multiplier=1.0)


def load_calls() -> list[tuple[str, ast.Call]]:
    """Every call of the package that may load a model, a tokenizer or a data set, and where it stands."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = getattr(getattr(function, "value", None), "id", None)
            own = name == "generate" and owner != "model"  # privlora's own function
            if (name in LOADERS or name.startswith("AutoProcessor")) and owner not in OF_ADAPTERS and not own:
                found.append((f"{path.relative_to(SOURCE)}:{node.lineno}", node))
    return found


def test_every_loader_is_told_to_run_no_code() -> None:
    calls = load_calls()
    assert len(calls) > 5
    careless = [
        place
        for place, call in calls
        if not any(
            each.arg == "trust_remote_code" and getattr(each.value, "value", None) is False
            for each in call.keywords
        )
    ]
    assert not careless


def evil_copy(place: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> Path:
    """The embedded model with code of its own, and what its files say besides."""
    shutil.copytree(model_path(), place)
    (place / "evil.py").write_text(EVIL.format(ran=str(place / "ran")), encoding="utf-8")
    for file, more in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        said = json.loads((place / file).read_text(encoding="utf-8"))
        (place / file).write_text(json.dumps(said | more), encoding="utf-8")
    return place


@pytest.mark.parametrize(
    ("config", "tokenizer", "file"),
    [
        ({"auto_map": CONFIG, "model_type": "evil"}, {}, "config.json"),
        ({"auto_map": CONFIG | MODEL, "model_type": "evil"}, {}, "config.json"),
        ({"auto_map": MODEL, "model_type": "vit"}, {}, "config.json"),
        ({}, TOKENIZER | {"tokenizer_class": "EvilTokenizer"}, "tokenizer_config.json"),
        ({"auto_map": CONFIG | MODEL}, {}, None),  # transformers has code of its own for it
    ],
)
def test_code_of_a_models_folder_never_runs(
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    file: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = evil_copy(tmp_path / "evil", config, tokenizer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    for load in (load_skeleton, load_model):
        if file is None or (load is load_skeleton and tokenizer):
            load(ModelSettings(name=str(folder)))
            continue
        with pytest.raises(
            ModelError, match=f"the code that its {file} names as auto_map, which is never run"
        ):
            load(ModelSettings(name=str(folder)))
    if file is not None:
        with pytest.raises(ModelError, match=r"Fix: take a model that transformers knows by itself"):
            fine_tune(str(folder), private_records(60, seed=1), privacy=PROMISE, output=tmp_path / "run")
        assert not (tmp_path / "run").exists()
    assert sys.stdin.read() == "y\n" * 20  # nobody was asked
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "said",
    [
        {"attn_implementation": "org/kernel"},
        {"_attn_implementation": "org/kernel@v1:flash"},
        {"attn_implementation": {"": "org/kernel"}},
    ],
)
def test_attention_from_a_repository_is_refused(said: dict[str, Any], tmp_path: Path) -> None:
    folder = evil_copy(tmp_path / "kernel", said, {})
    for load in (load_skeleton, load_model):
        with pytest.raises(ModelError, match=r"attention is code of a hub repository.*Fix: take attn_impl"):
            load(ModelSettings(name=str(folder)))


def test_a_loaded_models_attention_from_a_repository_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(model_path()))
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()))
    model.config._attn_implementation = "org/kernel"
    with pytest.raises(ModelError, match=r"attention is code of a hub repository"):
        fine_tune(
            model, private_records(60, seed=1), tokenizer=tokenizer, privacy=PROMISE, output=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
