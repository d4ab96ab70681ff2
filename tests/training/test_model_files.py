"""What is wrong with a model's own files is told before its weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import PRIVACY, save_tiny_model

from privlora.config import ModelSettings, settings_from
from privlora.errors import ModelError, PrivloraError
from privlora.training.models import look_at_model
from privlora.training.preflight import files_of, refuse_damaged_weights, refuse_no_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path)


def refused(model: Path, *words: str, **groups: Any) -> None:
    content = {"model": {"name": str(model)}, "data": {"path": "(in memory)"}, "privacy": PRIVACY, **groups}
    with pytest.raises(PrivloraError) as caught:
        look_at_model(settings_from(content))
    for word in words:
        assert word in str(caught.value)


def test_files_that_lack_or_are_cut_short_are_told_together(model: Path) -> None:
    settings, weights = ModelSettings(name=str(model)), model / "model.safetensors"
    refuse_damaged_weights(settings.name)
    whole = weights.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for cut in (len(whole) - 1, header, header - 1, 8, 3, 0):
        weights.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"safetensors' is cut short or damaged\. Fix: copy it again"):
            refuse_damaged_weights(settings.name)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    (model / "tokenizer.json").unlink()
    refused(model, "a pointer of git LFS", "`git lfs pull`", "its tokenizer: ", "the tokenizer's files too")


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer", "GemmaTokenizer"])
def test_a_tokenizer_without_a_vocabulary_is_none(kind: str, model: Path) -> None:
    """Which transformers makes of nothing, for some kinds."""
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    refused(model, "it has no tokenizer.json (nor other tokenizer files)")


def test_all_that_the_configuration_rules_out_is_told_together(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, dtype=torch.float16)
    own = {"data": {"path": "(in memory)", "max_length": 129}, "adapter": {"r": 17}}
    refused(model, "128 positions", "stored in float16", "exceeds the smaller side", **own)


def test_weights_in_parts_are_those_of_the_index(model: Path) -> None:
    settings, whole = ModelSettings(name=str(model)), model / "model.safetensors"
    part, other = model / "model-1.safetensors", model / "consolidated.safetensors"
    part.write_bytes(whole.read_bytes()[:-1])
    other.write_bytes(b"of another program")
    refuse_damaged_weights(settings.name)  # neither is read
    whole.unlink()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": part.name, "b": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-1\.safetensors' is cut short"):
        refuse_damaged_weights(settings.name)
    index.write_text("[]")
    refuse_damaged_weights(settings.name)


def test_a_model_that_is_nowhere() -> None:
    assert files_of("nobody/nothing") is None


def test_a_gguf_file_is_refused_with_the_command_that_makes_a_folder_of_it(tmp_path: Path) -> None:
    file = tmp_path / "base.gguf"
    file.write_bytes(b"GGUF")
    for name in (file, tmp_path):  # the file, or the folder that holds it
        with pytest.raises(ModelError, match="GGUF file") as caught:
            refuse_no_model(str(name))
        assert "python -c" in str(caught.value)
        assert f'gguf_file="{file.name}"' in str(caught.value)
